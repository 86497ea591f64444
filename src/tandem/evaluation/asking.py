"""Asking: samples of rows as episodes of the executor, each judged alone. Failures come out as values with a reason."""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from tandem.api.engines import InferenceEngine
from tandem.api.failures import EngineDied, EpisodeFailure
from tandem.api.requests import StopReason
from tandem.api.samples import Sample
from tandem.api.workflow import RolloutWorkflow
from tandem.config.rollout import RolloutConfig
from tandem.rollout.episodes import Episode, EpisodeRunner
from tandem.rollout.event_loop import BackgroundLoop
from tandem.rollout.failure_budget import Beginning
from tandem.rollout.ledger import PromptId

log = logging.getLogger(__name__)

EVALUATION_EPOCH = -1
"""Epoch in the noise keys of evaluation, so that they never meet those of training."""

PATIENCE_S = 60.0
"""Beyond the time of its episodes, for a wave to issue its requests."""

EARLY_ANSWERS = 24
"""An evaluation whose first answers all fail by the user's code ends with this one: as many as three groups of eight."""


@dataclass(frozen=True)
class Ask:
    """One sample to make: sample ``sample`` of row ``row`` of data set ``data``."""

    data: str
    row: int
    sample: int
    columns: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Answer:
    """The answer to one question; a plain line of `samples.jsonl`. A failed one has ``failed`` and ``error``, and
    the text if it was the judgement that failed."""

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
    """The terms on which samples are asked for."""

    seed: int = 0
    timeout_s: float = 600.0
    max_retries: int = 0
    max_concurrent: int | None = None
    """Most samples under way at once; None: all."""

    together: bool = False
    """The engine stands still until every sample has issued its first request, and later turns are taken together too; see
    `Wave`. So timing does not decide which samples are computed together, and on one machine the answers are equal to the
    bit: with a ``deterministic`` engine that does nothing else, and tools and environments that answer alike."""

    ends_early: bool = False
    """Give up where the first answers all fail by the user's code."""

    on_samples: Callable[["Ask", Sequence[Sample]], None] | None = None
    """Called with what each episode made, which then has log-probabilities: for rewards that need a model."""


def ask(
    engine: InferenceEngine,
    loop: BackgroundLoop,
    workflow: RolloutWorkflow,
    asks: Sequence[Ask],
    terms: AskingTerms,
    *,
    on_answer: Callable[[Answer], None] | None = None,
) -> list[Answer]:
    """Runs ``workflow`` on ``loop`` once a sample, beside whatever else the engine is doing; the answers in the order of
    ``asks``. Not from the loop itself, on which ``on_answer`` is called.

    It stands outside the staleness gate: these episodes take no slot and are never trained on. Noise is keyed by row and
    sample alone, so what is drawn does not depend on batching, arrival or what else is asked. `finish_group` is not called:
    samples are judged one by one, not against each other. A workflow that has places for fewer samples (``at_once``) gets
    as many waves as it needs, if samples take their turns together.

    Raises:
        EngineDied: the engine is gone.
        WrongWorkflow: the workflow returns what nobody can use.
        NoBatch: the first answers all fail by the user's code, and `AskingTerms.ends_early`.
    """
    most = (workflow.at_once if terms.together else None) or max(1, len(asks))
    beginning, told, answers = Beginning(EARLY_ANSWERS if terms.ends_early else 0, "answers"), set[str](), list[Answer]()

    def ended(answer: Answer) -> None:
        if answer.failed is None:
            beginning.well()
        elif error := beginning.lose([answer.failed], answer.error):
            raise error
        elif answer.failed not in told:
            told.add(answer.failed)
            log.warning("%s, row %d, sample %d failed: %s", answer.data, answer.row, answer.sample, answer.error)
        if on_answer is not None:
            on_answer(answer)

    for start in range(0, len(asks), most):
        answers += _ask_wave(engine, loop, workflow, asks[start : start + most], terms, ended)
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
    if terms.together:  # all turns begin at once: who waits for a place would never issue a request
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

    async def one(item: Ask, episode: Episode) -> Answer:
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
        tasks.extend(asyncio.get_running_loop().create_task(one(*both)) for both in zip(asks, episodes, strict=True))

    async def everybody() -> list[Answer]:
        return await asyncio.shield(asyncio.gather(*tasks))

    def stop() -> None:
        for episode, task in zip(episodes, tasks, strict=False):
            episode.aborted = True
            task.cancel()

    try:
        runner.begin(episodes, spawn, timeout_s + PATIENCE_S)
        return loop.run(everybody())
    finally:
        loop.call(stop)


def answer_of(item: Ask, samples: Sequence[Sample]) -> Answer:
    """The judgement of a sample; of a group that a workflow made as a whole, the mean: it gives no one answer, and was cut
    where any sample was."""
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
    """The answer of a sample that failed; ``text``: what the model had said."""
    log.info("%s, row %d, sample %d failed: %s", item.data, item.row, item.sample, failure)  # to log.txt
    return Answer(item.data, item.row, item.sample, failed=failure.reason, error=str(failure), text=text)
