"""Rollout workers: processes without an engine that run episodes, and ask the engine of the one that collects.

Gate, ledger and book stay there; what travels are orders and outcomes as in `tandem.rollout.ranks`, requests and
completions. A worker is told its *term* first. All that it says carries it, and what is said of an earlier term counts no
more: a worker that dies gets another term, and its episodes begin again elsewhere, with the same noise.
"""

import asyncio
import itertools
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from tandem.api.activity import GENERATING, did
from tandem.api.engines import InferenceEngine
from tandem.api.failures import EngineDied, InfrastructureFailure, WaitTimeout
from tandem.api.requests import LLMRequest
from tandem.api.samples import Group
from tandem.api.workflow import RolloutWorkflow
from tandem.rollout.episodes import Episode
from tandem.rollout.event_loop import BackgroundLoop
from tandem.rollout.ranks import order_of, portable

_AGAIN = InfrastructureFailure("worker_died", "the wave begins again")

Send = Callable[[Any], None]
"""Sends a message to a worker, after those before it; one that cannot travel fails here."""


class RolloutWorkers:
    """The workers, seen from the process that collects. They run all episodes of `workflow`, whose other half is there.

    `attach`, `detach`, `heard`, `gone`, `back` and `cancel` are for any thread, the rest for the loop's.
    """

    def __init__(self, orders: Sequence[Send], answers: Sequence[Send]):
        """``orders``, ``answers``: the ways to each worker; answers come through while it begins what it was ordered."""
        self._orders, self._answers = orders, answers
        self.workflow: RolloutWorkflow | None = None
        self._alive = set(range(1, len(orders) + 1))
        self._count = itertools.count(1)
        self._terms: dict[int, int] = {}
        self._lock = threading.Lock()
        self._loop: BackgroundLoop | None = None
        self._owed: set[tuple[int, int]] = set()
        """Control calls that wait for an answer: worker and number."""

        self._stands = False
        """True while the engine stands still for them."""

    def attach(self, loop: BackgroundLoop, engine: InferenceEngine, lost: Callable[[Exception], None], waves: bool) -> None:
        """Begins anew, for an executor. ``lost``: is told what breaks it. ``waves``: a deterministic run, in which episodes
        begin together and take their turns together, in all workers."""
        self._engine, self._lost, self._waves = engine, lost, waves
        self._refuse()
        self._terms.clear()
        self._outcomes: dict[int, asyncio.Future[Group | Exception]] = {}
        self._episodes: dict[int, Episode] = {}
        self._at: dict[int, int] = {}
        """The worker of each episode whose outcome is not there."""

        self._homeless: list[Episode] = []
        self._wave: list[Episode] = []
        self._asks: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._pausing: dict[int, int] = {}
        self._paused: dict[int, int] = {}
        self._resuming: dict[int, int] = {}
        self._turning, self._restarts = asyncio.Lock(), 0
        with self._lock:
            self._loop = loop
        self._call(self._begin, self._alive)

    def detach(self) -> None:
        """The executor's loop is about to end."""
        with self._lock:
            self._loop = None
        if self._stands:
            with suppress(EngineDied, WaitTimeout):
                self._engine.resume()
            self._stands = False

    def heard(self, place: int, message: bytes) -> None:
        """A worker said something; places are counted from 1."""
        term, what, number, said = pickle.loads(message)
        with self._lock:
            if self._loop is not None:
                self._loop.call(self._heard, place, term, what, number, said)
            elif what == "control":  # between two executors; its thread waits, and the orders of the next behind it
                self._answers[place - 1]((number, _AGAIN))

    def gone(self, place: int) -> None:
        """A worker died. What it ran begins again in others, at the latest in the one that comes `back` in its place."""
        self._alive.discard(place)
        self._call(self._gone, place)

    def back(self, place: int) -> None:
        """Another process is in its place."""
        self._call(self._begin, [place])
        self._alive.add(place)
        self._call(self._house)

    @property
    def left(self) -> int:
        """Number of those that live."""
        return len(self._alive)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        with self._lock:
            if self._loop is not None:
                self._loop.call(function, *arguments)

    # ------------------------------------------------------------------ as `OtherRanks`

    @contextmanager
    def working(self, workflow: RolloutWorkflow | None) -> Iterator[None]:
        """They always do."""
        yield

    def runs(self, workflow: RolloutWorkflow) -> bool:
        """True if the workers run the episodes of this workflow."""
        return workflow is self.workflow

    def give(self, episodes: Sequence[Episode]) -> None:
        """Hands out those of the workers; in a deterministic run they are a wave."""
        mine = [episode for episode in episodes if self.runs(episode.workflow)]
        for episode in mine:
            self._outcomes[episode.number] = asyncio.get_running_loop().create_future()
            self._episodes[episode.number] = episode
        self._wave = mine if mine and self._waves else self._wave
        self._hand_out(mine)

    def cancel(self, episode: Episode) -> None:
        """Stops an episode."""
        self._call(self._cancel, episode.number)

    async def group_of(self, episode: Episode) -> Group:
        """Waits for an episode. Raises what it raised there."""
        outcome = await self._outcomes[episode.number]
        if isinstance(outcome, Exception):
            raise outcome
        return replace(outcome, data=episode.row)

    def ended(self, episode: Episode, _: asyncio.Task[None]) -> None:
        """An episode has ended."""
        self._outcomes.pop(episode.number, None)
        self._episodes.pop(episode.number, None)

    # ------------------------------------------------------------------ on the loop's thread

    def _begin(self, places: Iterable[int]) -> None:
        for place in list(places):
            self._terms[place] = next(self._count)
            self._orders[place - 1]((self._terms[place], None))

    def _house(self) -> None:
        self._begin(self._alive - self._terms.keys())  # of one that came back between two executors
        homeless, self._homeless = self._homeless, []
        self._hand_out([one for one in homeless if not one.aborted])

    def _hand_out(self, episodes: Iterable[Episode]) -> None:
        loads, orders = Counter(self._at.values()), dict[int, list[Episode]]()
        there = [place for place in sorted(self._alive) if place in self._terms]
        for episode in episodes:
            episode.place = min(there, key=lambda place: loads[place], default=-1)
            if episode.place < 0:
                self._homeless.append(episode)
                continue
            self._at[episode.number] = episode.place
            loads[episode.place] += 1
            orders.setdefault(episode.place, []).append(episode)
        for place, some in orders.items():
            self._orders[place - 1]((self._terms[place], order_of(some)))

    def _cancel(self, number: int) -> None:
        place = self._at.pop(number, None)
        if place is not None:
            self._orders[place - 1]((self._terms[place], number))
            if self._waves:
                self._look()

    def _heard(self, place: int, term: int, what: str, number: int, said: Any) -> None:
        stale = term != self._terms.get(place)
        if what == "control":
            self._owed.add((place, number))
            if stale:
                self._answer(place, number, _AGAIN)
            else:
                (self._pausing if said == ("pause",) else self._resuming)[place] = number
        elif stale:
            return
        elif what == "ask" and said is None:
            if task := self._asks.pop((place, number), None):
                task.cancel()
        elif what == "ask":
            self._asks[place, number] = asyncio.get_running_loop().create_task(self._ask(place, number, said))
        elif what == "blocked":
            self._lost(said)
        elif self._at.get(number) == place:
            del self._at[number]
            future = self._outcomes.get(number)
            if future is not None and not future.done():  # else the wave began again, and this one had ended before
                future.set_result(said)
        if self._waves:
            self._look()

    async def _ask(self, place: int, number: int, request: LLMRequest) -> None:
        answer: Any
        try:
            answer = await self._engine.agenerate(request)
            did(*GENERATING)
        except Exception as error:  # the worker boundary: it must reach the episode
            answer = portable(error, "the engine")
        self._asks.pop((place, number), None)
        self._answer(place, number, answer)

    def _look(self) -> None:
        """The engine stands still once each worker that runs episodes asks for it, and goes on when these all say so: then
        it has the requests of all, which it orders by their noise. So a wave is that of one process."""
        if self._pausing and not self._paused and self._pausing.keys() >= set(self._at.values()):
            calls, self._pausing = self._pausing, {}
            self._paused = calls
            asyncio.get_running_loop().create_task(self._turn("pause", calls))
        if self._paused and self._resuming.keys() >= self._paused.keys():
            calls, self._paused, self._resuming = self._resuming, {}, {}
            # a task, so that it comes after those of requests that arrived before
            asyncio.get_running_loop().create_task(self._turn("resume", calls))

    async def _turn(self, name: str, calls: dict[int, int]) -> None:
        answer: Any = None
        async with self._turning:
            try:
                self._stands = True  # from before it does, so that `detach` lets it go on in any case
                await asyncio.to_thread(getattr(self._engine, name))
                self._stands = name == "pause"
            except Exception as error:  # the worker boundary: the requests will say it
                answer = portable(error, "the engine")
                if name == "pause":
                    self._paused = {}  # nobody will ask for the engine to go on: the next turn may begin
        for place, number in calls.items():
            self._answer(place, number, answer)

    def _gone(self, place: int) -> None:
        self._terms.pop(place, None)  # the next process may be in its place already, and gets no orders of the old term
        mine = [number for number, at in self._at.items() if at == place]
        self._owed = {one for one in self._owed if one[0] != place}
        if self._waves and (mine or place in self._paused):
            self._restarts += 1
            self._refuse()
            self._pausing, self._paused, self._resuming = {}, {}, {}
            self._drop_asks([place, *self._terms])
            self._at.clear()
            self._begin(self._alive)
            asyncio.get_running_loop().create_task(self._again(self._restarts))
            return
        self._drop_asks([place])
        self._pausing.pop(place, None)
        for number in mine:
            del self._at[number]
        self._hand_out([self._episodes[number] for number in mine if number in self._episodes])

    async def _again(self, restart: int) -> None:
        """The whole wave, also the episodes of it that have ended: what is computed together is as it was."""
        try:
            async with self._turning:
                if self._stands:
                    await asyncio.to_thread(self._engine.resume)
                    self._stands = False
                await asyncio.to_thread(self._engine.flush)
        except Exception as error:  # the worker boundary: no request is left that would say it
            self._lost(error)
            return
        if restart == self._restarts:
            self._hand_out([one for one in self._wave if not one.aborted])

    def _drop_asks(self, places: Iterable[int]) -> None:
        places = set(places)
        for key in [key for key in self._asks if key[0] in places]:
            self._asks.pop(key).cancel()

    def _refuse(self) -> None:
        for place, number in list(self._owed):
            self._answer(place, number, _AGAIN)

    def _answer(self, place: int, number: int, answer: Any) -> None:
        if number >= 0 or (place, number) in self._owed:
            self._owed.discard((place, number))
            self._answers[place - 1]((number, answer))
