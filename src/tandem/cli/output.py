"""The streams of a command: words that a terminal cannot show, or that nobody takes any more, are no reason to end.

A terminal in ASCII gets `?` for the characters that it lacks. What a run says while it works goes to log.txt too, so a
terminal that has closed, a full disk behind `>` or a reader such as `head` that has gone only makes it silent.
"""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

from tandem.config.errors import TandemError


class OutputLost(TandemError):
    """A command cannot print the words that it was asked for."""


class ReaderGone(Exception):
    """Nobody reads what a command prints any more, as behind `| head`."""


class _Stream(io.FileIO):
    """The file of a descriptor, which becomes the null device once it takes nothing more."""

    matters = True
    """Its words are what the command is for: their loss is an error, told once."""

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            with open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), self.fileno())
            if self.matters and isinstance(error, BrokenPipeError):
                raise ReaderGone from error
            if self.matters:
                raise OutputLost(f"what this command prints cannot be written: {error.strerror}") from error
            return len(data)


@contextlib.contextmanager
def command_output() -> Iterator[None]:
    """A block that prints to such streams; those that are not the process's own stay as they are."""
    before = sys.stdout, sys.stderr
    made = [_wrapped(name) for name in ("stdout", "stderr") if getattr(sys, name) is getattr(sys, f"__{name}__")]
    try:
        yield
    finally:
        for stream in filter(None, made):
            stream.buffer.raw.matters = False
            stream.flush()
        sys.stdout, sys.stderr = before


def _wrapped(name: str) -> Any:
    stream = getattr(sys, name)
    if stream is None:  # closed by who started this process
        return None
    stream.flush()
    raw = _Stream(stream.fileno(), "w", closefd=False)
    raw.matters = name == "stdout"
    at_once = stream.line_buffering or stream.write_through or not raw.matters
    new = io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, "replace", line_buffering=at_once)
    setattr(sys, name, new)
    return new


def survive_lost_output() -> None:
    """From now on the command works on where nobody takes what it prints."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, _Stream):
        raw.matters = False
