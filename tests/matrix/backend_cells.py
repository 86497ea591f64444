"""The matrix of backends: how a model is spread × what it learns × one option more. Each cell is a whole run of two steps,
by the function behind the command: folder, metrics, checkpoint and all."""

import itertools
import json
import math
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig, SFTConfig, TrainConfig
from tandem.config.load import load_config
from tandem.config.preference import PreferenceConfig, RewardModelConfig
from tandem.config.train_engine import parse_layout
from tandem.flow.process import Process
from tandem.models.packed import PackedModel
from tandem.state.checkpoint import verify
from tandem.trainers import loop, recipes
from tandem.trainers.loop import Summary
from tests.matrix.pairing import pairwise

HERE = Path(__file__).parent
RAN = "runs"


class Cell(NamedTuple):
    """One combination."""

    preset: str
    backend: str
    option: str

    def __str__(self) -> str:
        return " ".join(self)

    @property
    def ranks(self) -> int:
        return parse_layout(self.backend).ranks


ROWS: dict[str, tuple[type[BaseConfig], Any, str]] = {
    "dpo": (PreferenceConfig, recipes, "addition_pairs"),
    "sft": (SFTConfig, recipes, "addition"),
    "reward": (RewardModelConfig, recipes, "addition_pairs"),
}
"""What learns from rows: configuration, trainer and data."""

OPTIONS = {
    "none": [],
    "lora": ["actor.lora.rank=4"],
    "checkpointing": ["actor.gradient_checkpointing=true"],
    "selective": ["actor.gradient_checkpointing=true", "actor.selective_checkpointing=true"],
    "compile": ["actor.compile=true"],
    "offload": ["actor.offload=true"],
    "asynchronous": ["async_training=true"],
    "saves": ["checkpoint.every_steps=1", "checkpoint.resumable=true"],
}
ZERO = tuple(f"deepspeed:zero{stage}:d{ranks}" for ranks in (1, 2) for stage in (1, 2, 3))
FACTORS = {
    "preset": ("grpo", "ppo", "dr_grpo", "gspo", "cispo", *ROWS),
    "backend": ("fsdp:d1", "fsdp:d2", "fsdp:d1t2", "fsdp:d1c2", *ZERO),
    "option": tuple(OPTIONS),
}
HAS_ZERO = find_spec("deepspeed") is not None


def possible(cell: Cell) -> bool:
    """False where two choices contradict each other: other cells avoid them, so that no pair is hidden behind a refusal."""
    layout = parse_layout(cell.backend)
    if cell.option == "lora":
        return layout.zero is None and layout.tensor == 1
    if cell.option in ("selective", "compile"):
        return layout.zero != 3
    return cell.option != "offload" and not (cell.option == "asynchronous" and cell.preset in ROWS)


def impossible() -> list[Cell]:
    """Each two choices that contradict each other, once."""
    spread = (Cell("sft", *rest) for rest in itertools.product(FACTORS["backend"], OPTIONS) if rest[1] != "asynchronous")
    return [cell for cell in (*spread, *(Cell(preset, "fsdp:d1", "asynchronous") for preset in ROWS)) if not possible(cell)]


def cover() -> list[Cell]:
    """Cells in which every pair of values occurs; in the order of the page."""
    candidates = filter(possible, itertools.starmap(Cell, itertools.product(*FACTORS.values())))
    places = {value: place for values in FACTORS.values() for place, value in enumerate(values)}
    return sorted([*impossible(), *pairwise(candidates)], key=lambda cell: [places[cell[i]] for i in (1, 2, 0)])


def overrides(cell: Cell, model: Path) -> list[str]:
    """The configuration of a cell: two steps of a tiny model. Runs lie beside it."""
    items = [
        f"run.root={model.parent / 'runs'}",
        f"trial_name={cell.preset}.{cell.backend.replace(':', '.')}.{cell.option}",
        f"actor.path={model}",
        f"actor.backend={cell.backend}",
        "actor.dtype=float32",
        "actor.optimizer.lr=0.01",
        "train_dataset.size=40",
        "total_train_steps=2",
        "tracking.plot_every_steps=null",
        "evaluate.every_steps=null",
        "checkpoint.resumable=false",
        "threads=1",
    ]
    if cell.preset in ROWS:
        items += [f"train_dataset.path={ROWS[cell.preset][2]}", "batch_size=4"]
    else:
        items += [
            f"algorithm={cell.preset}",
            f"reward={HERE / 'rewards.py'}:parts",
            "rollout.dtype=float32",
            "rollout.batch_size=3",
            "rollout.wait_timeout_s=300",
            "rollout.engine.kv_cache_gib=0.02",
            "rollout.engine.max_running=32",
            "gconfig.n_samples=4",
            "gconfig.max_new_tokens=6",
            "train_dataset.path=addition",
        ]
    return list({item.partition("=")[0]: item for item in [*items, *OPTIONS[cell.option]]}.values())


