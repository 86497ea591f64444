"""Runs one episode (a workflow on one row) with its deadline and retries. Failures are exceptions with a reason.

In deterministic runs (`Wave`), all requests of one turn reach the engine together.
"""

import asyncio
import copy
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.api.engines import InferenceEngine
from tandem.api.failures import DataFailure, EngineDied, InfrastructureFailure, WaitTimeout, WrongWorkflow, as_failure
from tandem.api.plugins import ends_the_task
from tandem.api.requests import NoiseKey
from tandem.api.workflow import EPISODE, Dropped, Group, RolloutWorkflow, Sample
from tandem.config.data import SOURCE
from tandem.config.rollout import RolloutConfig
from tandem.media.parts import sources_in
from tandem.rollout.episode_engine import EpisodeEngine, Wave
from tandem.rollout.event_loop import BackgroundLoop
from tandem.rollout.gate import PromptId
from tandem.rollout.sample_checks import check_sample


@dataclass(eq=False)
class Episode:
    """One episode that is running, or finished and not yet consumed."""

    number: int
    """Number of the episode in order of start; also the id of its group."""

    prompt: PromptId
    row: Mapping[str, Any]
    workflow: RolloutWorkflow
    version: int
    """Version of the engine's weights when the episode started; none of its tokens is older."""

    sample: int = 0
    """Number of the episode's first sample, for the noise: an evaluation runs one episode for each sample of a prompt."""

    needs_logprobs: bool = True
    """False if the episode's tokens are neither trained on nor scored by a model."""

    started: float = field(default_factory=time.monotonic)
    task: asyncio.Task[None] | None = None
    engine: EpisodeEngine | None = None
    group: Group | None = None
    judged: bool = False
    """True if the group has all its rewards, also those of a model, and has passed the group filter."""

    place: int = 0
    """The number of the generating rank that runs the episode; 0: this rank."""

    aborted: bool = False
    over: bool = False
    """True if this rank has finished the episode, with or without a group."""

    wave: Wave | None = None
    """The wave of the episodes that started together, in a deterministic run."""

    @property
    def _done_here(self) -> bool:
        """True if this rank does not run the episode, or runs it no more."""
        return self.over or self.aborted or self.place > 0

    @property
    def at_turn(self) -> bool:
        return self._done_here or (self.engine is not None and self.engine.at_turn)

    @property
    def at_rest(self) -> bool:
        return self._done_here or (self.engine is not None and self.engine.at_rest)

    @property
    def settled(self) -> bool:
        """True if this rank need not wait for a request: each sample has issued its first request, or has ended without a
        request."""
        return self._done_here or (self.engine is not None and self.engine.settled)

    def has_expired(self, oldest: int) -> bool:
        """True if the group has a trained token from a version older than ``oldest``."""
        samples = () if self.group is None else self.group.samples
        return any(bool(t.older_than(oldest).any()) for sample in samples for t in sample.trajectories)

    def dropped(self, reason: str, words: str) -> Dropped:
        """Returns the record of the dropped episode."""
        nothing = Group((), self.number, str(self.row.get(SOURCE) or ""), self.row)
        return Dropped(reason, words, self.group or nothing)


Spawn = Callable[[Sequence[Episode]], None]
"""Creates the tasks of these episodes; called on the event loop."""


class EpisodeRunner:
    """Runs episodes with the engine of this rank. `begin` may be called from any thread, `group_of` on the loop only."""

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
        """Starts these episodes on the loop. In a deterministic run, the engine is paused until each episode has issued its
        first requests, so that the order of arrival does not decide which requests are computed together.

        Raises:
            WaitTimeout: an episode has issued no request after ``patience_s`` seconds.
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
        """Runs an episode. Each attempt gets its own copy of the row and its own noise; the deadline covers all attempts.

        Raises:
            WrongWorkflow: the workflow is faulty for every prompt.
            EpisodeFailure: the episode has no group: ``deadline``, ``workflow_raised``, ``cancelled`` if a workflow cancels
                itself, or the failure of the workflow, reward or engine.
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
        if sources := sources_in(episode.row.get("messages")):  # decoded in a thread, once for all samples
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
"""An episode and its group after scoring by models, or the failure of the scoring."""


async def finish_groups(scored: Sequence[Scored], timeout_s: float) -> list[Group | DataFailure]:
    """Runs the `finish_group` of the workflows that wait for rewards of a model, concurrently, and returns the groups."""

    async def finish(episode: Episode, outcome: Group | DataFailure) -> Group | DataFailure:
        if isinstance(outcome, DataFailure) or not episode.workflow.reads_scores:
            return outcome
        return await _finished(episode.workflow, outcome, timeout_s)

    return await asyncio.gather(*(finish(*item) for item in scored))


async def _finished(workflow: RolloutWorkflow, group: Group, timeout_s: float) -> Group | DataFailure:
    """Returns the finished group, or its failure: ``deadline`` if `finish_group` takes longer than ``timeout_s`` seconds."""
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
    """Checks the result of a workflow and returns it as the group of this episode.

    Raises:
        DataFailure: the result is empty, or a number is not finite (see `check_sample`).
        WrongWorkflow: the result is not a group or sample, or a value has the wrong type or shape.
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
