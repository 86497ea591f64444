"""Episodes that run in other processes: on other ranks, which have an engine, or in rollout workers, which have none.

Gate, ledger and book stay in the collecting process, which sends whole episodes. All samples of a prompt are made by one
workflow; only the finished group is sent back.

*Other ranks* make the samples with their own engine and rewards. While rank 0 collects a batch, it sends and receives, and
the other ranks serve it. Between batches nobody listens; an outcome that is too late for one batch is sent with the next.
All waits are limited by the deadlines of rank 0.

*Rollout workers* use the engine of the collecting process: their messages are also requests and completions. A worker first
gets the number of its *term*, which all its messages carry; messages of an earlier term are ignored. When a worker dies, its
successor gets a new term, and its episodes start again in other workers with the same noise.
"""

import asyncio
import contextlib
import itertools
import pickle
import queue
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist

from tandem.api.activity import GENERATING, OTHER_RANKS, did, waiting
from tandem.api.engines import InferenceEngine
from tandem.api.failures import DataFailure, EngineDied, EpisodeFailure, InfrastructureFailure, RankFailed, WaitTimeout
from tandem.api.requests import LLMRequest
from tandem.api.team import Team
from tandem.api.workflow import Group, RolloutWorkflow
from tandem.rollout.episodes import Episode, EpisodeRunner
from tandem.rollout.event_loop import BackgroundLoop

END = None
"""The last message of a batch, from rank 0 or to rank 0."""

LEAVE_TIMEOUT_S = 60.0
"""Maximum time in seconds for a rank to confirm that the batch is complete."""


def order_of(episodes: Iterable[Episode]) -> list[tuple[Any, ...]]:
    """Returns the message that assigns these episodes to another rank."""
    return [(episode.number, episode.prompt, episode.row, episode.version) for episode in episodes]


class RankMessages:
    """Ordered messages in both directions between this rank and another rank of the team."""

    def __init__(self, team: Team, peer: int):
        """``peer``: the other rank's index in the team."""
        self._group = team.group
        self.rank = peer if team.group is None else dist.get_global_rank(team.group, peer)
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def put(self, message: Any) -> None:
        """Queues a message for `send`. Pickles it at once, so that the caller of `put` gets an error of pickling."""
        self._outbox.put(pickle.dumps(message))

    def send(self) -> None:
        """Sends the queued messages up to `END`; runs in a thread. A lost rank is reported by `receive`."""
        message, last = b"", pickle.dumps(END)
        with contextlib.suppress(RuntimeError):
            while message != last:
                message = self._outbox.get()
                dist.send_object_list([message], dst=self.rank, group=self._group)

    def receive(self) -> Any:
        """Waits for the next message and returns it.

        Raises:
            RankFailed: the other rank has died.
        """
        box: list[Any] = [None]
        try:
            dist.recv_object_list(box, src=self.rank, group=self._group)
        except RuntimeError as error:
            raise RankFailed(f"rank {self.rank}, which shares the episodes, is gone: {error}") from error
        return pickle.loads(box[0])


class OtherProcesses:
    """Processes that run episodes. Holds the outcome of each one under way."""

    _outcomes: dict[int, asyncio.Future[Group | Exception]]

    async def group_of(self, episode: Episode) -> Group:
        """Waits for an episode in another process and returns its group, or raises its error."""
        outcome = await self._outcomes[episode.number]
        if isinstance(outcome, Exception):
            raise outcome
        return replace(outcome, data=episode.row)


