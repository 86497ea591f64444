"""Functions of the user's as workflows: episodes that ask the engine, and agents that are given an endpoint."""

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

from tandem.api.failures import DataFailure, EngineDied, WrongWorkflow, described
from tandem.api.samples import Sample
from tandem.api.workflow import GeneratesTokens, RewardFn, RewardResult, RolloutWorkflow, messages_for
from tandem.config.errors import ConfigError
from tandem.config.generation import GenerationConfig
from tandem.rollout.deadlines import PLAY, inside, left_for_play
from tandem.rollout.recording.forest import Node
from tandem.rollout.recording.recorder import SessionRecorder
from tandem.rollout.recording.session import RecordingSession, SessionLimits
from tandem.rollout.recording.verdict import read_verdict

LOOK_BESIDE_S = 5.0
"""Longest time that a sample waits for the rewards of replies that are left out, which are only told."""

AGENT_ARGUMENTS = ("base_url", "api_key", "data")
"""The arguments of an agent in each episode."""

AGENT_KNOBS = ("agent_timeout_s", "max_turns", "max_concurrent", "side_calls")
"""Knobs of `AgentWorkflow`, beside those of the function."""


class FunctionWorkflow(RolloutWorkflow):
    """A coroutine function ``episode(engine, data, …)`` as a workflow; ``episode.makes_group = True`` and
    ``episode.reads_reward = …`` count too."""

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any]):
        self.function, self.arguments = function, arguments
        self.name = getattr(function, "__name__", "function")
        self.makes_group = bool(getattr(function, "makes_group", False))
        if getattr(function, "reads_scores", False):
            raise ConfigError(
                f"{self.name} is a function, which has no finish_group to read scores in: leave reads_scores out"
            )

    async def arun_episode(self, engine: Any, data: Mapping[str, Any]) -> Any:
        """Implements `RolloutWorkflow.arun_episode`."""
        return await self.function(engine, data, **self.arguments)


def is_agent(function: Callable[..., Any]) -> bool:
    """Says whether a coroutine function wants an endpoint: it has an argument ``base_url``."""
    return inspect.iscoroutinefunction(function) and "base_url" in inspect.signature(function).parameters


