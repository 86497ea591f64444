"""The command line. `command` is what `tandem` runs. This file imports nothing slow, so that Ctrl-C is handled early."""

import os
import signal
from types import FrameType


def leave(number: int, frame: FrameType | None) -> None:
    """Handles Ctrl-C while modules are imported: says so and ends the process, which has nothing to close yet. An exception
    in the middle of an import can be replaced by another one, or be lost."""
    os.write(2, b"\nInterrupted.\n")
    os._exit(130)  # `EXIT_INTERRUPTED`, whose module is not imported yet


def leave_when_interrupted() -> None:
    """Sets `leave` as the handler of Ctrl-C, unless this process ignores Ctrl-C. `tandem.cli.main` removes it when all
    modules of the command are imported."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)


def command() -> int:
    """Runs the command of `sys.argv` and returns its exit code."""
    leave_when_interrupted()
    from tandem.cli.main import main  # noqa: PLC0415 — imported once Ctrl-C is handled

    return main()
