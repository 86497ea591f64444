"""What HTTP costs, and how long an update stops two served engines. Ratios within one run, the contenders in turn.

    python benchmarks/serving.py                          # SmolLM2-135M: throughput served and in process, and the pause
    python benchmarks/serving.py --requests 4 --tokens 8 --rounds 1 --updates 1      # only to see that it starts

Throughput: the same requests, once to an engine in a process of its own and once to a server of the same model, in turn.
Pause: two servers, each with requests under way, take the same weights from a folder; ``pause_s`` is when nothing is
generated, ``recompute_s`` the keys and values of running requests under the new weights. Prints one JSON object.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from tandem.api.engines import InferenceEngine
from tandem.api.requests import LLMRequest, NoiseKey
from tandem.api.weights import FolderSource, WeightUpdate, WeightVersion, tensor_digest, version_digest
from tandem.config.generation import GenerationConfig
from tandem.config.rollout import EmbeddedEngineConfig
from tandem.engines.inference.process import EmbeddedProcess
from tandem.engines.inference.remote.tandem_server import TandemServer
from tandem.engines.inference.remote.tandem_start import start_tandem_server
from tandem.models.catalog import resolve
from tandem.state.machine import usable_cores


def requests_of(count: int, tokens: int, round_number: int) -> list[LLMRequest]:
    """Requests that make exactly so many tokens each."""
    gconfig = GenerationConfig(n_samples=1, max_new_tokens=tokens, min_new_tokens=tokens)
    return [LLMRequest(tuple(range(100 + i, 164 + i)), gconfig, NoiseKey(round_number, sample=i)) for i in range(count)]


def seconds(engine: InferenceEngine, requests: list[LLMRequest]) -> float:
    """Of all requests together."""

    async def ask() -> None:
        await asyncio.gather(*(engine.agenerate(request) for request in requests))

    began = time.perf_counter()
    asyncio.run(ask())
    return time.perf_counter() - began


def throughput(engines: dict[str, InferenceEngine], count: int, tokens: int, rounds: int) -> dict[str, float]:
    """Tokens a second of each, the median of rounds in turn, and the median of their ratios."""
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    for engine in engines.values():
        seconds(engine, requests_of(count, 4, -1))
    for number in range(rounds):
        for name in sorted(engines, reverse=bool(number % 2)):
            speeds[name].append(count * tokens / seconds(engines[name], requests_of(count, tokens, number)))
    ratios = [a / b for a, b in zip(speeds["served"], speeds["in process"], strict=True)]
    return {f"{name}_tokens_per_s": statistics.median(values) for name, values in speeds.items()} | {
        "served_to_in_process": statistics.median(ratios)
    }


def generated(server: TandemServer) -> float:
    """Tokens that it has made."""
    return server.statistics()["generated_tokens"]


async def again(server: TandemServer, request: LLMRequest) -> None:
    """Keeps a request under way."""
    while True:
        await server.agenerate(request)


async def pauses(servers: list[TandemServer], folder: Path, running: int, updates: int) -> list[dict[str, float]]:
    """Updates of all servers among running requests, one more at first for warmth; the slowest server counts."""
    source = FolderSource(folder)
    digests = {name: tensor_digest(tensor) for name, tensor in source.tensors()}
    requests = requests_of(running, 1024, 0)
    tasks = [asyncio.ensure_future(again(server, request)) for server in servers for request in requests]
    rows = []
    for number in range(1, updates + 2):
        before = [generated(server) for server in servers]
        while running and any(generated(s) < told + 4 * running for s, told in zip(servers, before, strict=True)):
            await asyncio.sleep(0.05)
        update = WeightUpdate(WeightVersion(number, version_digest(digests), "bench"), source, digests)
        began = time.perf_counter()
        await asyncio.gather(*(asyncio.to_thread(server.prepare_weights, update) for server in servers))
        prepared = time.perf_counter()
        reports = await asyncio.gather(*(asyncio.to_thread(server.commit_weights, update.version) for server in servers))
        row = {key: max(report[key] for report in reports) for key in ("pause_s", "recompute_s")}
        rows.append(row | {"prepare_s": prepared - began, "commit_s": time.perf_counter() - prepared})
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return rows[1:]


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of one engine in the throughput part")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--running", type=int, default=16, help="requests under way at each server during an update")
    parser.add_argument("--updates", type=int, default=5)
    arguments = parser.parse_args()
    folder, dtype = resolve(arguments.model), getattr(torch, arguments.dtype)
    config = EmbeddedEngineConfig(threads=arguments.threads)
    with ExitStack() as stack, tempfile.TemporaryDirectory() as logs:

        def serve(name: str, own: EmbeddedEngineConfig) -> TandemServer:
            log = Path(logs) / f"{name}.log"
            server = start_tandem_server(folder, own, dtype, "cpu", run="bench", log_file=log, weights_roots=[folder])
            stack.callback(server.close)
            return server

        local = EmbeddedProcess.start(folder, config, dtype, "cpu", version=WeightVersion(0), threads=arguments.threads)
        served = serve("throughput", config)
        result = throughput({"in process": local, "served": served}, arguments.requests, arguments.tokens, arguments.rounds)
        local.close()
        served.close()
        half = EmbeddedEngineConfig(threads=max(1, arguments.threads // 2))
        rows = asyncio.run(
            pauses([serve(name, half) for name in ("one", "two")], folder, arguments.running, arguments.updates)
        )
        result |= {f"two_servers_{key}": statistics.median(row[key] for row in rows) for key in rows[0]}
    print(json.dumps({"arguments": vars(arguments), **{key: round(value, 4) for key, value in result.items()}}))


if __name__ == "__main__":
    main()
