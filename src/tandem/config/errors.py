"""The error that every wrong configuration ends in."""

from typing import ClassVar


class TandemError(Exception):
    """Root of all errors that Tandem raises on purpose."""

    may_pass: ClassVar[bool] = False
    """Whether a run that ended with it may go better when it is started again: machines fail so, configurations do not."""


class ConfigError(TandemError, ValueError):
    """A configuration that cannot work; the message names the key, the value, the rule and the remedy."""
