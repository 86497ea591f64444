"""Output streams with which a command goes on even if its output cannot be shown or written.

A terminal in ASCII gets `?` for characters that it lacks. A run writes its messages to log.txt too, so a closed terminal, a
full disk behind `>`, or a reader such as `head` that has ended makes the run silent and does not end it.
"""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

from tandem.config.errors import TandemError


class OutputLost(TandemError):
    """A command cannot write its output."""


class ReaderGone(Exception):
    """The process that reads a command's output has ended, as in `… | head`."""


class _Stream(io.FileIO):
    """A file on a descriptor. After the first failed write, the descriptor is redirected to the null device."""

    matters = True
    """If true, a failed write is an error, raised once; otherwise the output is lost silently."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            with open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), self.fileno())
            if self.matters and isinstance(error, BrokenPipeError):
                raise ReaderGone from error
            if self.matters:
                raise OutputLost(f"the output of this command cannot be written: {error.strerror}") from error
            return len(data)


@contextlib.contextmanager
def command_output() -> Iterator[None]:
    """Within the block, `sys.stdout` and `sys.stderr` print to `_Stream`. A stream that was replaced before, as by a test,
    stays as it is."""
    before = sys.stdout, sys.stderr
    streams = [_wrapped(name) for name in ("stdout", "stderr") if getattr(sys, name) is getattr(sys, f"__{name}__")]
    try:
        yield
    finally:
        for stream in filter(None, streams):
            stream.buffer.raw.matters = False
            stream.flush()
        sys.stdout, sys.stderr = before


def _wrapped(name: str) -> Any:
    stream = getattr(sys, name)
    if stream is None:  # closed by the parent process
        return None
    stream.flush()
    raw = _Stream(stream.fileno(), "w", closefd=False)
    raw.matters = name == "stdout"
    at_once = stream.line_buffering or stream.write_through or not raw.matters
    new = io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, "replace", line_buffering=at_once)
    setattr(sys, name, new)
    return new


def survive_lost_output() -> None:
    """From now on the command goes on even if its output cannot be written."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, _Stream):
        raw.matters = False
