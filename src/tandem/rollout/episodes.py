"""One episode: a workflow on one row, with its deadline and its retries. Failures come out as values with a reason."""

import asyncio
import copy
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.api.activity import GENERATING, did
from tandem.api.engines import InferenceEngine
from tandem.api.failures import DataFailure, EngineDied, InfrastructureFailure, WaitTimeout, WrongWorkflow, as_failure
from tandem.api.plugins import ends_the_task
from tandem.api.requests import LLMRequest, LLMResponse, NoiseKey, RequestTiming, StopReason
from tandem.api.samples import Dropped, Group, Sample
from tandem.api.workflow import EPISODE, GeneratesTokens, RolloutWorkflow
from tandem.config.data import SOURCE
from tandem.config.rollout import RolloutConfig
from tandem.media.parts import sources_in
from tandem.rollout.collate import expired
from tandem.rollout.event_loop import BackgroundLoop
from tandem.rollout.ledger import PromptId
from tandem.rollout.sample_checks import check_sample
from tandem.rollout.wave import Wave

BESIDE = 1 << 20
"""The first number of the noise of requests to a model beside the engine: an episode has fewer trajectories."""


class EpisodeEngine:
    """Fills in what a request leaves out; what a request says itself is kept.

    ``noise_key`` names the episode (its ``trajectory`` is counted here: a request that continues the last one's tokens
    belongs to the same trajectory, any other begins a new one, so that no noise is used twice). ``deadline_s`` counts
    from construction. ``on_issue`` is called on the event loop once the first request of each sample has been issued.
    ``needs_logprobs``: see `LLMRequest`; a request that says False itself keeps that. ``wave``: of a deterministic run;
    ``as_one``: samples are not told to `end`, so whichever issues a request speaks for all.
    """

    def __init__(
        self,
        engine: GeneratesTokens,
        noise_key: NoiseKey,
        *,
        deadline_s: float | None = None,
        affinity: str | None = None,
        on_issue: Callable[[], None] | None = None,
        needs_logprobs: bool = True,
        wave: Wave | None = None,
        as_one: bool = False,
    ):
        self._engine, self.noise_key, self._needs_logprobs = engine, noise_key, needs_logprobs
        self._expires = None if deadline_s is None else time.monotonic() + deadline_s
        self._affinity = affinity or f"{noise_key.epoch}/{noise_key.group}"
        self._on_issue = on_issue
        self._samples: list[EpisodeEngine] = []
        self._last: tuple[int, ...] | None = None
        self._trajectory = -1
        self._wave, self._as_one, self._whole = wave, as_one, as_one
        self._waiting = self._generating = self._asking = self._asked = 0
        self.issued = self._ended = False
        self._read: list[tuple[tuple[int, ...], Sequence[str]]] = []

    def for_sample(self, sample: int) -> "EpisodeEngine":
        """The engine of one sample of the group: other noise, same affinity and deadline."""
        one = EpisodeEngine(
            self._engine,
            self.noise_key._replace(sample=sample),
            affinity=self._affinity,
            on_issue=self._on_issue,
            needs_logprobs=self._needs_logprobs,
            wave=self._wave,
        )
        one._expires = self._expires
        if self._whole:
            one._read, one._whole = self._read, True
        self._samples.append(one)
        return one

    @property
    def settled(self) -> bool:
        """True if each sample has issued its first request, or ended without one."""
        return all(one.settled for one in self._samples) if self._samples else self.issued

    @property
    def at_turn(self) -> bool:
        """True if each sample waits for its next turn, or has ended; see `Wave`."""
        parts = [self, *self._samples] if self._as_one else self._samples or [self]
        if self._as_one:
            return any(one._waiting for one in parts) and not any(one._generating for one in parts)
        return all(one._ended or (one._waiting and not one._generating) for one in parts)

    @property
    def at_rest(self) -> bool:
        """True if each sample waits for a turn of the engine or of a model beside it, or has ended; see `Wave`."""
        parts = [self, *self._samples] if self._as_one else self._samples or [self]
        waits = [one._waiting + one._asking > 0 for one in parts]
        if any(one._generating for one in parts):
            return False
        return any(waits) if self._as_one else all(one._ended or waits[i] for i, one in enumerate(parts))

    def end(self) -> None:
        """This sample will issue nothing any more."""
        self._settle()
        self._ended = True
        if self._wave is not None:
            self._wave.look()

    def has_read(self, context: tuple[int, ...], missing: Sequence[str]) -> None:
        """Implements `tandem.api.workflow.EpisodeView.has_read`."""
        self._read.append((context, missing))

    def _refuse_going_on(self, request: LLMRequest) -> None:
        """Passes if no decision of the episode rests on a reward that lacked terms. In one of a whole group, samples may be
        judged one after another, so there only a request that continues what was judged is refused.

        Raises:
            WrongWorkflow: one does.
        """
        for context, missing in self._read:
            if not self._whole or (context and request.input_ids[: len(context)] == context):
                raise WrongWorkflow(
                    f"the workflow asked for the reward and generated again, and {', '.join(missing)} of the reward is "
                    "added only when the episode has ended, so it went on by a part of it. Use terms that are there at once "
                    "(models behind a server: judge(url=…), remote(url=…)), ask for the reward last, or say in the workflow "
                    'reads_reward = "partly" if the other terms are enough to go on by'
                )

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        """Generates, as `InferenceEngine.agenerate` says.

        Raises:
            DataFailure: ``deadline``, when the episode's time is spent.
            WrongWorkflow: the episode has read a reward that is not whole, and goes on.
        """
        self._refuse_going_on(request)
        if self._wave is not None and self.issued:
            await self._turn(self._wave)
        request, ours = self._complete(request)
        self._settle()
        began = time.monotonic()
        self._generating += 1
        try:
            response = await self._engine.agenerate(request)
        finally:
            self._generating -= 1
            if self._wave is not None and self._waiting:  # several requests of one sample: this was what the wave waited for
                self._wave.look()
        did(*GENERATING)
        if response.timing is None:  # a server that does not say when it began
            response = replace(response, timing=RequestTiming(math.nan, math.nan, time.monotonic() - began))
        if ours and response.stop_reason == StopReason.CANCELLED and self.remaining_s <= 0:
            raise DataFailure("deadline", "the episode's time (rollout.episode_timeout_s) was spent while it was generating")
        self._last = (*request.input_ids, *response.output_ids)
        return response

    async def ask_beside(self, other: InferenceEngine, request: LLMRequest) -> LLMResponse:
        """Asks another model within the episode's time, with noise of its own; nothing of it is trained.

        Raises:
            DataFailure: ``deadline``, when the episode's time is spent.
        """
        self._settle()  # a sample that asks here first is not waited for with its first request
        key = self.noise_key._replace(trajectory=BESIDE + self._asked)
        self._asked += 1
        if self._wave is not None:
            self._asking += 1
            try:
                await self._wave.beside(other).turn()
            finally:
                self._asking -= 1
        ours = request.deadline_s is None or request.deadline_s > self.remaining_s
        deadline_s = max(0.0, self.remaining_s) if ours else request.deadline_s
        deadline_s = None if deadline_s == math.inf else deadline_s
        self._generating += 1
        try:
            response = await other.agenerate(
                replace(request, noise_key=key, affinity=self._affinity, deadline_s=deadline_s, needs_logprobs=False)
            )
        finally:
            self._generating -= 1
            if self._wave is not None:
                self._wave.look()
        did(*GENERATING)
        if ours and response.stop_reason == StopReason.CANCELLED and self.remaining_s <= 0:
            raise DataFailure("deadline", "the episode's time (rollout.episode_timeout_s) was spent while a partner wrote")
        return response

    async def _turn(self, wave: Wave) -> None:
        self._waiting += 1
        try:
            await wave.turn()
        finally:
            self._waiting -= 1

    def _complete(self, request: LLMRequest) -> tuple[LLMRequest, bool]:
        """The request with all fields filled in; whether its deadline is the episode's."""
        changes: dict[str, object] = {}
        if request.noise_key is None:
            if self._last is None or request.input_ids[: len(self._last)] != self._last:
                self._trajectory += 1
            self._last = None  # taken: another request beside this one is another trajectory
            changes["noise_key"] = self.noise_key._replace(trajectory=self._trajectory)
        if request.affinity is None:
            changes["affinity"] = self._affinity
        if not self._needs_logprobs:
            changes["needs_logprobs"] = False
        ours = request.deadline_s is None and self._expires is not None
        if ours:
            changes["deadline_s"] = max(0.0, self.remaining_s)
        return replace(request, **changes), ours  # type: ignore[arg-type]

    @property
    def remaining_s(self) -> float:
        """Seconds that the episode has left."""
        return float("inf") if self._expires is None else self._expires - time.monotonic()

    def _settle(self) -> None:
        if not self.issued:
            self.issued = True
            if self._on_issue is not None:  # after this step of the loop: then the engine has the request
                asyncio.get_running_loop().call_soon(self._on_issue)


