"""How long training waits for a save: the whole of it, or the copy that a thread then writes while training goes on.

    python benchmarks/saving.py                    # a tiny model, and a random one of 135M parameters
    python benchmarks/saving.py --sizes tiny       # some of them
    python benchmarks/saving.py --model FOLDER     # a model of yours

Each model gets moments of AdamW and is saved a few times in each way, in turn, on one disk; one save before them is left out
(its copy takes memory for the first time). Both write the same files: a Hugging Face folder and the state, hashed, flushed,
renamed. `during` is what the same work (matrix products) takes while a save is being written, against without one. Prints a
table, and one JSON object as the last line; the copies are as large as ``state``.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tandem.api.engines import TrainEngine
from tandem.config.experiment import SFTConfig
from tandem.config.load import load_config
from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.train.build import build_train_engine
from tandem.models.allocator import keep_freed_memory
from tandem.models.catalog import resolve
from tandem.state.run_folder import RunFolder
from tandem.trainers.recovery import Progress, Recovery
from tandem.trainers.saving import Saving

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
    """What a run has after its first step, without one: zeros for both moments of every master."""
    state = engine.state_dict()
    moments = {
        name: {"step": torch.tensor(1.0), "exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
        for name, master in state["masters"].items()
    }
    masters = {name: master.clone() for name, master in state["masters"].items()}
    engine.load_state_dict({"masters": masters, "optimizer": state["optimizer"] | {"step": 1, "moments": moments}})


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


def measure(model: Path, root: Path, saves: int, dtype: str) -> dict[str, float]:
    """Seconds that training waits for each kind of save, and GiB of a checkpoint; medians over ``saves``."""
    engine = build_train_engine(TrainEngineConfig(path=str(model), dtype=dtype), total_steps=1000)
    give_moments(engine)
    alone = statistics.median(work() for _ in range(20))
    waits: dict[bool, list[float]] = {False: [], True: []}
    during: list[float] = []
    background: list[float] = []
    with RunFolder.open(root, "benchmark", model.name, config_text="") as run:
        progress = Progress()
        recovery = Recovery(run, {"progress": progress, "trainer": engine}, progress)
        made = {}
        for beside in (False, True):
            items = ["train_dataset.path=addition", "checkpoint.every_steps=1", "checkpoint.keep_last=1"]
            config = load_config(SFTConfig, None, [*items, f"checkpoint.asynchronous={str(beside).lower()}"]).config
            late = lambda states: engine.late_writer(states["trainer"])  # noqa: E731
            made[beside] = Saving(config, run, 10**6, engine, lambda folder: None, recovery, late)
        for number in range(saves + 1):
            for beside, saving in made.items():
                if not number and not beside:
                    continue  # it has nothing to warm up
                progress.step += 1
                began = time.perf_counter()
                saving.after_step(progress.step, {})
                waited = time.perf_counter() - began
                pieces = list(worked(saving))
                path = saving.finish()
                if number:
                    waits[beside].append(waited)
                    during += pieces
                    background += [saving.metrics().get("time/save_background_s", 0.0)] if beside else []
                else:
                    saving.metrics()
        assert path is not None
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        state = made[True]._snapshots.num_bytes
    synchronous, asynchronous = (statistics.median(waits[beside]) for beside in (False, True))
    return {
        "synchronous_s": synchronous,
        "asynchronous_s": asynchronous,
        "ratio": asynchronous / synchronous,
        "background_s": statistics.median(background),
        "during": statistics.median(during) / alone if during else 1.0,
        "checkpoint_gib": size / 2**30,
        "state_gib": state / 2**30,
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--model", help="a model of yours, instead of random ones")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
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
            row = rows[name] = measure(folder, Path(scratch) / "runs", arguments.saves, arguments.dtype)
            print(
                f"{name:>8}{row['synchronous_s']:>10.3f} s{row['asynchronous_s']:>10.3f} s{row['ratio']:>8.3f}"
                f"{row['background_s']:>10.3f} s{row['during']:>7.2f}x{row['checkpoint_gib']:>8.2f} GiB"
                f"{row['state_gib']:>6.2f} GiB",
                flush=True,
            )
    print(json.dumps({"dtype": arguments.dtype, "threads": arguments.threads, "models": rows}))


if __name__ == "__main__":
    main()
