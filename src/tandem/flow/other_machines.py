"""The other machines of a run: whether they are heard of, in the store in which its ranks met."""

import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import TCPStore

from tandem.config.machines import Machines

log = logging.getLogger(__name__)

TOLD_S = 15.0
"""A machine that is silent for so long is told of."""

EVERY_S, JOIN_S = 1.0, 2.0
CONNECT = timedelta(seconds=10)
LEFT = 2**40
"""A machine that has counted so far has ended."""


class OtherMachines:
    """Hears of the others on the first rank of a machine: each counts on in the store, from a thread of its own."""

    def __init__(
        self,
        here: Machines,
        host: str,
        port: int,
        patience_s: float | None,
        *,
        told_s: float = TOLD_S,
        every_s: float = EVERY_S,
    ):
        """``host``, ``port``: of the store. ``patience_s``: how long the run waits for a silent one; None: for ever."""
        self._patience_s, self._told_s, self._every_s = patience_s, told_s, every_s
        now = time.monotonic()
        self._heard = {number: now for number in range(here.count) if number != here.number}
        self._silent: set[int] = set()
        self._end = threading.Event()
        given = (here.number, host, port)
        self._thread = threading.Thread(target=self._count, args=given, name="other-machines", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def words(self) -> Mapping[str, str]:
        """Says as ``cut_off`` which has been silent for too long, for the launcher, which ends the run; else nothing."""
        for number, heard in self._heard.items():
            silent_s = time.monotonic() - heard
            text = f"machine {number} has not been heard of for {silent_s:.0f} s: it is gone, or cut off"
            if self._patience_s is not None and silent_s > self._patience_s:
                return {"cut_off": f"{text} (recover.cut_off_after_s)"}
            if (silent_s > self._told_s) != (number in self._silent):
                self._silent ^= {number}
                log.warning("%s", text if number in self._silent else f"machine {number} is heard of again")
        return {}

    def close(self) -> None:
        """Tells the others that this one ends."""
        self._end.set()
        self._thread.join(JOIN_S)

    def _count(self, number: int, host: str, port: int) -> None:
        seen: dict[int, int] = {}
        while not self._end.is_set():
            with contextlib.suppress(RuntimeError):  # the connection broke; or rank 0 has ended, and its store with it
                store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=CONNECT)
                while not self._end.wait(self._every_s):
                    store.add(f"machine-{number}", 1)
                    for other in self._heard:
                        count = store.add(f"machine-{other}", 0)
                        if count != seen.get(other):
                            seen[other] = count
                            self._heard[other] = float("inf") if count >= LEFT else time.monotonic()
                store.add(f"machine-{number}", LEFT)
            self._end.wait(self._every_s)
