"""Plays episodes of a verifiers taskset, one a line of its input; run by verifiers' own Python. See verifiers_taskset.py.

python examples/verifiers/player.py my_taskset rows.jsonl   # writes the tasks as rows for train_dataset.path
python examples/verifiers/player.py my_taskset              # {"number", "index", "url"} in, rewards out
"""

import asyncio
import json
import sys
from pathlib import Path

import verifiers.v1 as vf
from verifiers.v1.configs.cli.eval import EvalConfig
from verifiers.v1.utils.loaders import load_environment

AGENT = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}


def opened(taskset):
    """The environment of a taskset, and its tasks."""
    config = EvalConfig.model_validate(
        {"env": {"taskset": {"id": taskset}, "agent": AGENT}, "model": "policy", "push": False}
    )
    env = load_environment(config.env)
    return env, list(env.taskset)


async def episode(env, tasks, asked):
    """One episode at a session: the sum of its weighted rewards, or what went wrong."""
    context = vf.ModelContext(model="policy", client=vf.EvalClientConfig(base_url=asked["url"]))
    made = await env.run_episode(tasks[asked["index"]], context)
    traces = made.traces
    if not made.ok:
        errors = [error.message for source in (made, *traces) for error in source.errors]
        return {"number": asked["number"], "error": "; ".join(errors) or "the episode failed"}
    rewards = {name: one.score * one.weight for trace in traces for name, one in trace.rewards.items()}
    return {"number": asked["number"], "reward": sum(rewards.values()), "rewards": rewards}


async def play(taskset):
    """Until the input ends."""
    env, tasks = opened(taskset)
    lines = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)

    async def answer(asked):
        print(json.dumps(await episode(env, tasks, asked)), flush=True)

    async with env.serving(), asyncio.TaskGroup() as group:
        while line := await lines.readline():
            group.create_task(answer(json.loads(line)))


def write_rows(taskset, path):
    """Each task's prompt, and its place in the taskset."""
    _, tasks = opened(taskset)
    rows = [{"prompt": str(task.data.prompt), "index": place} for place, task in enumerate(tasks)]
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        write_rows(*sys.argv[1:3])
    else:
        asyncio.run(play(sys.argv[1]))
