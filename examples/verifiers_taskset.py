"""Train on a taskset of verifiers: its harness plays at the address of a session, and its rewards are what is trained.

verifiers lives in an environment of its own (scripts/foreign_agents.sh), where examples/verifiers/player.py runs.

    envs/verifiers/bin/python examples/verifiers/player.py my_taskset rows.jsonl
    tandem train workflow=examples/verifiers_taskset.py:play workflow_args.taskset=my_taskset \\
      workflow_args.python=envs/verifiers/bin/python train_dataset.path=rows.jsonl
"""

import asyncio
import json
import os
from pathlib import Path

PLAYER = Path(__file__).resolve().parent / "verifiers/player.py"


class Player:
    """The process that plays; it ends with the run, because its input does."""

    def __init__(self):
        self.process, self.waiting = None, {}

    async def start(self, python, taskset):
        """Starts it, with its own programs (uv) on the path."""
        tools = str(Path(python).absolute().parent)
        environment = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(
            str(python), str(PLAYER), taskset, stdin=pipe, stdout=pipe, env=environment
        )
        self.reading = asyncio.create_task(self.read())

    async def read(self):
        """Gives each answer to whoever waits for it."""
        while line := await self.process.stdout.readline():
            if line.startswith(b"{"):
                answer = json.loads(line)
                self.waiting.pop(answer["number"]).set_result(answer)
        for future in self.waiting.values():
            future.set_exception(RuntimeError("the process of verifiers ended; its errors are above"))

    async def ask(self, index, url):
        """The answer of one episode."""
        number, future = len(self.waiting), asyncio.get_running_loop().create_future()
        while number in self.waiting:
            number += 1
        self.waiting[number] = future
        self.process.stdin.write(json.dumps({"number": number, "index": index, "url": url}).encode() + b"\n")
        await self.process.stdin.drain()
        return await future


PLAYERS = {}


async def play(base_url, api_key, data, taskset: str, python: str = "envs/verifiers/bin/python"):
    """One episode: the reward is verifiers', the tokens are the recorder's."""
    if (python, taskset) not in PLAYERS:
        player = Player()
        PLAYERS[python, taskset] = player, asyncio.create_task(player.start(python, taskset))
    player, started = PLAYERS[python, taskset]
    await asyncio.shield(started)
    keyed = base_url.removesuffix("/v1") + f"/sessions/{api_key}/v1"  # its clients take a key from the environment only
    answer = await player.ask(data["index"], keyed)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return {"reward": answer["reward"], "rewards": answer["rewards"]}
