"""Rewards that need a model, in evaluations: the models, stages and sums of training, behind the episodes."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tandem.api.failures import DataFailure
from tandem.api.samples import Group, Sample
from tandem.config.experiment import TrainConfig
from tandem.evaluation.asking import Answer, Ask, answer_of, failure_answer
from tandem.flow.conductor import LocalConductor
from tandem.flow.plan import RunPlan
from tandem.flow.process import Process
from tandem.flow.residency import Residency
from tandem.flow.residents import open_model, open_scores
from tandem.flow.scoring import ModelGroupScorer
from tandem.flow.session import make_scorer
from tandem.rewards.reward import Reward
from tandem.tracking.statistics import PhaseTimer

Groups = dict[tuple[int, int], tuple[Ask, Group]]
"""Row and sample → what was asked, and what came of it."""


class KeptSamples:
    """The samples of episodes, kept until their rewards are whole."""

    def __init__(self) -> None:
        self.groups: Groups = {}

    def keep(self, item: Ask, samples: Sequence[Sample]) -> None:
        """Called for each episode; see `AskingTerms.on_samples`."""
        self.groups[item.row, item.sample] = item, Group(tuple(samples), source=item.data, data=item.columns)

    def scored(self, scorer: ModelGroupScorer, answers: Sequence[Answer]) -> list[Answer]:
        """The answers with the rewards that need a model. Collective; ranks other than 0 bring none."""
        ordered = sorted(self.groups.items())  # not as they arrived: how they are packed must not depend on timing
        outcomes = scorer([group for _, (_, group) in ordered], training=False)
        found = {place: _answer(*made, outcome) for (place, made), outcome in zip(ordered, outcomes, strict=True)}
        return [found.get((answer.row, answer.sample), answer) for answer in answers]


def _answer(item: Ask, asked: Group, outcome: Group | DataFailure) -> Answer:
    if isinstance(outcome, DataFailure):
        return failure_answer(item, outcome, asked.samples[0].completion_text)
    return answer_of(item, outcome.samples)


def open_scorer(
    config: TrainConfig, plan: RunPlan, reward: Reward, tokenizer: PreTrainedTokenizerBase, device: str, threads: int
) -> ModelGroupScorer:
    """The scorer of an evaluation by itself, whose models are open and stay awake. ``plan``: of `plan_scores`.

    Raises:
        ConfigError: a model cannot be opened.
    """
    process = Process(device, threads)
    residency = Residency(None, Path(), PhaseTimer(), open_model)
    roles = open_scores(config, plan, process, tokenizer, residency)
    conductor = LocalConductor(lambda stage: contextlib.nullcontext(), residency, plan)
    return make_scorer(config, plan, roles, reward, conductor, process.team)


def paths_of(plan: RunPlan) -> Mapping[str, str]:
    """The name of each score → the path of its model."""
    return {planned.name: planned.score.model.path for planned in plan.scores}
