"""When a key that was set would not be read."""

from collections.abc import Callable, Container
from typing import Any, NamedTuple

Written = Container[str]
"""Keys that the user set himself."""


class Unused(NamedTuple):
    """Keys (or whole sections) that are not read under a condition."""

    keys: tuple[str, ...]
    when: Callable[[Any, Written], bool]
    """A test of the configuration and of the keys that the user set."""

    why: str
    """Goes on after "KEY=VALUE is not used": the reason, and what to do."""

    choice: str = ""
    """The key by which the user brings the condition about; on the command line it overrules what a file says of `keys`."""
