"""The rewards of models that episodes await: each judges in the middle of an episode with the model of its score."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from tandem.api.batch import pack
from tandem.api.failures import DataFailure, InfrastructureFailure, RewardFailure, UserCodeFailed, WrongWorkflow
from tandem.api.samples import Sample
from tandem.api.workflow import RewardFn, RewardResult
from tandem.flow.plan import RunPlan
from tandem.flow.scoring import ScoreRole
from tandem.flow.writing import WritingRole
from tandem.rewards.combination import MOST


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
            InfrastructureFailure: the model is not open yet, as outside of an episode.
            WrongWorkflow: a score of a user's file raised, or gave something else; this ends the run.
        """
        asked = Sample((), 0.0, prompt_text=prompt, completion_text=completion, messages=tuple(messages))
        return RewardResult(await self._scores.ask(self.name, asked, row))


class EpisodeScores:
    """The rewards of models that the episodes of this process await. They compute in one thread, one after another."""

    def __init__(self, plan: RunPlan):
        self.rewards = {one.name: EpisodeScore(one.name, self) for one in plan.scores if one.in_episodes}
        self._roles: Mapping[str, ScoreRole] = {}
        self._asked: SimpleQueue[_Asked | None] | None = None

    def start(self, roles: Mapping[str, ScoreRole | WritingRole], device: str) -> None:
        """From now on these models score, on this device and with as many threads as the caller computes with."""
        self._roles = {name: role for name, role in roles.items() if name in self.rewards and isinstance(role, ScoreRole)}
        if self._roles and self._asked is None:
            self._asked = SimpleQueue()
            given = (self._asked, torch.get_num_threads(), device)
            # a daemon: a score that hangs must not keep the process from ending, as a pool's thread would
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
            return await asyncio.wrap_future(future)
        except UserCodeFailed as error:
            raise WrongWorkflow(str(error)) from error

    def close(self) -> None:
        """Ends the thread; idempotent."""
        queue, self._asked = self._asked, None
        if queue is not None:
            queue.put(None)


_Asked = tuple[Future[float], ScoreRole, Sample, Mapping[str, Any]]


def _serve(asked: "SimpleQueue[_Asked | None]", threads: int, device: str) -> None:
    """The thread. It first sets what it does not take over from the one that made it: the number of threads, and the
    current GPU."""
    torch.set_num_threads(threads)
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)
    while (one := asked.get()) is not None:
        future, role, sample, row = one
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(_score(role, sample, row))
            except Exception as error:  # the worker boundary: it reaches whoever awaits
                future.set_exception(error)


def _score(role: ScoreRole, sample: Sample, row: Mapping[str, Any]) -> float:
    sequence = role.read(sample, row)
    if isinstance(sequence, DataFailure):
        raise sequence
    value = float(role.score(pack([sequence]))[0])
    if not abs(value) <= MOST:
        raise RewardFailure("reward_not_finite", f"reward {role.planned.name!r} gave {value}")
    return value
