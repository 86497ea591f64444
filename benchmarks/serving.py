"""Measures what HTTP costs, what a second server brings, and how long an update stops servers. Ratios within one run.

    python benchmarks/serving.py                          # SmolLM2-135M: the four parts with `tandem serve`
    python benchmarks/serving.py --vllm ENV/bin/python    # and vLLM's pause on the same machine
    python benchmarks/serving.py --requests 4 --tokens 8 --rounds 1 --updates 1      # only to see that it starts

Throughput: the same requests, once to an engine in a process of its own and once to a server of the same model, in turn.
Latency: the same of one request of 1 and of 32 tokens, with nothing beside it.
Cores: the same requests to one server on one core, then shared by two servers on a core each, in turn.
Pause: servers with requests under way take the same weights from a folder; ``pause_s`` is when nothing is generated,
``recompute_s`` the keys and values of running requests under the new weights (vLLM computes them after its pause, and
says no time). One vLLM server gets all the requests that two of ours share. Prints one JSON object.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from tandem.api.engines import InferenceEngine
from tandem.api.requests import LLMRequest, NoiseKey
from tandem.api.weights import FolderSource, WeightUpdate, WeightVersion, tensor_digest, version_digest
from tandem.config.devices import usable_cores
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig
from tandem.engines.inference.embedded import EmbeddedProcess
from tandem.engines.inference.remote.foreign.vllm import VllmServer
from tandem.engines.inference.remote.tandem_server import TandemServer, start_tandem_server
from tandem.models.catalog import resolve


def requests_of(count: int, tokens: int, round_number: int, exactly: bool = True) -> list[LLMRequest]:
    """Requests that make so many tokens each, or at most so many."""
    gconfig = GenerationConfig(n_samples=1, max_new_tokens=tokens, min_new_tokens=tokens if exactly else 0)
    return [LLMRequest(tuple(range(100 + i, 164 + i)), gconfig, NoiseKey(round_number, sample=i)) for i in range(count)]


def seconds(engines: Sequence[InferenceEngine], requests: list[LLMRequest]) -> float:
    """Seconds of all requests together, each engine with its share."""

    async def ask() -> None:
        await asyncio.gather(*(engines[i % len(engines)].agenerate(request) for i, request in enumerate(requests)))

    began = time.perf_counter()
    asyncio.run(ask())
    return time.perf_counter() - began


def throughput(contenders: dict[str, Sequence[InferenceEngine]], count: int, tokens: int, rounds: int) -> dict[str, float]:
    """Tokens a second of the first and the second, medians of rounds in turn, and the median of their ratios."""
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for engines in contenders.values():
        seconds(engines, requests_of(count, 4, -1))
    for number in range(rounds):
        for name in sorted(contenders, reverse=bool(number % 2)):
            speeds[name].append(count * tokens / seconds(contenders[name], requests_of(count, tokens, number)))
    one, other = speeds
    ratios = [a / b for a, b in zip(speeds[one], speeds[other], strict=True)]
    return {f"{name}_tokens_per_s": statistics.median(values) for name, values in speeds.items()} | {
        f"{one}_to_{other}": statistics.median(ratios)
    }


async def again(server: InferenceEngine, request: LLMRequest) -> None:
    """Keeps a request under way."""
    while True:
        await server.agenerate(request)


def made(server: InferenceEngine) -> float:
    """Tokens that it has made, those of requests under way too."""
    told = server.statistics()
    return told.get("server_tokens", told["generated_tokens"])


async def pauses(servers: Sequence[InferenceEngine], folder: Path, running: int, updates: int) -> list[dict[str, float]]:
    """Updates of all servers among running requests, one more at first for warmth; the slowest server counts."""
    source = FolderSource(folder)
    digests = {name: tensor_digest(tensor) for name, tensor in source.tensors()}
    requests = requests_of(running, 1024, 0, exactly=False)  # which vLLM does not take; who ends early is asked again
    tasks = [asyncio.ensure_future(again(server, request)) for server in servers for request in requests]
    rows = []
    for number in range(1, updates + 2):
        before = [made(server) for server in servers]
        while running and any(made(s) < told + 4 * running for s, told in zip(servers, before, strict=True)):
            await asyncio.sleep(0.05)
            for failed in (task for task in tasks if task.done()):
                failed.result()
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


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of one engine in the throughput part")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--running", type=int, default=16, help="requests under way at each server during an update")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--vllm", metavar="PYTHON", help="python of the environment that has vLLM: its pause, too")
    return parser.parse_args()


@dataclass(frozen=True)
class Servers:
    """Starts them, and ends them with the benchmark."""

    arguments: argparse.Namespace
    stack: ExitStack
    logs: Path

    @property
    def folder(self) -> Path:
        """The folder of the model."""
        return resolve(self.arguments.model)

    @property
    def dtype(self) -> torch.dtype:
        """The folder of the weights."""
        return getattr(torch, self.arguments.dtype)

    def ours(self, name: str, threads: int, cpus: Sequence[int] | None = None) -> TandemServer:
        """A `tandem serve`."""
        config = EmbeddedEngineConfig(threads=threads)
        roots, log = [self.folder], self.logs / f"{name}.log"
        server = start_tandem_server(
            self.folder, config, self.dtype, "cpu", run="bench", log_file=log, weights_roots=roots, cpus=cpus
        )
        self.stack.callback(server.close)
        return server

    def vllm(self, settings: EmbeddedEngineConfig) -> VllmServer:
        """vLLM on the same cores; compiling takes longer than it saves here."""
        server = VllmServer.start(
            self.folder,
            python=self.arguments.vllm,
            log_file=self.logs / "vllm.log",
            dtype=self.dtype,
            version=WeightVersion(0),
            settings=settings,
            options=("--enforce-eager",),
        )
        self.stack.callback(server.close)
        return server


def both(servers: Servers) -> dict[str, Sequence[InferenceEngine]]:
    """One that is served, and one whose process this one has on a pipe."""
    threads, version = servers.arguments.threads, WeightVersion(0)
    config = EmbeddedEngineConfig(threads=threads)
    local = EmbeddedProcess.start(servers.folder, config, servers.dtype, "cpu", version=version, threads=threads)
    servers.stack.callback(local.close)
    return {"served": [servers.ours("served", threads)], "in_process": [local]}


def served_throughput(servers: Servers) -> dict[str, float]:
    """Served against in process."""
    asked = servers.arguments
    return throughput(both(servers), asked.requests, asked.tokens, asked.rounds)


def latency(servers: Servers) -> dict[str, float]:
    """Milliseconds of a request alone, of 1 and of 32 tokens, served and in process: medians of 10 a round."""
    contenders, lengths = both(servers), (1, 32)
    found: dict[str, list[float]] = {f"{name}_{length}_ms": [] for name in contenders for length in lengths}
    for number in range(-1, servers.arguments.rounds):
        for name, length in itertools.product(sorted(contenders, reverse=bool(number % 2)), lengths):
            took = [1e3 * seconds(contenders[name], requests_of(1, length, 10 * number + i)) for i in range(10)]
            found[f"{name}_{length}_ms"] += took if number >= 0 else []  # the first round warms up
    return {name: statistics.median(values) for name, values in found.items()}


def two_cores(servers: Servers) -> dict[str, float]:
    """Two servers on a core each against one of them."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("--parts cores needs two cores; this process may use one")
    pair = [servers.ours(f"core{core}", 1, (core,)) for core in cores]
    asked = servers.arguments
    return throughput({"two_servers": pair, "one_server": pair[:1]}, asked.requests, asked.tokens, asked.rounds)


