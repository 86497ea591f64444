"""What a run folder holds already, read from its files; tolerant of a run that was killed while writing."""

import json
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

OWN_FILES = ("run.json", "config.yaml", "metrics.jsonl", "checkpoints", "trajectories", "ledger.sqlite")
SHOWN = ("reward/mean", "loss", "eval/accuracy")


@dataclass(frozen=True)
class ExistingRun:
    """A run that was found in a folder."""

    folder: Path
    steps: int = 0
    """The last step in metrics.jsonl."""

    metrics: dict[str, Any] = field(default_factory=dict)
    """The last line of metrics.jsonl."""

    status: str = "unknown"
    """As in run.json; `running` in a folder that nobody holds means that the run was killed."""

    when: str = ""
    """When it ended, or began where it never said so."""

    checkpoints: tuple[str, ...] = ()
    id: str = ""
    """The run's own name; empty where run.json is lost."""

    def describe(self) -> str:
        """One or two sentences."""
        words = {"running": "was killed before it could end", "unknown": "left no run.json"}
        ended = words.get(self.status, self.status)
        numbers = {name: self.metrics.get(name) for name in SHOWN}
        told = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items() if isinstance(value, (int, float)))
        parts = [f"{self.steps} step{'' if self.steps == 1 else 's'} done", ended + (f" ({self.when})" if self.when else "")]
        parts += [f"last metrics: {told}"] if told else []
        parts += [f"checkpoints: {', '.join(self.checkpoints)}"] if self.checkpoints else ["no checkpoint"]
        return "; ".join(parts)


def _json(text: str) -> dict[str, Any]:
    """The object in the text; empty where the text is torn or no object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def run_info(folder: Path) -> dict[str, Any]:
    """What `run.json` says; empty where there is none, or it is torn."""
    record = folder / "run.json"
    return _json(record.read_text(encoding="utf-8", errors="replace")) if record.is_file() else {}


def last_metrics(folder: Path) -> dict[str, Any]:
    """The last whole line of metrics.jsonl; empty where there is none."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    return next((line for line in map(_json, reversed(lines)) if line), {})


def step_of(path: Path) -> int:
    """k of a checkpoint folder `step_k`; -1 for anything else."""
    number = path.name.removeprefix("step_")
    return int(number) if path.name.startswith("step_") and number.isdecimal() else -1


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in `folder`, oldest step first."""
    found = [path for path in folder.iterdir() if path.is_dir() and step_of(path) >= 0] if folder.is_dir() else []
    return sorted(found, key=step_of)


def is_alive(folder: Path) -> bool:
    """Whether the process that took the folder's lock lives, as far as this machine can tell."""
    lock = folder / ".lock"
    words = lock.read_text(encoding="utf-8", errors="replace").split() if lock.is_file() else []
    if len(words) < 4 or not words[1].isdecimal():
        return False
    return words[3] != socket.gethostname() or psutil.pid_exists(int(words[1]))


def existing_run(folder: Path) -> ExistingRun | None:
    """The run in this folder, or None where there is none."""
    if not any((folder / name).exists() for name in OWN_FILES):
        return None
    info = run_info(folder)
    metrics = last_metrics(folder)
    return ExistingRun(
        folder,
        steps=int(metrics.get("step", 0)),
        metrics=metrics,
        status=str(info.get("status", "unknown")),
        when=str(info.get("ended") or info.get("started") or ""),
        checkpoints=tuple(path.name for path in checkpoints(folder / "checkpoints")),
        id=str(info.get("id") or ""),
    )