@dataclass(eq=False)
class Episode:
    """One episode under way, or finished and not consumed."""

    number: int
    """Order of start; also the id of its group."""

    prompt: PromptId
    row: Mapping[str, Any]
    workflow: RolloutWorkflow
    version: int
    """Number of the engine's weights when it started; all its tokens are at least as new."""

    sample: int = 0
    """The number of its first sample, for the noise: an episode of an evaluation makes one of several."""

    needs_logprobs: bool = True
    """False if nothing that it makes is trained on or scored by a model."""

    started: float = field(default_factory=time.monotonic)
    task: asyncio.Task[None] | None = None
    engine: EpisodeEngine | None = None
    group: Group | None = None
    judged: bool = False
    """True if the group has all its rewards, those that need a model too, and passed the filter of groups."""

    place: int = 0
    """The number of the generating rank that runs it; 0: this one."""

    aborted: bool = False
    over: bool = False
    """True if this rank has made its group, or cannot."""

    wave: Wave | None = None
    """The episodes that began with it, in a deterministic run."""

    @property
    def at_turn(self) -> bool:
        return self.over or self.aborted or self.place > 0 or (self.engine is not None and self.engine.at_turn)

    @property
    def at_rest(self) -> bool:
        return self.over or self.aborted or self.place > 0 or (self.engine is not None and self.engine.at_rest)

    @property
    def settled(self) -> bool:
        """True if this rank need not wait for a request of it: each sample has issued its first, or ended without one."""
        return self.over or self.aborted or self.place > 0 or (self.engine is not None and self.engine.settled)

    def has_expired(self, oldest: int) -> bool:
        """True if a trained token of its group is of an older version than ``oldest``."""
        samples = () if self.group is None else self.group.samples
        return any(bool(expired(t, oldest).any()) for sample in samples for t in sample.trajectories)

    def dropped(self, reason: str, words: str) -> Dropped:
        """The record of it when it is dropped."""
        nothing = Group((), self.number, str(self.row.get(SOURCE) or ""), self.row)
        return Dropped(reason, words, self.group or nothing)


