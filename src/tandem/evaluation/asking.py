"""Generates and judges samples of rows in an evaluation, each as one episode. A sample
that fails is returned with the reason; nothing is raised.

Rewards that need a model are computed after the episodes, by the models and stages of training.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers import PreTrainedTokenizerBase

from tandem.api.engines import InferenceEngine
from tandem.api.failures import DataFailure, EngineDied, EpisodeFailure
from tandem.api.requests import StopReason
from tandem.api.workflow import Group, RolloutWorkflow, Sample
from tandem.config.experiment import TrainConfig
from tandem.config.rollout import RolloutConfig
from tandem.flow.conductor import LocalConductor
from tandem.flow.plan import RunPlan
from tandem.flow.process import Process
from tandem.flow.residency import Residency
from tandem.flow.residents import open_model, open_scores
from tandem.flow.scoring import ModelGroupScorer
from tandem.rewards.reward import Reward
from tandem.rollout.book import Beginning
from tandem.rollout.episodes import Episode, EpisodeRunner
from tandem.rollout.event_loop import BackgroundLoop
from tandem.rollout.gate import PromptId
from tandem.tracking.statistics import PhaseTimer

log = logging.getLogger(__name__)

EVALUATION_EPOCH = -1
"""Epoch in the noise keys of evaluation. Training uses epochs from 0 on, so the keys never coincide."""

PATIENCE_S = 60.0
"""Seconds that a wave has to issue its requests, in addition to the time limit of its episodes."""

EARLY_ANSWERS = 24
"""Number of first answers after which an evaluation ends, if all of them fail because of the user's code. It is the size of
three groups of eight."""


@dataclass(frozen=True)
class Ask:
    """A sample to generate: number ``sample`` of row ``row`` of data set ``data``."""

    data: str
    row: int
    sample: int
    columns: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Answer:
    """The result of one `Ask`, and a line of `samples.jsonl`. A failed sample has ``failed`` (the reason) and ``error``, and
    also ``text`` if generation succeeded and the judgement failed."""

    data: str
    row: int
    sample: int
    failed: str | None = None
    error: str = ""
    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    accuracy: float | None = None
    answer: str | None = None
    extracted: bool | None = None
    stop_reason: str = ""
    tokens: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    text: str = ""

    @property
    def truncated(self) -> bool:
        return self.stop_reason == StopReason.LENGTH.name.lower()


@dataclass(frozen=True)
class AskingTerms:
    """Settings of `ask`."""

    seed: int = 0
    timeout_s: float = 600.0
    max_retries: int = 0
    max_concurrent: int | None = None
    """Most samples at once; None: all."""

    together: bool = False
    """The engine waits until every sample has issued its first request, and later turns start together too; see `Wave`. Then
    timing does not decide which samples are computed together, so answers on one machine are bitwise reproducible, if the
    engine is ``deterministic`` and does nothing else, and tools and environments are deterministic."""

    ends_early: bool = False
    """End the evaluation if the first answers all fail because of the user's code; see `EARLY_ANSWERS`."""

    on_samples: Callable[["Ask", Sequence[Sample]], None] | None = None
    """Called with the samples of each episode, which then have log-probabilities; for rewards that need a model."""


def ask(
    engine: InferenceEngine,
    loop: BackgroundLoop,
    workflow: RolloutWorkflow,
    asks: Sequence[Ask],
    terms: AskingTerms,
    *,
    on_answer: Callable[[Answer], None] | None = None,
) -> list[Answer]:
    """Runs ``workflow`` on ``loop`` once for each sample and returns the answers in the order of ``asks``. The engine may
    serve other requests meanwhile. ``on_answer`` is called on the loop; `ask` itself must not be called there.

    The staleness limit does not apply: these episodes take no slot and are never trained on. Noise is keyed by row and
    sample alone, so samples do not depend on batching, arrival or other requests. `finish_group` is not called, because
    samples are judged one by one, not against each other. With ``terms.together``, a workflow that has places for fewer
    samples (``at_once``) gets several waves.

    Raises:
        EngineDied: the engine has died.
        WrongWorkflow: the workflow returns a value of the wrong type.
        NoBatch: the first answers all fail because of the user's code, and `AskingTerms.ends_early` is set.
    """
    wave_size = (workflow.at_once if terms.together else None) or max(1, len(asks))
    beginning, reported = Beginning(EARLY_ANSWERS if terms.ends_early else 0, "answers"), set[str]()
    answers: list[Answer] = []

    def ended(answer: Answer) -> None:
        if answer.failed is None:
            beginning.succeed()
        elif error := beginning.lose([answer.failed], answer.error):
            raise error
        elif answer.failed not in reported:
            reported.add(answer.failed)
            log.warning("%s, row %d, sample %d failed: %s", answer.data, answer.row, answer.sample, answer.error)
        if on_answer is not None:
            on_answer(answer)

    for start in range(0, len(asks), wave_size):
        answers += _ask_wave(engine, loop, workflow, asks[start : start + wave_size], terms, ended)
    return answers


