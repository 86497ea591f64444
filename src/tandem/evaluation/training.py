"""Evaluation on held-out rows beside training, with the engine and the workflow of the run."""

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.config.arithmetic import evaluation_places, generating_ranks
from tandem.config.data import SOURCE
from tandem.config.experiment import TrainConfig
from tandem.evaluation.asking import Answer, Ask, AskingTerms, ask
from tandem.evaluation.scores import metrics_of
from tandem.evaluation.scoring import Groups, KeptSamples
from tandem.flow.parts import Rows
from tandem.flow.session import Session


def asks_of(rows: Sequence[Mapping[str, Any]], n_samples: int = 1, part: slice = slice(None)) -> list[Ask]:
    """``n_samples`` of each row; ``part``: of the rows, those to ask, which keep their numbers."""
    return [
        Ask(str(row.get(SOURCE) or ""), index, sample, row)
        for index, row in list(enumerate(rows))[part]
        for sample in range(n_samples)
    ]


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
            part = slice(generating.index(session.team.rank), None, len(generating))
            terms = AskingTerms(
                config.seed,
                config.rollout.episode_timeout_s,
                max_concurrent=evaluation_places(config),
                together=config.deterministic,
                on_samples=made.keep if session.scorer else None,
            )
            asks = asks_of(rows.valid, config.evaluate.n_samples, part)
            answers = ask(session.engine, session.rollout.loop, session.episodes.examiner, asks, terms)
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
