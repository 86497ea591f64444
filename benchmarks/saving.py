"""Measures how long training waits for a save: the whole of it, or the copy that a thread writes while training goes on.

    python benchmarks/saving.py                    # a tiny model, and a random one of 135M parameters
    python benchmarks/saving.py --sizes tiny       # some of them
    python benchmarks/saving.py --model FOLDER     # a model of yours
    python benchmarks/saving.py --ranks 2          # spread over two processes, a thread each
    python benchmarks/saving.py --lora-rank 16     # an adapter, and the model that it is merged into

Each model takes a step of a few tokens and is saved a few times in each way, in turn, on one disk; one save before them is
left out (its copy takes memory for the first time). Both write the same files: a Hugging Face folder and the state, hashed,
flushed, renamed. `during` is what the same work (matrix products) takes while a save is being written, against without one.
Prints a table, and one JSON object as the last line; the copies of a rank are as large as ``state``.
"""

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM, LlamaConfig

from tandem.api.batch import pack
from tandem.api.engines import TrainEngine
from tandem.api.team import Team
from tandem.config.experiment import SFTConfig
from tandem.config.load import load_config
from tandem.config.train_engine import LoRAConfig, TrainEngineConfig
from tandem.engines.train.engine import SpreadEngine
from tandem.lifecycle.recovery import Progress, Recovery
from tandem.lifecycle.saving import Saving
from tandem.models.allocator import keep_freed_memory
from tandem.models.catalog import resolve
from tandem.state.run_folder import RunFolder

SIZES = {  # width, width inside, layers, heads, vocabulary
    "tiny": (32, 64, 2, 4, 304),
    "135m": (576, 1536, 30, 9, 49152),
}
"""SmolLM2-135M's shape, and that of the tests' models."""


def random_model(name: str, folder: Path) -> Path:
    """A random model of that size, as a folder."""
    width, inner, layers, heads, vocabulary = SIZES[name]
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 3),
        vocab_size=vocabulary,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def give_moments(engine: TrainEngine) -> None:
    """The optimizer's state is there after a first step."""
    sequence = {"input_ids": torch.arange(8), "loss_mask": torch.arange(8) > 0}
    batch = pack([sequence] * 2)
    batch["loss_weights"] = batch["loss_mask"] / batch["loss_mask"].sum()
    engine.train_batch(batch, lambda outputs, view: (-outputs.logprobs * view["loss_mask"], {}))


def work() -> float:
    """Seconds of a fixed piece of training's kind of work."""
    matrix = torch.ones(512, 512)
    began = time.perf_counter()
    for _ in range(20):
        matrix @ matrix
    return time.perf_counter() - began


def worked(saving: Saving) -> Iterator[float]:
    """Pieces of work until the save has ended."""
    while saving._background.busy:
        yield work()


def measure(model: Path, root: Path, options: argparse.Namespace) -> dict[str, float]:
    """Seconds that training waits for each kind of save, and GiB of a checkpoint; medians. Collective; on rank 0."""
    lora = LoRAConfig(rank=options.lora_rank)
    settings = TrainEngineConfig(path=str(model), dtype=options.dtype, backend=f"fsdp:d{options.ranks}", lora=lora)
    engine = SpreadEngine(settings, total_steps=1000)
    give_moments(engine)
    found: dict[str, list[float]] = {name: [] for name in ("waited for", "beside", "background", "during")}
    alone = statistics.median(work() for _ in range(20))
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(RunFolder.open(root, "benchmark", model.name, config_text="")) if Team().main else None
        progress = Progress()
        recovery = Recovery(run, {"progress": progress, "trainer": engine}, progress, Team())
        made = {beside: saving_of(engine, run, recovery, beside) for beside in (False, True)}
        for number in range(options.saves + 1):
            for beside, saving in made.items():
                if not number and not beside:
                    continue  # it has nothing to warm up
                progress.step += 1
                began = time.perf_counter()
                saving.save(progress.step, {})
                waited = time.perf_counter() - began
                pieces = list(worked(saving))
                path = saving.finish()
                seconds = saving.metrics()
                if number:
                    found["beside" if beside else "waited for"].append(waited)
                    found["during"] += pieces
                    found["background"] += [seconds.get("time/save_background_s", 0.0)] if beside else []
        if path is None:
            return {}  # another rank than 0
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        state = made[True].snapshots.num_bytes
    median = {name: statistics.median(values) for name, values in found.items() if values}
    return {
        "synchronous_s": median["waited for"],
        "asynchronous_s": median["beside"],
        "ratio": median["beside"] / median["waited for"],
        "background_s": median["background"],
        "during": median.get("during", alone) / alone,
        "checkpoint_gib": size / 2**30,
        "state_gib": state / 2**30,
    }


def saving_of(engine: TrainEngine, run: RunFolder | None, recovery: Recovery, beside: bool) -> Saving:
    """The saver, as a run has it."""
    items = ["train_dataset.path=addition", "checkpoint.every_steps=1", "checkpoint.keep_last=1"]
    config = load_config(SFTConfig, None, [*items, f"checkpoint.asynchronous={str(beside).lower()}"]).config
    late = lambda states: engine.late_writer(states["trainer"])  # noqa: E731
    return Saving(config.checkpoint, run, 10**6, engine.save, lambda folder: None, recovery, late)


def _rank(rank: int, model: Path, root: Path, options: argparse.Namespace, out: Path) -> None:
    torch.set_num_threads(1 if options.ranks > 1 else options.threads)
    keep_freed_memory()
    if options.ranks > 1:
        meeting = f"file://{out}.meeting"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=options.ranks)
    row = measure(model, root, options)
    if rank == 0:
        out.write_text(json.dumps(row))
    if options.ranks > 1:
        dist.destroy_process_group()


def measured(name: str, model: Path, scratch: Path, options: argparse.Namespace) -> dict[str, float]:
    """`measure`, in processes of its own."""
    out = scratch / f"{name}.json"
    mp.spawn(_rank, (model, scratch / "runs", options, out), nprocs=options.ranks)
    found: dict[str, float] = json.loads(out.read_text())
    return found


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--model", help="a model of yours, instead of random ones")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--lora-rank", type=int)
    arguments = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        models = (
            {Path(arguments.model).name: resolve(arguments.model)} if arguments.model else dict.fromkeys(arguments.sizes)
        )
        print(
            f"{'':<8}{'waited for':>12}{'beside':>12}{'ratio':>8}{'writing':>12}{'during':>8}{'checkpoint':>12}{'state':>10}"
        )
        for name, folder in models.items():
            folder = folder or random_model(name, Path(scratch) / name)
            row = rows[name] = measured(name, folder, Path(scratch), arguments)
            print(
                f"{name:>8}{row['synchronous_s']:>10.3f} s{row['asynchronous_s']:>10.3f} s{row['ratio']:>8.3f}"
                f"{row['background_s']:>10.3f} s{row['during']:>7.2f}x{row['checkpoint_gib']:>8.2f} GiB"
                f"{row['state_gib']:>6.2f} GiB",
                flush=True,
            )
    shown = {name: getattr(arguments, name) for name in ("dtype", "threads", "ranks", "lora_rank")}
    print(json.dumps({**shown, "models": rows}))


if __name__ == "__main__":
    main()