def pause(servers: Servers) -> dict[str, float]:
    """Pauses at an update, of two servers of ours and of vLLM."""
    asked, result = servers.arguments, {}
    half = max(1, asked.threads // 2)
    pair = [servers.ours(name, half) for name in ("one", "two")]
    rows = asyncio.run(pauses(pair, servers.folder, asked.running, asked.updates))
    result |= {f"two_servers_{key}": statistics.median(row[key] for row in rows) for key in rows[0]}
    for server in pair:
        server.close()
    if asked.vllm:
        settings = EmbeddedEngineConfig(threads=asked.threads, max_running=64, kv_cache_gib=2.0, max_model_len=2048)
        rows = asyncio.run(pauses([servers.vllm(settings)], servers.folder, 2 * asked.running, asked.updates))
        result |= {f"vllm_{key}": statistics.median(row[key] for row in rows) for key in rows[0] if key != "recompute_s"}
        result["pause_to_vllm"] = result["two_servers_pause_s"] / result["vllm_pause_s"]
    return result


PARTS = {"throughput": served_throughput, "latency": latency, "cores": two_cores, "pause": pause}


def main() -> None:
    """Prints one JSON object."""
    arguments = parse()
    result: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as logs:
        for part in arguments.parts:
            with ExitStack() as stack:
                found = PARTS[part](Servers(arguments, stack, Path(logs)))
            result |= {key: round(value, 4) for key, value in found.items()}
            print(f"{part}: {result}", file=sys.stderr, flush=True)
    print(json.dumps({"arguments": vars(arguments), **result}))


if __name__ == "__main__":
    main()
