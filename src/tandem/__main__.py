"""`python -m tandem` is `tandem`, and how each rank is started."""

import atexit
import os
import sys

from tandem.cli.main import main
from tandem.launch.rank import has_launcher


def _end_once_closed(status: list[int]) -> None:
    """Makes this process, a rank, end without its interpreter being taken apart, once all that closes at exit has: torch's
    communication threads may still let go of tensors then, and one that needs the interpreter for it ends the process with
    SIGABRT, after a run that went well."""

    def end() -> None:
        if status:  # else an error is on its way out
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status[0])

    atexit.register(end)  # first, for what is registered last is called first


if __name__ == "__main__":
    status: list[int] = []
    if has_launcher():
        _end_once_closed(status)
    status.append(main())
    sys.exit(status[0])
