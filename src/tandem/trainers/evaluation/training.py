"""Evaluation on held-out rows beside training, with the engine and the workflow of the run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.api.engines import InferenceEngine
from tandem.api.workflow import GeneratesTokens, RolloutWorkflow
from tandem.config.arithmetic import placement
from tandem.config.experiment import TrainConfig
from tandem.config.generation import GenerationConfig
from tandem.trainers.evaluation.asking import Answer, Ask, Terms, ask, ask_together
from tandem.trainers.evaluation.scores import metrics_of


@dataclass(frozen=True)
class Evaluation:
    """What came of it. A sample whose episode failed counts as wrong in ``accuracy``, its row is counted in ``failed``."""

    accuracy: float
    """Mean over all samples; NaN where the reward states none and its value is no share."""

    reward: float
    completion_length: float
    truncated: float
    failed: int
    rows: int
    values: dict[str, float] = field(default_factory=dict)
    """All of them by metric name, with several samples also ``eval/pass@k`` and ``eval/maj@k``."""

    def metrics(self) -> dict[str, float]:
        """By metric name."""
        return dict(self.values)


def is_due(every_steps: int | None, step: int, steps: int) -> bool:
    """Whether `evaluate.every_steps` asks for an evaluation after ``step``: also before the first (0) and after the last."""
    return every_steps is not None and (step % every_steps == 0 or step == steps)


def evaluation_gconfig(config: TrainConfig) -> GenerationConfig:
    """The run's sampling with the number of samples, temperature and length of its evaluation."""
    wanted = config.evaluate
    temperature = wanted.temperature
    greedy = wanted.n_samples == 1 if temperature is None else temperature == 0
    return replace(
        config.gconfig,
        n_samples=wanted.n_samples,
        greedy=greedy,
        temperature=temperature or config.gconfig.temperature,
        first_token_temperature=None,
        train_first_token=False,
        max_new_tokens=wanted.max_new_tokens or config.gconfig.max_new_tokens,
    )


def evaluation_places(config: TrainConfig) -> int:
    """Most samples of an evaluation under way at once: what the engine decodes together, half of it where rollouts go on."""
    places = config.rollout.engine.max_running
    return max(1, places // 2) if placement(config) == "decoupled" else places


async def evaluate(
    engine: GeneratesTokens,
    workflow: RolloutWorkflow,
    rows: Sequence[dict[str, Any]],
    seed: int = 0,
    deadline_s: float = 600.0,
    *,
    n_samples: int = 1,
    max_concurrent: int | None = None,
    together: bool = False,
) -> Evaluation:
    """Runs ``workflow`` (one sample) ``n_samples`` times on each row, beside whatever else the engine is doing.

    Where the workflow makes a group, its mean counts. It stands outside the staleness gate: evaluation episodes take no
    slot and are never trained on. ``deadline_s`` counts from a sample's turn, of which there are ``max_concurrent`` at once.
    ``together``: as one wave that the engine stands still for, so that two deterministic runs are equal (nothing else may be
    running).
    """
    asks = [
        Ask(str(row.get("source") or ""), index, sample, row)
        for index, row in enumerate(rows)
        for sample in range(n_samples)
    ]
    terms = Terms(seed=seed, timeout_s=deadline_s, max_concurrent=max_concurrent)
    if together and isinstance(engine, InferenceEngine):
        rounds = math.ceil(len(asks) / (max_concurrent or len(asks) or 1))
        terms = replace(terms, timeout_s=deadline_s * max(1, rounds))  # all turns begin at once
        answers = await ask_together(engine, workflow, asks, terms)
    else:
        answers = await ask(engine, workflow, asks, terms)
    return summarise(answers, n_samples, len(rows))


def summarise(answers: Sequence[Answer], n_samples: int, rows: int) -> Evaluation:
    """The figures of an evaluation beside training."""
    values = metrics_of(answers, n_samples)
    return Evaluation(
        accuracy=values.get("eval/accuracy", float("nan")),
        reward=values["eval/reward"],
        completion_length=values["eval/completion_length"],
        truncated=values["eval/truncated"],
        failed=int(values["eval/failed"]),
        rows=rows,
        values=values,
    )
