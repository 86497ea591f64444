"""Greedy accuracy on held-out rows, with the engine and the workflow of the run."""

import asyncio
import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from tandem.api.failures import EngineDied, WrongWorkflow
from tandem.api.requests import NoiseKey, StopReason
from tandem.api.samples import Group, Sample
from tandem.api.workflow import GeneratesTokens, RolloutWorkflow
from tandem.config.experiment import TrainConfig
from tandem.config.generation import GenerationConfig
from tandem.rollout.episode_engine import EpisodeEngine
from tandem.rollout.workflows import as_failure

log = logging.getLogger(__name__)

EVALUATION_EPOCH = -1
"""Epoch in the noise keys of evaluation, so that they never meet those of training."""


@dataclass(frozen=True)
class Evaluation:
    """What came of it. A row whose episode failed counts as wrong in ``accuracy`` and is counted in ``failed``."""

    accuracy: float
    reward: float
    completion_length: float
    truncated: float
    failed: int
    rows: int

    def metrics(self) -> dict[str, float]:
        """By metric name."""
        values = {"accuracy": self.accuracy, "reward": self.reward, "truncated": self.truncated, "failed": self.failed}
        return {f"eval/{name}": float(value) for name, value in values.items()} | {
            "eval/completion_length": self.completion_length
        }


def is_due(every_steps: int | None, step: int, steps: int) -> bool:
    """Whether `evaluate.every_steps` asks for an evaluation after ``step``: also before the first (0) and after the last."""
    return every_steps is not None and (step % every_steps == 0 or step == steps)


def greedy(config: TrainConfig) -> GenerationConfig:
    """The run's sampling with one greedy sample and the evaluation's length."""
    longest = config.evaluate.max_new_tokens or config.gconfig.max_new_tokens
    return replace(config.gconfig, n_samples=1, greedy=True, max_new_tokens=longest)


async def evaluate(
    engine: GeneratesTokens,
    workflow: RolloutWorkflow,
    rows: Sequence[dict[str, Any]],
    seed: int = 0,
    deadline_s: float = 600.0,
) -> Evaluation:
    """Runs ``workflow`` (one sample a row) on all rows at once, beside whatever else the engine is doing.

    Where a row gives a group, its mean counts. It stands outside the staleness gate: evaluation episodes take no slot and
    are never trained on.
    """

    async def one(index: int, row: dict[str, Any]) -> Any:
        handle = EpisodeEngine(engine, NoiseKey(seed, EVALUATION_EPOCH, index), deadline_s=deadline_s)
        try:
            async with asyncio.timeout(deadline_s):
                return await workflow.arun_episode(handle, copy.deepcopy(row))
        except (EngineDied, WrongWorkflow):
            raise
        except Exception as error:  # the episode boundary: a row that fails is counted, and the others go on
            failure = as_failure(error)
            log.warning("evaluation row %d failed: %s", index, failure)
            return failure

    results = await asyncio.gather(*(one(i, row) for i, row in enumerate(rows)))
    groups = [r.samples if isinstance(r, Group) else (r,) for r in results if isinstance(r, (Group, Sample))]
    groups = [group for group in groups if group]
    count = max(1, len(rows))
    samples = [sample for group in groups for sample in group]
    return Evaluation(
        accuracy=sum(fmean(s.reward if s.accuracy is None else s.accuracy for s in group) for group in groups) / count,
        reward=fmean(s.reward for s in samples) if samples else 0.0,
        completion_length=fmean(s.num_trained_tokens for s in samples) if samples else 0.0,
        truncated=sum(fmean(s.trajectories[-1].stop_reason == StopReason.LENGTH for s in group) for group in groups) / count,
        failed=len(rows) - len(groups),
        rows=len(rows),
    )
