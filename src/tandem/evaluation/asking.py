"""Asking: samples of rows through a workflow and an engine, each judged alone. Failures come out as values with a reason."""

import asyncio
import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from tandem.api.engines import InferenceEngine
from tandem.api.failures import DataFailure, EngineDied, EpisodeFailure, InfrastructureFailure, WrongWorkflow, as_failure
from tandem.api.plugins import ends_the_task
from tandem.api.requests import NoiseKey, StopReason
from tandem.api.samples import Group, Sample
from tandem.api.workflow import EPISODE, GeneratesTokens, RolloutWorkflow
from tandem.rollout.episode_engine import EpisodeEngine
from tandem.rollout.failure_budget import Beginning
from tandem.rollout.sample_checks import check_sample
from tandem.rollout.wave import Wave

log = logging.getLogger(__name__)

EVALUATION_EPOCH = -1
"""Epoch in the noise keys of evaluation, so that they never meet those of training."""


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

    ends_early: bool = False
    """Give up where the first answers all fail by the user's code."""

    on_samples: Callable[["Ask", Sequence[Sample]], None] | None = None
    """Called with what each episode made, which then has log-probabilities: for rewards that need a model."""


@dataclass(eq=False)
class _Place:
    """The place of a sample in its wave."""

    wave: Wave | None = None
    engine: EpisodeEngine | None = None
    over: bool = False

    @property
    def at_turn(self) -> bool:
        return self.over or (self.engine is not None and self.engine.at_turn)

    @property
    def at_rest(self) -> bool:
        return self.over or (self.engine is not None and self.engine.at_rest)

    def leave(self) -> None:
        """The sample is made, or failed: nobody waits for it any more."""
        self.over = True
        if self.wave is not None:
            self.wave.look()


async def ask(
    engine: GeneratesTokens,
    workflow: RolloutWorkflow,
    asks: Sequence[Ask],
    terms: AskingTerms,
    *,
    on_answer: Callable[[Answer], None] | None = None,
    on_issue: Callable[[], None] | None = None,
    together: bool = False,
) -> list[Answer]:
    """Runs ``workflow`` once a sample, beside whatever else the engine is doing; the answers in the order of ``asks``.

    It stands outside the staleness gate: these episodes take no slot and are never trained on. Noise is keyed by row and
    sample alone, so what is drawn does not depend on batching, arrival or what else is asked. `finish_group` is not called:
    samples are judged one by one, not against each other. ``on_issue`` is called once a sample, when its first request
    has reached the engine or it has ended without one. ``together``: the samples take their turns together; see `Wave`.

    Raises:
        EngineDied: the engine is gone.
        WrongWorkflow: the workflow returns what nobody can use.
        NoBatch: the first answers all fail by the user's code, and `AskingTerms.ends_early`.
    """
    beginning, told = Beginning(EARLY_ANSWERS if terms.ends_early else 0, "answers"), set[str]()
    at_once = asyncio.Semaphore(terms.max_concurrent or max(1, len(asks)))
    places = [_Place() for _ in asks]
    wave = Wave(engine, places) if together and isinstance(engine, InferenceEngine) else None

    async def one(item: Ask, place: _Place) -> Answer:
        place.wave = wave
        try:
            async with at_once:
                answer = await _ask_one(engine, workflow, item, terms, place, on_issue)
        finally:
            place.leave()
        if answer.failed is None:
            beginning.well()
        elif error := beginning.lose([answer.failed], answer.error):
            raise error
        elif answer.failed not in told:
            told.add(answer.failed)
            log.warning("%s, row %d, sample %d failed: %s", answer.data, answer.row, answer.sample, answer.error)
        if on_answer is not None:
            on_answer(answer)
        return answer

    tasks = [asyncio.ensure_future(one(*both)) for both in zip(asks, places, strict=True)]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def ask_together(
    engine: InferenceEngine,
    workflow: RolloutWorkflow,
    asks: Sequence[Ask],
    terms: AskingTerms,
    *,
    on_answer: Callable[[Answer], None] | None = None,
) -> list[Answer]:
    """`ask` as one wave: the engine stands still until every sample has issued its first request, and then begins; later
    turns of conversations are taken together too. A workflow that has places for fewer samples (``at_once``) gets as many
    waves as it needs.

    So which samples are computed together does not depend on timing, and on one machine the answers are equal to the bit
    (an engine that was built ``deterministic``, tools and environments that answer alike).
    """
    most, answers = workflow.at_once or len(asks), list[Answer]()
    for start in range(0, len(asks), max(1, most)):
        answers += await _ask_wave(engine, workflow, asks[start : start + most], terms, on_answer)
    return answers


