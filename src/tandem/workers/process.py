"""The run's side of a worker process: it sends calls, waits for their answers until a deadline, and kills."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

from tandem.workers.child import HEADER
from tandem.workers.trees import kill_tree

LOAD_TIMEOUT_S = 120.0
"""Longest time to start a worker and import what it runs; it is not part of a call's deadline."""
MAX_ANSWER_BYTES = 1 << 20
BOOT = """
import importlib, json, sys
path, requests, answers, main, *rest = sys.argv[1:]
sys.path[:] = json.loads(path)
importlib.import_module(main).main(int(requests), int(answers), *rest)
"""


class RemoteError(Exception):
    """An exception in a worker process; its text is the traceback there."""


def exit_code(code: int) -> str:
    """It in words, with the name of a signal."""
    number = code - 128 if code > 128 else -code
    name = signal.Signals(number).name if number in set(signal.Signals) else ""
    return f"{code} ({name})" if name else str(code)


class Silent(Exception):
    """No answer: ``died`` or ``late``."""


class Worker:
    """One worker process; owned by one thread at a time."""

    def __init__(self, main: str, *arguments: str):
        """``main``: the module whose ``main(requests, answers, *arguments)`` runs there."""
        request_read, self._requests = os.pipe()
        self._answers, answer_write = os.pipe()
        words = [json.dumps(sys.path), str(request_read), str(answer_write), main, *arguments]
        self._process = subprocess.Popen(
            [sys.executable, "-c", BOOT, *words],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a reward prints is for people, not for pipes that read the run's output
            pass_fds=(request_read, answer_write),
            start_new_session=True,
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )
        os.close(request_read)
        os.close(answer_write)
        self._descriptors: tuple[int, ...] = (self._requests, self._answers)

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._process.poll() is None

    def _wait(self, poll: select.poll, deadline: float) -> None:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise Silent("late")

    def _read(self, size: int, deadline: float) -> bytes:
        poll, data = select.poll(), b""
        poll.register(self._answers, select.POLLIN)
        while len(data) < size:
            self._wait(poll, deadline)
            piece = os.read(self._answers, size - len(data))
            if not piece:
                raise Silent("died")
            data += piece
        return data

    def receive(self, deadline: float) -> dict[str, Any]:
        """The next message, by ``deadline`` (monotonic)."""
        size = HEADER.unpack(self._read(HEADER.size, deadline))[0]
        if size > MAX_ANSWER_BYTES:
            raise Silent("died")
        try:
            message = json.loads(self._read(size, deadline))
        except ValueError:
            raise Silent("died") from None
        return message if isinstance(message, dict) else {}

    def send(self, body: bytes, deadline: float) -> None:
        """Writes a request; a worker that does not read is late as well."""
        os.set_blocking(self._requests, False)
        poll, data = select.poll(), memoryview(HEADER.pack(len(body)) + body)
        poll.register(self._requests, select.POLLOUT)
        while data:
            self._wait(poll, deadline)
            try:
                data = data[os.write(self._requests, data) :]
            except BlockingIOError:
                continue
            except OSError:
                raise Silent("died") from None

    def kill(self, grace_s: float = 0.0) -> int:
        """Ends the process with everything that it started; returns its exit code. Any thread, twice is fine."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)  # one that died by itself keeps its own exit code
        if self.alive:
            kill_tree(self.pid)
        return self._process.wait()

    def release(self) -> None:
        """Closes the pipes of a killed worker, once nobody reads from them; twice is fine."""
        descriptors, self._descriptors = self._descriptors, ()
        for descriptor in descriptors:
            os.close(descriptor)
