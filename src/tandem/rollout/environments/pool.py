"""The run's side of environments: a worker process for each episode under way, reused, and killed if it misbehaves."""

import asyncio
import contextlib
import json
import logging
import pickle
import secrets
import threading
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from tandem.api.environment import Observation, StepResult
from tandem.api.failures import DataFailure
from tandem.api.media import unwritten
from tandem.config.cores import usable_cores
from tandem.workers.process import LOAD_TIMEOUT_S, RemoteError, Silent, Worker, exit_code

log = logging.getLogger(__name__)

MOST_CALLS = 256
"""Calls under way at once, each of which waits in a thread."""


@dataclass(frozen=True)
class EnvironmentLimits:
    """The bounds of an environment."""

    workers: int | None = None
    """Most worker processes; None: one for each episode under way."""

    reset_timeout_s: float = 60.0
    step_timeout_s: float = 30.0
    close_timeout_s: float = 5.0
    max_episodes: int = 1000
    """After so many episodes the worker is replaced."""

    memory_mib: float = 2048.0
    """A worker that has more after an episode is replaced; one that has twice as much in the middle of one is killed."""


class EnvironmentWorker:
    """A worker process with an environment in it."""

    def __init__(self, worker: Worker):
        self.worker = worker
        self.episodes = 0
        self.memory_mib = 0.0
        self.call: Future[dict[str, Any]] | None = None
        """Under way; or the last one."""


class EnvironmentPool:
    """Lends environments to episodes. Bound to no event loop; its constructor starts no process.

    Example::

        async with pool.world() as world:
            observation = await world.reset({"answer": "7"}, seed=0)
            result = await world.step("5")
    """

    def __init__(self, spec: str, knobs: Mapping[str, Any], *, name: str, limits: EnvironmentLimits):
        """``spec``: the class, as ``my_file.py:Name`` or ``package.module:Name``, with plain values as its ``knobs``."""
        self.name, self.limits = name, limits
        self._start = ("tandem.rollout.environments.worker", spec, json.dumps(dict(knobs)))
        # Only so many workers are made at once as there are cores; who waits for one must not keep others from their calls.
        self._takers = ThreadPoolExecutor(usable_cores(), thread_name_prefix=f"environment {name}, start")
        self._callers = ThreadPoolExecutor(limits.workers or MOST_CALLS, thread_name_prefix=f"environment {name}")
        self._idle: list[EnvironmentWorker] = []
        self._all: set[EnvironmentWorker] = set()
        self._changed = threading.Condition()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Process numbers of the present workers."""
        with self._changed:
            return [place.worker.pid for place in self._all]

    @contextlib.asynccontextmanager
    async def world(self) -> AsyncIterator["World"]:
        """An environment for one episode.

        Raises:
            DataFailure: ``environment_raised``, ``environment_died`` or ``environment_timeout``: none can be made.
        """
        if self._closed:
            raise RuntimeError(f"environment {self.name} is closed")
        taking = self._takers.submit(self._take)
        try:
            place = await asyncio.wrap_future(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(self._given_back)
            raise
        world = World(self, place)
        try:
            yield world
        finally:
            self._return(place, world.is_sound)

    def close(self) -> None:
        """Closes the environments, those in the middle of a call aside, and ends the workers. Idempotent."""
        with self._changed:
            self._closed = True
            idle, places = list(self._idle), list(self._all)
            self._idle.clear()
            self._changed.notify_all()
        for place in places:
            if place not in idle:
                place.worker.kill()
        asked = [self._callers.submit(self._farewell, place) for place in idle]
        for one in asked:
            one.result()
        for place in places:
            place.worker.kill()
        self._takers.shutdown(wait=True, cancel_futures=True)
        self._callers.shutdown(wait=True, cancel_futures=True)
        for place in places:
            place.worker.release()
        self._all.clear()

    # ------------------------------------------------------------------ in threads

    def ask(self, place: EnvironmentWorker, call: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Has the environment do something.

        Raises:
            DataFailure: it raised, is late, died, or returned what nobody can use.
        """
        token = secrets.token_hex(8)
        try:
            body = pickle.dumps((token, call))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise DataFailure("environment_raised", f"{self.name}: the row cannot be sent to a worker: {error}") from error
        deadline, doing = time.monotonic() + timeout_s, f"in {call['operation']}"
        try:
            place.worker.send(body, deadline)
            message = place.worker.receive(deadline)
        except Silent as silent:
            raise self._silence(place, str(silent), f"{doing} for more than {timeout_s:g} s", doing) from None
        if message.get("token") != token:
            raise DataFailure("environment_died", f"{self.name}: an answer without the call's token; it was killed")
        return self._read(place, message)

    def _read(self, place: EnvironmentWorker, message: dict[str, Any]) -> dict[str, Any]:
        if "failure" in message:
            cause = RemoteError(message["traceback"])
            raise DataFailure(message["failure"], f"{self.name}: {message['message']}") from cause
        place.memory_mib = float(message.get("memory_mib", 0.0))
        most = 2 * self.limits.memory_mib
        if place.memory_mib > most:
            words = f"{self.name} has {place.memory_mib:.0f} MiB, more than twice memory_mib={self.limits.memory_mib:g}"
            raise DataFailure("environment_memory", words)
        return message

    def _silence(self, place: EnvironmentWorker, why: str, late: str, doing: str) -> DataFailure:
        if self._closed:
            return DataFailure("environment_died", f"{self.name}: the run ended during a call")
        if why == "late":
            place.worker.kill()
            return DataFailure("environment_timeout", f"{self.name} was {late} and was killed")
        code = exit_code(place.worker.kill(grace_s=1.0))
        return DataFailure("environment_died", f"{self.name}: the worker died with exit code {code} {doing}")

    def _take(self) -> EnvironmentWorker:
        """One that is idle, or a new one."""
        while True:
            with self._changed:
                while not (self._closed or self._idle or self._has_room()):
                    self._changed.wait()
                if self._closed:
                    raise DataFailure("environment_died", f"{self.name}: the run ended before the episode began")
                is_new = not self._idle
                place = EnvironmentWorker(Worker(*self._start)) if is_new else self._idle.pop()
                self._all.add(place)
            if is_new:
                break
            if place.worker.alive:
                return place
            self._retire(place)  # died between two episodes: the next one is not to blame
        try:
            self._read(place, place.worker.receive(time.monotonic() + LOAD_TIMEOUT_S))
        except Silent as silent:
            failure = self._silence(place, str(silent), f"not loaded after {LOAD_TIMEOUT_S:g} s", "while it was made")
            self._retire(place)
            raise failure from None
        except BaseException:
            self._retire(place)
            raise
        return place

    def _has_room(self) -> bool:
        return self.limits.workers is None or len(self._all) < self.limits.workers

    def _given_back(self, taking: "Future[EnvironmentWorker]") -> None:
        if not taking.cancelled() and taking.exception() is None:
            self._return(taking.result(), True)

    def _return(self, place: EnvironmentWorker, is_sound: bool) -> None:
        """After an episode: it waits for the next one, or ends."""
        place.episodes += 1
        too_large = place.memory_mib > self.limits.memory_mib
        if too_large:
            log.info("environment %s has %.0f MiB after an episode and is made anew", self.name, place.memory_mib)
        stays = is_sound and not too_large and place.episodes < self.limits.max_episodes
        with self._changed:
            if stays and not self._closed:
                self._idle.append(place)
                self._changed.notify()
            if stays or self._closed:
                return
        with contextlib.suppress(RuntimeError):  # closed meanwhile: `close` ends it
            self._callers.submit(self._end, place, is_sound)

    def _end(self, place: EnvironmentWorker, is_sound: bool) -> None:
        if is_sound:
            self._farewell(place)
        self._retire(place)

    def _farewell(self, place: EnvironmentWorker) -> None:
        """Has the environment closed; what goes wrong is a warning."""
        try:
            self.ask(place, {"operation": "close"}, self.limits.close_timeout_s)
        except DataFailure as failure:
            log.warning("an environment did not close: %s", failure)

    def _retire(self, place: EnvironmentWorker) -> None:
        place.worker.kill()
        if place.call is not None:
            wait([place.call])  # its thread reads from the pipes until it sees that the worker is dead
        place.worker.release()
        with self._changed:
            self._all.discard(place)
            self._changed.notify()

    def call(self, place: EnvironmentWorker, call: Mapping[str, Any], timeout_s: float) -> "Future[dict[str, Any]]":
        """`ask` in a thread."""
        place.call = self._callers.submit(self.ask, place, call, timeout_s)
        return place.call


