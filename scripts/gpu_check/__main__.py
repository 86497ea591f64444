"""`python -m scripts.gpu_check`: see command.py. This file imports nothing that may be missing."""

import sys

from scripts.gpu_check.needs import missing

if __name__ == "__main__":
    absent = missing()
    if absent:
        sys.exit(f"error: not installed here: {', '.join(absent)}; install them, or carry their wheels to this machine")
    from scripts.gpu_check.command import main  # imports all of them

    sys.exit(main())
