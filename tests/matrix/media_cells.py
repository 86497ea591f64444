"""The matrix of media: what learns × which family of models that see or hear. Each cell is a whole run of a step, by the
function behind the command, on rows with several pictures or sounds, the same one twice, and none."""

import contextlib
import io
import json
import math
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tandem.cli.main import main
from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig, SFTConfig, TrainConfig
from tandem.config.load import load_config
from tandem.config.preference import DistillConfig, PreferenceConfig, RewardModelConfig
from tandem.flow.process import Process
from tandem.models.load import tensors_of
from tandem.models.tokenizer import load_tokenizer
from tandem.trainers import distill, loop, recipes
from tests.scalar_judge import save_judge
from tests.tiny_media import FAMILIES, tiny_media_model

HERE = Path(__file__).parent
RAN = "runs"
LEARNS: dict[str, tuple[type[BaseConfig], Any, str, list[str]]] = {
    "`train`: GRPO": (TrainConfig, loop, "prompts", ["algorithm=grpo"]),
    "… asynchronous": (TrainConfig, loop, "prompts", ["algorithm=grpo", "async_training=true"]),
    "… tower frozen": (TrainConfig, loop, "prompts", ["algorithm=grpo", "actor.freeze=[TOWER]"]),
    "… adapters, also in the tower": (
        TrainConfig,
        loop,
        "prompts",
        ["algorithm=grpo", "actor.lora.rank=4", "actor.lora.towers=[TOWER]"],
    ),
    "… a reward model that sees or hears": (TrainConfig, loop, "prompts", ["algorithm=grpo", "reward=model(path=JUDGE)"]),
    "PPO, a critic of its own": (TrainConfig, loop, "prompts", ["algorithm=ppo"]),
    "PPO, the critic on the actor": (TrainConfig, loop, "prompts", ["algorithm=ppo", "critic.shared=true"]),
    "`sft`": (SFTConfig, recipes, "replies", []),
    "`preference`: DPO": (PreferenceConfig, recipes, "pairs", []),
    "`reward`": (RewardModelConfig, recipes, "pairs", []),
    "`distill`": (DistillConfig, distill, "prompts", ["teacher.path=TEACHER"]),
    "`eval`": (TrainConfig, None, "prompts", []),
}
"""Command → its configuration, trainer, rows and settings."""


class Cell(NamedTuple):
    """One combination."""

    learns: str
    family: str

    @property
    def ranks(self) -> int:
        return 1


def cover() -> list[Cell]:
    """All of them, in the order of the page."""
    return [Cell(learns, family) for learns in LEARNS for family in FAMILIES]


def medium(kind: str, seed: int) -> dict[str, Any]:
    """A content part with a random picture, or half a second of noise."""
    random = np.random.default_rng(seed)
    if kind == "audio":
        return {"type": "audio", "audio": {"array": random.normal(0, 0.2, 8000), "sampling_rate": 16_000}}
    return {"type": "image", "image": random.integers(0, 256, (16, 20 + 4 * (seed % 3), 3), dtype=np.uint8)}


def rows(kind: str) -> list[dict[str, Any]]:
    """``kind``: ``image-replies``, ``audio-pairs`` …"""
    kind, _, form = kind.partition("-")
    made = []
    for seed in range(3):
        one, two = medium(kind, seed), medium(kind, 10 + seed)
        for parts in ([one], [one, two], [], [two, two]):
            asked = [{"role": "user", "content": [*parts, {"type": "text", "text": "which?"}]}]
            right, wrong = ([{"role": "assistant", "content": said}] for said in (f"it is {seed}", "no"))
            made.append(
                {
                    "prompts": {"messages": asked, "answer": "a"},
                    "replies": {"messages": asked + right},
                    "pairs": {"prompt": asked, "chosen": right, "rejected": wrong},
                }[form]
            )
    return made


FILE = """
def rows(split="train"):
    from tests.matrix.media_cells import rows
    return rows("KIND-FORM")

def length(completion):
    return float(len(completion) % 3)
"""
"""A user's file: rows and a reward, which is called in a process of its own and so must import little."""


