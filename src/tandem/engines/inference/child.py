"""The child process of `EmbeddedProcess`: ``python -m tandem.engines.inference.child FD PARENT_PID``.

Its main thread drives the core, one thread reads the pipe. It ends when it is told to, when the pipe closes, and when
its parent is gone: a process that the parent forked may hold the pipe open, so the parent's number is watched too.
"""

import contextlib
import os
import pickle
import signal
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from tandem.api.failures import EngineDied
from tandem.config.errors import kind_and_text
from tandem.engines.inference.core import EngineCore
from tandem.engines.inference.driver import Driver
from tandem.engines.inference.link import (
    CallResult,
    ChildStart,
    Died,
    MethodCall,
    Ready,
    RequestResults,
    StreamNews,
    portable,
)
from tandem.engines.inference.threads import use_gpu

WATCH_S = 0.5
"""Seconds between looks at the parent's number while the pipe is silent."""


class Child:
    """The child's end of the pipe, and the driver behind it."""

    def __init__(self, connection: Connection, parent: int):
        self._connection, self._parent = connection, parent
        self.device = "cpu"
        self._send_lock = threading.Lock()

    def run(self) -> None:
        """Loads the model, says `Ready`, and drives the core until told to end."""
        start: ChildStart = self._receive()
        use_gpu(start.device)  # else kernels of our own and of libraries run on the first one
        self.device = start.device
        core = EngineCore(start.folder, start.config, start.dtype, start.device, start.version, start.deterministic)
        driver = Driver(
            core,
            threads=start.threads,
            deterministic=start.deterministic,
            keep_kv=start.config.keep_kv_on_update,
            deliver=lambda results: self.send(RequestResults(tuple((n, _portable_result(r)) for n, r in results))),
            progress=lambda drawn: self.send(StreamNews(tuple(drawn))),
        )
        threading.Thread(target=self._read, args=(driver,), name="engine-reader", daemon=True).start()
        self.send(Ready())
        driver.run()

    def send(self, message: Any) -> None:
        """Sends to the parent; whoever sends to a parent that is gone ends."""
        try:
            with self._send_lock:
                self._connection.send_bytes(pickle.dumps(message))
        except OSError:
            _vanish()

    def _receive(self) -> Any:
        try:
            while not self._connection.poll(WATCH_S):
                if os.getppid() != self._parent:
                    _vanish()
            return pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            _vanish()

    def _read(self, driver: Driver) -> None:
        try:
            self.listen(driver)
        except Exception as error:  # the worker boundary: the parent gets the cause
            self.die(error)

    def listen(self, driver: Driver) -> None:
        # Calls wait for the driver, so they have threads of their own: one prepares weights while others come and go.
        with ThreadPoolExecutor(4, "engine-call", use_gpu, (self.device,)) as pool:
            while True:
                for call in map(pickle.loads, self._receive()):
                    if call.number is not None:
                        pool.submit(self._answer, driver, call)
                        continue
                    with contextlib.suppress(EngineDied):  # the end itself is said by the main thread
                        getattr(driver, call.method)(*call.arguments)
                    if call.method == "stop":
                        return

    def die(self, error: Exception) -> NoReturn:
        """Tells the parent why, and ends."""
        self.send(Died(kind_and_text(error), "".join(traceback.format_exception(error))))
        _vanish()

    def _answer(self, driver: Driver, call: MethodCall) -> None:
        assert call.number is not None
        try:
            self.send(CallResult(call.number, value=driver.call(call.method, *call.arguments)))
        except Exception as error:  # the worker boundary: the caller gets it
            self.send(CallResult(call.number, error=portable(error)))


def _portable_result(result: Any) -> Any:
    return portable(result) if isinstance(result, Exception) else result


def _vanish() -> NoReturn:
    """Ends at once, whatever the other threads compute: nobody is left to read it."""
    os._exit(1)


def main() -> None:
    """Entry point; the exit status is 0 only for an orderly end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business: it closes us
    child = Child(Connection(int(sys.argv[1])), int(sys.argv[2]))
    try:
        child.run()
    except Exception as error:  # the worker boundary: the parent gets the cause
        child.die(error)
    os._exit(0)  # threads that still answer a call must not hold the exit up


if __name__ == "__main__":
    main()
