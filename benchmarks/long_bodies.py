"""The cost of long bodies to everybody else: the recorder's loop, and a server. Reach: 40 ms, and 500 ms.

    python benchmarks/long_bodies.py [--agents 16] [--megabytes 7] [--lists 10]

``hold_ms`` is the longest time for which the recorder's loop did not turn while so many agents send a chat of so many
megabytes at once (a process of its own sends them), and ``idle_ms`` the same while nobody sends: what the machine adds.
The time for which the loop waited for a core, because other programs had them all, does not count.
``normal_ms`` is the longest that a normal request waits beside ``--lists`` bodies of 8 MB of empty lists, sent to a server
whose schema takes them; ``left_mib`` is the memory that stays. Prints one JSON object.
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

import aiohttp
import psutil

from tandem.config.rollout import GenerationConfig
from tandem.models.catalog import resolve
from tandem.models.tokenizer import load_tokenizer
from tandem.protocol.access import Access, ServerLimits
from tandem.protocol.server import Application, Route, Server
from tandem.rollout.recorder import SessionRecorder

WORDS = 'There are three trees, in the yard, and she said: "four apples" for each of them.\n'
TEXT = "text"
"""Names a body that is a chat; any other is empty lists."""


class Echo(Application):
    """Takes any object; stands for `tandem serve`, whose bodies are read by the same function."""

    limits = ServerLimits()

    def __init__(self) -> None:
        schema = {"type": "object", "additionalProperties": True}
        self.routes = (Route("POST", "/", "data", "Any object", self._answer, schema, None, self.limits.max_body_bytes),)

    async def _answer(self, body: dict, request: object) -> dict:
        return {"ok": True}

    def busy(self) -> bool:
        """Never."""
        return False

    def drain(self) -> None:
        """Nothing waits."""


def queued() -> float:
    """Seconds that this thread has waited for a core so far."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


async def turns(gaps: list[float]) -> None:
    """Notes how long each turn of the loop takes beyond its sleep and its waits for a core."""
    while True:
        began, before = time.perf_counter(), queued()
        await asyncio.sleep(0.001)
        gaps.append(time.perf_counter() - began - 0.001 - (queued() - before))


async def measured(awaitable: object) -> tuple[object, float]:
    """The result, and the longest gap of the loop on the way."""
    gaps: list[float] = []
    watch = asyncio.create_task(turns(gaps))
    result = await awaitable
    watch.cancel()
    return result, round(1e3 * max(gaps), 1)


async def send(told: dict) -> list[tuple[int, float, str]]:
    """Posts all bodies at once: status, seconds and words of each."""
    if told["body"] == TEXT:
        content = WORDS * (told["bytes"] // len(WORDS))
        raw = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
    else:
        raw = b'{"a":[' + b"[]," * ((told["bytes"] - 20) // 3) + b"[]]}"
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:

        async def post(headers: dict, data: bytes) -> tuple[int, float, str]:
            began = time.perf_counter()
            try:
                async with http.post(
                    told["url"], data=data, headers={"Content-Type": "application/json", **headers}
                ) as answer:
                    return answer.status, time.perf_counter() - began, (await answer.text())[:200]
            except aiohttp.ClientError as error:  # refused before all of it was sent
                return 0, time.perf_counter() - began, repr(error)

        sent = [asyncio.create_task(post({"Authorization": f"Bearer {key}"}, raw)) for key in told["keys"]]
        normal = []
        while told["normal"] and not all(task.done() for task in sent):
            normal.append(await post({}, b'{"a": 1}'))
        return [*await asyncio.gather(*sent), *normal]


async def sender(**told: object) -> list:
    """`send` in a process of its own."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        sys.executable, "benchmarks/long_bodies.py", "--send", stdin=pipe, stdout=pipe
    )
    said, _ = await child.communicate(json.dumps(told).encode())
    return json.loads(said)


async def measure(args: argparse.Namespace) -> dict:
    """Both measurements."""
    recorder = SessionRecorder(load_tokenizer(resolve("smollm2-135m")), context=8192)
    opened = [recorder.session(None, GenerationConfig(n_samples=1)) for _ in range(args.agents)]
    sessions = [await one.__aenter__() for one in opened]
    _, idle_ms = await measured(asyncio.sleep(2))
    url, keys = f"{sessions[0].base_url}/chat/completions", [session.key for session in sessions]
    told = {"body": TEXT, "url": url, "keys": keys, "bytes": args.megabytes * 10**6, "normal": False}
    said, hold_ms = await measured(sender(**told))
    for one in opened:
        await one.__aexit__(None, None, None)
    process = psutil.Process()
    async with Server(Echo(), Access.of("127.0.0.1", token=None, admin_token=None)).listening("127.0.0.1", 0) as port:
        before = process.memory_info().rss
        told = {"body": "lists", "url": f"http://127.0.0.1:{port}/", "keys": ["k"] * args.lists, "bytes": 8 * 10**6}
        answers = await sender(**told, normal=True)
        left = process.memory_info().rss - before
    lists, normal = answers[: args.lists], answers[args.lists :]
    return {
        "idle_ms": idle_ms,
        "hold_ms": hold_ms,
        "agents": sorted({(status, words) for status, _, words in said}),
        "agents_s": round(max(seconds for _, seconds, _ in said), 2),
        "normal_ms": round(1e3 * max(seconds for _, seconds, _ in normal), 1),
        "normal": len(normal),
        "lists": sorted({(status, words) for status, _, words in lists}),
        "left_mib": round(left / 2**20, 1),
    }


def main() -> None:
    """Measures, or sends for a measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, default=16)
    parser.add_argument("--megabytes", type=int, default=7)
    parser.add_argument("--lists", type=int, default=10)
    parser.add_argument("--send", action="store_true", help="for the measurement itself")
    args = parser.parse_args()
    if args.send:
        print(json.dumps(asyncio.run(send(json.load(sys.stdin)))))
    else:
        print(json.dumps(asyncio.run(measure(args)), indent=1))


if __name__ == "__main__":
    main()