Spawn = Callable[[Sequence[Episode]], None]
"""Makes tasks of episodes, on the loop."""


class EpisodeRunner:
    """Makes the groups of episodes with the engine of this rank. `begin` is for any thread, `group_of` for the loop's."""

    def __init__(
        self,
        engine: InferenceEngine | None,
        config: RolloutConfig,
        loop: BackgroundLoop,
        *,
        seed: int,
        deterministic: bool,
    ):
        self._engine, self._config, self._loop = engine, config, loop
        self._seed, self._deterministic = seed, deterministic
        self._issued = threading.Condition()

    def begin(self, episodes: Sequence[Episode], spawn: Spawn, patience_s: float) -> None:
        """Has them spawned on the loop. In a deterministic run, the engine stands still until each has issued its requests:
        the order in which these arrive must not decide what is computed together.

        Raises:
            WaitTimeout: they have not after ``patience_s``.
        """
        if not self._deterministic:
            self._loop.call(spawn, episodes)
            return
        assert self._engine is not None, "a rank that runs episodes has an engine"
        wave = Wave(self._engine, episodes)
        for episode in episodes:
            episode.wave = wave
        self._engine.pause()
        try:
            self._loop.call(spawn, episodes)
            with self._issued:
                if not self._issued.wait_for(lambda: all(e.settled for e in episodes), patience_s):
                    raise WaitTimeout(f"waited {patience_s:.1f} s for {len(episodes)} episodes to issue their requests")
        finally:
            self._engine.resume()

    async def group_of(self, episode: Episode) -> Group:
        """Runs it; each attempt gets its own copy of the row and its own noise. The deadline is over all attempts.

        Raises:
            WrongWorkflow: it can work for no prompt.
            EpisodeFailure: why there is no group: ``deadline``, ``workflow_raised``, ``cancelled`` if a workflow cancels
                itself, or what workflow, reward or engine gave.
        """
        try:
            return await self._run(episode)
        except (asyncio.CancelledError, GeneratorExit) as error:
            if episode.aborted:
                raise
            raise DataFailure("cancelled", f"the workflow was cancelled, not by the executor: {error!r}") from error
        finally:
            episode.over = True
            if episode.wave is not None:
                self._notify()
                episode.wave.look()

    async def _run(self, episode: Episode) -> Group:
        assert self._engine is not None, "a rank that runs episodes has an engine"
        timeout_s, max_retries = self._config.episode_timeout_s, self._config.max_retries
        loop = asyncio.get_running_loop()
        expires = loop.time() + timeout_s
        if sources := sources_in(episode.row.get("messages")):  # decoded outside of the loop, and remembered for all samples
            await asyncio.to_thread(lambda: [source.read() for source in sources])
        for attempt in range(max_retries + 1):
            key = NoiseKey(self._seed, episode.prompt.epoch, episode.prompt.index, episode.sample, attempt=attempt)
            episode.engine = EpisodeEngine(
                self._engine,
                key,
                deadline_s=expires - loop.time(),
                on_issue=self._notify if self._deterministic else None,
                needs_logprobs=episode.needs_logprobs,
                wave=episode.wave,
                as_one=episode.workflow.makes_group,
            )
            EPISODE.set(episode.engine)
            limit = asyncio.timeout_at(expires)
            try:
                async with limit:
                    result = await episode.workflow.arun_episode(episode.engine, copy.deepcopy(dict(episode.row)))
                    return as_group(result, episode)
            except (EngineDied, WrongWorkflow, asyncio.CancelledError, GeneratorExit):
                raise
            except InfrastructureFailure:
                if attempt == max_retries:
                    raise
            except BaseException as error:  # the episode boundary, also for sys.exit()
                if limit.expired():
                    raise DataFailure("deadline", f"not done after {timeout_s:g} s (by episode_timeout_s)") from error
                raise as_failure(error) from error.__cause__
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _notify(self) -> None:
        with self._issued:
            self._issued.notify_all()