def _ask_wave(
    engine: InferenceEngine,
    loop: BackgroundLoop,
    workflow: RolloutWorkflow,
    asks: Sequence[Ask],
    terms: AskingTerms,
    ended: Callable[[Answer], None],
) -> list[Answer]:
    places, timeout_s = terms.max_concurrent or len(asks), terms.timeout_s
    if terms.together:  # the engine waits for the requests of all samples, so no sample may wait for a place
        places, timeout_s = len(asks), timeout_s * math.ceil(len(asks) / places)
    config = RolloutConfig(episode_timeout_s=timeout_s, max_retries=terms.max_retries)
    runner = EpisodeRunner(engine, config, loop, seed=terms.seed, deterministic=terms.together)
    episodes = [
        Episode(
            number,
            PromptId(EVALUATION_EPOCH, item.row),
            item.columns,
            workflow,
            version=0,
            sample=item.sample,
            needs_logprobs=terms.on_samples is not None,
        )
        for number, item in enumerate(asks)
    ]
    at_once, tasks = asyncio.Semaphore(places), list[asyncio.Task[Answer]]()

    async def answer_ask(item: Ask, episode: Episode) -> Answer:
        async with at_once:
            try:
                samples = (await runner.group_of(episode)).samples
                if terms.on_samples is not None:
                    terms.on_samples(item, samples)
                answer = answer_of(item, samples)
            except EngineDied:
                raise
            except EpisodeFailure as failure:
                answer = failure_answer(item, failure, failure.completion_text)
        ended(answer)
        return answer

    def spawn(episodes: Sequence[Episode]) -> None:
        tasks.extend(asyncio.get_running_loop().create_task(answer_ask(*pair)) for pair in zip(asks, episodes, strict=True))

    async def all_answers() -> list[Answer]:
        return await asyncio.shield(asyncio.gather(*tasks))

    def stop() -> None:
        for episode, task in zip(episodes, tasks, strict=False):
            episode.aborted = True
            task.cancel()

    try:
        runner.begin(episodes, spawn, timeout_s + PATIENCE_S)
        return loop.run(all_answers())
    finally:
        loop.call(stop)


def answer_of(item: Ask, samples: Sequence[Sample]) -> Answer:
    """Builds the answer from the samples of an episode. If a workflow made a whole group, reward, accuracy and length are
    means, there is no single answer, and the stop reason is that of a truncated sample, if any."""
    first = samples[0]
    if len(samples) > 1:
        stated = any(sample.accuracy is not None for sample in samples)
        cut = next((s for s in samples if s.trajectories[-1].stop_reason == StopReason.LENGTH), first)
        return Answer(
            item.data,
            item.row,
            item.sample,
            reward=fmean(sample.reward for sample in samples),
            accuracy=fmean(s.reward if s.accuracy is None else s.accuracy for s in samples) if stated else None,
            stop_reason=cut.trajectories[-1].stop_reason.name.lower(),
            tokens=round(fmean(sample.num_trained_tokens for sample in samples)),
            text=first.completion_text,
        )
    return Answer(
        item.data,
        item.row,
        item.sample,
        reward=float(first.reward),
        rewards={name: float(value) for name, value in first.rewards.items()},
        accuracy=first.accuracy,
        answer=first.answer,
        extracted=first.extracted,
        stop_reason=first.trajectories[-1].stop_reason.name.lower(),
        tokens=first.num_trained_tokens,
        metrics={name: float(value) for name, value in first.metrics.items()},
        text=first.completion_text,
    )


def failure_answer(item: Ask, failure: EpisodeFailure, text: str) -> Answer:
    """Builds the answer of a sample that failed. ``text``: the text that the model had generated."""
    log.info("%s, row %d, sample %d failed: %s", item.data, item.row, item.sample, failure)  # to log.txt
    return Answer(item.data, item.row, item.sample, failed=failure.reason, error=str(failure), text=text)


Groups = dict[tuple[int, int], tuple[Ask, Group]]
"""(row, number of the sample) → the `Ask` and its samples."""


class KeptSamples:
    """Stores the samples of episodes until the rewards that need a model are computed."""

    def __init__(self) -> None:
        self.groups: Groups = {}

    def keep(self, item: Ask, samples: Sequence[Sample]) -> None:
        """Stores the samples of an episode; a callback for `AskingTerms.on_samples`."""
        self.groups[item.row, item.sample] = item, Group(tuple(samples), source=item.data, data=item.columns)

    def scored(self, scorer: ModelGroupScorer, answers: Sequence[Answer]) -> list[Answer]:
        """Returns the answers with the rewards that need a model. Collective; only rank 0 passes answers."""
        ordered = sorted(self.groups.items())  # not in order of arrival: packing must not depend on timing
        outcomes = scorer([group for _, (_, group) in ordered], training=False)
        scored = {place: _answer(*stored, outcome) for (place, stored), outcome in zip(ordered, outcomes, strict=True)}
        return [scored.get((answer.row, answer.sample), answer) for answer in answers]


def _answer(item: Ask, generated: Group, outcome: Group | DataFailure) -> Answer:
    if isinstance(outcome, DataFailure):
        return failure_answer(item, outcome, generated.samples[0].completion_text)
    return answer_of(item, outcome.samples)


def open_scorer(
    config: TrainConfig, plan: RunPlan, reward: Reward, tokenizer: PreTrainedTokenizerBase, device: str, threads: int
) -> ModelGroupScorer:
    """Opens the scorer of an evaluation without training; its models stay in memory. ``plan``: from `plan_scores`.

    Raises:
        ConfigError: a model cannot be opened.
    """
    process = Process(device, threads)
    residency = Residency(None, Path(), PhaseTimer(), open_model)
    roles = open_scores(config, plan, process, tokenizer, residency)
    conductor = LocalConductor(lambda stage: contextlib.nullcontext(), residency, plan)
    return ModelGroupScorer(plan, roles, reward, conductor, process.team, config.rollout.min_group_size)


def paths_of(plan: RunPlan) -> Mapping[str, str]:
    """Maps the name of each score to the path of its model."""
    return {planned.name: planned.score.model.path for planned in plan.scores}
