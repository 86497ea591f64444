"""The rewards of models that episodes await: each judges in the middle of an episode with the model of its score."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
        self._thread: ThreadPoolExecutor | None = None

    def start(self, roles: Mapping[str, ScoreRole | WritingRole], device: str) -> None:
        """From now on these models score, on this device and with as many threads as the caller computes with."""
        self._roles = {name: role for name, role in roles.items() if name in self.rewards and isinstance(role, ScoreRole)}
        if self._roles and self._thread is None:
            given = (torch.get_num_threads(), device)
            self._thread = ThreadPoolExecutor(1, "scores-in-episodes", initializer=_begin, initargs=given)

    async def ask(self, name: str, sample: Sample, row: Mapping[str, Any]) -> float:
        """The score of one conversation."""
        role, thread = self._roles.get(name), self._thread
        if role is None or thread is None:
            raise InfrastructureFailure(
                "no_model", f"reward {name!r} was asked before its model was open; ask in an episode"
            )
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, _score, role, sample, row)
        except UserCodeFailed as error:
            raise WrongWorkflow(str(error)) from error

    def close(self) -> None:
        """Ends the thread; idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=False, cancel_futures=True)


def _begin(threads: int, device: str) -> None:
    """Sets what a new thread does not take over from the one that made it: the number of threads, and the current GPU."""
    torch.set_num_threads(threads)
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)


def _score(role: ScoreRole, sample: Sample, row: Mapping[str, Any]) -> float:
    sequence = role.read(sample, row)
    if isinstance(sequence, DataFailure):
        raise sequence
    value = float(role.score(pack([sequence]))[0])
    if not abs(value) <= MOST:
        raise RewardFailure("reward_not_finite", f"reward {role.planned.name!r} gave {value}")
    return value
