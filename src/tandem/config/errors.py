"""The error that every wrong configuration ends in."""

from collections.abc import Iterable
from typing import ClassVar


class TandemError(Exception):
    """Root of all errors that Tandem raises on purpose."""

    may_pass: ClassVar[bool] = False
    """True if a run that ended with it may succeed when it is started again: machines fail so, configurations do not."""


class ConfigError(TandemError, ValueError):
    """A configuration that cannot work; the message names the key, the value, the rule and the remedy."""

    def _render_traceback_(self) -> list[str]:
        """A notebook shows these lines in place of a traceback, which tells a user nothing."""
        return [f"ConfigError: {self}"]


def refuse(problems: Iterable[str]) -> None:
    """Passes if there are none.

    Raises:
        ConfigError: all of them together, each once.
    """
    found = list(dict.fromkeys(problems))
    if found:
        raise ConfigError(found[0] if len(found) == 1 else f"{len(found)} problems:\n" + "\n".join(f"- {p}" for p in found))


def kind_and_text(error: BaseException) -> str:
    """An error in words: its type and its text, or its type alone if it has no text."""
    try:
        text = str(error)
    except Exception:  # the boundary of a user's code: its own __str__ may raise
        text = "it has a __str__ that raises"
    return f"{type(error).__name__}{': ' if text else ''}{text}"
