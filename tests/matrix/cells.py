"""The matrix of algorithms: which combinations there are, which of them are tried, and what trying one means."""

import itertools
import math
from pathlib import Path
from typing import Any, NamedTuple

from tandem.config.algorithm import PRESETS
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.flow.conductor import Conductor
from tandem.flow.opening import open_rows, open_session
from tandem.flow.plan import RunPlan
from tandem.flow.process import Process
from tandem.flow.stages import Stage
from tandem.planning.job import Lengths, job_of
from tandem.trainers.loop import step
from tests.matrix.pairing import pairwise
from tests.trainers.planning import HAND, round_machine

HERE = Path(__file__).parent
RAN = "runs"


class Cell(NamedTuple):
    """One combination."""

    preset: str
    mode: str
    placement: str
    extra: str
    ranks: int

    def __str__(self) -> str:
        return " ".join(map(str, self))


FACTORS = {
    "preset": tuple(PRESETS),
    "mode": ("synchronous", "asynchronous", "replay"),
    "placement": ("colocate", "decoupled"),
    "extra": ("none", "reference", "critic"),
    "ranks": (1, 2),
}
IMPOSSIBLE = [Cell("grpo", "asynchronous", "colocate", "none", 1)]
"""Pairs that contradict each other, once each: the other cells avoid them, so that no pair is hidden behind a refusal."""


def possible(cell: Cell) -> bool:
    return not (cell.mode == "asynchronous" and cell.placement == "colocate")


def cover() -> list[Cell]:
    """Cells in which every pair of values occurs that can."""
    candidates = filter(possible, itertools.starmap(Cell, itertools.product(*FACTORS.values())))
    chosen = [*IMPOSSIBLE, *pairwise(candidates)]
    return sorted(chosen, key=lambda cell: (FACTORS["preset"].index(cell.preset), cell[1:]))


MODES = {"synchronous": [], "asynchronous": ["async_training=true"], "replay": ["rollout.replay.groups=2"]}


def overrides(cell: Cell, model: Path) -> list[str]:
    """The configuration of a cell: two steps of a tiny model."""
    preset = PRESETS[cell.preset]
    items = [
        f"algorithm={cell.preset}",
        *MODES[cell.mode],
        f"placement={cell.placement}",
        f"actor.backend=fsdp:d{cell.ranks}",
        f"actor.path={model}",
        "actor.dtype=float32",
        "actor.optimizer.lr=0.01",
        "rollout.dtype=float32",
        "rollout.batch_size=3",
        "rollout.wait_timeout_s=60",
        "rollout.engine.kv_cache_gib=0.02",
        "rollout.engine.max_running=32",
        "gconfig.n_samples=4",
        "gconfig.max_new_tokens=6",
        "train_dataset.path=addition",
        "train_dataset.size=40",
        "total_train_steps=2",
        "tracking.plot_every_steps=null",
        "threads=1",
    ]
    if "labels" in preset.values:
        items += ["gconfig.max_new_tokens=16", "gconfig.n_samples=6", "algorithm.update_samples=3"]
    else:
        items.append(f"reward={HERE / 'rewards.py'}:parts")
    if cell.extra == "critic":
        items.append("algorithm.advantage=gae")
    elif cell.preset == "ppo":
        items.append("algorithm.advantage=grpo")
    if cell.extra == "reference":
        items.append("algorithm.kl.coefficient=0.01")
    elif "kl" in preset.values:
        items += ["algorithm.kl.coefficient=0"]
    return items


def stages_called(conductor: Conductor) -> list[Stage]:
    """A list that grows by each stage that the conductor is asked for."""
    called, call = [], conductor.call

    def listed(stage: Stage, *arguments: Any) -> Any:
        called.append(stage)
        return call(stage, *arguments)

    conductor.call = listed  # type: ignore[method-assign]
    return called


def step_of(plan: RunPlan) -> list[Stage]:
    """The stages that a step calls itself."""
    return [stage for stage in plan.stages if stage.kind not in ("score", "keep")]


def try_cell(cell: Cell, model: Path, process: Process) -> str:
    """`RAN`, or why it is refused. Anything but a refusal raises; so does a step that is not finite or learns nothing."""
    keys = {item.partition("=")[0]: item for item in overrides(cell, model)}
    try:
        config = load_config(TrainConfig, None, list(keys.values())).config
        rows = open_rows(config)
        with open_session(config, process, rows, 2, "matrix") as session:
            called = stages_called(session.conductor)
            found = [step(session)[0] for _ in range(2)]
    except ConfigError as refusal:
        return " ".join(str(refusal).split())
    passes = [(stage.name, stage.awake[0]) for stage in called if stage.kind in ("score", "pass") and stage.awake]
    assert called == step_of(session.plan) * 2, (cell, called)
    assert passes == [*job_of(config, round_machine(), Lengths(8, 4), lambda _: HAND).passes] * 2, (cell, passes)
    for metrics in found:
        assert math.isfinite(metrics["loss"]), (cell, metrics)
        assert math.isfinite(metrics["grad_norm"]), (cell, metrics)
    assert max(metrics["grad_norm"] for metrics in found) > 0, (cell, found)
    wanted = {"reference": {"kl/reference"}, "critic": {"value/loss", "value/grad_norm"}, "none": set()}[cell.extra]
    if cell.mode != "synchronous" and config.algorithm.correction.weight != "none":
        wanted |= {"correction/mean", "correction/ess"}
    assert wanted <= set(found[-1]), (cell, wanted - set(found[-1]))  # what was chosen took part
    if process.is_main:
        assert found[-1]["episodes/trained"] == 6, (cell, found)
        assert cell.mode != "replay" or found[-1]["replay/reused"] == 2, (cell, found)
    return RAN


def table(results: dict[Cell, str]) -> str:
    """Markdown: a line a cell, refusals with their reason."""
    lines = ["| algorithm | training | placement | beside the actor | ranks | |", "|---|---|---|---|---|---|"]
    for cell, result in results.items():
        shown = result if result == RAN else "refused: " + result.replace("|", "\\|")
        lines.append(f"| `{cell.preset}` | {cell.mode} | {cell.placement} | {cell.extra} | {cell.ranks} | {shown} |")
    return "\n".join(lines)
