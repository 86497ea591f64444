"""The child process of `EmbeddedProcess`: ``python -m tandem.engines.inference.child``, its pipe on standard input.

Its main thread drives the core, one thread reads the pipe; `link.py` says what travels. It ends when the pipe closes; its
keeper ends it when it is told to, and when the parent is gone while a process that it forked holds the pipe open.
"""

import contextlib
import os
import pickle
import signal
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
from tandem.engines.inference.link import ChildStart, portable
from tandem.engines.inference.threads import use_gpu


class Child:
    """The child's end of the pipe, and the driver behind it."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self.device = "cpu"
        self._send_lock = threading.Lock()

    def run(self) -> None:
        """Loads the model, says that it is ready, and drives the core until it raises."""
        start: ChildStart = self._receive()
        use_gpu(start.device)  # else kernels of our own and of libraries run on the first one
        self.device = start.device
        core = EngineCore(start.folder, start.config, start.dtype, start.device, start.version, start.deterministic)
        driver = Driver(
            core,
            threads=start.threads,
            deterministic=start.deterministic,
            keep_kv=start.config.keep_kv_on_update,
            deliver=lambda results: self.send("resolve", [(n, _portable_result(r)) for n, r in results]),
            progress=partial(self.send, "progress"),
        )
        threading.Thread(target=self._read, args=(driver,), name="engine-reader", daemon=True).start()
        self.send("ready")
        driver.run()

    def send(self, word: str, *arguments: Any) -> None:
        """Sends to the parent; whoever sends to a parent that is gone ends."""
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
        """Makes the calls that arrive. Raises `EOFError` or `OSError` once the parent has closed the pipe."""
        # Calls wait for the driver, so they have threads of their own: one prepares weights while others come and go.
        pool = ThreadPoolExecutor(4, "engine-call", use_gpu, (self.device,))
        while True:
            for number, method, arguments in map(pickle.loads, self._receive()):
                if number is not None:
                    pool.submit(self._answer, driver, number, method, arguments)
                    continue
                with contextlib.suppress(EngineDied):  # the end itself is said by the main thread
                    getattr(driver, method)(*arguments)

    def die(self, error: Exception) -> NoReturn:
        """Tells the parent why, and ends."""
        self.send("died", kind_and_text(error), "".join(traceback.format_exception(error)))
        _vanish()

    def _answer(self, driver: Driver, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            self.send("answer", number, driver.call(method, *arguments), None)
        except Exception as error:  # the worker boundary: the caller gets it
            self.send("answer", number, None, portable(error))


def _portable_result(result: Any) -> Any:
    return portable(result) if isinstance(result, Exception) else result


def _vanish() -> NoReturn:
    """Ends at once, whatever the other threads compute: nobody is left to read it."""
    os._exit(1)


def main() -> None:
    """Entry point."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business: it closes us
    child = Child(Connection(os.dup(0)))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nothing else may read from the pipe
    try:
        child.run()
    except EOFError:
        _vanish()
    except Exception as error:  # the worker boundary: the parent gets the cause
        child.die(error)


if __name__ == "__main__":
    main()
