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
from tandem.rewards.processes import computes, kill_tree, usable_cores
from tandem.rewards.worker import HEADER

LOAD_TIMEOUT_S = 120.0
"""Longest time to start a worker and import the reward; it is not part of a call's deadline."""
MAX_ANSWER_BYTES = 1 << 20
LOOK_EVERY_S = 0.05
"""While calls queue, so often it is looked at which of those under way compute."""

WORKERS_A_CORE, MOST_WORKERS = 8, 64
"""Bounds of the default number of workers: most of them wait, and each takes memory."""
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


def most_workers(samples: int | None = None) -> int:
    """The default number of worker processes: one for each of the ``samples`` that are judged together (None: any number),
    but at most 8 a core and 64; and never fewer than cores."""
    cores = usable_cores()
    most = min(WORKERS_A_CORE * cores, MOST_WORKERS)
    return max(cores, most if samples is None else min(most, samples))


class WorkerPool:
    """Runs one function, ``spec``, in up to ``size`` worker processes, started when first needed. None: `most_workers`.

    As many calls as there are cores run at once; a further one is begun, and a worker started for it, only while fewer calls
    compute than there are cores. So calls that sleep or wait for a network overlap, and those that compute neither slow each
    other down towards their deadline nor take the memory of many workers. The deadline of a call counts from when a worker
    takes it. Bound to no event loop.
    """

    def __init__(self, spec: str, *, name: str, timeout_s: float, size: int | None = None):
        self.spec, self.name, self.timeout_s = spec, name, timeout_s
        self.size = size or most_workers()
        self._threads = ThreadPoolExecutor(self.size, thread_name_prefix=f"reward {name}")
        self._cores = usable_cores()
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()
        self._busy: dict[Worker, float] = {}  # since when (monotonic)
        self._room, self._look_at = 0, 0.0
        self._changed = threading.Condition()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Of the workers that are there."""
        with self._changed:
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
        with self._changed:
            self._closed = True
            workers = list(self._all)
            self._changed.notify_all()
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
        with self._changed:
            self._idle.append(worker)
            self._end_turn(worker)
        return self._outcome(message)

    def _has_room(self) -> bool:
        """Decides whether another call may begin. With ``_changed`` held."""
        if len(self._busy) < self._cores:
            return True
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            # one that has just begun has not come to the point where it waits
            computing = sum(now - began < LOOK_EVERY_S or computes(worker.pid) for worker, began in self._busy.items())
            self._room = self._cores - computing if computing else len(self._busy)  # all wait: twice as many may
        return self._room > 0

    def _begin_turn(self, worker: Worker) -> None:
        """The worker has a call. With ``_changed`` held."""
        self._room -= len(self._busy) >= self._cores
        self._busy[worker] = time.monotonic()

    def _end_turn(self, worker: Worker) -> None:
        """The worker has none any more. With ``_changed`` held."""
        self._busy.pop(worker, None)
        self._changed.notify()

    def _take(self) -> Worker:
        """An idle worker, or a new one that has loaded the function."""
        while True:
            with self._changed:
                while not (self._closed or self._has_room()):
                    self._changed.wait(LOOK_EVERY_S)
                if self._closed:
                    raise RewardFailure("reward_raised", f"{self.name}: the reward was closed during the call")
                is_new = not self._idle
                worker = Worker(self.spec, self.name) if is_new else self._idle.pop()
                self._all.add(worker)
                self._begin_turn(worker)
            if is_new:
                break
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
        with self._changed:
            self._all.discard(worker)
        code = worker.kill(grace_s)
        with self._changed:
            self._end_turn(worker)
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
