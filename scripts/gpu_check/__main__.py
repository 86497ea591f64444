"""`python -m scripts.gpu_check`: see command.py, which imports nothing that may be missing."""

import sys

from scripts.gpu_check.command import main

if __name__ == "__main__":
    sys.exit(main())
