"""Reads the contents of a run folder, also of a run that was killed while it wrote."""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tandem.config.errors import ConfigError

OWN_FILES = ("run.json", "config.yaml", "metrics.jsonl", "checkpoints", "trajectories", "ledger.sqlite")
SHOWN = ("reward/mean", "loss", "eval/accuracy", "control/changes")
SIGNS = (".lock", "run.json", "log.txt", "metrics.jsonl", "ledger.sqlite", "trajectories", "checkpoints", "checkpoints/*")
"""Files whose dates show when a run last wrote anything."""

BLOCK_BYTES = 2**16


@dataclass(frozen=True)
class ExistingRun:
    """A run in a folder."""

    folder: Path
    steps: int = 0
    """Last step in metrics.jsonl."""

    metrics: dict[str, Any] = field(default_factory=dict)
    status: str = "unknown"
    """Status in run.json. If it says `running` and no process holds the folder's lock, the run was killed."""

    when: str = ""
    """Time of its end; of its beginning if no end is recorded."""

    checkpoints: tuple[str, ...] = ()
    id: str = ""
    """The run's unique name; empty if run.json is lost."""

    def describe(self) -> str:
        words = {"running": "was killed before it could end", "unknown": "left no run.json"}
        ended = words.get(self.status, self.status)
        numbers = {name: self.metrics.get(name) for name in SHOWN}
        figures = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items() if isinstance(value, (int, float)))
        parts = [f"{self.steps} step{'' if self.steps == 1 else 's'} done", ended + (f" ({self.when})" if self.when else "")]
        parts += [f"last metrics: {figures}"] if figures else []
        parts += [f"checkpoints: {', '.join(self.checkpoints)}"] if self.checkpoints else ["no checkpoint"]
        return "; ".join(parts)


def _json(text: str) -> dict[str, Any]:
    """Parses a JSON object; empty if the text is torn or no object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a file of JSON lines; skips a line that a kill has torn. No file: none."""
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as lines:
            yield from filter(None, map(_json, lines))


def run_info(folder: Path) -> dict[str, Any]:
    """The contents of `run.json`; empty if the file is missing or torn."""
    record = folder / "run.json"
    return _json(record.read_text(encoding="utf-8", errors="replace")) if record.is_file() else {}


def written_config(folder: Path, unknown: str, remedy: str) -> Any:
    """The contents of `config.yaml`; an empty object if there is no such file.

    Raises:
        ConfigError: the file cannot be read, so that ``unknown`` is not known; the message ends with ``remedy``.
    """
    path = folder / "config.yaml"
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read, so nobody knows {unknown}: {error}; {remedy}") from error


def times_resumed(folder: Path) -> list[dict[str, Any]]:
    """The entries of `run.json` about each resumption of the run, oldest first."""
    lines = run_info(folder).get("resumed")
    return [line for line in lines if isinstance(line, dict)] if isinstance(lines, list) else []


def last_metrics(folder: Path) -> dict[str, Any]:
    """The last whole line of metrics.jsonl; empty if there is none."""
    path = folder / "metrics.jsonl"
    return next((line for line in map(_json, _from_the_end(path)) if line), {}) if path.is_file() else {}


def _from_the_end(path: Path) -> Iterator[str]:
    """Yields the lines from the last to the first, and reads only as much of the file as it needs."""
    with path.open("rb") as file:
        at, rest = file.seek(0, os.SEEK_END), b""
        while at > 0:
            size = min(BLOCK_BYTES, at)
            at = file.seek(at - size)
            rest, *lines = (file.read(size) + rest).split(b"\n")
            yield from (line.decode(errors="replace") for line in reversed(lines))
        yield rest.decode(errors="replace")


def step_of(path: Path) -> int:
    """k of a checkpoint folder `step_k`; -1 for anything else."""
    number = path.name.removeprefix("step_")
    return int(number) if path.name.startswith("step_") and number.isdecimal() else -1


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in `folder`, oldest step first."""
    folders = [path for path in folder.iterdir() if path.is_dir() and step_of(path) >= 0] if folder.is_dir() else []
    return sorted(folders, key=step_of)


def is_held(folder: Path) -> bool:
    """True if a process holds the lock of a run folder, as far as this machine can tell. Writes nothing."""
    lock = folder / ".lock"
    if not lock.is_file():
        return False
    with lock.open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def begun_elsewhere(folder: Path) -> str | None:
    """Host name of the machine that last locked the run folder; None if it was this one."""
    lock = folder / ".lock"
    words = lock.read_text(encoding="utf-8", errors="replace").split() if lock.is_file() else []
    if len(words) < 4 or not words[1].isdecimal() or words[3] == socket.gethostname():
        return None
    return "".join(letter if letter.isprintable() else "?" for letter in words[3])  # it is shown on a terminal


def silent_s(folder: Path) -> float:
    """Seconds since the run last wrote, by this machine's clock and the file system's dates."""
    newest = 0.0
    for file in (file for name in SIGNS for file in folder.glob(name)):
        with contextlib.suppress(OSError):  # gone since
            newest = max(newest, file.stat().st_mtime)
    return max(0.0, time.time() - newest)


def existing_run(folder: Path) -> ExistingRun | None:
    """The run in this folder; None if there is none."""
    if not any(os.path.exists(folder / name) for name in OWN_FILES):  # False also where nobody may look
        return None
    info = run_info(folder)
    metrics = last_metrics(folder)
    return ExistingRun(
        folder,
        steps=metrics["step"] if isinstance(metrics.get("step"), int) else 0,
        metrics=metrics,
        status=str(info.get("status", "unknown")),
        when=str(info.get("ended") or info.get("started") or ""),
        checkpoints=tuple(path.name for path in checkpoints(folder / "checkpoints")),
        id=str(info.get("id") or ""),
    )


def run_folders(root: Path) -> list[Path]:
    """Folders below ``root`` that may hold a run, in order. If ``root`` is an experiment, its runs; if it is a run's folder,
    itself."""
    nearer = [path for path in (root, *root.glob("*/")) if _is_no_experiment(path)]
    return sorted([*nearer, *root.glob("*/*/")])


def _is_no_experiment(folder: Path) -> bool:
    """True if the folder is a run's: it says so, or has a run's files and no run below it, whose folder may have the name of
    such a file."""
    if os.path.isfile(folder / "run.json"):
        return True
    return _has_a_runs_files(folder) and not any(map(_has_a_runs_files, (*folder.glob("*/"), *folder.glob("*/*/"))))


def _has_a_runs_files(folder: Path) -> bool:
    return any(os.path.exists(folder / name) for name in OWN_FILES)


def status_now(run: ExistingRun) -> dict[str, Any]:
    """The status as JSON: `killed` for a run whose process is gone, `elsewhere` for a run of another machine, with that
    machine's name and the seconds of silence, because this machine cannot see its processes."""
    if run.status != "running" or is_held(run.folder):
        return {"status": run.status}
    host = begun_elsewhere(run.folder)
    if host is None:
        return {"status": "killed"}
    return {"status": "elsewhere", "host": host, "silent_s": round(silent_s(run.folder), 1)}
