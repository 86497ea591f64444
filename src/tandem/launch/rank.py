"""What a rank knows of its launcher."""

import os
import signal
import threading
import time

from tandem.launch.local import LAUNCHER, RENDEZVOUS

LOOK_S = 0.5
CLOSE_S = 30.0
"""What a rank may take to close after its launcher is gone."""


def meeting_place() -> str:
    """Where the ranks find each other, as torch.distributed wants it: our file, or what torchrun has set up."""
    file = os.environ.get(RENDEZVOUS)
    return f"file://{file}" if file else "env://"


def follow_launcher() -> None:
    """From now on this process ends when its launcher does: first as by Ctrl-C, after `CLOSE_S` in any case.

    Nothing happens where no launcher of ours has started it.
    """
    launcher = os.environ.get(LAUNCHER)
    if launcher is not None:
        threading.Thread(target=_follow, args=(int(launcher),), name="follow-launcher", daemon=True).start()


def _follow(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(LOOK_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(CLOSE_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # a session of its own: with all that it has started
