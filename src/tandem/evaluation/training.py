"""Evaluation on held-out rows beside training, with the engine and the workflow of the run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.api.collective import together as all_ranks
from tandem.api.engines import InferenceEngine
from tandem.api.workflow import GeneratesTokens, RolloutWorkflow
from tandem.config.arithmetic import evaluation_places, is_evaluation_due
from tandem.config.experiment import TrainConfig
from tandem.evaluation.asking import Answer, Ask, Terms, ask, ask_together
from tandem.evaluation.scores import metrics_of
from tandem.flow.parts import Rows
from tandem.flow.session import Session


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


def evaluate_if_due(config: TrainConfig, session: Session, rows: Rows, step: int, steps: int) -> dict[str, float]:
    """Figures of the validation rows, where `evaluate.every_steps` asks for them at this step; 0 is before the first.

    On the executor's own event loop, beside running episodes. Empty where nothing is due, and on ranks other than 0.
    Collective.
    """
    metrics: dict[str, float] = {}
    if is_evaluation_due(config.evaluate.every_steps, step, steps):
        with all_ranks():
            if session.engine is not None:
                work = evaluate(
                    session.engine,
                    session.examiner,
                    rows.valid,
                    seed=config.seed,
                    deadline_s=config.rollout.episode_timeout_s,
                    n_samples=config.evaluate.n_samples,
                    max_concurrent=evaluation_places(config),
                    together=config.deterministic,
                )
                metrics = session.rollout.run(work).metrics()
    return metrics
