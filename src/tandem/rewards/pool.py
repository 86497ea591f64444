"""A few long-lived worker processes that can be killed, and the deadline of each call."""

import asyncio
import pickle
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tandem.api.failures import RewardFailure
from tandem.api.workflow import RewardResult
from tandem.config.cores import usable_cores
from tandem.rewards.outcome import late
from tandem.workers.process import LOAD_TIMEOUT_S, RemoteError, Silent, Worker, exit_code
from tandem.workers.trees import computes

LOOK_EVERY_S = 0.05
"""While calls queue, so often it is looked at which of those under way compute."""

WORKERS_A_CORE, MOST_WORKERS = 8, 64
"""Bounds of the default number of workers: most of them wait, and each takes memory."""


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
        """Process numbers of the workers that are there."""
        with self._changed:
            return [worker.pid for worker in self._all]

    async def call(self, arguments: dict[str, Any]) -> RewardResult:
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

    def _call(self, token: str, body: bytes) -> RewardResult:
        worker = self._take()
        deadline = time.monotonic() + self.timeout_s
        try:
            worker.send(body, deadline)
            message = worker.receive(deadline)
        except Silent as silent:
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
                worker = Worker("tandem.rewards.worker", self.spec) if is_new else self._idle.pop()
                self._all.add(worker)
                self._begin_turn(worker)
            if is_new:
                break
            if worker.alive:
                return worker
            self._retire(worker)  # died between two calls: the next call is not to blame
        try:
            message = worker.receive(time.monotonic() + LOAD_TIMEOUT_S)
        except Silent as silent:
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
            if not when:
                return late(self.name, limit_s, "killed")
            return RewardFailure("reward_timeout", f"{self.name} took longer than {limit_s:g} s{when} and was killed")
        return RewardFailure("reward_raised", f"{self.name}: the worker died with exit code {exit_code(code)}{when}")

    def _outcome(self, message: dict[str, Any]) -> RewardResult:
        if "failure" in message:
            cause = RemoteError(message["traceback"])
            raise RewardFailure(message["failure"], f"{self.name}: {message['message']}") from cause
        return RewardResult(**{name: message[name] for name in ("value", "rewards", "accuracy", "answer", "extracted")})
