"""`python -m tandem` does the same as the command `tandem`. Launchers start each rank in this way."""

import atexit
import contextlib
import gc
import io
import os
import sys
import traceback

from tandem.cli import command, leave_when_interrupted


def _end_once_closed(status: list[int]) -> None:
    """Makes this process, a rank, exit with ``status[0]`` after the functions of `atexit`, without the shutdown of the
    interpreter. During that shutdown a communication thread of torch may free a tensor, and then end a successful run with
    SIGABRT."""

    def end() -> None:
        for file in gc.get_objects():  # those of a user's code too, which nobody closes now
            # `isinstance` would ask each object for its class, and one of torch's warns when it is asked
            if issubclass(type(file), io.TextIOWrapper | io.BufferedWriter):
                with contextlib.suppress(Exception):  # the boundary of a user's code: its file raises what it likes
                    file.flush()
        os._exit(status[0])

    atexit.register(end)  # first, for what is registered last is called first


def _rank() -> int:
    """Runs the command and returns its exit status, also if the command raises an error."""
    try:
        return command()
    except SystemExit as left:  # of the parser of arguments
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:  # the worker boundary: what `command` lets through is a fault of ours, or `--debug`
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    leave_when_interrupted()
    from tandem.launch.rank import has_launcher  # imported once Ctrl-C is handled

    if has_launcher():
        ended = [1]
        _end_once_closed(ended)
        ended[0] = _rank()
        sys.exit(ended[0])
    sys.exit(command())
