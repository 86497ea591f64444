"""The child process of `EmbeddedProcess`: ``python -m tandem.engines.inference.child``, with a socket as standard input.

Its main thread drives the core, and another thread reads the socket; `embedded.py` describes the messages. The process ends
when the parent closes the socket. If the parent has ended while a process that it forked holds the socket open, the keeper
ends this process.
"""

import gc

if __name__ == "__main__":
    gc.disable()  # nothing of an import is garbage, and looking for it takes a fifth of the time

import contextlib
import os
import pickle
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from tandem.api.failures import EngineDied
from tandem.config.errors import kind_and_text
from tandem.engines.inference.core import EngineCore
from tandem.engines.inference.driver import Driver
from tandem.engines.inference.embedded import ChildStart, portable
from tandem.engines.inference.engine_calls import use_gpu
from tandem.workers.child import own_socket


class PipeEnd:
    """The child's end of the pipe. It passes messages between the parent and the driver."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self.device = "cpu"
        self._send_lock = threading.Lock()

    def run(self) -> None:
        """Loads the model, tells the parent that it is ready, and drives the core until an exception is raised."""
        start: ChildStart = self._receive()
        use_gpu(start.device)  # otherwise Tandem's and libraries' kernels would run on the first GPU
        self.device = start.device
        core = EngineCore(start.folder, start.config, start.dtype, start.device, start.version, start.deterministic)
        driver = Driver(
            core,
            threads=start.threads,
            deterministic=start.deterministic,
            keep_kv=start.config.keep_kv_on_update,
            deliver=lambda results: self.send(
                "resolve", [(n, portable(r) if isinstance(r, Exception) else r) for n, r in results]
            ),
            progress=partial(self.send, "progress"),
        )
        threading.Thread(target=self._read, args=(driver,), name="engine-reader", daemon=True).start()
        self.send("ready")
        driver.run()

    def send(self, word: str, *arguments: Any) -> None:
        """Sends a message to the parent. Ends this process if the parent has ended."""
        try:
            with self._send_lock:
                self._connection.send_bytes(pickle.dumps((word, arguments)))
        except OSError:
            _vanish()

    def _receive(self) -> Any:
        return pickle.loads(self._connection.recv_bytes())

    def _read(self, driver: Driver) -> None:
        try:
            self.listen(driver)
        except (EOFError, OSError):
            _vanish()
        except Exception as error:  # the worker boundary: the parent gets the cause
            self.die(error)

    def listen(self, driver: Driver) -> None:
        """Runs the calls that the parent sends. Raises `EOFError` or `OSError` once the parent has closed the pipe."""
        # Numbered calls wait for the driver, so they run in other threads: other calls go on while one prepares weights.
        pool = ThreadPoolExecutor(4, "engine-call", use_gpu, (self.device,))
        while True:
            for number, method, arguments in map(pickle.loads, self._receive()):
                if number is not None:
                    pool.submit(self._answer, driver, number, method, arguments)
                    continue
                with contextlib.suppress(EngineDied):  # the main thread reports the end
                    getattr(driver, method)(*arguments)

    def die(self, error: Exception) -> NoReturn:
        """Sends the error to the parent and ends this process."""
        self.send("died", kind_and_text(error), "".join(traceback.format_exception(error)))
        _vanish()

    def _answer(self, driver: Driver, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            self.send("answer", number, driver.call(method, *arguments), None)
        except Exception as error:  # the worker boundary: the caller gets the error
            self.send("answer", number, None, portable(error))


def _vanish() -> NoReturn:
    """Ends this process at once, without waiting for other threads, because the parent reads no more results."""
    os._exit(1)


def main() -> None:
    """Entry point."""
    gc.freeze()  # what was imported lives as long as this process
    gc.enable()
    child = PipeEnd(Connection(own_socket().detach()))
    try:
        child.run()
    except EOFError:
        _vanish()
    except Exception as error:  # the worker boundary: the parent gets the cause
        child.die(error)


if __name__ == "__main__":
    main()
