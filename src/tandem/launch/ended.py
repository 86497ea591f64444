"""How a group of ranks ended, for whoever writes it down."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Ended:
    """How a group of ranks ended."""

    code: int
    """0, or the exit status of the command."""

    cause: str = ""
    """Why, in one sentence, where it failed."""

    rank: int = 0
    """Who was first."""

    stacks: str = ""
    """Of all ranks, where one of them did not answer or got nowhere."""

    may_pass: bool = False
    """Whether it may go better when it is started again."""

    step: int = 0
    """In which it failed, as far as rank 0 said."""

    has_folder: bool = False
    """Whether the run folder was this group's when it failed."""


Record = Callable[[Ended, int | None], None]
"""Writes down how a group failed, and the number of the restart that follows; None: it is over."""