class OtherRanks(OtherProcesses):
    """The ranks that run episodes for rank 0. `working` and `cancel` may be called from any thread, the rest on the loop."""

    def __init__(self, team: Team | None, loop: BackgroundLoop, lost: Callable[[Exception], None]):
        """``team``: the generating ranks; None: only rank 0 generates. ``lost``: called with the error if a rank has
        died."""
        self._lost = lost
        self._lines = [] if team is None else [RankMessages(team, peer) for peer in range(1, team.size)]
        self._loop = loop
        self._workflow: RolloutWorkflow | None = None
        self._loads = [0] * (1 + len(self._lines))
        self._outcomes = {}

    @contextlib.contextmanager
    def working(self, workflow: RolloutWorkflow | None) -> Iterator[None]:
        """Context manager in which the other ranks run episodes of this workflow; if None, they run none.

        Raises:
            WaitTimeout: a rank has not confirmed the end of the block.
        """
        if workflow is None or not self._lines:
            yield
            return
        work = [(line.send, ()) for line in self._lines] + [(self._listen, (line,)) for line in self._lines]
        threads = [threading.Thread(target=target, args=args, name="other-ranks", daemon=True) for target, args in work]
        for thread in threads:
            thread.start()
        self._workflow = workflow
        try:
            yield
        finally:
            self._workflow = None
            for line in self._lines:
                line.put(END)
            deadline = time.monotonic() + LEAVE_TIMEOUT_S
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            if any(thread.is_alive() for thread in threads):
                raise WaitTimeout(f"waited {LEAVE_TIMEOUT_S:g} s for the other ranks to end their part of the batch")

    def runs(self, workflow: RolloutWorkflow) -> bool:
        """Returns False, because rank 0 runs episodes of every workflow too."""
        return False

    def give(self, episodes: Sequence[Episode]) -> None:
        """Assigns each episode to the rank with the fewest running episodes, and sends the other ranks theirs."""
        orders: dict[int, list[Episode]] = {}
        for episode in episodes:
            if episode.workflow is self._workflow:
                episode.place = self._loads.index(min(self._loads))
            self._loads[episode.place] += 1
            if episode.place:
                self._outcomes[episode.number] = asyncio.get_running_loop().create_future()
                orders.setdefault(episode.place, []).append(episode)
        for place, assigned in orders.items():
            self._lines[place - 1].put(order_of(assigned))

    def cancel(self, episode: Episode) -> None:
        """Cancels an episode that runs on another rank."""
        if episode.place:
            self._lines[episode.place - 1].put(episode.number)

    def detach(self) -> None:
        """Does nothing, because between batches the other ranks do not listen."""

    def ended(self, episode: Episode, _: asyncio.Task[None]) -> None:
        """Updates the load of a rank when an episode has ended there."""
        self._loads[episode.place] -= 1
        self._outcomes.pop(episode.number, None)

    def _listen(self, line: RankMessages) -> None:
        try:
            while (message := line.receive()) is not END:
                self._loop.call(self._arrived, *message)
        except Exception as error:  # the worker boundary: the error must reach the waiting caller
            self._lost(error)

    def _arrived(self, number: int, outcome: Group | Exception) -> None:
        future = self._outcomes.get(number)
        if future is not None and not future.done():  # otherwise the episode was aborted in the meantime
            future.set_result(outcome)


def portable(error: Exception, where: str) -> Exception:
    """Returns an error that can be pickled, with the original's traceback as a note, because its cause cannot be sent."""
    sent = Team().portable(error)
    if isinstance(error, EpisodeFailure) and not isinstance(sent, EpisodeFailure):
        kind = InfrastructureFailure if isinstance(error, InfrastructureFailure) else DataFailure
        sent = kind(error.reason, error.words)
        sent.failed_samples, sent.num_left = error.failed_samples, error.num_left
    sent.add_note(f"on {where}:\n" + "".join(traceback.format_exception(error)))
    return sent


class Line(Protocol):
    """A channel to the process that collects the batches."""

    def put(self, message: Any) -> None:
        """Sends a message in order. Raises if the message cannot be pickled."""


