"""Episodes on several ranks: rank 0 has loader, gate and ledger, and hands whole episodes to ranks with an engine.

Workflow, engine and rewards of one rank make all samples of a prompt, and only the finished group travels. Rank 0 hands
out and receives while it collects a batch, and the others serve it meanwhile; between two batches nobody listens, and an
outcome that comes too late for one batch is sent with the next. Whoever waits ends with the deadlines of rank 0.
"""

import asyncio
import contextlib
import pickle
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist

from tandem.api.activity import GENERATING, OTHER_RANKS, did, waiting
from tandem.api.failures import DataFailure, EpisodeFailure, InfrastructureFailure, RankFailed, WaitTimeout
from tandem.api.samples import Group
from tandem.api.team import Team
from tandem.api.workflow import RolloutWorkflow
from tandem.rollout.episodes import Episode, EpisodeRunner
from tandem.rollout.event_loop import BackgroundLoop

END = None
"""The last message of a batch, in both directions."""

LEAVE_TIMEOUT_S = 60.0
"""Longest time for a rank to answer that the batch is complete."""


def order_of(episodes: Iterable[Episode]) -> list[tuple[Any, ...]]:
    """The message that hands these out."""
    return [(one.number, one.prompt, one.row, one.version) for one in episodes]


class RankMessages:
    """Messages between this rank and another one of the team, each way in order."""

    def __init__(self, team: Team, peer: int):
        """``peer``: its place in the team."""
        self._group = team.group
        self.rank = peer if team.group is None else dist.get_global_rank(team.group, peer)
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def put(self, message: Any) -> None:
        """Queues a message for `send`. It is pickled here, so that one that cannot travel fails where it was made."""
        self._outbox.put(pickle.dumps(message))

    def send(self) -> None:
        """Sends what is queued, up to `END`. A thread's work; the reader notices when the other rank is gone."""
        message, last = b"", pickle.dumps(END)
        with contextlib.suppress(RuntimeError):
            while message != last:
                message = self._outbox.get()
                dist.send_object_list([message], dst=self.rank, group=self._group)

    def receive(self) -> Any:
        """Waits for the next message.

        Raises:
            RankFailed: the other rank is gone.
        """
        box: list[Any] = [None]
        try:
            dist.recv_object_list(box, src=self.rank, group=self._group)
        except RuntimeError as error:
            raise RankFailed(f"rank {self.rank}, which shares the episodes, is gone: {error}") from error
        return pickle.loads(box[0])


class OtherRanks:
    """The ranks that run episodes for rank 0. `working` and `cancel` are for any thread, the rest for the loop's."""

    def __init__(self, team: Team | None, loop: BackgroundLoop, lost: Callable[[Exception], None]):
        """``team``: the ranks that generate; None: rank 0 alone, so there are no others. ``lost`` is told of a rank that
        is gone."""
        self._lost = lost
        self._lines = [] if team is None else [RankMessages(team, peer) for peer in range(1, team.size)]
        self._loop = loop
        self._workflow: RolloutWorkflow | None = None
        self._loads = [0] * (1 + len(self._lines))
        self._outcomes: dict[int, asyncio.Future[Group | Exception]] = {}

    @contextlib.contextmanager
    def working(self, workflow: RolloutWorkflow | None) -> Iterator[None]:
        """A block in which the other ranks run episodes of this workflow; they run none if it is None.

        Raises:
            WaitTimeout: at the end of the block one of them does not answer.
        """
        if workflow is None or not self._lines:
            yield
            return
        work = [(line.send, ()) for line in self._lines] + [(self._listen, (line,)) for line in self._lines]
        threads = [threading.Thread(target=what, args=given, name="other-ranks", daemon=True) for what, given in work]
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
        """False: rank 0 runs episodes too."""
        return False

    def give(self, episodes: Sequence[Episode]) -> None:
        """Settles where each runs, which is where the fewest are under way, and hands out those of other ranks."""
        orders: dict[int, list[Episode]] = {}
        for episode in episodes:
            if episode.workflow is self._workflow:
                episode.place = self._loads.index(min(self._loads))
            self._loads[episode.place] += 1
            if episode.place:
                self._outcomes[episode.number] = asyncio.get_running_loop().create_future()
                orders.setdefault(episode.place, []).append(episode)
        for place, some in orders.items():
            self._lines[place - 1].put(order_of(some))

    def cancel(self, episode: Episode) -> None:
        """Stops an episode that another rank runs."""
        if episode.place:
            self._lines[episode.place - 1].put(episode.number)

    async def group_of(self, episode: Episode) -> Group:
        """Waits for an episode of another rank. Raises what it raised there."""
        outcome = await self._outcomes[episode.number]
        if isinstance(outcome, Exception):
            raise outcome
        return replace(outcome, data=episode.row)

    def detach(self) -> None:
        """Nothing: between two batches nobody listens."""

    def ended(self, episode: Episode, _: asyncio.Task[None]) -> None:
        """An episode has ended, wherever it ran."""
        self._loads[episode.place] -= 1
        self._outcomes.pop(episode.number, None)

    def _listen(self, line: RankMessages) -> None:
        try:
            while (message := line.receive()) is not END:
                self._loop.call(self._arrived, *message)
        except Exception as error:  # the worker boundary: it must reach whoever waits
            self._lost(error)

    def _arrived(self, number: int, outcome: Group | Exception) -> None:
        future = self._outcomes.get(number)
        if future is not None and not future.done():  # else the episode was aborted in the meantime
            future.set_result(outcome)


