"""One save at a time, written in a thread of its own.

A thread and not a process: what a save does (writing, hashing, flushing) lets go of the interpreter's lock, the copy of the
state need not be shared with anybody, and a process that is killed leaves no second one that goes on writing.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path

from tandem.api.activity import waiting


class BackgroundSave:
    """Writes a checkpoint while the caller goes on. Not for several threads at once."""

    def __init__(self) -> None:
        self._future: Future[Path | None] | None = None
        self._what = ""
        self._seconds = 0.0

    @property
    def busy(self) -> bool:
        return self._future is not None and not self._future.done()

    def start(self, what: str, work: Callable[[], Path | None]) -> None:
        """Calls ``work`` in the background. ``what`` it writes: for messages. The one before must have been taken."""
        assert self._future is None, "one save at a time"
        future: Future[Path | None] = Future()
        self._future, self._what = future, what

        def run() -> None:
            began = time.perf_counter()
            try:
                path = work()
            except BaseException as error:  # the worker boundary: whoever waits gets it
                self._seconds = time.perf_counter() - began
                future.set_exception(error)
            else:
                self._seconds = time.perf_counter() - began
                future.set_result(path)

        # a daemon: a disk that hangs must not keep the process from ending
        threading.Thread(target=run, name="checkpoint-save", daemon=True).start()

    def wait(self, seconds: float | None) -> bool:
        """Waits for at most so long (None: as long as it takes); whether nothing is being written any more. A large one on a
        slow disk is healthy, and whoever watches over the run sees one that writes nothing any more
        (`recover.stalled_after_s`)."""
        if self._future is not None:
            with waiting(self._what):
                wait([self._future], seconds)
        return not self.busy

    def take(self) -> tuple[Path | None, float] | None:
        """The result of the last `start`, once: the checkpoint, and the seconds that it took; None where nothing was
        started. Waits for it, as long as it takes.

        Raises:
            CheckpointFailed: it failed; or whatever else ``work`` raised.
        """
        future = self._future
        if future is None:
            return None
        self.wait(None)
        self._future = None
        return future.result(), self._seconds
