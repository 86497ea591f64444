"""The runs that the viewer shows, by name, and the content of their files: state, curves, logs, configuration."""

import contextlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from tandem.api.shared_files import json_object
from tandem.config.devices import MACHINE
from tandem.config.errors import ConfigError
from tandem.config.resume import differences
from tandem.state.existing import existing_run, rows_of, run_folders, run_info, status_now, written_config
from tandem.tracking.catalog import explain
from tandem.tracking.record_files import TIMELINE, recorded_steps

MOST_ROWS = 4000
"""Most rows of a metrics file in one answer; of a longer file only every second, third, … row is sent."""

MOST_SICKNESSES = 50
"""Most lines about the health of a run in one answer."""

LOG_BYTES = 1 << 18
"""Bytes at the end of a log that are shown."""

_LOG_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ ([A-Z]+) (\S+?): (.*)", re.DOTALL)
_TOTAL = re.compile(
    r"^total_train_steps: (\d{1,12})$", re.MULTILINE
)  # parsing the whole file takes 15 ms, and runs are many
EVALUATIONS = "evaluations.jsonl"
"""File of the metrics that a separate evaluation job measured."""

_FILES = ("metrics.jsonl", EVALUATIONS, "run.json", "log.txt", "control.jsonl", "health.jsonl")
_SIGNS = (*_FILES, "trajectories", "checkpoints", ".lock")


MOST_WHOLE = 10**300
"""Largest integer that is shown as a number; much larger ones do not fit into a float."""

_NOTHING: dict[str, Any] = {"status": "empty", "steps": 0, "metrics": {}, "checkpoints": [], "recorded": 0, "health": []}
"""The summary of a run about which nothing is known."""


class Runs:
    """Run folders by name. Each call searches again, so new runs appear."""

    def __init__(self, places: Iterable[Path]):
        """``places``: run folders, or folders that contain run folders."""
        self._places = [place.expanduser().absolute() for place in places]

    def all(self) -> dict[str, Path]:
        """Returns run folders by name, such as ``experiment/trial``; a repeated name becomes ``experiment/trial~2``."""
        folders: dict[str, Path] = {}
        for folder in dict.fromkeys(folder for place in self._places for folder in self._below(place)):
            name, number = f"{folder.parent.name}/{folder.name}", 2
            while name in folders:
                name, number = f"{folder.parent.name}/{folder.name}~{number}", number + 1
            folders[name] = folder
        return folders

    @staticmethod
    def _below(place: Path) -> Iterator[Path]:
        """Yields the runs in a folder. Without runs, yields the folder itself if it has no subfolders, because a run
        may begin there."""
        with contextlib.suppress(OSError):
            folders = [folder for folder in run_folders(place) if is_run(folder)]
            yield from folders or ([place] if place.is_dir() and not any(map(Path.is_dir, place.iterdir())) else [])

    def folder(self, name: str) -> Path:
        """Returns the folder of a run by its name. The name is looked up and never used as a path.

        Raises:
            ConfigError: there is no such run.
        """
        folder = self.all().get(name)
        if folder is None:
            raise ConfigError(f"there is no run {name[:100]!r} here (any more)")
        return folder


def is_run(folder: Path) -> bool:
    """True if the folder is a run, or its files cannot be read."""
    try:
        return existing_run(folder) is not None
    except OSError:
        return True


def summary(name: str, folder: Path) -> dict[str, Any]:
    """Returns the row of a run in the list of runs."""
    try:
        return _summary(name, folder)
    except OSError as error:  # another user's run, or it has just been removed
        return _NOTHING | {"name": name, "status": "unreadable", "error": str(error)}


