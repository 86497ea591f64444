"""`workflow=verifiers`: episodes of a taskset of verifiers, which plays in an environment and a process of its own."""

import asyncio
import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tandem.api.samples import Sample
from tandem.api.workflow import GeneratesTokens, RolloutWorkflow
from tandem.config.data import INDEX
from tandem.config.errors import ConfigError
from tandem.config.generation import GenerationConfig
from tandem.rollout.own import AGENT_ARGUMENTS, AgentWorkflow
from tandem.rollout.recording.recorder import SessionRecorder
from tandem.rollout.recording.session import SessionLimits

PLAYER = Path(__file__).with_name("verifiers_player.py")
"""The program that plays; it imports verifiers, and nothing of Tandem."""

LONGEST_LINE = 1 << 24
"""Bytes that a taskset may print in one line."""


class VerifiersWorkflow(RolloutWorkflow):
    """The harness of verifiers plays at the address of a session; the sum of its weighted rewards is the sample's.

    A row is the task that has its place, so `train_dataset.path=seeds` will do.
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
        """``taskset``: its package, or a file on ``PYTHONPATH``. ``python``: that of the environment that has verifiers."""
        if not Path(python).is_file():
            raise ConfigError(
                f"workflow=verifiers: workflow_args.python={python} is not there; make an environment with "
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
        """One episode; raises `DataFailure` as an agent does."""
        return await self._agent.arun_episode(engine, data)

    async def _play(self, base_url: str, api_key: str, data: Mapping[str, Any]) -> dict[str, Any]:
        keyed = f"{base_url.removesuffix('/v1')}/sessions/{api_key}/v1"  # its clients take a key from the environment only
        answer = await self._process.ask(int(data[INDEX]), keyed)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return {"reward": answer["reward"], "rewards": answer["rewards"]}


class PlayerProcess:
    """The process that plays, started by the first episode. It ends with the run, because its input does."""

    def __init__(self, python: str, taskset: str):
        self._python, self._taskset = python, taskset
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._started: asyncio.Task[asyncio.subprocess.Process] | None = None
        self._reading: asyncio.Task[None] | None = None

    async def ask(self, index: int, url: str) -> dict[str, Any]:
        """Has the task of this place played; returns the answer of the player.

        Raises:
            RuntimeError: the process ended.
        """
        if self._started is None:
            self._started = asyncio.create_task(self._start())
        process = await asyncio.shield(self._started)
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        if self._reading is None or self._reading.done() or process.stdin is None:
            raise RuntimeError("the process of verifiers ended; its errors are above")
        self._waiting[number] = future
        process.stdin.write(json.dumps({"number": number, "index": index, "url": url}).encode() + b"\n")
        try:
            await process.stdin.drain()
            return await future
        finally:
            self._waiting.pop(number, None)

    async def _start(self) -> asyncio.subprocess.Process:
        """Starts it, with its own programs (uv) on the path."""
        tools = str(Path(self._python).absolute().parent)
        environment = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
        command, pipe = (self._python, str(PLAYER), self._taskset), asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, env=environment, limit=LONGEST_LINE
        )
        self._reading = asyncio.create_task(self._read(process))
        return process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Gives each answer to whoever waits for it."""
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                if (answer := _answer(line)) is None:
                    continue
                future = self._waiting.get(answer["number"])
                if future is not None and not future.done():
                    future.set_result(answer)
        finally:  # a reader that fails leaves nobody waiting
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(RuntimeError("the process of verifiers ended; its errors are above"))


def _answer(line: bytes) -> dict[str, Any] | None:
    """The answer that a line of the player is; None if a library or a taskset printed it."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) and isinstance(answer.get("number"), int) else None
