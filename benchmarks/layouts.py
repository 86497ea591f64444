"""Measures the time that spreading a model over two ranks costs, and the memory that it saves.

    python benchmarks/layouts.py                         # a random model of 31M parameters, about six minutes on two cores
    python benchmarks/layouts.py --parts speed memory    # without DeepSpeed
    python benchmarks/layouts.py --model smollm2-135m    # a model of yours

- `speed`: a step on two ranks of one thread each (fsdp:d2) against one process of one thread, at several numbers of tokens a
  step. Efficiency is that of a core: seconds alone / (2 · seconds together). `apart` is what there is to reach: both
  processes at once, half of the tokens each, none of them sending anything; below 1, the cores share memory or batches of
  half the size are slower.
- `memory`: parameters and optimizer of a rank, counted from its tensors after a step, and what the process has grown by.
- `deepspeed`: a step under each of its stages against FSDP2's in the same dtype.

Contenders take turns in the same processes, after a round that is not counted; medians. Prints tables in Markdown, and one
JSON object as the last line.
"""

import argparse
import ctypes
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tensordict import TensorDict
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig

from tandem.api.batch import pack
from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.train.engine import SpreadEngine
from tandem.engines.train.micro_batches import micro_batches
from tandem.models.allocator import keep_freed_memory
from tandem.models.catalog import resolve
from tandem.models.load import read_config

RANKS = 2
SIZES = {  # width, width inside, layers, heads, key-value heads, vocabulary
    "tiny": (32, 64, 2, 4, 2, 304),
    "31m": (512, 1408, 8, 8, 2, 16384),
}
LENGTHS = (48, 512)
"""Shortest and longest sequence."""

PARTS = ("speed", "memory", "deepspeed")
GOALS = {4096: 0.6, 16384: 0.85}
STAGES = {"float32": (1, 2, 3), "bfloat16": (2, 3)}
"""Layouts of DeepSpeed that train in this dtype."""


