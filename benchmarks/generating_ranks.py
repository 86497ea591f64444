"""Tokens a second when every rank generates, against engines that know nothing of each other.

    chrt -r 5 python benchmarks/generating_ranks.py           # a random model of 31M parameters, two minutes on two cores
    python benchmarks/generating_ranks.py --model smollm2-135m

Two ranks of one thread each, in the same two processes, in turn:

- `together`: one executor over both ranks, as `actor.backend=fsdp:d2` has it: rank 0 hands out groups and collects them, and
  every rank has the batch.
- `apart`: each rank runs an executor of its own on half of the groups, and nobody sends anything. What there is to reach.
- `first`: rank 0 generates alone, with the threads of both.

Every request makes the same number of tokens. Medians over the rounds; prints a table, and one JSON object as the last line.
"""

import argparse
import json
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from layouts import random_model

from tandem.api.engines import InferenceEngine
from tandem.api.requests import LLMRequest
from tandem.api.team import Team
from tandem.api.workflow import RolloutWorkflow, Sample
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig, RolloutConfig
from tandem.engines.inference.build import build_inference_engine
from tandem.models.catalog import resolve
from tandem.models.load import read_config
from tandem.rollout.executor import Rollout
from tandem.rollout.workflows import Repeated, Tokens

RANKS = 2
GOAL = 0.9
WAYS = ("together", "apart", "first")


class OneRequest(RolloutWorkflow):
    """An answer of a fixed length to the tokens of the row."""

    def __init__(self, new_tokens: int):
        self._gconfig = GenerationConfig(max_new_tokens=new_tokens, min_new_tokens=new_tokens)

    async def arun_episode(self, engine, data) -> Sample:
        tokens = Tokens(data["ids"])
        tokens.add_response(await engine.agenerate(LLMRequest(tuple(tokens.ids), self._gconfig)))
        return Sample((tokens.trajectory(),), reward=0.0)


def make_engine(folder: Path, threads: int) -> InferenceEngine:
    """An embedded engine of so many threads."""
    config = RolloutConfig(dtype="float32", engine=EmbeddedEngineConfig(kv_cache_gib=0.5))
    given = {"folder": folder, "placement": "colocate", "device": "cpu", "deterministic": False}
    return build_inference_engine(config, threads=threads, **given)


def measure(rank: int, arguments: argparse.Namespace, folder: Path, out: Path) -> None:
    """The rounds of one rank. Rank 0 writes the seconds of each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=RANKS)
    generators = Team(dist.new_group(list(range(RANKS)), backend="gloo", timeout=timedelta(seconds=600)))
    own, wide = make_engine(folder, 1), make_engine(folder, RANKS) if rank == 0 else None
    vocabulary = read_config(folder).vocab_size
    ids = torch.randint(3, vocabulary, (arguments.prompts, arguments.prompt_tokens), generator=torch.manual_seed(0))
    rows = [{"ids": row} for row in ids.tolist()]
    everything, half = RolloutConfig(batch_size=len(rows)), RolloutConfig(batch_size=len(rows) // RANKS)
    executors = {
        "together": Rollout(own, everything, generators=generators),
        "apart": Rollout(own, half, team=Team.alone()),
        "first": Rollout(wide, everything),
    }
    workflow = Repeated(OneRequest(arguments.new_tokens), arguments.samples)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(arguments.rounds + 1):
        for way in WAYS if number % 2 else reversed(WAYS):
            dist.barrier()
            began = time.perf_counter()
            executors[way].rollout_batch(rows[rank::RANKS] if way == "apart" else rows, workflow)
            dist.barrier()
            executors[way].end_step()
            if number:  # the first is not counted
                seconds[way].append(time.perf_counter() - began)
    for executor in executors.values():
        executor.close()
    for engine in (own, wide):
        if engine is not None:
            engine.close()
    if rank == 0:
        (out / "seconds.json").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="31m", help="31m or tiny (random), or a model's folder or name")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary)
        random = arguments.model in ("31m", "tiny")
        folder = random_model(arguments.model, out / "model") if random else resolve(arguments.model)
        mp.spawn(measure, (arguments, folder, out), nprocs=RANKS)
        seconds = json.loads((out / "seconds.json").read_text())
    tokens = arguments.prompts * arguments.samples * arguments.new_tokens
    rates = {way: tokens / statistics.median(seconds[way]) for way in WAYS}
    share = statistics.median(a / t for a, t in zip(seconds["apart"], seconds["together"], strict=True))
    print("| | tokens/s | of `apart` |\n|---|---|---|")
    for way in WAYS:
        print(f"| `{way}` | {rates[way]:.0f} | {rates[way] / rates['apart']:.2f} |")
    print(json.dumps({"rates": rates, "together_of_apart": share, "goal": GOAL, "seconds": seconds}))


if __name__ == "__main__":
    main()
