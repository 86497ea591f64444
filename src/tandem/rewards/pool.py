"""A few long-lived worker processes that can be killed, and the deadline of each call."""

import asyncio
import contextlib
import json
import os
import pickle
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tandem.api.failures import RewardFailure
from tandem.rewards.outcome import Outcome, RemoteError
from tandem.rewards.processes import kill_tree
from tandem.rewards.worker import HEADER

LOAD_TIMEOUT_S = 120.0
"""Longest time to start a worker and import the reward; it is not part of a call's deadline."""
MAX_ANSWER_BYTES = 1 << 20
BOOT = """
import json, sys
path, requests, answers, spec, name = sys.argv[1:]
sys.path[:] = json.loads(path)
from tandem.rewards.worker import main
main(int(requests), int(answers), spec, name)
"""


def _exit_code(code: int) -> str:
    number = code - 128 if code > 128 else -code
    name = signal.Signals(number).name if number in set(signal.Signals) else ""
    return f"{code} ({name})" if name else str(code)


class _Silent(Exception):
    """No answer: ``died`` or ``late``."""


class Worker:
    """One worker process; owned by one thread at a time."""

    def __init__(self, spec: str, name: str):
        self.name = name
        request_read, self._requests = os.pipe()
        self._answers, answer_write = os.pipe()
        arguments = [json.dumps(sys.path), str(request_read), str(answer_write), spec, name]
        self._process = subprocess.Popen(
            [sys.executable, "-c", BOOT, *arguments],
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
        """Of the process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def _wait(self, poll: select.poll, deadline: float) -> None:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise _Silent("late")

    def _read(self, size: int, deadline: float) -> bytes:
        poll, data = select.poll(), b""
        poll.register(self._answers, select.POLLIN)
        while len(data) < size:
            self._wait(poll, deadline)
            piece = os.read(self._answers, size - len(data))
            if not piece:
                raise _Silent("died")
            data += piece
        return data

    def receive(self, deadline: float) -> dict[str, Any]:
        """The next message, by ``deadline`` (monotonic)."""
        size = HEADER.unpack(self._read(HEADER.size, deadline))[0]
        if size > MAX_ANSWER_BYTES:
            raise _Silent("died")
        try:
            message = json.loads(self._read(size, deadline))
        except ValueError:
            raise _Silent("died") from None
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
                raise _Silent("died") from None

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


class WorkerPool:
    """Runs one function, ``spec``, in up to ``size`` worker processes, started when first needed.

    Calls beyond ``size`` wait; the deadline of a call counts from when a worker takes it. Bound to no event loop.
    """

    def __init__(self, spec: str, *, name: str, timeout_s: float, size: int = 2):
        self.spec, self.name, self.timeout_s = spec, name, timeout_s
        self._threads = ThreadPoolExecutor(size, thread_name_prefix=f"reward {name}")
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Of the workers that are there."""
        with self._lock:
            return [worker.pid for worker in self._all]

    async def call(self, arguments: dict[str, Any]) -> Outcome:
        """Calls the function with keyword arguments.

        Raises:
            RewardFailure: it raised, ran late, died, or returned something that is no reward.
        """
        token = secrets.token_hex(8)
        try:
            body = pickle.dumps((token, arguments))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise RewardFailure("reward_raised", f"{self.name}: the row cannot be sent to a worker: {error}") from error
        if self._closed:
            raise RuntimeError(f"reward {self.name} is closed")
        return await asyncio.wrap_future(self._threads.submit(self._call, token, body))

    def close(self) -> None:
        """Kills the workers; calls under way end as failures. Idempotent."""
        with self._lock:
            self._closed = True
            workers = list(self._all)
        for worker in workers:
            worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in workers:
            worker.release()
        self._all.clear()

    def _call(self, token: str, body: bytes) -> Outcome:
        worker = self._take()
        deadline = time.monotonic() + self.timeout_s
        try:
            worker.send(body, deadline)
            message = worker.receive(deadline)
        except _Silent as silent:
            raise self._end(worker, str(silent), self.timeout_s) from None
        if message.get("token") != token:
            self._retire(worker)
            raise RewardFailure("reward_raised", f"{self.name}: an answer without the call's token; the worker was killed")
        with self._lock:
            self._idle.append(worker)
        return self._outcome(message)

    def _take(self) -> Worker:
        """An idle worker, or a new one that has loaded the function."""
        while True:
            with self._lock:
                if self._closed:
                    raise RewardFailure("reward_raised", f"{self.name}: the reward was closed during the call")
                if not self._idle:
                    worker = Worker(self.spec, self.name)
                    self._all.add(worker)
                    break
                worker = self._idle.pop()
            if worker.alive:
                return worker
            self._retire(worker)  # died between two calls: the next call is not to blame
        try:
            message = worker.receive(time.monotonic() + LOAD_TIMEOUT_S)
        except _Silent as silent:
            raise self._end(worker, str(silent), LOAD_TIMEOUT_S, " while it was loaded") from None
        if "failure" in message:
            self._retire(worker)
            self._outcome(message)
        return worker

    def _retire(self, worker: Worker, grace_s: float = 0.0) -> int:
        with self._lock:
            self._all.discard(worker)
        code = worker.kill(grace_s)
        worker.release()
        return code

    def _end(self, worker: Worker, why: str, limit_s: float, when: str = "") -> RewardFailure:
        code = self._retire(worker, grace_s=1.0 if why == "died" else 0.0)
        if self._closed:
            return RewardFailure("reward_raised", f"{self.name}: the reward was closed during the call")
        if why == "late":
            return RewardFailure("reward_timeout", f"{self.name} took longer than {limit_s:g} s{when} and was killed")
        return RewardFailure("reward_raised", f"{self.name}: the worker died with exit code {_exit_code(code)}{when}")

    def _outcome(self, message: dict[str, Any]) -> Outcome:
        if "failure" in message:
            cause = RemoteError(message["traceback"])
            raise RewardFailure(message["failure"], f"{self.name}: {message['message']}") from cause
        return Outcome(**{name: message[name] for name in ("value", "rewards", "accuracy", "answer", "extracted")})