def portable(error: Exception, where: str) -> Exception:
    """The error, or one that stands for it, with its traceback as text: what caused it cannot travel."""
    told = Team().portable(error)
    if isinstance(error, EpisodeFailure) and not isinstance(told, EpisodeFailure):
        kind = InfrastructureFailure if isinstance(error, InfrastructureFailure) else DataFailure
        told = kind(error.reason, error.words)
        told.failed_samples, told.num_left = error.failed_samples, error.num_left
    told.add_note(f"on {where}:\n" + "".join(traceback.format_exception(error)))
    return told


class Line(Protocol):
    """A way to who collects the batches."""

    def put(self, message: Any) -> None:
        """Sends a message, after those before it. One that cannot travel fails here."""


class Helper:
    """Runs, elsewhere, the episodes that whoever collects the batches hands out. `take` and `stop` are for one thread."""

    def __init__(self, line: Line, loop: BackgroundLoop, runner: EpisodeRunner, patience_s: float, where: str):
        """``patience_s``: how long the episodes of a deterministic run may take to issue their requests. ``where``: names
        this process, for errors."""
        self._line, self._loop, self._runner, self._patience_s, self._where = line, loop, runner, patience_s, where
        self._running: dict[int, tuple[Episode, asyncio.Task[None]]] = {}

    def take(self, message: Any, workflow: RolloutWorkflow) -> None:
        """Begins the episodes of an order, or cancels that of a number."""
        if isinstance(message, int):
            self._loop.call(self._cancel, message)
            return
        episodes = [Episode(number, prompt, row, workflow, version) for number, prompt, row, version in message]
        try:
            self._runner.begin(episodes, self._spawn, self._patience_s)
        except Exception as error:  # the worker boundary: somebody waits for these episodes
            for episode in episodes:
                self._report(episode.number, error)

    def stop(self) -> None:
        """Cancels all that runs."""
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
        except Exception as error:  # the worker boundary: it must reach whoever collects
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
    """Runs, on another rank, the episodes that rank 0 hands out."""

    def __init__(self, team: Team, loop: BackgroundLoop, runner: EpisodeRunner, patience_s: float):
        """``patience_s``: see `Helper`."""
        self._messages = RankMessages(team, 0)
        super().__init__(self._messages, loop, runner, patience_s, f"rank {dist.get_rank()}")

    def serve(self, workflow: RolloutWorkflow) -> None:
        """Runs episodes of this workflow until rank 0 has its batch.

        Raises:
            RankFailed: rank 0 is gone.
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
