"""Workflows made of code from outside: functions that call the engine, agents that call an HTTP endpoint, and
`workflow=verifiers`, whose episodes run in a process and Python environment of their own.
"""

import asyncio
import contextlib
import inspect
import itertools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from tandem.api.failures import DataFailure, EngineDied, WrongWorkflow, described
from tandem.api.workflow import GeneratesTokens, RewardFn, RewardResult, RolloutWorkflow, Sample, messages_to
from tandem.config.data import INDEX
from tandem.config.errors import ConfigError
from tandem.config.rollout import GenerationConfig
from tandem.rollout.episode_engine import PLAY, inside, left_for_play
from tandem.rollout.forest import Node
from tandem.rollout.recorder import SessionRecorder
from tandem.rollout.recording_session import RecordingSession, SessionLimits, read_verdict
from tandem.workers.process import Child

LOOK_BESIDE_S = 5.0
"""Maximum time in seconds that a sample waits for the rewards of side calls. These rewards are used for a metric only."""

AGENT_ARGUMENTS = ("base_url", "api_key", "data")
"""The arguments that Tandem passes to an agent in each episode."""

AGENT_KNOBS = ("agent_timeout_s", "max_turns", "max_concurrent", "side_calls")
"""Knobs of `AgentWorkflow`, in addition to those of the user's function."""


class FunctionWorkflow(RolloutWorkflow):
    """A coroutine function ``episode(engine, data, …)`` as a workflow. Its attributes ``makes_group`` and ``reads_reward``
    are used like those of a `RolloutWorkflow`."""

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any]):
        self.function, self.arguments = function, arguments
        self.name = getattr(function, "__name__", "function")
        self.makes_group = bool(getattr(function, "makes_group", False))
        if getattr(function, "reads_scores", False):
            raise ConfigError(
                f"{self.name} is a function and has no finish_group in which to read scores: leave reads_scores out"
            )

    async def arun_episode(self, engine: Any, data: Mapping[str, Any]) -> Any:
        """Implements `RolloutWorkflow.arun_episode`."""
        return await self.function(engine, data, **self.arguments)


def is_agent(function: Callable[..., Any]) -> bool:
    """True if a coroutine function needs an endpoint: it has an argument ``base_url``."""
    return inspect.iscoroutinefunction(function) and "base_url" in inspect.signature(function).parameters


class AgentWorkflow(RolloutWorkflow):
    """A coroutine function ``agent(base_url, api_key, data, …)`` that calls the model through OpenAI's API, as a workflow.

    The reward is the agent's return value, a number or ``{"reward": …}``, or what it posted to ``…/reward``; giving both
    is an error. If the agent gives no reward, the configured reward judges the last reply.
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
        """``own_arguments``: arguments of the function; each episode sets its `AGENT_ARGUMENTS`. ``agent_timeout_s``:
        maximum time of the agent, in seconds; it never includes the part of the episode's time that is reserved for the
        reward."""
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
        """Runs one episode, see `RolloutWorkflow`.

        Raises:
            DataFailure: ``agent_timeout``, ``agent_raised``, ``agent_raised_on_cut_reply``, ``agent_never_called``,
                ``agent_refused``, ``agent_exited_early``, ``two_rewards`` or ``no_reward``; ``prompt_too_long`` if the agent
                failed because a prompt was too long.
        """
        async with self.recorder.session(engine, self.gconfig, limits=self.limits, side_calls=self.side_calls) as session:
            returned = await self._run(session, data, min(self.agent_timeout_s, left_for_play(engine)))
        _ = session.last  # an agent that never spoke to the model has no reward
        if returned is not None and session.reward is not None:
            raise DataFailure("two_rewards", "the agent returned a reward, and sent one to …/reward; do only one")
        verdict = session.reward if returned is None else returned
        return session.sample(**(await judge_reply(self.reward, session, data) if verdict is None else verdict))

    async def _run(self, session: RecordingSession, data: Mapping[str, Any], seconds: float) -> dict[str, Any] | None:
        """Runs the agent. Returns the verdict that it returned, as arguments of `RecordingSession.sample`, or None."""
        values = {"base_url": session.base_url, "api_key": session.key, "data": data}
        arguments = self.arguments | {name: values[name] for name in self._takes}
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
                raise session.failure from error  # the engine's failure, which is not the agent's fault
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
    """Returns the verdict of the configured reward on the session's last reply, or on ``output`` instead of that reply.

    Also judges the side calls that are not trained on. A metric tells if one of them got a higher reward.

    Raises:
        DataFailure: ``no_reward``: no reward is configured, or it needs a column that the row lacks.
    """
    if reward is None:
        raise DataFailure("no_reward", "the agent gave no reward, and none is configured")
    check = getattr(reward, "check_row", None)
    try:
        if check is not None:
            check(data)
    except ConfigError as error:
        raise DataFailure(
            "no_reward", f"the agent gave no reward, and the run's reward cannot judge this row: {error}"
        ) from error

    async def judged(node: Node) -> RewardResult:
        return await reward(
            prompt=node.root.prompt_text,
            completion=node.words if output is None else output,
            prompt_ids=node.root.request.context,
            completion_ids=node.response.output_ids,
            row=data,
            **messages_to(reward, node.messages()),
        )

    result = await judged(session.last)
    looks = asyncio.gather(*map(judged, session.left_out if output is None else ()), return_exceptions=True)
    with contextlib.suppress(TimeoutError):  # used for a metric only, so no sample waits long for it
        beside = await asyncio.wait_for(looks, LOOK_BESIDE_S)
        session.outdone = any(isinstance(other, RewardResult) and other.value > result.value for other in beside)
    return {"reward": result.value, "raw_rewards": dict(result.raw_rewards), **result.details()}


async def _guarded(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Runs an agent. Turns `sys.exit` into an error, so that it ends only the agent."""
    try:
        return await function(**arguments)
    except SystemExit as error:
        raise RuntimeError(f"the agent called sys.exit({error.code!r})") from error


