"""The rewards of models that episodes await: each judges in the middle of an episode with the model of its score."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch

from tandem.api.batch import pack
from tandem.api.failures import DataFailure, InfrastructureFailure, RewardFailure, UserCodeFailed, WrongWorkflow
from tandem.api.plugins import Interrupted, interrupt
from tandem.api.samples import Sample
from tandem.api.workflow import RewardFn, RewardResult
from tandem.engines.inference.threads import use_gpu
from tandem.flow.plan import RunPlan
from tandem.flow.scoring import ScoreRole
from tandem.flow.writing import WritingRole
from tandem.rewards.reward import MOST

MAX_STUCK = 8
"""Scores that hang, each in a thread that cannot be ended, at which the run ends."""


class EpisodeScore(RewardFn):
    """A `Score` as a reward that a workflow awaits: ``result = await self.judge(chat, data, self.helpful)``.

    Each conversation is computed by itself, so its value depends neither on the others nor on the order in which they come.
    It is equal, to the bit, to what the stage of the score gives to that conversation alone; a stage that computes several
    together may differ in the last digits.
    """

    reads_messages = True

    def __init__(self, name: str, scores: "EpisodeScores"):
        self.name, self._scores = name, scores

    async def __call__(
        self,
        *,
        prompt: str,
        completion: str,
        prompt_ids: tuple[int, ...],
        completion_ids: tuple[int, ...],
        row: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]] = (),
    ) -> RewardResult:
        """Implements `RewardFn.__call__`.

        Raises:
            DataFailure: its model cannot read this conversation.
            RewardFailure: a score of a user's file took longer than `reward_timeout_s` from when its turn came.
            InfrastructureFailure: the model is not open yet, as outside of an episode.
            WrongWorkflow: a score of a user's file raised, gave something else, or hangs too often; this ends the run.
        """
        asked = Sample((), 0.0, prompt_text=prompt, completion_text=completion, messages=tuple(messages))
        return RewardResult(await self._scores.ask(self.name, asked, row))


class EpisodeScores:
    """The rewards of models that the episodes of this process await. They compute in one thread, one after another; behind
    one that hangs, in a new one."""

    def __init__(self, plan: RunPlan, max_stuck: int = MAX_STUCK):
        self.rewards = {one.name: EpisodeScore(one.name, self) for one in plan.scores if one.in_episodes}
        self._roles: Mapping[str, ScoreRole] = {}
        self._asked: SimpleQueue[_Asked | None] | None = None
        self._max_stuck = max_stuck

    def start(self, roles: Mapping[str, ScoreRole | WritingRole], device: str) -> None:
        """From now on these models score, on this device and with as many threads as the caller computes with."""
        self._roles = {name: role for name, role in roles.items() if name in self.rewards and isinstance(role, ScoreRole)}
        if self._roles and self._asked is None:
            self._asked = SimpleQueue()
            given = (self._asked, partial(_ScoringThread, torch.get_num_threads(), device), self._max_stuck)
            Thread(target=_serve, args=given, name="scores-in-episodes", daemon=True).start()

    async def ask(self, name: str, sample: Sample, row: Mapping[str, Any]) -> float:
        """The score of one conversation."""
        role, queue = self._roles.get(name), self._asked
        if role is None or queue is None:
            raise InfrastructureFailure(
                "no_model", f"reward {name!r} was asked before its model was open; ask in an episode"
            )
        try:
            future: Future[float] = Future()
            queue.put((future, role, sample, row))
            if self._asked is not queue and future.cancel():  # closed meanwhile: nobody reads behind the end
                raise InfrastructureFailure("no_model", f"reward {name!r} was asked when its model had been closed")
            return await asyncio.wrap_future(future)
        except UserCodeFailed as error:
            raise WrongWorkflow(str(error)) from error

    def close(self) -> None:
        """Ends the thread; idempotent."""
        queue, self._asked = self._asked, None
        if queue is not None:
            queue.put(None)


_Asked = tuple[Future[float], ScoreRole, Sample, Mapping[str, Any]]


class _ScoringThread:
    """Computes scores, until one is late. A daemon: a score that hangs must not keep the process from ending."""

    def __init__(self, threads: int, device: str):
        self._todo: SimpleQueue[Callable[[], float] | None] = SimpleQueue()
        self._done: SimpleQueue[float | BaseException] = SimpleQueue()
        self._thread = Thread(target=self._run, args=(threads, device), name="score-in-episode", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """False once it has ended."""
        return self._thread.is_alive()

    def call(self, work: Callable[[], float], timeout_s: float | None) -> float | BaseException:
        """Returns what the work gives or raises. After `queue.Empty`, which says that it is late, it takes no more work."""
        self._todo.put(work)
        try:
            return self._done.get(timeout=timeout_s)
        except Empty:
            interrupt(self._thread)
            self.close()
            raise

    def close(self) -> None:
        """Ends it once its work is done."""
        self._todo.put(None)

    def _run(self, threads: int, device: str) -> None:
        torch.set_num_threads(threads)  # a thread takes over neither this nor the current GPU from the one that made it
        use_gpu(device)
        with contextlib.suppress(Interrupted):
            while (work := self._todo.get()) is not None:
                try:
                    self._done.put(work())
                except Interrupted:
                    raise
                except BaseException as error:  # the worker boundary: it reaches whoever awaits
                    self._done.put(error)


def _serve(asked: "SimpleQueue[_Asked | None]", start: Callable[[], _ScoringThread], max_stuck: int) -> None:
    thread, stuck = start(), list[_ScoringThread]()
    while (one := asked.get()) is not None:
        future, role, sample, row = one
        if not future.set_running_or_notify_cancel():
            continue
        try:
            result = thread.call(partial(_score, role, sample, row), role.deadline_s)
        except Empty:
            stuck = [*(late for late in stuck if late.is_alive), thread]
            result, thread = _late(role, len(stuck), max_stuck), start()
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
    thread.close()


def _late(role: ScoreRole, stuck: int, max_stuck: int) -> Exception:
    name, limit = role.planned.term.name, f"took longer than {role.deadline_s:g} s (reward_timeout_s)"
    if stuck < max_stuck:
        return RewardFailure("reward_timeout", f"{name} {limit} and was left to itself")
    return UserCodeFailed(
        f"{name!r} {limit}, and {stuck} calls of it hang in threads that cannot be ended; mend it there and start again. "
        "Checkpoints that were saved stay"
    )


def _score(role: ScoreRole, sample: Sample, row: Mapping[str, Any]) -> float:
    sequence = role.read(sample, row)
    if isinstance(sequence, DataFailure):
        raise sequence
    value = float(role.score(pack([sequence]))[0])
    if not abs(value) <= MOST:
        raise RewardFailure("reward_not_finite", f"reward {role.planned.name!r} gave {value}")
    return value
