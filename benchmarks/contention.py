"""Tokens a second of the engine and of the trainer, alone and beside busy processes, with long and with short waiting.

    python benchmarks/contention.py [--model smollm2-135m] [--competitors 2] [--spins 300000 10000]

Each number of `--spins` (`GOMP_SPINCOUNT`: how often a thread looks whether the others are done before it sleeps; 300000 is
OpenMP's own) is measured in a process of its own, for it is read once; `passive` stands for `OMP_WAIT_POLICY=passive`. In
that process engine and trainer take turns, and so do rounds alone and beside the competitors, which this script starts, and
which end by themselves should it be killed. What counts are ratios; run it while the machine does nothing else. Prints a
table, and one JSON object as the last line.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from tensordict import TensorDict

from tandem.api.requests import LLMRequest, NoiseKey
from tandem.api.weights import WeightVersion
from tandem.config.libraries import WAITING
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig
from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.inference.core import EngineCore
from tandem.engines.train.engine import SpreadEngine
from tandem.models.allocator import keep_freed_memory
from tandem.models.catalog import resolve
from tandem.models.hardware import resolve_dtype

BUSY = "import sys, time\nend = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < end: pass"
LONGEST_ROUND_S = 180.0
VOCABULARY = 256
"""Random tokens are below it."""

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 40, 24


@contextmanager
def competitors(count: int) -> Iterator[None]:
    """So many processes that compute for as long as the block lasts."""
    with ExitStack() as stack:
        for _ in range(count):
            command = [sys.executable, "-c", BUSY, str(LONGEST_ROUND_S)]
            stack.callback(stack.enter_context(subprocess.Popen(command)).kill)
        yield


def engine_round(core: EngineCore, draw: random.Random) -> int:
    """Generates; tokens made."""
    gconfig = GenerationConfig(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
    for group in range(PROMPTS):
        prompt = tuple(draw.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS))
        for sample in range(SAMPLES):
            core.add(draw.getrandbits(60), LLMRequest(prompt, gconfig, NoiseKey(draw.getrandbits(30), 0, group, sample)))
    made = 0
    while core.has_work:
        made += sum(len(response.output_ids) for _, response in core.step())
    return made


def training_batch(draw: random.Random) -> TensorDict:
    """Groups whose samples share a prompt, the samples of different lengths."""
    ids, mask, bounds = [], [], [0]
    for _ in range(PROMPTS):
        prompt = [draw.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]
        for _ in range(SAMPLES):
            own = [draw.randrange(VOCABULARY) for _ in range(draw.randrange(4, NEW_TOKENS))]
            ids += prompt + own
            mask += [False] * len(prompt) + [True] * len(own)
            bounds.append(len(ids))
    trained = torch.tensor(mask)
    columns = {"input_ids": torch.tensor(ids), "cu_seqlens": torch.tensor(bounds), "loss_mask": trained}
    return TensorDict({**columns, "loss_weights": trained / trained.sum()}, batch_size=[])


def make_rounds(model: str, dtype: str) -> dict[str, Callable[[], int]]:
    """A round of each; it returns its tokens."""
    folder, draw = resolve(model), random.Random(0)
    settings = EmbeddedEngineConfig(kv_cache_gib=0.25)
    core = EngineCore(folder, settings, resolve_dtype(dtype, "cpu"), torch.device("cpu"), WeightVersion(0))
    trainer = SpreadEngine(TrainEngineConfig(path=str(folder), dtype=dtype), total_steps=10_000, device="cpu")

    def train() -> int:
        batch = training_batch(draw)
        trainer.train_batch(batch, lambda outputs, view: (-outputs.logprobs, {}))
        return len(batch["input_ids"])

    return {"engine": lambda: engine_round(core, draw), "trainer": train}


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """In the process of one setting: tokens/s of engine and trainer, alone and contended, medians of the rounds."""
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    rounds = make_rounds(arguments.model, arguments.dtype)
    rates: dict[str, dict[str, list[float]]] = {name: {"alone": [], "contended": []} for name in rounds}
    for one in rounds.values():
        one()  # warm up
    for _ in range(arguments.repeats):
        for name, one in rounds.items():
            for state, count in (("alone", 0), ("contended", arguments.competitors)):
                with competitors(count):
                    began = time.perf_counter()
                    tokens = one()
                    rates[name][state].append(tokens / (time.perf_counter() - began))
    return {name: {state: statistics.median(values) for state, values in both.items()} for name, both in rates.items()}


def in_process_of_its_own(spins: str) -> dict[str, dict[str, float]]:
    """`measure` where threads wait like this."""
    chosen = {"OMP_WAIT_POLICY": "passive"} if spins == "passive" else {"GOMP_SPINCOUNT": spins}
    inherited = {name: value for name, value in os.environ.items() if name not in (*WAITING, "OMP_WAIT_POLICY")}
    command = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--measure"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**inherited, **chosen})
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measures every setting, and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--competitors", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--spins", nargs="+", default=["300000", WAITING["GOMP_SPINCOUNT"].value], help="or passive")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments)))
        return
    found = {spins: in_process_of_its_own(spins) for spins in arguments.spins}
    first = found[arguments.spins[0]]
    for spins, rates in found.items():
        for name, both in rates.items():
            alone, contended = both["alone"], both["contended"]
            print(
                f"{spins:>8} {name:8} alone {alone:7.1f} tok/s, {alone / first[name]['alone']:.2f} of the first setting's; "
                f"beside {arguments.competitors} busy processes {contended:7.1f} tok/s, {contended / alone:.0%} of alone"
            )
    print(json.dumps({"benchmark": "contention", "competitors": arguments.competitors, "tokens_per_s": found}))


if __name__ == "__main__":
    main()
