"""Tokens a second of the embedded engine when the cache is too small for all that is asked for.

    python benchmarks/small_cache.py --gsm8k ../shared/data/gsm8k

The same requests on two engines in turn: one reserves what each may draw at most (`deterministic`), the other what
completions usually take, and makes room by preemption. Each may draw ``--most`` tokens and draws far fewer; their lengths
are those of a log-normal distribution with a median of 64 tokens. The kind "first requests" is distinct prompts on new
engines, which do not know what is usual. Prints a table, and one JSON object as the last line.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from generation import gsm8k_prompts

from tandem.api.requests import LLMRequest, NoiseKey
from tandem.api.weights import WeightVersion
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig
from tandem.engines.inference.core import EngineCore
from tandem.models.allocator import keep_freed_memory
from tandem.models.catalog import resolve
from tandem.models.tokenizer import load_tokenizer


@dataclass
class Engine:
    """An engine, and how it reserves rows."""

    name: str
    make: Callable[[], EngineCore]
    core: EngineCore
    most: int
    number: int = 0

    def generate(self, prompts: list[tuple[int, ...]], samples: int, lengths: list[int]) -> dict[str, float]:
        """Runs all requests, each until it has drawn its length; tokens a second, and what the engine counted."""
        ends: dict[int, int] = {}
        for place, length in enumerate(lengths):
            self.number += 1
            ends[self.number] = length
            gconfig = GenerationConfig(max_new_tokens=self.most, min_new_tokens=self.most)
            noise = NoiseKey(0, 0, place // samples, place % samples)
            self.core.add(self.number, LLMRequest(prompts[place // samples], gconfig, noise))
        before, began, steps, running = self.core.statistics(), time.perf_counter(), 0, 0.0
        while self.core.has_work:
            self.core.step()
            steps += 1
            running += self.core.statistics()["running"]
            for number in [n for n, length in ends.items() if len(self.core.drawn(n, 0)[0]) >= length]:
                self.core.cancel(number)
                del ends[number]
        seconds, after = time.perf_counter() - began, self.core.statistics()
        return {
            "tokens_per_s": (after["generated_tokens"] - before["generated_tokens"]) / seconds,
            "running": running / steps,
            "preempted": after["preempted"] - before["preempted"],
        }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--gsm8k", type=Path, required=True, help="folder with train.jsonl")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--most", type=int, default=512, help="tokens that a request may draw")
    parser.add_argument("--only", help="one of the kinds of work")
    parser.add_argument("--cache-of", type=int, default=6, help="sequences that fit if each reserves all that it may draw")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    keep_freed_memory()
    folder, dtype = resolve(arguments.model), getattr(torch, arguments.dtype)
    prompts = gsm8k_prompts(arguments.gsm8k, load_tokenizer(folder), arguments.requests)
    probe = EngineCore(folder, EmbeddedEngineConfig(kv_cache_gib=2.0), dtype, "cpu", WeightVersion(0))
    tokens = arguments.cache_of * (arguments.most + 128)
    config = EmbeddedEngineConfig(kv_cache_gib=2.0 * tokens / probe.statistics()["kv_budget_tokens"])
    del probe
    engines = []
    for name, deterministic in (("whole rows", True), ("rows that grow", False)):
        make = partial(EngineCore, folder, config, dtype, "cpu", WeightVersion(0), deterministic)
        engines.append(Engine(name, make, make(), arguments.most))
    draw = random.Random(0)
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for kind, samples in (("first requests", 1), ("distinct prompts", 1), ("groups of 8", 8)):
        if arguments.only not in (None, kind):
            continue
        for repeat in range(arguments.repeats + 1):
            lengths = [min(arguments.most, int(draw.lognormvariate(4.16, 0.7)) + 1) for _ in range(arguments.requests)]
            for engine in engines:
                if kind == "first requests":
                    engine.core = engine.make()
                result = engine.generate(prompts, samples, lengths)
                if repeat:  # the first warms up, and teaches what is usual
                    found.setdefault(kind, {}).setdefault(engine.name, []).append(result)
    table = {
        kind: {
            name: {key: statistics.median(one[key] for one in results) for key in results[0]}
            for name, results in by_engine.items()
        }
        for kind, by_engine in found.items()
    }
    for kind, by_engine in table.items():
        for name, result in by_engine.items():
            words = "   ".join(f"{key} {value:.1f}" for key, value in result.items())
            print(f"{kind:>16} {name:>14}   {words}")
        whole, grown = (by_engine[engine.name]["tokens_per_s"] for engine in engines)
        print(f"{kind:>16}          ratio   {grown / whole:.2f}x", flush=True)
    print(json.dumps(table))


if __name__ == "__main__":
    main()
