"""Rewards for runs that are changed while they go on: one of them asks for a change itself, at a step that is known."""

import asyncio
import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.api.workflow import GroupReward, RewardFn, RewardResult
from tandem.config.recipes import Change
from tandem.engines.train.engine import SpreadEngine
from tandem.state.control import ask


class Asks(RewardFn):
    """Judges by evenness. At its ``call``-th call it asks the run in ``folder`` for a change, as another process would."""

    def __init__(self, folder: str, call: int, action: str, value: str, name: str):
        self.wish, self.folder, self.call, self.calls = Change(action, value), Path(folder), call, 0

    async def __call__(self, *, completion_ids: tuple[int, ...], row: Mapping[str, Any], **_: Any) -> RewardResult:
        self.calls += 1
        if self.calls == self.call and not (self.folder / "asked").exists():
            (self.folder / "asked").touch()
            ask(self.folder, self.wish)
        return RewardResult(sum(token % 2 == 0 for token in completion_ids) / max(1, len(completion_ids)))


class Shortest(GroupReward):
    """1 for the shortest."""

    async def compare(self, samples: Any, row: Any) -> list[float]:
        least = min(sample.num_trained_tokens for sample in samples)
        return [float(sample.num_trained_tokens == least) for sample in samples]


class Slow(RewardFn):
    """1 for all, after a while."""

    async def __call__(self, **_: Any) -> RewardResult:
        await asyncio.sleep(0.02)
        return RewardResult(1.0)


class Engines(RewardFn):
    """How many models are in memory in a training engine."""

    async def __call__(self, **_: Any) -> RewardResult:
        return RewardResult(float(sum(type(one) is SpreadEngine for one in gc.get_objects())))
