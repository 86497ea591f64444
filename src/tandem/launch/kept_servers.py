"""Servers that outlive the ranks that started them, so that ranks that are started again need not wait for new ones.

Rank 0 writes a file for each server that is ready, ``NAME.json`` with its keeper's process number, into a folder of the
launcher's. Keepers hold the reading end of a pipe, and only the launcher and rank 0 hold its other end: with the last of
these two the servers end, however they went.
"""

import contextlib
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import psutil

KEPT = "TANDEM_KEPT"
"""The variable that gives rank 0 both ends of the pipe, and the folder."""

END_S = 20.0
"""Seconds that the servers may take to end, all at the same time; a keeper is kind to its own for 8 s."""

LOOK_S = 0.05


class KeptServers:
    """Those of one run; on leaving the block all of them are gone."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.gettempdir()) / f"tandem-servers-{uuid.uuid4().hex}"
        """Made by rank 0, if it has a server to keep."""

        self.pipe = os.pipe()

    def __enter__(self) -> "KeptServers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def environment(self) -> dict[str, str]:
        """The environment of rank 0, with both ends of the pipe."""
        return {KEPT: ":".join(map(str, (*self.pipe, self.folder)))}

    def processes(self) -> list[psutil.Process]:
        """Keepers of servers that are ready, and all below them."""
        found = []
        for keeper in self._keepers():
            with contextlib.suppress(psutil.Error):
                found += [keeper, *keeper.children(recursive=True)]
        return found

    def close(self) -> None:
        """Ends them, kindly at first; whoever interrupts that does not want to wait."""
        keepers, everybody = self._keepers(), self.processes()
        for end in self.pipe:
            os.close(end)
        try:
            for keeper in keepers:
                with contextlib.suppress(psutil.Error):
                    keeper.terminate()
            deadline = time.monotonic() + END_S
            while _running(keepers) and time.monotonic() < deadline:
                time.sleep(LOOK_S)
        except KeyboardInterrupt:
            pass
        finally:
            for process in _running(everybody):
                with contextlib.suppress(psutil.Error):
                    process.kill()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _keepers(self) -> list[psutil.Process]:
        """A keeper has its file's path among its words, so a number that was given away since is none."""
        found = []
        for file in self.folder.glob("*.json"):
            with contextlib.suppress(psutil.Error, OSError, ValueError, KeyError):
                keeper = psutil.Process(int(json.loads(file.read_text(encoding="utf-8"))["keeper"]))
                if any(str(file) in word for word in keeper.cmdline()):
                    found.append(keeper)
        return found


def _running(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
