"""The error that every wrong configuration ends in."""


class TandemError(Exception):
    """Root of all errors that Tandem raises on purpose."""


class ConfigError(TandemError, ValueError):
    """A configuration that cannot work; the message names the key, the value, the rule and the remedy."""
