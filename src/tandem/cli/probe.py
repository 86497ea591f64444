"""The time of a step on this machine: a few steps of the run itself, in a folder that is removed afterwards."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tandem.cli.arguments import split_arguments
from tandem.config.commands import KINDS
from tandem.config.errors import TandemError
from tandem.config.experiment import BaseConfig, TrainConfig
from tandem.config.keys import leaves
from tandem.config.load import load_config

STEPS = 3
"""The first one warms up; the others are measured."""

QUIET = {"checkpoint.every_steps": "null", "checkpoint.at_end": "false", "tracking.sinks": "[]", "recover.max_restarts": "0"}
"""So a probe saves nothing, opens no sink, and is not begun again."""

READ_WITH = {
    "checkpoint.every_steps": (
        *("checkpoint.keep_last", "checkpoint.keep_every", "checkpoint.keep_best"),
        *("checkpoint.on_error", "checkpoint.asynchronous"),
    ),
    "tracking.sinks": ("tracking.project",),
    "evaluate.every_steps": ("checkpoint.keep_best",),
    "rollout.verify.every_steps": ("rollout.verify.trajectories", "rollout.verify.tolerance"),
}
"""Keys that nothing reads where another is off, and which are refused then unless they are as by default."""

PARTS = ("generate", "rows", "score", "train", "update_weights", "switch")
"""The parts of a step, by their names in the metrics: `time/NAME_s`."""


class ProbeFailed(TandemError):
    """The run ended before the steps were done."""


def quiet(config: BaseConfig, besides: Iterable[str] = ()) -> list[str]:
    """Values without the work that only some steps have, or a run as a whole; keys that are given ``besides`` stay."""
    usual = dict(leaves(type(config)()))
    values = QUIET | {key: "null" for key in ("evaluate.every_steps", "rollout.verify.every_steps") if key in usual}
    values = {key: value for key, value in values.items() if key not in besides}
    unread = [key for off in values for key in READ_WITH.get(off, ())]
    votes = isinstance(config, TrainConfig) and config.algorithm.labels == "majority"
    if votes and "evaluate.every_steps" in values:
        unread.append("reward")  # a vote rewards the training samples; the rest was for evaluation
    return [f"{key}={value}" for key, value in (values | {key: _written(usual[key]) for key in unread}).items()]


def _written(value: Any) -> str:
    return "null" if value is None else str(value).lower()


def measure(command: str, arguments: Sequence[str]) -> dict[str, float]:
    """Seconds of a step and of its parts, and the memory of its processes: medians of the steps after the first.

    ``command``: that trains; ``arguments``: its file and keys. Progress goes to stderr.

    Raises:
        ProbeFailed: the run failed; it has said why.
    """
    with tempfile.TemporaryDirectory(prefix="tandem-probe-") as folder:
        given = [*arguments, *quiet(load_config(KINDS[command], *split_arguments(arguments)).config), f"run.root={folder}"]
        program = [sys.executable, "-P", "-m", "tandem", command, *given, "--until", str(STEPS)]
        code = subprocess.run(program, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False).returncode
        files = list(Path(folder).glob("*/*/metrics.jsonl"))
        rows = [json.loads(line) for line in files[0].read_text(encoding="utf-8").splitlines()] if files else []
    rows = [row for row in rows if row["step"] > 1] or rows
    if code or not rows:
        raise ProbeFailed(f"the {STEPS} steps that were to be measured ended with exit status {code}; its words are above")
    names = {f"{name}_s": f"time/{name}_s" for name in ("step", *PARTS)} | {"peak_gib": "memory/peak_gib"}
    return {name: median(row[key] for row in rows) for name, key in names.items() if key in rows[-1]}


def describe(measured: dict[str, float], steps: int | None) -> str:
    """The measurement in lines. ``steps``: of the whole run, if they are known."""
    whole = measured["step_s"]
    lines = [f"Time of a step, measured here: {_seconds(whole)}"]
    parts = {name: measured[f"{name}_s"] for name in PARTS if measured.get(f"{name}_s", 0.0) >= 0.005 * whole}
    for name, seconds in parts.items():
        lines.append(f"  {name.replace('_', ' '):<18}{_seconds(seconds):>10}{seconds / whole:>7.0%}")
    if steps is not None:
        lines.append(f"All {steps} steps: {_seconds(whole * steps)}, without evaluations and saves")
    if "peak_gib" in measured:
        lines.append(f"Memory of its processes after {STEPS} steps, measured: {measured['peak_gib']:.2f} GiB")
    return "\n".join(lines)


def _seconds(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 36_000 else f"{seconds / 3600:.3g} h"