class AgentWorkflow(RolloutWorkflow):
    """A coroutine function ``agent(base_url, api_key, data, …)`` that talks to the model as to OpenAI's API.

    Its reward is what the agent returns, a number or ``{"reward": …}``, or what it sent to ``…/reward``, but not both; where
    it says nothing, the configured reward judges the last reply.
    """

    def __init__(
        self,
        own_agent: Callable[..., Any],
        own_arguments: Mapping[str, Any],
        reward: RewardFn | None,
        gconfig: GenerationConfig,
        recorder: SessionRecorder,
        episode_timeout_s: float = 600.0,
        *,
        agent_timeout_s: float | None = None,
        max_turns: int = SessionLimits.max_turns,
        max_concurrent: int = SessionLimits.max_concurrent,
        side_calls: Literal["skip", "train"] = "skip",
    ):
        """``own_arguments``: those of the function; an episode fills in its own. ``agent_timeout_s``: the longest that an
        agent may take; it never takes the part of the episode's time that is the reward's."""
        if max_turns < 1 or max_concurrent < 1:
            raise ConfigError("max_turns and max_concurrent must be at least 1")
        self.function, self.arguments = own_agent, dict(own_arguments)
        self.name = getattr(own_agent, "__name__", "agent")
        self.reward, self.gconfig, self.recorder = reward, gconfig, recorder
        most_s = PLAY * episode_timeout_s
        self.agent_timeout_s = inside("workflow_args.agent_timeout_s", agent_timeout_s, most_s, episode_timeout_s)
        self.side_calls = side_calls
        self.limits = SessionLimits(max_turns=max_turns, max_concurrent=max_concurrent)
        self._takes = [name for name in AGENT_ARGUMENTS if name in own_arguments]

    async def arun_episode(self, engine: GeneratesTokens, data: Mapping[str, Any]) -> Sample:
        """Plays an episode, as `RolloutWorkflow` says.

        Raises:
            DataFailure: ``agent_timeout``, ``agent_raised``, ``agent_raised_on_cut_reply``, ``agent_never_called``,
                ``agent_refused``, ``agent_exited_early``, ``two_rewards`` or ``no_reward``; ``prompt_too_long`` where it
                ended by that.
        """
        async with self.recorder.session(engine, self.gconfig, limits=self.limits, side_calls=self.side_calls) as session:
            returned = await self._run(session, data, min(self.agent_timeout_s, left_for_play(engine)))
        _ = session.last  # an agent that never spoke to the model has no reward
        if returned is not None and session.reward is not None:
            raise DataFailure("two_rewards", "the agent returned a reward, and sent one to …/reward; do one of both")
        given = session.reward if returned is None else returned
        return session.sample(**(await judge_reply(self.reward, session, data) if given is None else given))

    async def _run(self, session: RecordingSession, data: Mapping[str, Any], seconds: float) -> dict[str, Any] | None:
        """Runs the agent and returns what it returned."""
        there = {"base_url": session.base_url, "api_key": session.key, "data": data}
        arguments = self.arguments | {name: there[name] for name in self._takes}
        running = asyncio.wrap_future(self.recorder.run_agent(_guarded(self.function, arguments)))
        try:
            done, _ = await asyncio.wait([running], timeout=seconds)
            if not done:
                raise DataFailure("agent_timeout", f"the agent was not done after {seconds:.3g} s")
        finally:
            if not running.done():
                running.cancel()
        error = asyncio.CancelledError("it cancelled itself") if running.cancelled() else running.exception()
        if error is not None:
            if session.failure is not None:
                raise session.failure from error  # the engine's, which the agent could not help
            raise session.failed("agent_raised", described(error)) from error
        if isinstance(session.failure, EngineDied):
            raise session.failure
        try:
            return read_verdict(running.result())
        except ValueError as wrong:
            raise WrongWorkflow(f"agent {self.name} must return a number, a dict with 'reward', or None: {wrong}") from wrong


async def judge_reply(
    reward: RewardFn | None, session: RecordingSession, data: Mapping[str, Any], output: str | None = None
) -> dict[str, Any]:
    """The verdict of the configured reward on the last reply of a session, or on an ``output`` in its place.

    It judges the side calls that are left out, too, to tell whether one of them was better.

    Raises:
        DataFailure: ``no_reward``, where none is configured, or it lacks something in the row.
    """
    if reward is None:
        raise DataFailure("no_reward", "the agent gave no reward, and none is configured")
    check = getattr(reward, "check_row", None)
    try:
        if check is not None:
            check(data)
    except ConfigError as error:
        raise DataFailure("no_reward", f"the agent gave no reward, and the run's cannot judge this row: {error}") from error

    async def judged(node: Node) -> RewardResult:
        return await reward(
            prompt=node.root.prompt_text,
            completion=node.words if output is None else output,
            prompt_ids=node.root.asked.context,
            completion_ids=node.response.output_ids,
            row=data,
            **messages_for(reward, node.messages()),
        )

    result = await judged(session.last)
    looks = asyncio.gather(*map(judged, session.left_out if output is None else ()), return_exceptions=True)
    with contextlib.suppress(TimeoutError):  # only told: no sample waits long for it
        beside = await asyncio.wait_for(looks, LOOK_BESIDE_S)
        session.outdone = any(isinstance(other, RewardResult) and other.value > result.value for other in beside)
    return {"reward": result.value, "raw_rewards": dict(result.raw_rewards), **result.details()}


async def _guarded(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Runs an agent; one that ends its program ends itself alone."""
    try:
        return await function(**arguments)
    except SystemExit as error:
        raise RuntimeError(f"the agent called sys.exit({error.code!r})") from error
