"""The recorder's own cost a call, with an engine that waits and says what it was told. Reach: 3 ms at 200 sessions.

    chrt -r 5 python benchmarks/recorder.py [--sessions 200] [--turns 8] [--wait-s 1.0] [--no-freeze]

The clients are a process of their own. Each plays a chat that grows by a question of 60 words and a reply of 64 tokens.
``cpu_ms`` is the time that the recorder's process computes, divided by the calls: reading the request, finding its turn,
rendering, tokens, the reply as JSON, and HTTP. ``added_ms`` is what a client waits beyond the engine's time, median and
95th percentile, while all sessions call at once. What is loaded before the first call is kept from the garbage collector, as
in a run; ``--no-freeze`` leaves it there. ``gc_ms`` is the longest collection and ``gc_all_ms`` all of them, in
processor time, so they are steady on a busy machine where ``added_ms`` is not. Prints one JSON object.
"""

import argparse
import asyncio
import gc
import json
import statistics
import sys
import time

import aiohttp

from tandem.api.requests import LLMRequest, LLMResponse, StopReason
from tandem.config.rollout import GenerationConfig
from tandem.models.catalog import resolve
from tandem.models.tokenizer import load_tokenizer
from tandem.rollout.recorder import SessionRecorder

SAMPLING = GenerationConfig(n_samples=1, max_new_tokens=64)
QUESTION = "There are three trees in the yard and she has four apples for each of them . " * 4


class Waiting:
    """An engine that answers after a while, with tokens that are ready."""

    def __init__(self, wait_s: float, output_ids: tuple[int, ...]):
        self._wait_s, self._output_ids = wait_s, output_ids

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        """The same reply each time."""
        await asyncio.sleep(self._wait_s)
        numbers, zeros = (-0.5,) * len(self._output_ids), (0,) * len(self._output_ids)
        return LLMResponse(request.input_ids, self._output_ids, numbers, zeros, StopReason.STOP)


async def play(http: aiohttp.ClientSession, url: str, key: str, turns: int, delay_s: float) -> list[float]:
    """One chat; seconds of each turn."""
    messages, waits = [], []
    await asyncio.sleep(delay_s)
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{turn}: {QUESTION}"})
        began = time.perf_counter()
        body = {"model": "m", "messages": messages}
        async with http.post(f"{url}/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
            said = await answer.json()
        waits.append(time.perf_counter() - began)
        messages.append({"role": "assistant", "content": said["choices"][0]["message"]["content"]})
    return waits


async def clients(told: dict) -> list[float]:
    """All chats, their beginnings spread over the time of one turn."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        count = len(told["sessions"])
        spread = [told["wait_s"] * i / count for i in range(count)]
        chats = [play(http, u, k, told["turns"], d) for (u, k), d in zip(told["sessions"], spread, strict=True)]
        return [wait for waits in await asyncio.gather(*chats) for wait in waits]


def time_collections() -> list[float]:
    """Processor seconds of each collection from now on."""
    seconds: list[float] = []
    began = [0.0]

    def note(phase: str, info: dict) -> None:
        if phase == "start":
            began[0] = time.thread_time()
        else:
            seconds.append(time.thread_time() - began[0])

    gc.callbacks.append(note)
    return seconds


async def measure(args: argparse.Namespace) -> dict[str, float]:
    """Opens the sessions, has the clients play in another process, and makes the samples."""
    tokenizer = load_tokenizer(resolve(args.model))
    reply = tokenizer("word " * 63, add_special_tokens=False)["input_ids"][:63]
    engine = Waiting(args.wait_s, (*reply, tokenizer.eos_token_id))
    recorder = SessionRecorder(tokenizer)
    if args.freeze:
        gc.collect()
        gc.freeze()
    opened = [recorder.session(engine, SAMPLING) for _ in range(args.sessions)]
    sessions = [await one.__aenter__() for one in opened]
    told = {"sessions": [(s.base_url, s.key) for s in sessions], "turns": args.turns, "wait_s": args.wait_s}
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(sys.executable, __file__, "--clients", stdin=pipe, stdout=pipe)
    collections, began = time_collections(), time.process_time()
    said, _ = await child.communicate(json.dumps(told).encode())
    cpu_s = time.process_time() - began
    waits = [wait - args.wait_s for wait in json.loads(said)]
    began = time.perf_counter()
    samples = [session.sample(1.0) for session in sessions]
    sample_s = (time.perf_counter() - began) / len(samples)
    for one in opened:
        await one.__aexit__(None, None, None)
    assert all(len(sample.trajectories) == 1 for sample in samples), "every chat only grows"
    return {
        "calls": len(waits),
        "cpu_ms": round(1e3 * cpu_s / len(waits), 2),
        "added_ms": round(1e3 * statistics.median(waits), 2),
        "added_p95_ms": round(1e3 * statistics.quantiles(waits, n=20)[-1], 2),
        "gc_ms": round(1e3 * max(collections, default=0.0), 1),
        "gc_all_ms": round(1e3 * sum(collections), 1),
        "sample_ms": round(1e3 * sample_s, 2),
    }


def main() -> None:
    """Measures, or plays the clients for a measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--wait-s", type=float, default=1.0)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--no-freeze", dest="freeze", action="store_false", help="what is loaded is collected, too")
    parser.add_argument("--clients", action="store_true", help="for the measurement itself")
    args = parser.parse_args()
    if args.clients:
        print(json.dumps(asyncio.run(clients(json.load(sys.stdin)))))
    else:
        print(json.dumps(asyncio.run(measure(args))))


if __name__ == "__main__":
    main()
