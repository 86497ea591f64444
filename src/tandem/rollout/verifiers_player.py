"""Runs episodes of a verifiers taskset, one for each line of input, in the Python of verifiers. See verifiers_taskset.py.

PYTHON verifiers_player.py TASKSET

Its standard input is a socket with one message a line: {"number", "index", "url"} in, {"number", "reward", "rewards"} or an
error out.
"""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.cli.eval import EvalConfig
from verifiers.v1.utils.loaders import load_environment

AGENT = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}


def opened(taskset: str) -> tuple[Any, list[Any]]:
    """Returns the environment of a taskset and its tasks."""
    config = EvalConfig.model_validate(
        {"env": {"taskset": {"id": taskset}, "agent": AGENT}, "model": "policy", "push": False}
    )
    env = load_environment(config.env)
    return env, list(env.taskset)


async def episode(env: Any, tasks: Sequence[Any], request: dict[str, Any]) -> dict[str, Any]:
    """Runs one episode at a session's address. Returns its weighted rewards and their sum, or the error. An index beyond the
    last task starts again with the first."""
    context = vf.ModelContext(model="policy", client=vf.EvalClientConfig(base_url=request["url"]))
    result = await env.run_episode(tasks[request["index"] % len(tasks)], context)
    traces = result.traces
    if not result.ok:
        errors = [error.message for source in (result, *traces) for error in source.errors]
        return {"number": request["number"], "error": "; ".join(errors) or "the episode failed"}
    rewards = {name: reward.score * reward.weight for trace in traces for name, reward in trace.rewards.items()}
    return {"number": request["number"], "reward": sum(rewards.values()), "rewards": rewards}


async def play(taskset: str) -> None:
    """Runs the requested episodes until the input ends."""
    env, tasks = opened(taskset)
    lines, answers = await asyncio.open_connection(sock=socket.socket(fileno=os.dup(0)), limit=1 << 20)

    async def answer(request: dict[str, Any]) -> None:
        try:
            line = json.dumps(await episode(env, tasks, request))
        except Exception as error:  # the boundary of a taskset: its error fails only this episode
            line = json.dumps({"number": request["number"], "error": f"{type(error).__name__}: {error}".removesuffix(": ")})
        answers.write(line.encode() + b"\n")

    async with env.serving(), asyncio.TaskGroup() as group:
        while line := await lines.readline():
            group.create_task(answer(json.loads(line)))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run decides when this process ends
    asyncio.run(play(sys.argv[1]))