async def _ask_wave(
    engine: InferenceEngine,
    workflow: RolloutWorkflow,
    asks: Sequence[Ask],
    terms: AskingTerms,
    on_answer: Callable[[Answer], None] | None,
) -> list[Answer]:
    issued, everybody = 0, asyncio.Event()

    def count() -> None:
        nonlocal issued
        issued += 1
        if issued == len(asks):
            everybody.set()

    terms = replace(terms, max_concurrent=None)  # who waits for a place would never issue a request
    await asyncio.to_thread(engine.pause)
    asking = ask(engine, workflow, asks, terms, on_answer=on_answer, on_issue=count, together=True)
    running = asyncio.ensure_future(asking)
    try:
        waiting = asyncio.ensure_future(everybody.wait())
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
    except BaseException:
        running.cancel()
        raise
    finally:
        engine.resume()
    try:
        return await running
    finally:
        running.cancel()


async def _ask_one(
    engine: GeneratesTokens,
    workflow: RolloutWorkflow,
    item: Ask,
    terms: AskingTerms,
    place: _Place,
    on_issue: Callable[[], None] | None,
) -> Answer:
    loop = asyncio.get_running_loop()
    expires = loop.time() + terms.timeout_s
    for attempt in range(terms.max_retries + 1):
        key = NoiseKey(terms.seed, EVALUATION_EPOCH, item.row, item.sample, attempt=attempt)
        place.engine = handle = EpisodeEngine(
            engine,
            key,
            deadline_s=expires - loop.time(),
            affinity=f"{item.data}/{item.row}",
            on_issue=on_issue if attempt == 0 else None,
            needs_logprobs=terms.on_samples is not None,
            wave=place.wave,
            as_one=workflow.makes_group,
        )
        EPISODE.set(handle)
        limit = asyncio.timeout_at(expires)
        try:
            async with limit:
                result = await workflow.arun_episode(handle, copy.deepcopy(dict(item.columns)))
            samples = _samples(result)
            if terms.on_samples is not None:
                terms.on_samples(item, samples)
            return answer_of(item, samples)
        except (EngineDied, WrongWorkflow):
            raise
        except BaseException as error:  # the episode boundary: a sample that fails is counted, and the others go on
            if ends_the_task(error):
                raise
            if isinstance(error, InfrastructureFailure) and attempt < terms.max_retries:
                continue
            failure = as_failure(error)
            if limit.expired():
                failure = DataFailure("deadline", f"not done after {terms.timeout_s:g} s")
            return failure_answer(item, failure, failure.completion_text)
        finally:
            handle.end()
    raise AssertionError("unreachable: the last attempt returns")


def _samples(result: Group | Sample | None) -> Sequence[Sample]:
    if result is None:
        raise DataFailure("workflow_returned_none")
    if not isinstance(result, (Sample, Group)):
        raise WrongWorkflow(f"a workflow must return a Sample, a Group, or None; it returned a {type(result).__name__}")
    samples = result.samples if isinstance(result, Group) else (result,)
    if not samples:
        raise DataFailure("workflow_returned_none", "a group without samples")
    for sample in samples:
        check_sample(sample)
    return samples


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