def random_model(size: str, folder: Path) -> Path:
    """A random model, as a folder."""
    width, inner, layers, heads, kv_heads, vocabulary = SIZES[size]
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def make_batch(num_tokens: int, vocabulary: int) -> TensorDict:
    """Ragged sequences of random tokens, so many in all, the first eighth of each a prompt."""
    generator, rows, left = torch.Generator().manual_seed(0), [], num_tokens
    while left:
        length = int(torch.randint(*LENGTHS, (), generator=generator))
        length = left if left < length + LENGTHS[0] else length
        mask = torch.ones(length, dtype=torch.bool)
        mask[: max(1, length // 8)] = False
        rows.append({"input_ids": torch.randint(0, vocabulary, (length,), generator=generator), "loss_mask": mask})
        left -= length
    batch = pack(rows)
    batch["loss_weights"] = batch["loss_mask"] / batch["loss_mask"].sum()
    return batch


def loss(outputs: Any, view: TensorDict) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Negative log-likelihood."""
    return -outputs.logprobs * view["loss_mask"], {}


def engine_of(options: dict[str, Any], backend: str, dtype: str, alone: dist.ProcessGroup | None = None) -> SpreadEngine:
    """One that is ready for its first step."""
    config = TrainEngineConfig(
        path=options["model"], backend=backend, dtype=dtype, max_tokens_per_micro_batch=options["micro_batch"]
    )
    return SpreadEngine(config, total_steps=1000, process_group=alone)


def timed(work: Callable[[], object] | None) -> float:
    """Seconds until all ranks have done their work; None has none."""
    dist.barrier()
    began = time.perf_counter()
    if work is not None:
        work()
    dist.barrier()
    return time.perf_counter() - began


def in_turn(contenders: dict[str, Callable[[], object] | None], rounds: int) -> dict[str, float]:
    """Median seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, work in contenders.items():
            took = timed(work)
            if number:
                seconds[name].append(took)
    return {name: statistics.median(found) for name, found in seconds.items()}


def speed(options: dict[str, Any]) -> dict[str, Any]:
    """By tokens a step: seconds, efficiency, what there is to reach, and how evenly the tokens were spread."""
    rank, found = dist.get_rank(), {}
    groups = [dist.new_group([each]) for each in range(RANKS)]
    alone = engine_of(options, "fsdp:d1", options["dtype"], groups[rank])
    together = engine_of(options, f"fsdp:d{RANKS}", options["dtype"])
    for tokens in options["tokens"]:
        batch, half = (make_batch(count, options["vocabulary"]) for count in (tokens, tokens // RANKS))
        contenders = {
            "alone": (lambda batch=batch: alone.train_batch(batch, loss)) if rank == 0 else None,
            "together": lambda batch=batch: together.train_batch(batch, loss),
            "apart": lambda half=half: alone.train_batch(half, loss),
        }
        seconds = in_turn(contenders, options["rounds"])
        shares = [micro_batches(batch, options["micro_batch"], each, RANKS) for each in range(RANKS)]
        sizes = batch["cu_seqlens"].diff()
        mine = [sum(int(sizes[i]) for indices in share for i in indices) for share in shares]
        found[str(tokens)] = {
            **{f"{name}_s": value for name, value in seconds.items()},
            "efficiency": seconds["alone"] / (RANKS * seconds["together"]),
            "reachable": seconds["alone"] / (RANKS * seconds["apart"]),
            "micro_batches": len(shares[0]),
            "most_tokens": max(mine) * RANKS / tokens,
        }
    return found


def deepspeed(options: dict[str, Any]) -> dict[str, Any]:
    """By stage: seconds, and how many times FSDP2's, which takes turns with it. Each is told as soon as it is known."""
    batch, found, dtype = make_batch(options["tokens"][0], options["vocabulary"]), {}, options["dtype"]
    fsdp = engine_of(options, f"fsdp:d{RANKS}", dtype)
    for stage in STAGES[dtype]:
        backend = f"deepspeed:zero{stage}:d{RANKS}"
        engine = engine_of(options, backend, dtype)
        contenders = {
            "fsdp": lambda: fsdp.train_batch(batch, loss),
            backend: lambda engine=engine: engine.train_batch(batch, loss),
        }
        seconds = in_turn(contenders, options["rounds"])
        found[backend] = {
            "dtype": dtype,
            "step_s": seconds[backend],
            "fsdp_s": seconds["fsdp"],
            "ratio": seconds[backend] / seconds["fsdp"],
        }
        if dist.get_rank() == 0:
            print(json.dumps({backend: found[backend]}), flush=True)
    return found


def resident() -> int:
    """Bytes of this process's memory, after what is free was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    words = Path("/proc/self/status").read_text().split()
    return int(words[words.index("VmRSS:") + 1]) * 1024


def tensors_of(engine: SpreadEngine) -> Iterator[torch.Tensor]:
    """Parameters, masters and moments, as this rank has them."""
    holder, adamw = engine._holder, engine._optimizer._adamw
    yield from holder.masters.values()
    yield from engine.model.parameters()
    yield from getattr(holder, "_pieces", list)()  # DeepSpeed's flat masters
    for state in adamw.state.values():
        yield from (tensor for tensor in state.values() if isinstance(tensor, torch.Tensor) and tensor.dim())


def counted(engine: SpreadEngine) -> int:
    """Bytes of the memory behind them, each once."""
    sizes = {}
    for tensor in tensors_of(engine):
        local = tensor.to_local() if isinstance(tensor, DTensor) else getattr(tensor, "ds_tensor", tensor)
        storage = local.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def memory(options: dict[str, Any]) -> dict[str, int]:
    """Bytes of this rank: counted, and what the process has grown by."""
    batch, before = make_batch(64 * RANKS, options["vocabulary"]), resident()
    engine = engine_of(options, options["backend"], options["dtype"])
    engine.train_batch(batch, loss)
    return {"counted": counted(engine), "resident": resident() - before}


WORK: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"speed": speed, "memory": memory, "deepspeed": deepspeed}


def _rank(rank: int, ranks: int, part: str, options: dict[str, Any], out: str) -> None:
    torch.set_num_threads(1)
    if part != "memory":
        keep_freed_memory()  # as every run does
    dist.init_process_group("gloo", init_method=f"file://{out}/meeting", rank=rank, world_size=ranks)
    found = WORK[part](options)
    if rank == 0:
        Path(out, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measured(part: str, options: dict[str, Any], ranks: int = RANKS) -> dict[str, Any]:
    """The figures that rank 0 of so many found."""
    with tempfile.TemporaryDirectory() as out:
        mp.spawn(_rank, (ranks, part, options, out), nprocs=ranks)
        found: dict[str, Any] = json.loads(Path(out, "found.json").read_text())
    return found


def memories(options: dict[str, Any], zero: bool) -> dict[str, Any]:
    """By backend: GiB of a rank, and how many times one process's."""
    backends = ["fsdp:d1", f"fsdp:d{RANKS}", *([f"deepspeed:zero3:d{RANKS}"] if zero else [])]
    found = {}
    for backend in backends:
        ranks = 1 if backend.endswith("d1") else RANKS
        found[backend] = measured("memory", options | {"backend": backend}, ranks)
    one = found["fsdp:d1"]
    return {
        backend: {f"{name}_gib": size / 2**30 for name, size in row.items()}
        | {f"{name}_ratio": size / one[name] for name, size in row.items()}
        for backend, row in found.items()
    }


def table(head: list[str], rows: list[list[str]]) -> None:
    """In Markdown."""
    for row in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(row)} |", flush=True)
    print()


def show(part: str, found: dict[str, Any]) -> None:
    """Prints one part."""
    if part == "speed":
        head = ["tokens a step", "one process", "two ranks", "efficiency", "aim", "reachable", "most tokens of a rank"]
        table(
            head,
            [
                [
                    tokens,
                    f"{row['alone_s']:.2f} s",
                    f"{row['together_s']:.2f} s",
                    f"{row['efficiency']:.2f}×",
                    f"≥ {GOALS[int(tokens)]}×" if int(tokens) in GOALS else "",
                    f"{row['reachable']:.2f}×",
                    f"{row['most_tokens']:.3f}× mean",
                ]
                for tokens, row in found.items()
            ],
        )
    elif part == "memory":
        rows = [
            [name, *(f"{row[f'{what}_gib']:.3f} GiB, {row[f'{what}_ratio']:.2f}×" for what in ("counted", "resident"))]
            for name, row in found.items()
        ]
        table(["backend", "parameters and optimizer of a rank (aim ≤ 0.6×)", "the process grew by"], rows)
    else:
        rows = [
            [name, row["dtype"], f"{row['step_s']:.2f} s", f"{row['fsdp_s']:.2f} s", f"{row['ratio']:.2f}×"]
            for name, row in found.items()
        ]
        table(["backend", "dtype", "step", "FSDP2's", "ratio (aim ≤ 1.3×)"], rows)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--size", choices=SIZES, default="31m", help="of the random model")
    parser.add_argument("--model", help="a model of yours, instead of a random one")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384], help="of a step; DeepSpeed gets the first")
    parser.add_argument("--micro-batch", type=int, default=4096, help="tokens of a forward pass")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    arguments = parser.parse_args()
    zero = find_spec("deepspeed") is not None
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = resolve(arguments.model) if arguments.model else random_model(arguments.size, Path(scratch))
        options = {
            "model": str(folder),
            "vocabulary": read_config(folder).vocab_size,
            "tokens": arguments.tokens,
            "micro_batch": arguments.micro_batch,
            "rounds": arguments.rounds,
            "dtype": arguments.dtype,
        }
        for part in arguments.parts:
            if part == "deepspeed" and not zero:
                print("DeepSpeed is not installed: left out\n", flush=True)
                continue
            results[part] = memories(options, zero) if part == "memory" else measured(part, options)
            show(part, results[part])
    name = arguments.model or f"random {arguments.size}"
    print(json.dumps({"model": name, "dtype": arguments.dtype, "micro_batch": arguments.micro_batch, **results}))


if __name__ == "__main__":
    main()