def try_cell(cell: Cell, model: Path, process: Process) -> str:
    """`RAN`, or why it is refused. Anything but a refusal raises; so does a run that learns nothing."""
    kind, trainer, _ = ROWS.get(cell.preset, (TrainConfig, loop, ""))
    if cell.option == "compile":
        torch._dynamo.reset()  # or programs of the cells before it would do
        torch._dynamo.utils.counters.clear()
    with pytest.MonkeyPatch.context() as patch:
        recomputes = watched(patch, PackedModel, "enable_gradient_checkpointing")
        try:
            summary = trainer.train(load_config(kind, None, overrides(cell, model)))
        except ConfigError as refusal:
            return " ".join(str(refusal).split())
    wanted = {"checkpointing": {"all"}, "selective": {"selective"}}.get(cell.option, set())
    assert set(recomputes) == wanted, (cell, recomputes)
    if cell.option == "compile":
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, cell
    if process.is_main:
        assert_learnt(cell, summary, model)
    return RAN


def watched(patch: pytest.MonkeyPatch, holder: Any, name: str) -> Counter[str]:
    """Counts calls from now on: ``all``, or ``selective`` where the argument says so."""
    counts, function = Counter(), getattr(holder, name)

    def counted(self: Any, selective: bool = False) -> None:
        counts["selective" if selective else "all"] += 1
        function(self, selective)

    patch.setattr(holder, name, counted)
    return counts


def assert_learnt(cell: Cell, summary: Summary, model: Path) -> None:
    """Two steps with finite figures, weights that moved, and what the option promises."""
    assert summary.folder is not None and summary.checkpoint is not None and summary.steps == 2
    rows = [json.loads(line) for line in (summary.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2], cell
    assert all(math.isfinite(row[name]) for row in rows for name in ("loss", "grad_norm")), (cell, rows)
    assert max(row["grad_norm"] for row in rows) > 0, (cell, rows)
    begun = load_file(model / "model.safetensors")
    folders = [summary.checkpoint, *([summary.checkpoint / "critic"] if cell.preset == "ppo" else [])]
    for folder in folders:
        found = load_file(folder / "model.safetensors")
        common = begun.keys() & found.keys()
        assert len(common) >= len(begun) - 1  # a classifier has another head
        assert all(bool(found[name].isfinite().all()) for name in found), cell
        assert any(not torch.equal(begun[name], found[name]) for name in common), (cell, folder.name)
    assert (summary.checkpoint / "adapter/adapter_model.safetensors").exists() == (cell.option == "lora"), cell
    if cell.option == "saves":
        checkpoints = [summary.checkpoint.with_name(f"step_{step}") for step in (1, 2)]
        assert [verify(path).step for path in checkpoints] == [1, 2], cell
        said = (summary.folder / "log.txt").read_text()
        assert "training waits for each save" not in said, (cell, said)


def row(backend: str, results: dict[Cell, str]) -> str:
    """A line of Markdown: which presets were tried with each option."""
    fields = []
    for option in OPTIONS:
        own = {cell.preset: result for cell, result in results.items() if cell[1:] == (backend, option)}
        ran = [f"`{preset}`" for preset, result in own.items() if result == RAN]
        fields.append(", ".join(ran) or "refused")
    return f"| `{backend}` | {' | '.join(fields)} |"


def refusals(backend: str, results: dict[Cell, str]) -> list[str]:
    """Lines of Markdown: why a cell of this backend is refused."""
    found = {cell: result for cell, result in results.items() if cell.backend == backend and result != RAN}
    return [
        f"| `{cell.backend}` | {cell.option} | `{cell.preset}` | {result.replace('|', chr(92) + '|')} |"
        for cell, result in found.items()
    ]


def table(results: dict[Cell, str]) -> str:
    """Markdown: a line a backend, and below each refusal with its reason."""
    backends = list(dict.fromkeys(cell.backend for cell in results))
    lines = [f"| | {' | '.join(OPTIONS)} |", "|---" * (len(OPTIONS) + 1) + "|"]
    lines += [row(backend, results) for backend in backends]
    lines += ["", "| refused | with | tried with | because |", "|---|---|---|---|"]
    return "\n".join([*lines, *itertools.chain.from_iterable(refusals(backend, results) for backend in backends)])
