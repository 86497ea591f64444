"""Plays episodes of a verifiers taskset, one a line of its input; run by verifiers' own Python. See verifiers_taskset.py.

PYTHON verifiers_player.py TASKSET      # {"number", "index", "url"} in, {"number", "reward", "rewards"} or an error out
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.cli.eval import EvalConfig
from verifiers.v1.utils.loaders import load_environment

AGENT = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}


def opened(taskset: str) -> tuple[Any, list[Any]]:
    """The environment of a taskset, and its tasks."""
    config = EvalConfig.model_validate(
        {"env": {"taskset": {"id": taskset}, "agent": AGENT}, "model": "policy", "push": False}
    )
    env = load_environment(config.env)
    return env, list(env.taskset)


async def episode(env: Any, tasks: Sequence[Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Plays at a session: the sum of its weighted rewards, or what went wrong. After the last task comes the first."""
    context = vf.ModelContext(model="policy", client=vf.EvalClientConfig(base_url=asked["url"]))
    made = await env.run_episode(tasks[asked["index"] % len(tasks)], context)
    traces = made.traces
    if not made.ok:
        errors = [error.message for source in (made, *traces) for error in source.errors]
        return {"number": asked["number"], "error": "; ".join(errors) or "the episode failed"}
    rewards = {name: one.score * one.weight for trace in traces for name, one in trace.rewards.items()}
    return {"number": asked["number"], "reward": sum(rewards.values()), "rewards": rewards}


async def play(taskset: str) -> None:
    """Plays until the input ends."""
    env, tasks = opened(taskset)
    lines = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)

    async def answer(asked: dict[str, Any]) -> None:
        try:
            line = json.dumps(await episode(env, tasks, asked))
        except Exception as error:  # the boundary of a taskset, which costs its own episode
            line = json.dumps({"number": asked["number"], "error": f"{type(error).__name__}: {error}".removesuffix(": ")})
        print(line, flush=True)

    async with env.serving(), asyncio.TaskGroup() as group:
        while line := await lines.readline():
            group.create_task(answer(json.loads(line)))


if __name__ == "__main__":
    asyncio.run(play(sys.argv[1]))