Scored = tuple[Episode, Group | DataFailure]
"""An episode, and what the rewards that need a model made of its group."""


async def finish_groups(scored: Sequence[Scored], timeout_s: float) -> list[Group | DataFailure]:
    """The groups after the `finish_group` of workflows that wait for such rewards, all at the same time."""

    async def finish(episode: Episode, outcome: Group | DataFailure) -> Group | DataFailure:
        if isinstance(outcome, DataFailure) or not episode.workflow.reads_scores:
            return outcome
        return await _finished(episode.workflow, outcome, timeout_s)

    return await asyncio.gather(*(finish(*one) for one in scored))


async def _finished(workflow: RolloutWorkflow, group: Group, timeout_s: float) -> Group | DataFailure:
    """The group, or why there is none: ``deadline`` after ``timeout_s``."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            samples = tuple(await workflow.finish_group(group.samples, group.data))
        if not samples:
            raise DataFailure("empty_group", "finish_group left no sample")
        for sample in samples:
            check_sample(sample)
        return replace(group, samples=samples)
    except WrongWorkflow:
        raise
    except BaseException as error:  # the episode boundary, also for sys.exit()
        if ends_the_task(error):
            raise
        late = DataFailure("deadline", f"finish_group was not done after {timeout_s:g} s (rollout.episode_timeout_s)")
        failure = late if limit.expired() else as_failure(error)
        if not isinstance(failure, DataFailure):
            raise failure from error
        failure.failed_samples = group.failures
        return failure


def as_group(result: Group | Sample | None, episode: Episode) -> Group:
    """The group of this episode: the workflow's result, checked.

    Raises:
        DataFailure: there is nothing in it, or a number is not finite (see `check_sample`).
        WrongWorkflow: it is something else, or a value has the wrong type or shape.
    """
    if result is None:
        raise DataFailure("workflow_returned_none")
    group = Group((result,)) if isinstance(result, Sample) else result
    if not isinstance(group, Group):
        raise WrongWorkflow(f"a workflow must return a Sample, a Group, or None; it returned a {type(result).__name__}")
    if not group.samples:
        raise DataFailure("empty_group", "a group needs at least one sample, a sample at least one trajectory")
    for sample in group.samples:
        check_sample(sample)
    source = group.source or str(episode.row.get(SOURCE) or "")
    return replace(group, group_id=episode.number, source=source, data=episode.row)
