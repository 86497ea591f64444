"""Reads the contents of a run folder, even if the run was killed while it wrote, and tells who writes there.

One process holds the lock of a folder while it writes there. The lock ends with its process, however that ends.
"""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import yaml

from tandem.api.shared_files import json_object
from tandem.config.errors import ConfigError
from tandem.state.machine import now

LOOKED_AT_S = 0.3
"""Seconds to wait for the lock, because a process that only inspects the folder holds it briefly."""

IN_USE = "{folder} is being written by another run: {who}. Wait for it, stop it, or choose another trial_name."


class RunFolderInUse(ConfigError):
    """Another process is writing to the folder."""


def take_lock(folder: Path, told: str = IN_USE) -> IO[str]:
    """Takes the lock of a folder and returns its file; closing the file, or the end of the process, releases the lock.

    ``told``: the message for a folder in use, with ``{folder}`` and ``{who}``.

    Raises:
        RunFolderInUse: another process holds the lock; the message names it.
        OSError: the folder cannot be written.
    """
    lock, until = (folder / ".lock").open("a+", encoding="utf-8"), time.monotonic() + LOOKED_AT_S
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() > until:
                    raise _in_use(folder, told) from None
                time.sleep(0.02)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()} since {now()}\n")
        lock.flush()
    except BaseException:
        lock.close()
        raise
    return lock


def is_held(folder: Path) -> bool:
    """Tells whether a process holds the lock of a run folder, as far as this machine can tell. Writes nothing."""
    lock = folder / ".lock"
    if not lock.is_file():
        return False
    with lock.open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def refuse_held(folder: Path, told: str = IN_USE) -> None:
    """Raises `RunFolderInUse` if a process holds the lock, see `take_lock`. Writes nothing."""
    if is_held(folder):
        raise _in_use(folder, told)


def _in_use(folder: Path, told: str) -> RunFolderInUse:
    holder = (folder / ".lock").read_text(encoding="utf-8", errors="replace").strip()
    return RunFolderInUse(told.format(folder=folder, who=holder or "a process that has just started"))


def begun_elsewhere(folder: Path) -> str | None:
    """Returns the host name of the machine that last locked the run folder; None if it was this machine."""
    lock = folder / ".lock"
    words = lock.read_text(encoding="utf-8", errors="replace").split() if lock.is_file() else []
    if len(words) < 4 or not words[1].isdecimal() or words[3] == socket.gethostname():
        return None
    return "".join(letter if letter.isprintable() else "?" for letter in words[3])  # it is shown on a terminal


OWN_FILES = ("run.json", "config.yaml", "metrics.jsonl", "checkpoints", "trajectories", "ledger.sqlite")

SHOWN = ("reward/mean", "loss", "eval/accuracy", "control/changes")