def overrides(cell: Cell, model: Path, runs: Path) -> list[str]:
    """The configuration of a cell."""
    _, _, form, own = LEARNS[cell.learns]
    kind = "audio" if "audio" in cell.family else "image"
    file = runs / f"{kind}_{form}.py"
    file.write_text(FILE.replace("KIND", kind).replace("FORM", form))
    items = [f"run.root={runs}", "trial_name=cell", f"actor.path={model}", "actor.dtype=float32", "actor.optimizer.lr=0.01"]
    items += [
        f"train_dataset.path={file}:rows",
        f"total_train_steps={1 + ('reward`' in cell.learns)}",  # its head is 0, and teaches nothing at first
        "tracking.plot_every_steps=null",
    ]
    items += ["evaluate.every_steps=null", "checkpoint.resumable=false", "threads=1"]
    if form == "prompts":
        items += [f"reward={file}:length", "rollout.dtype=float32", "rollout.batch_size=4"]
        items += ["rollout.engine.kv_cache_gib=0.02", "gconfig.n_samples=4", "gconfig.max_new_tokens=6"]
    else:
        items += ["batch_size=4"]
    if "distill" in cell.learns:
        items = [item for item in items if not item.startswith("reward=")]
    if "JUDGE" in "".join(own):
        save_judge(runs / "judge", model, model)
    teacher = str(tiny_media_model(runs, cell.family, seed=1)) if "distill" in cell.learns else ""
    swapped = {"TOWER": "audio" if kind == "audio" else "vision", "JUDGE": str(runs / "judge"), "TEACHER": teacher}
    for word, value in swapped.items():
        own = [item.replace(word, value) for item in own]
    return list({item.partition("=")[0]: item for item in [*items, *own]}.values())


def evaluated(items: list[str], model: Path, out: Path) -> str:
    """`tandem eval`."""
    (data,), (judge,) = ([item.partition("=")[2] for item in items if item.startswith(key)] for key in ("train_d", "reward"))
    settings = [f"reward={judge}", f"out={out}/evaluations", "label=cell", "dtype=float32", "gconfig.max_new_tokens=4"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = main(["eval", str(model), "--data", data, "--json", *settings])
    assert code == 0, said.getvalue()
    assert json.loads(said.getvalue()), said.getvalue()
    return RAN


def try_cell(cell: Cell, out: Path, process: Process) -> str:
    """`RAN`, or why it is refused. Anything but a refusal raises; so does a run that learns nothing."""
    kind, trainer, _, _ = LEARNS[cell.learns]
    with tempfile.TemporaryDirectory(dir=out.parent) as own, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_MEDIA", f"{own}/media")
        model = tiny_media_model(Path(own), cell.family)
        try:
            items = overrides(cell, model, Path(own))
            if trainer is None:
                return evaluated(items, model, Path(own))
            summary = trainer.train(load_config(kind, None, items))
        except ConfigError as refusal:
            return " ".join(str(refusal).replace(own, "…").split())
        steps = [json.loads(line) for line in (summary.folder / "metrics.jsonl").read_text().splitlines()]
        assert steps, cell
        assert all(math.isfinite(step[name]) for step in steps for name in ("loss", "grad_norm")), (cell, steps)
        assert max(step["grad_norm"] for step in steps) > 0, (cell, steps)
        assert all(step.get("gap/max", 0) < 1e-3 for step in steps[:1]), (cell, "the engine and the trainer see the same")
        load_tokenizer(summary.checkpoint)  # with the processor that the model needs
        begun, found = (
            {name: stored[:] for name, stored in tensors_of(folder).items()} for folder in (model, summary.checkpoint)
        )
        moved = {name for name in begun.keys() & found.keys() if not torch.equal(begun[name], found[name])}
        sees = ("vision_model", "vision_tower.encoder", "visual.blocks", "audio_tower.layers")
        towers = {name for name in moved if any(part in name for part in sees)}
        assert moved and bool(towers) == ("frozen" not in cell.learns), (cell, moved)
    return RAN


def table(results: dict[Cell, str]) -> str:
    """Markdown: a line for each that learns, and below each refusal with its reason. A dash: not tried."""
    families = list(dict.fromkeys(cell.family for cell in results))
    lines = [f"| | {' | '.join(f'`{family}`' for family in families)} |", "|---" * (len(families) + 1) + "|"]
    for learns in dict.fromkeys(cell.learns for cell in results):
        told = (results.get(Cell(learns, family)) for family in families)
        own = ("–" if result is None else "runs" if result == RAN else "refused" for result in told)
        lines.append(f"| {learns} | {' | '.join(own)} |")
    refused = [f"| {cell.learns} | `{cell.family}` | {why} |" for cell, why in results.items() if why != RAN]
    return "\n".join([*lines, *(["", "| refused | with | because |", "|---|---|---|", *refused] if refused else [])])