PLAYER = Path(__file__).with_name("verifiers_player.py")
"""The program that runs the episodes; it imports verifiers, and nothing of Tandem."""

LONGEST_LINE = 1 << 24
"""Maximum size of one answer in bytes."""


class VerifiersWorkflow(RolloutWorkflow):
    """An episode of a verifiers taskset. The taskset's harness calls the model at a session's address; the sum of the
    taskset's weighted rewards is the sample's reward.

    A row stands for the task with the same index, so `train_dataset.path=seeds` is sufficient.
    """

    def __init__(
        self,
        gconfig: GenerationConfig,
        recorder: SessionRecorder,
        episode_timeout_s: float = 600.0,
        *,
        taskset: str,
        python: str = "envs/verifiers/bin/python",
        agent_timeout_s: float | None = None,
        max_turns: int = SessionLimits.max_turns,
        side_calls: Literal["skip", "train"] = "skip",
    ):
        """``taskset``: its package, or a file on ``PYTHONPATH``. ``python``: the Python of the environment with
        verifiers."""
        if not Path(python).is_file():
            raise ConfigError(
                f"workflow=verifiers: workflow_args.python={python} does not exist; make an environment with "
                "`pip install verifiers uv` and name its python"
            )
        self._process = PlayerProcess(python, taskset)
        self._agent = AgentWorkflow(
            self._play,
            dict.fromkeys(AGENT_ARGUMENTS),
            None,
            gconfig,
            recorder,
            episode_timeout_s,
            agent_timeout_s=agent_timeout_s,
            max_turns=max_turns,
            side_calls=side_calls,
        )

    async def arun_episode(self, engine: GeneratesTokens, data: Mapping[str, Any]) -> Sample:
        """Runs one episode. Raises `DataFailure` as `AgentWorkflow` does."""
        return await self._agent.arun_episode(engine, data)

    async def _play(self, base_url: str, api_key: str, data: Mapping[str, Any]) -> dict[str, Any]:
        keyed = f"{base_url.removesuffix('/v1')}/sessions/{api_key}/v1"  # its clients take a key from the environment only
        answer = await self._process.ask(int(data[INDEX]), keyed)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return {"reward": answer["reward"], "rewards": answer["rewards"]}


class PlayerProcess:
    """The process that runs the episodes, started by the first one. It ends with the run."""

    def __init__(self, python: str, taskset: str):
        self._command = (python, str(PLAYER), taskset)
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._started: asyncio.Task[asyncio.StreamWriter] | None = None
        self._reading: asyncio.Task[None] | None = None

    async def ask(self, index: int, url: str) -> dict[str, Any]:
        """Runs the task with this index and returns the process's answer.

        Raises:
            RuntimeError: the process has ended.
        """
        if self._started is None:
            self._started = asyncio.create_task(self._start())
        writer = await asyncio.shield(self._started)
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        if self._reading is None or self._reading.done():
            raise RuntimeError("the process of verifiers ended; its errors are above")
        self._waiting[number] = future
        writer.write(json.dumps({"number": number, "index": index, "url": url}).encode() + b"\n")
        try:
            await writer.drain()
            return await future
        finally:
            self._waiting.pop(number, None)

    async def _start(self) -> asyncio.StreamWriter:
        """Starts the process, with the programs of its environment (such as uv) on the path."""
        tools = str(Path(self._command[0]).absolute().parent)
        environment = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
        self._child, connection = Child.over_socket(self._command, environment=environment)
        reader, writer = await asyncio.open_connection(sock=connection, limit=LONGEST_LINE)
        self._reading = asyncio.create_task(self._read(reader, writer))
        return writer

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes each answer to the request that waits for it, until the event loop ends."""
        try:
            while line := await reader.readline():
                answer = json.loads(line)
                future = self._waiting.get(answer["number"])
                if future is not None and not future.done():
                    future.set_result(answer)
        finally:  # if reading fails, all waiting requests fail too
            writer.close()
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(RuntimeError("the process of verifiers ended; its errors are above"))