class World:
    """An environment that is lent to one episode."""

    def __init__(self, pool: EnvironmentPool, place: EnvironmentWorker):
        self._pool, self._place = pool, place
        self.is_sound = True
        """False once it failed: nobody else gets it."""

    async def reset(self, data: Mapping[str, Any], seed: int) -> Observation:
        """Begins the episode; returns the first observation. Raises `DataFailure`."""
        message = await self._do(self._pool.limits.reset_timeout_s, operation="reset", data=dict(data), seed=seed)
        if "invalid" in message:
            self.is_sound = False
            raise DataFailure("environment_raised", f"{self._pool.name}: InvalidAction in reset: {message['invalid']}")
        return unwritten(message["observation"])

    async def step(self, action: Any) -> StepResult | str:
        """Acts; a text is what the environment says of an invalid action. Raises `DataFailure`."""
        message = await self._do(self._pool.limits.step_timeout_s, operation="step", action=action)
        if "invalid" in message:
            return str(message["invalid"])
        info = {} if message["accuracy"] is None else {"accuracy": message["accuracy"]}
        return StepResult(
            unwritten(message["observation"]), message["reward"], message["terminated"], message["truncated"], info
        )

    async def _do(self, timeout_s: float, **call: Any) -> dict[str, Any]:
        is_sound, self.is_sound = self.is_sound, False  # also if this is cancelled in the middle of a call
        message = await asyncio.wrap_future(self._pool.call(self._place, call, timeout_s))
        self.is_sound = is_sound
        return message
