"""Language models that judge in words: an inference engine beside the policy's, awake only while it judges."""

import asyncio
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from tandem.api.engines import InferenceEngine
from tandem.api.failures import DataFailure, RewardFailure, WeightsChanged
from tandem.api.keyed_sum import KeyedSum
from tandem.api.samples import Group, Sample
from tandem.api.team import Team
from tandem.api.weight_files import weight_files
from tandem.api.weights import WeightVersion
from tandem.api.workflow import GroupReward, RewardFn, RewardResult, messages_for
from tandem.config.rollout import EmbeddedEngineConfig
from tandem.engines.inference.core import EngineCore
from tandem.engines.inference.embedded import EmbeddedEngine
from tandem.flow.plan import PlannedScore
from tandem.flow.residency import free_cache
from tandem.models.tokenizer import load_tokenizer
from tandem.rewards.engine_judge import PLACE, SamplePlace, WritingReward
from tandem.rewards.outcome import compared

SETTLE_S = 0.02
"""Without a new request for so long, all that judge have asked."""

GRACE_S = 5.0
"""So long after its deadline an engine that has not given up by itself counts as hanging."""


class WritingModel:
    """One model on each rank that generates, opened when it is needed and closed to sleep."""

    def __init__(
        self, folder: Path, settings: EmbeddedEngineConfig, dtype: torch.dtype, device: str, *, threads: int, member: bool
    ):
        """``member``: False on other ranks, which have none."""
        self.folder, self.member = folder, member
        self.tokenizer = load_tokenizer(folder)
        self._settings, self._dtype, self._device, self._threads = settings, dtype, device, threads
        self._engine: InferenceEngine | None = None
        self._sums: dict[str, int] = {}

    def engine(self) -> InferenceEngine:
        """It, awake.

        Raises:
            WeightsChanged: the folder has other weights than at first.
        """
        if self._engine is None:
            sums = {file.name: _file_sum(file) for file in weight_files(self.folder)}
            if self._sums and sums != self._sums:
                raise WeightsChanged(f"{self.folder} has other weights than when the run opened it; put them back")
            self._sums, version = sums, WeightVersion(0)
            core = EngineCore(self.folder, self._settings, self._dtype, self._device, version, deterministic=True)
            self._engine = EmbeddedEngine(core, version=version, threads=self._threads, deterministic=True)
        return self._engine

    def lend(self, engine: InferenceEngine) -> None:
        """From now on, and until it sleeps, another engine writes."""
        self.close()
        self._engine = engine

    def onload(self, parts: Iterable[str]) -> int:
        """Wakes; returns the bytes that were read."""
        if "parameters" not in parts or not self.member:
            return 0
        self.engine()
        return sum(file.stat().st_size for file in weight_files(self.folder))

    def offload(self, parts: Iterable[str], scratch: Path | None = None) -> int:
        """Gives all memory back; nothing moves, for the folder has it."""
        if "parameters" in parts:
            self.close()
        return 0

    def rest(self) -> None:
        """Gives the cache back, which is worth nothing for other prompts."""
        if self._engine is not None:
            free_cache(self._engine)

    def abandon(self) -> None:
        """Leaves an engine that hangs or has died; the next call opens another."""
        engine, self._engine = self._engine, None
        if engine is not None:
            threading.Thread(target=engine.close, name="abandoned judge", daemon=True).start()

    def close(self) -> None:
        """Ends the engine; idempotent."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


def _file_sum(file: Path) -> int:
    total = KeyedSum()
    with file.open("rb") as stream:
        while piece := stream.read(1 << 19):
            total.add(torch.frombuffer(bytearray(piece), dtype=torch.uint8))
    return total.value


class Judged(NamedTuple):
    """A judge's verdict on one sample."""

    value: float | DataFailure
    words: str = ""


class WritingRole:
    """A `WritingReward` reward with the model that it asked for."""

    def __init__(self, planned: PlannedScore, engine: WritingModel, team: Team):
        assert isinstance(planned.score, WritingReward), "its head is text"
        self.planned, self.engine, self.written, self._team = planned, engine, planned.score, team

    def score(self, groups: Sequence[Group]) -> list[list[Judged]]:
        """The judgements of each group's samples. Collective; rank 0 brings the groups, and each rank with an engine judges
        its share of them. Ends within the judge's patience."""
        members = self._team.gather(self.engine.member)
        engines, place = sum(members), sum(members[: self._team.rank])
        shared = list(enumerate(self._team.share(lambda: groups)))
        share = dict(shared[place::engines] if self.engine.member else ())
        judged: dict[int, list[Judged]] = {}
        with self._team.together():
            if share:
                with ThreadPoolExecutor(1) as thread:  # the caller may stand in a loop already, as in a notebook
                    found = thread.submit(asyncio.run, self._judge_all(share)).result()
                judged = dict(zip(share, found, strict=True))
        whole = {number: one for some in self._team.gather(judged) for number, one in some.items()}
        return [whole[number] for number in range(len(shared))]

    async def _judge_all(self, groups: Mapping[int, Group]) -> list[list[Judged]]:
        """Groups by their numbers as one wave, the samples of a group side by side, so that they share their prompt."""
        engine, client = self.engine.engine(), self.written.client
        client.use(engine, self.engine.tokenizer)
        until = time.monotonic() + client.patience_s + GRACE_S
        engine.pause()
        try:
            tasks = [asyncio.ensure_future(self._judge(i, group)) for i, group in groups.items()]
            issued = -1
            while issued != client.issued:
                issued = client.issued
                await asyncio.sleep(SETTLE_S)
        finally:
            engine.resume()
        _, late = await asyncio.wait(tasks, timeout=max(0.0, until - time.monotonic()))
        for task in late:
            task.cancel()
        hanging = Judged(RewardFailure("judge_timeout", f"{client.name}: no answer within patience_s={client.patience_s:g}"))
        judged = [
            [hanging] * len(group.samples) if task in late else task.result()
            for group, task in zip(groups.values(), tasks, strict=True)
        ]
        died = any(isinstance(j.value, RewardFailure) and j.value.reason == "judge_died" for group in judged for j in group)
        if late or died:
            self.engine.abandon()
        else:
            self.engine.rest()
        return judged

    async def _judge(self, number: int, group: Group) -> list[Judged]:
        reward = self.written.reward
        if isinstance(reward, GroupReward):
            PLACE.set(SamplePlace(number))
            try:
                results = compared(self.written.name, await reward.compare(group.samples, group.data), len(group.samples))
                return [_judged(result) for result in results]
            except DataFailure as failure:
                return [Judged(failure)] * len(group.samples)
        return list(await asyncio.gather(*(self._judge_one(reward, number, j, group) for j in range(len(group.samples)))))

    async def _judge_one(self, reward: RewardFn, number: int, place: int, group: Group) -> Judged:
        PLACE.set(SamplePlace(number, place))
        sample: Sample = group.samples[place]
        given = {"prompt": sample.prompt_text, "completion": sample.completion_text, "prompt_ids": (), "completion_ids": ()}
        try:
            result = await reward(row=group.data, **given, **messages_for(reward, sample.messages))  # type: ignore[arg-type]
        except DataFailure as failure:
            return Judged(failure)
        return _judged(result)


def _judged(result: RewardResult) -> Judged:
    return Judged(result.value, "\n---\n".join(result.words.values()))