SIGNS = (".lock", "run.json", "log.txt", "metrics.jsonl", "ledger.sqlite", "trajectories", "checkpoints", "checkpoints/*")
"""Files whose modification times show when a run last wrote anything."""

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
    """The time of its end, or of its start if no end is recorded."""

    checkpoints: tuple[str, ...] = ()
    id: str = ""
    """The run's unique id; empty if run.json is lost."""

    def describe(self) -> str:
        words = {"running": "was killed before it could end", "unknown": "left no run.json"}
        ended = words.get(self.status, self.status)
        numbers = {name: self.metrics.get(name) for name in SHOWN}
        figures = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items() if isinstance(value, (int, float)))
        parts = [f"{self.steps} step{'' if self.steps == 1 else 's'} done", ended + (f" ({self.when})" if self.when else "")]
        parts += [f"last metrics: {figures}"] if figures else []
        parts += [f"checkpoints: {', '.join(self.checkpoints)}"] if self.checkpoints else ["no checkpoint"]
        return "; ".join(parts)


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSON-lines file, without lines that a kill left incomplete; nothing if there is no file."""
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as lines:
            yield from filter(None, map(json_object, lines))


def run_info(folder: Path) -> dict[str, Any]:
    """Returns the contents of `run.json`; {} if the file is missing or incomplete."""
    record = folder / "run.json"
    return (json_object(record.read_text(encoding="utf-8", errors="replace")) if record.is_file() else None) or {}


def written_config(folder: Path, unknown: str, remedy: str) -> Any:
    """Returns the contents of `config.yaml`; {} if there is no such file.

    Raises:
        ConfigError: the file cannot be read; the message says that therefore ``unknown`` is not known, and then ``remedy``.
    """
    path = folder / "config.yaml"
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read, so it is not known {unknown}: {error}; {remedy}") from error


def times_resumed(folder: Path) -> list[dict[str, Any]]:
    """Returns the entries of `run.json` about each resumption of the run, oldest first."""
    lines = run_info(folder).get("resumed")
    return [line for line in lines if isinstance(line, dict)] if isinstance(lines, list) else []


def last_metrics(folder: Path) -> dict[str, Any]:
    """Returns the last complete line of metrics.jsonl; {} if there is none."""
    path = folder / "metrics.jsonl"
    return next((line for line in map(json_object, _from_the_end(path)) if line), {}) if path.is_file() else {}


def _from_the_end(path: Path) -> Iterator[str]:
    """Yields the lines from last to first, and reads only as much of the file as needed."""
    with path.open("rb") as file:
        at, beginning = file.seek(0, os.SEEK_END), b""
        while at > 0:
            size = min(BLOCK_BYTES, at)
            at = file.seek(at - size)
            beginning, *lines = (file.read(size) + beginning).split(b"\n")
            yield from (line.decode(errors="replace") for line in reversed(lines))
        yield beginning.decode(errors="replace")


def step_of(path: Path) -> int:
    """Returns k for a checkpoint folder `step_k`; -1 for any other name."""
    number = path.name.removeprefix("step_")
    return int(number) if path.name.startswith("step_") and number.isdecimal() else -1


def checkpoints(folder: Path) -> list[Path]:
    """Returns the complete checkpoints in `folder`, in the order of steps."""
    folders = [path for path in folder.iterdir() if path.is_dir() and step_of(path) >= 0] if folder.is_dir() else []
    return sorted(folders, key=step_of)


def silent_s(folder: Path) -> float:
    """Returns the seconds since the run last wrote, by this machine's clock and the file system's modification times."""
    newest = 0.0
    for file in (file for name in SIGNS for file in folder.glob(name)):
        with contextlib.suppress(OSError):  # removed meanwhile
            newest = max(newest, file.stat().st_mtime)
    return max(0.0, time.time() - newest)


def existing_run(folder: Path) -> ExistingRun | None:
    """Returns the run in this folder; None if there is none."""
    if not any(os.path.exists(folder / name) for name in OWN_FILES):  # also False without permission to read the folder
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
    """Returns the folders below ``root`` that may hold a run, sorted. ``root`` may also be an experiment's folder or a run's
    folder."""
    nearer = [path for path in (root, *root.glob("*/")) if _is_no_experiment(path)]
    return sorted([*nearer, *root.glob("*/*/")])


def _is_no_experiment(folder: Path) -> bool:
    """Tells whether a folder is a run's: it has a `run.json`, or has names of a run's files and no run below it (a run's
    folder may be called like such a file)."""
    if os.path.isfile(folder / "run.json"):
        return True
    return _has_a_runs_files(folder) and not any(map(_has_a_runs_files, (*folder.glob("*/"), *folder.glob("*/*/"))))


def _has_a_runs_files(folder: Path) -> bool:
    return any(os.path.exists(folder / name) for name in OWN_FILES)


def status_now(run: ExistingRun) -> dict[str, Any]:
    """Returns the run's status as JSON. `killed`: it was running, and its process no longer exists. `elsewhere`: it runs on
    another machine, whose processes this machine cannot see; then with the host name and the seconds since it last wrote."""
    if run.status != "running" or is_held(run.folder):
        return {"status": run.status}
    host = begun_elsewhere(run.folder)
    if host is None:
        return {"status": "killed"}
    return {"status": "elsewhere", "host": host, "silent_s": round(silent_s(run.folder), 1)}