def _summary(name: str, folder: Path) -> dict[str, Any]:
    info = run_info(folder)
    run = existing_run(folder)
    if run is None:
        return _NOTHING | {"name": name}
    return {
        "name": name,
        **status_now(run),
        "steps": run.steps,
        "total": int(match[1]) if (match := _TOTAL.search(config_text(folder))) else None,
        "metrics": {key: value for key, value in run.metrics.items() if _is_number(value)},
        "checkpoints": list(run.checkpoints),
        "recorded": len(recorded_steps(folder)),
        "health": list(rows_of(folder / "health.jsonl"))[-MOST_SICKNESSES:],
        **{key: str(info.get(key) or "") for key in ("started", "ended", "command", "error")},
        "seconds": info.get("seconds") if _is_number(info.get("seconds")) else None,
    }


def _config(folder: Path) -> dict[str, Any]:
    if not _is_inside(folder / "config.yaml", folder):
        return {}
    try:
        config = written_config(folder, "its keys", "")
    except (ConfigError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _is_number(value: Any) -> bool:
    if isinstance(value, int):
        return abs(value) <= MOST_WHOLE
    return isinstance(value, float) and math.isfinite(value)


def signs(folder: Path) -> str:
    """Returns a text that changes whenever a run writes something that the pages show, or its status changes."""
    states = []
    for name in _SIGNS:
        with contextlib.suppress(OSError):
            state = (folder / name).stat()
            states.append(f"{state.st_size} {state.st_mtime_ns} {state.st_ino}")
    with contextlib.suppress(OSError):
        run = existing_run(folder)
        states.append("" if run is None else status_now(run)["status"])
    return "|".join(states)


def curves(folder: Path, after: int, file: str) -> dict[str, Any]:
    """Returns the metrics as columns. If ``file`` is still the version of the metrics file, only rows from byte ``after`` on
    are returned; otherwise all rows."""
    path = folder / "metrics.jsonl"
    try:
        with path.open("rb") as opened:
            state = os.fstat(opened.fileno())
            evaluated = _size(folder / EVALUATIONS)
            version = f"{state.st_ino}-{evaluated}"  # late evaluations change older rows: send all again
            fresh = file == version and after <= state.st_size
            opened.seek(after if fresh else 0)
            data = opened.read()
    except FileNotFoundError:
        version, evaluated, fresh, data = "", 0, False, b""
    complete = data[: data.rfind(b"\n") + 1]
    lines = complete.splitlines()
    stride = math.ceil(len(lines) / MOST_ROWS) or 1
    rows = [row for row in map(_metrics_row, lines[::-stride][::-1]) if row is not None]
    rows = rows if fresh or not evaluated else _with_evaluations(folder, rows)
    names = sorted({name for row in rows for name in row} - {"step", "time"})
    values = {name: [_short(row.get(name)) for row in rows] for name in names}
    last = rows[-1] if rows else {}
    lost = {name: _since(rows, name) for name in names if name in last and not _is_number(last[name])}
    return {
        **{"file": version, "at": (after if fresh else 0) + len(complete), "fresh": fresh, "rows": len(rows)},
        **{
            "every": stride,
            "step": [row["step"] for row in rows],
            "time": [time if _is_number(time := row.get("time")) else None for row in rows],
        },
        "values": {name: column for name, column in values.items() if any(value is not None for value in column)},
        "lost": lost,
        "about": {} if fresh else {name: list(metric) for name in names if (metric := explain(name)) is not None},
    }


def _with_evaluations(folder: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds the metrics of `tandem eval --follow` to the rows of their steps, and new rows for steps without a row."""
    by_step = {row["step"]: row for row in rows}
    for row in rows_of(folder / EVALUATIONS):
        if type(row.get("step")) is int:
            by_step[row["step"]] = row | by_step.get(row["step"], {})
    return [by_step[step] for step in sorted(by_step)]


def _since(rows: list[dict[str, Any]], name: str) -> int:
    """Returns the step since which a metric has only been NaN or infinite."""
    not_finite = itertools.takewhile(lambda row: name in row and not _is_number(row[name]), reversed(rows))
    return int(list(not_finite)[-1]["step"])


def _metrics_row(line: bytes) -> dict[str, Any] | None:
    row = json_object(line) or {}
    return row if type(row.get("step")) is int else None


def _short(value: Any) -> float | None:
    return float(f"{value:.6g}") if _is_number(value) else None


def facts(folder: Path) -> dict[str, Any]:
    """Returns the run's run.json (environment, ends, resumptions), the changes of its reward, and its size in bytes."""
    size = sum(_size(Path(place, name)) for place, _, names in os.walk(folder) for name in names)
    return {"info": run_info(folder), "changes": list(rows_of(folder / "control.jsonl"))[-500:], "bytes": size}


def timeline(folder: Path, step: int) -> list[list[tuple[str, str, float, float]]]:
    """Returns the spans of each rank in a step: (role, stage, begin, end), in seconds after the first begin. Empty if none
    is recorded."""
    line = b""
    with contextlib.suppress(OSError), (folder / TIMELINE).open("rb") as file:
        for text in file:
            line = text if text.startswith(b'{"step": %d,' % step) else line  # of a repeated step, the last line counts
    try:
        ranks = json.loads(line)["ranks"]
        spans = [[(str(role), str(stage), float(a), float(b)) for role, stage, a, b in rank] for rank in ranks]
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):  # no line, or an incomplete one
        return []
    if not all(math.isfinite(span[2]) and math.isfinite(span[3]) for rank in spans for span in rank):
        return []
    began = min((span[2] for rank in spans for span in rank), default=0.0)
    return [[(role, stage, round(a - began, 4), round(b - began, 4)) for role, stage, a, b in rank] for rank in spans]


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def logs(folder: Path) -> dict[str, Path]:
    """Returns the logs of a run by name: its log.txt, and the logs of the servers that it started."""
    files = {"log.txt": folder / "log.txt"} if (folder / "log.txt").is_file() else {}
    files |= {file.stem: file for file in sorted(folder.glob("servers-logs/*.log"))}
    elsewhere = sorted(folder.glob(f"{MACHINE}*/servers-logs/*.log"))
    files |= {f"{file.parts[-3]}/{file.stem}": file for file in elsewhere}
    return {name: file for name, file in files.items() if _is_inside(file, folder)}


def _is_inside(file: Path, folder: Path) -> bool:
    """True if a file lies in the run's folder after its links are resolved; False for a loop of links."""
    try:
        return file.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a loop of links
        return False


def log_entries(folder: Path, name: str) -> dict[str, Any]:
    """Returns the end of one of a run's logs as entries, with time, level and logger if the log has them. Without a log of
    this name there are no entries."""
    files = logs(folder)
    if name not in files:
        return {"logs": list(files), "entries": [], "cut": False}
    with files[name].open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LOG_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    entries: list[dict[str, str]] = []
    for line in lines[1 if size > LOG_BYTES else 0 :]:
        match = _LOG_LINE.fullmatch(line)
        if match:
            entries.append({"time": match[1], "level": match[2], "who": match[3], "text": match[4]})
        elif entries and entries[-1]["level"]:
            entries[-1]["text"] += f"\n{line}"  # a further line of the message, as of a traceback
        elif line:
            entries.append({"time": "", "level": "", "who": "", "text": line})
    return {"logs": list(files), "entries": entries, "cut": size > LOG_BYTES}


def config_text(folder: Path) -> str:
    """Returns the text of the run's config.yaml, at most `LOG_BYTES` characters; empty if there is no file."""
    file = folder / "config.yaml"
    return (
        file.read_text(encoding="utf-8", errors="replace")[:LOG_BYTES] if file.is_file() and _is_inside(file, folder) else ""
    )


def config_differences(one: Path, other: Path) -> list[dict[str, str]]:
    """Returns the keys in which two runs' configurations differ, with both values as text."""
    changes = differences(_config(one), _config(other), {})
    return [{"key": change.key, "one": _yaml(change.before), "other": _yaml(change.now)} for change in changes]


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, allow_unicode=True, default_flow_style=True).removesuffix("...\n").strip()
