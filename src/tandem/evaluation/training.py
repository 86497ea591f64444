"""Evaluation on held-out rows beside training, with the engine and the workflow of the run."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tandem.api.engines import InferenceEngine
from tandem.api.samples import Sample
from tandem.api.workflow import GeneratesTokens, RolloutWorkflow
from tandem.config.arithmetic import evaluation_places, generating_ranks
from tandem.config.data import SOURCE
from tandem.config.experiment import TrainConfig
from tandem.evaluation.asking import Answer, Ask, AskingTerms, ask, ask_together
from tandem.evaluation.scores import metrics_of
from tandem.evaluation.scoring import Groups, KeptSamples
from tandem.flow.parts import Rows
from tandem.flow.session import Session


async def ask_rows(
    engine: GeneratesTokens,
    workflow: RolloutWorkflow,
    rows: Sequence[dict[str, Any]],
    seed: int = 0,
    deadline_s: float = 600.0,
    *,
    part: slice = slice(None),
    n_samples: int = 1,
    max_concurrent: int | None = None,
    together: bool = False,
    on_samples: Callable[[Ask, Sequence[Sample]], None] | None = None,
) -> list[Answer]:
    """Runs ``workflow`` (one sample) ``n_samples`` times on each row, beside whatever else the engine is doing.

    Where the workflow makes a group, its mean counts. It stands outside the staleness gate: evaluation episodes take no
    slot and are never trained on. ``deadline_s`` counts from a sample's turn, of which there are ``max_concurrent`` at once.
    ``together``: as one wave that the engine stands still for, so that two deterministic runs are equal (nothing else may be
    running). ``on_samples``: see `AskingTerms`. ``part``: of the rows, those to ask; they keep their numbers.
    """
    asks = [
        Ask(str(row.get(SOURCE) or ""), index, sample, row)
        for index, row in list(enumerate(rows))[part]
        for sample in range(n_samples)
    ]
    terms = AskingTerms(seed=seed, timeout_s=deadline_s, max_concurrent=max_concurrent, on_samples=on_samples)
    if together and isinstance(engine, InferenceEngine):
        rounds = math.ceil(len(asks) / (max_concurrent or len(asks) or 1))
        terms = replace(terms, timeout_s=deadline_s * max(1, rounds))  # all turns begin at once
        return await ask_together(engine, workflow, asks, terms)
    return await ask(engine, workflow, asks, terms)


def evaluate(config: TrainConfig, session: Session, rows: Rows) -> dict[str, float]:
    """Figures of the validation rows, as ``eval/…``.

    On the executor's own event loop, beside running episodes; each rank with an engine asks its share of the rows. Empty on
    ranks other than 0. Collective.
    """
    answers: list[Answer] = []
    made = KeptSamples()
    generating = generating_ranks(config)

    with session.team.together():
        if session.engine is not None:
            answers = session.rollout.run(
                ask_rows(
                    session.engine,
                    session.episodes.examiner,
                    rows.valid,
                    seed=config.seed,
                    deadline_s=config.rollout.episode_timeout_s,
                    part=slice(generating.index(session.team.rank), None, len(generating)),
                    n_samples=config.evaluate.n_samples,
                    max_concurrent=evaluation_places(config),
                    together=config.deterministic,
                    on_samples=made.keep if session.scorer else None,
                )
            )
    if len(generating) > 1:
        answers, made.groups = _of_all(session.team.gather((answers, made.groups)), first=session.team.main)
    if session.scorer:
        answers = made.scored(session.scorer, answers)
    return metrics_of(answers, config.evaluate.n_samples) if answers else {}


def _of_all(shares: Sequence[tuple[list[Answer], Groups]], *, first: bool) -> tuple[list[Answer], Groups]:
    """The answers of all ranks, in the order of one rank. On the first one; others have nothing."""
    if not first:
        return [], {}
    answers = sorted((answer for own, _ in shares for answer in own), key=lambda answer: (answer.row, answer.sample))
    return answers, {place: one for _, own in shares for place, one in own.items()}
