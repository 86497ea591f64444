"""Language models that judge in text: each has an inference engine beside the policy's, awake only while it judges."""

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
from tandem.api.team import Team
from tandem.api.weights import KeyedSum, WeightVersion, weight_files
from tandem.api.workflow import Group, GroupReward, RewardFn, RewardResult, Sample, messages_to
from tandem.config.rollout import EmbeddedEngineConfig
from tandem.engines.inference.core import EngineCore
from tandem.engines.inference.embedded import EmbeddedEngine
from tandem.flow.planned_models import PlannedScore
from tandem.flow.residency import free_cache
from tandem.models.tokenizer import load_tokenizer
from tandem.rewards.engine_judge import PLACE, SamplePlace, WritingReward
from tandem.rewards.signatures import compared

SETTLE_S = 0.02
"""If no new request arrives for this many seconds, every judging coroutine is taken to have sent its request."""

GRACE_S = 5.0
"""Grace period in seconds. An engine that is still generating this long after its own deadline counts as hanging."""


class WritingModel:
    """A language model with an engine on each generating rank; the engine starts when needed and is closed to sleep."""

    def __init__(
        self, folder: Path, settings: EmbeddedEngineConfig, dtype: torch.dtype, device: str, *, threads: int, member: bool
    ):
        """``member``: True on generating ranks; the others have no engine."""
        self.folder, self.member = folder, member
        self.tokenizer = load_tokenizer(folder)
        self._settings, self._dtype, self._device, self._threads = settings, dtype, device, threads
        self._engine: InferenceEngine | None = None
        self._sums: dict[str, int] = {}

    def engine(self) -> InferenceEngine:
        """Returns the running engine, and starts it if necessary.

        Raises:
            WeightsChanged: the weights in the folder are not those of the first start.
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
        """Uses another engine instead of its own until the model sleeps."""
        self.close()
        self._engine = engine

    def onload(self, parts: Iterable[str]) -> int:
        """Starts the engine; returns the bytes that were read."""
        if "parameters" not in parts or not self.member:
            return 0
        self.engine()
        return sum(file.stat().st_size for file in weight_files(self.folder))

    def offload(self, parts: Iterable[str], scratch: Path | None = None) -> int:
        """Closes the engine, which frees all its memory; returns 0, because the weights need not be saved first."""
        if "parameters" in parts:
            self.close()
        return 0

    def rest(self) -> None:
        """Frees the KV cache, which has no value for other prompts."""
        if self._engine is not None:
            free_cache(self._engine)

    def abandon(self) -> None:
        """Drops an engine that hangs or has died, and closes it in a thread; the next call of `engine` starts a new one."""
        engine, self._engine = self._engine, None
        if engine is not None:
            threading.Thread(target=engine.close, name="abandoned judge", daemon=True).start()

    def close(self) -> None:
        """Closes the engine. Idempotent."""
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
    """A `WritingReward` together with its model."""

    def __init__(self, planned: PlannedScore, engine: WritingModel, team: Team):
        assert isinstance(planned.score, WritingReward), "its head is text"
        self.planned, self.engine, self.written, self._team = planned, engine, planned.score, team

    def score(self, groups: Sequence[Group]) -> list[list[Judged]]:
        """Returns the judgements of each group's samples. Collective: rank 0 passes the groups, and each rank with an engine
        judges a share of them. Ends within the judge's ``patience_s``, plus a grace period."""
        members = self._team.gather(self.engine.member)
        engines, place = sum(members), sum(members[: self._team.rank])
        shared = list(enumerate(self._team.share(lambda: groups)))
        share = dict(shared[place::engines] if self.engine.member else ())
        judged: dict[int, list[Judged]] = {}
        with self._team.together():
            if share:
                with ThreadPoolExecutor(1) as thread:  # the caller's thread may already run an event loop, as in a notebook
                    results = thread.submit(asyncio.run, self._judge_all(share)).result()
                judged = dict(zip(share, results, strict=True))
        whole = {number: group for of_rank in self._team.gather(judged) for number, group in of_rank.items()}
        return [whole[number] for number in range(len(shared))]

    async def _judge_all(self, groups: Mapping[int, Group]) -> list[list[Judged]]:
        """Judges groups, by their numbers, in one batch of requests. Requests of a group are adjacent, to share a prompt."""
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
        texts = {"prompt": sample.prompt_text, "completion": sample.completion_text, "prompt_ids": (), "completion_ids": ()}
        try:
            result = await reward(row=group.data, **texts, **messages_to(reward, sample.messages))  # type: ignore[arg-type]
        except DataFailure as failure:
            return Judged(failure)
        return _judged(result)


def _judged(result: RewardResult) -> Judged:
    return Judged(result.value, "\n---\n".join(result.words.values()))