class Helper:
    """Runs episodes for the process that collects the batches. `take` and `stop` must be called from one thread."""

    def __init__(self, line: Line, loop: BackgroundLoop, runner: EpisodeRunner, patience_s: float, where: str):
        """``patience_s``: maximum time in seconds for the episodes of a deterministic run to issue their first requests.
        ``where``: the name of this process, for errors."""
        self._line, self._loop, self._runner, self._patience_s, self._where = line, loop, runner, patience_s, where
        self._running: dict[int, tuple[Episode, asyncio.Task[None]]] = {}

    def take(self, message: Any, workflow: RolloutWorkflow) -> None:
        """Starts the episodes of a message. A message that is a number cancels the episode with this number."""
        if isinstance(message, int):
            self._loop.call(self._cancel, message)
            return
        episodes = [Episode(number, prompt, row, workflow, version) for number, prompt, row, version in message]
        try:
            self._runner.begin(episodes, self._spawn, self._patience_s)
        except Exception as error:  # the worker boundary: another process waits for these episodes
            for episode in episodes:
                self._report(episode.number, error)

    def stop(self) -> None:
        """Cancels all running episodes."""
        self._loop.call(self._cancel_all)

    def _spawn(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            task = asyncio.get_running_loop().create_task(self._make(episode))
            self._running[episode.number] = episode, task
            task.add_done_callback(partial(self._ended, episode.number))

    def _ended(self, number: int, _: asyncio.Task[None]) -> None:
        del self._running[number]

    async def _make(self, episode: Episode) -> None:
        try:
            self._report(episode.number, replace(await self._runner.group_of(episode), data={}))
        except Exception as error:  # the worker boundary: the error must reach the collecting process
            self._report(episode.number, error)
        did(*GENERATING)

    def _cancel(self, number: int) -> None:
        if number in self._running:
            episode, task = self._running[number]
            episode.aborted = True
            task.cancel()

    def _cancel_all(self) -> None:
        for number in self._running:
            self._cancel(number)

    def _report(self, number: int, outcome: Group | Exception) -> None:
        self._line.put((number, portable(outcome, self._where) if isinstance(outcome, Exception) else outcome))


class RankHelper(Helper):
    """Runs, on another rank, the episodes that rank 0 assigns."""

    def __init__(self, team: Team, loop: BackgroundLoop, runner: EpisodeRunner, patience_s: float):
        """``patience_s``: see `Helper`."""
        self._messages = RankMessages(team, 0)
        super().__init__(self._messages, loop, runner, patience_s, f"rank {dist.get_rank()}")

    def serve(self, workflow: RolloutWorkflow) -> None:
        """Runs episodes of this workflow until rank 0 has its batch.

        Raises:
            RankFailed: rank 0 has died.
        """
        sender = threading.Thread(target=self._messages.send, name="to-rank-0", daemon=True)
        sender.start()
        try:
            with waiting(OTHER_RANKS):
                while (message := self._messages.receive()) is not END:
                    self.take(message, workflow)
        finally:
            self._messages.put(END)
            sender.join(LEAVE_TIMEOUT_S)


_AGAIN = InfrastructureFailure("worker_died", "the wave begins again")

Send = Callable[[Any], None]
"""Sends a message to a worker, in order. Raises if the message cannot be pickled."""


class RolloutWorkers(OtherProcesses):
    """The workers, as seen by the collecting process. They run all episodes of `workflow`; each worker has a copy of it.

    `attach`, `detach`, `heard`, `gone`, `back` and `cancel` may be called from any thread, the rest on the loop only.
    """

    def __init__(self, orders: Sequence[Send], answers: Sequence[Send]):
        """``orders``, ``answers``: the channels to each worker; answers arrive even while the worker starts new orders."""
        self._orders, self._answers = orders, answers
        self.workflow: RolloutWorkflow | None = None
        self._alive = set(range(1, len(orders) + 1))
        self._count = itertools.count(1)
        self._terms: dict[int, int] = {}
        self._lock = threading.Lock()
        self._loop: BackgroundLoop | None = None
        self._unanswered: set[tuple[int, int]] = set()
        """Control calls without an answer so far: (worker, number)."""

        self._is_paused = False
        """True while the engine is paused for the workers."""

    def attach(self, loop: BackgroundLoop, engine: InferenceEngine, lost: Callable[[Exception], None], waves: bool) -> None:
        """Starts to serve an executor, with no episodes. ``lost``: called with an error that breaks the executor. ``waves``:
        the run is deterministic, so the episodes of all workers start together and take their turns together."""
        self._engine, self._lost, self._waves = engine, lost, waves
        self._refuse()
        self._terms.clear()
        self._outcomes = {}
        self._episodes: dict[int, Episode] = {}
        self._at: dict[int, int] = {}
        """The worker of each episode that has no outcome yet."""

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
        """Detaches from the executor, whose loop is about to end."""
        with self._lock:
            self._loop = None
        if self._is_paused:
            with suppress(EngineDied, WaitTimeout):
                self._engine.resume()
            self._is_paused = False

    def heard(self, place: int, message: bytes) -> None:
        """Handles a message of the worker number ``place``, counted from 1."""
        term, kind, number, content = pickle.loads(message)
        with self._lock:
            if self._loop is not None:
                self._loop.call(self._heard, place, term, kind, number, content)
            elif kind == "control":  # no executor: the waiting thread would hold up the next orders
                self._answers[place - 1]((number, _AGAIN))

    def gone(self, place: int) -> None:
        """Handles the death of a worker. Its episodes start again in others, or in its successor after `back`."""
        self._alive.discard(place)
        self._call(self._gone, place)

    def back(self, place: int) -> None:
        """Adds a new process in the place of a dead worker."""
        self._call(self._begin, [place])
        self._alive.add(place)
        self._call(self._house)

    @property
    def left(self) -> int:
        """Number of living workers."""
        return len(self._alive)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        with self._lock:
            if self._loop is not None:
                self._loop.call(function, *arguments)

    # ------------------------------------------------------------------ as `OtherRanks`

    @contextmanager
    def working(self, workflow: RolloutWorkflow | None) -> Iterator[None]:
        """Does nothing, because workers are always available."""
        yield

    def runs(self, workflow: RolloutWorkflow) -> bool:
        """True if the workers run the episodes of this workflow."""
        return workflow is self.workflow

    def give(self, episodes: Sequence[Episode]) -> None:
        """Sends the workers' episodes to them; in a deterministic run these episodes are one wave."""
        assigned = [episode for episode in episodes if self.runs(episode.workflow)]
        for episode in assigned:
            self._outcomes[episode.number] = asyncio.get_running_loop().create_future()
            self._episodes[episode.number] = episode
        self._wave = assigned if assigned and self._waves else self._wave
        self._hand_out(assigned)

    def cancel(self, episode: Episode) -> None:
        """Cancels an episode."""
        self._call(self._cancel, episode.number)

    def ended(self, episode: Episode, _: asyncio.Task[None]) -> None:
        """Forgets an episode that has ended."""
        self._outcomes.pop(episode.number, None)
        self._episodes.pop(episode.number, None)

    # ------------------------------------------------------------------ on the loop's thread

    def _begin(self, places: Iterable[int]) -> None:
        for place in list(places):
            self._terms[place] = next(self._count)
            self._orders[place - 1]((self._terms[place], None))

    def _house(self) -> None:
        self._begin(self._alive - self._terms.keys())  # for a worker that came back between two executors
        pending, self._homeless = self._homeless, []
        self._hand_out([episode for episode in pending if not episode.aborted])

    def _hand_out(self, episodes: Iterable[Episode]) -> None:
        loads, orders = Counter(self._at.values()), dict[int, list[Episode]]()
        ready = [place for place in sorted(self._alive) if place in self._terms]
        for episode in episodes:
            episode.place = min(ready, key=lambda place: loads[place], default=-1)
            if episode.place < 0:
                self._homeless.append(episode)
                continue
            self._at[episode.number] = episode.place
            loads[episode.place] += 1
            orders.setdefault(episode.place, []).append(episode)
        for place, assigned in orders.items():
            self._orders[place - 1]((self._terms[place], order_of(assigned)))

    def _cancel(self, number: int) -> None:
        place = self._at.pop(number, None)
        if place is not None:
            self._orders[place - 1]((self._terms[place], number))
            if self._waves:
                self._look()

    def _heard(self, place: int, term: int, kind: str, number: int, content: Any) -> None:
        stale = term != self._terms.get(place)
        if kind == "control":
            self._unanswered.add((place, number))
            if stale:
                self._answer(place, number, _AGAIN)
            else:
                (self._pausing if content == ("pause",) else self._resuming)[place] = number
        elif stale:
            return
        elif kind == "ask" and content is None:
            if task := self._asks.pop((place, number), None):
                task.cancel()
        elif kind == "ask":
            self._asks[place, number] = asyncio.get_running_loop().create_task(self._ask(place, number, content))
        elif kind == "blocked":
            self._lost(content)
        elif self._at.get(number) == place:
            del self._at[number]
            future = self._outcomes.get(number)
            # otherwise the wave was restarted, and this episode had ended before
            if future is not None and not future.done():
                future.set_result(content)
        if self._waves:
            self._look()

    async def _ask(self, place: int, number: int, request: LLMRequest) -> None:
        answer: Any
        try:
            answer = await self._engine.agenerate(request)
            did(*GENERATING)
        except Exception as error:  # the worker boundary: the error must reach the episode
            answer = portable(error, "the engine")
        self._asks.pop((place, number), None)
        self._answer(place, number, answer)

    def _look(self) -> None:
        """Pauses the engine when every worker with episodes has asked for a pause, and resumes it when all these workers
        have asked to resume. By then the engine has the requests of all workers, and orders them by their noise. So a wave
        is computed as in one process."""
        if self._pausing and not self._paused and self._pausing.keys() >= set(self._at.values()):
            calls, self._pausing = self._pausing, {}
            self._paused = calls
            asyncio.get_running_loop().create_task(self._turn("pause", calls))
        if self._paused and self._resuming.keys() >= self._paused.keys():
            calls, self._paused, self._resuming = self._resuming, {}, {}
            # a task, so that it runs after the tasks of earlier requests
            asyncio.get_running_loop().create_task(self._turn("resume", calls))

    async def _turn(self, name: str, calls: dict[int, int]) -> None:
        answer: Any = None
        async with self._turning:
            try:
                self._is_paused = True  # set before the pause, so that `detach` resumes the engine in any case
                await asyncio.to_thread(getattr(self._engine, name))
                self._is_paused = name == "pause"
            except Exception as error:  # the worker boundary: the requests will raise the error themselves
                answer = portable(error, "the engine")
                if name == "pause":
                    self._paused = {}  # no worker will ask to resume, so the next turn may begin
        for place, number in calls.items():
            self._answer(place, number, answer)

    def _gone(self, place: int) -> None:
        self._terms.pop(place, None)  # the successor may already exist, and must not get orders of the old term
        affected = [number for number, at in self._at.items() if at == place]
        self._unanswered = {call for call in self._unanswered if call[0] != place}
        if self._waves and (affected or place in self._paused):
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
        for number in affected:
            del self._at[number]
        self._hand_out([self._episodes[number] for number in affected if number in self._episodes])

    async def _again(self, restart: int) -> None:
        """Restarts the whole wave, including its finished episodes, so that the same requests are computed together."""
        try:
            async with self._turning:
                if self._is_paused:
                    await asyncio.to_thread(self._engine.resume)
                    self._is_paused = False
                await asyncio.to_thread(self._engine.flush)
        except Exception as error:  # the worker boundary: no request is left that would raise the error
            self._lost(error)
            return
        if restart == self._restarts:
            self._hand_out([episode for episode in self._wave if not episode.aborted])

    def _drop_asks(self, places: Iterable[int]) -> None:
        places = set(places)
        for key in [key for key in self._asks if key[0] in places]:
            self._asks.pop(key).cancel()

    def _refuse(self) -> None:
        for place, number in list(self._unanswered):
            self._answer(place, number, _AGAIN)

    def _answer(self, place: int, number: int, answer: Any) -> None:
        if number >= 0 or (place, number) in self._unanswered:
            self._unanswered.discard((place, number))
            self._answers[place - 1]((number, answer))
