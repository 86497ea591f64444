"""The runs that the viewer shows, by name, and what their files say: state, curves, logs, configuration."""

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

from tandem.config.errors import ConfigError
from tandem.config.machines import MACHINE
from tandem.config.resume import differences
from tandem.state.existing import existing_run, rows_of, run_folders, run_info, status_now, written_config
from tandem.tracking.catalog import explain
from tandem.tracking.record_files import TIMELINE, recorded_steps

MOST_ROWS = 4000
"""Rows of a metrics file that are told at once; of a longer one every second, third, …"""

MOST_SICKNESSES = 50
"""Lines about the health of a run that are told."""

LOG_BYTES = 1 << 18
"""The end of a log that is shown."""

_LOG_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ ([A-Z]+) (\S+?): (.*)", re.DOTALL)
_TOTAL = re.compile(
    r"^total_train_steps: (\d{1,12})$", re.MULTILINE
)  # parsing the whole file takes 15 ms, and runs are many
EVALUATIONS = "evaluations.jsonl"
"""Figures that a job of its own measured."""

_SIGNS = ("metrics.jsonl", EVALUATIONS, "run.json", "log.txt", "control.jsonl", "health.jsonl")
_SIGNS += ("trajectories", "checkpoints", ".lock")


MOST_WHOLE = 10**300
"""Whole numbers beyond it are none that a figure can show."""

_NOTHING: dict[str, Any] = {"status": "empty", "steps": 0, "metrics": {}, "checkpoints": [], "recorded": 0, "health": []}
"""The line of a run of which nothing is known."""


class Runs:
    """Run folders by name, found again each time: a run that begins later is there too."""

    def __init__(self, places: Iterable[Path]):
        """``places``: folders of runs, or roots below which they are."""
        self._places = [place.expanduser().absolute() for place in places]

    def all(self) -> dict[str, Path]:
        """Name, such as ``experiment/trial``, → folder; of two that are called alike the second has a number."""
        found: dict[str, Path] = {}
        for folder in dict.fromkeys(folder for place in self._places for folder in self._below(place)):
            name, number = f"{folder.parent.name}/{folder.name}", 2
            while name in found:
                name, number = f"{folder.parent.name}/{folder.name}~{number}", number + 1
            found[name] = folder
        return found

    @staticmethod
    def _below(place: Path) -> Iterator[Path]:
        """A folder that is named is a run, also an empty one, unless runs are below it."""
        with contextlib.suppress(OSError):
            found = [folder for folder in run_folders(place) if is_run(folder)]
            yield from found or ([place] if place.is_dir() and not any(map(Path.is_dir, place.iterdir())) else [])

    def folder(self, name: str) -> Path:
        """The folder of a run by its name; a name is never made a path.

        Raises:
            ConfigError: there is no such run.
        """
        found = self.all().get(name)
        if found is None:
            raise ConfigError(f"there is no run {name[:100]!r} here (any more)")
        return found


def is_run(folder: Path) -> bool:
    """True also for a run whose files may not be read."""
    try:
        return existing_run(folder) is not None
    except OSError:
        return True


def summary(name: str, folder: Path) -> dict[str, Any]:
    """The line of a run in the list."""
    try:
        return _summary(name, folder)
    except OSError as error:  # of somebody else, or it has just been removed
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
        "total": int(found[1]) if (found := _TOTAL.search(config_text(folder))) else None,
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
    """Changes whenever a run has written something that the pages show, or has died."""
    told = []
    for name in _SIGNS:
        with contextlib.suppress(OSError):
            state = (folder / name).stat()
            told.append(f"{state.st_size} {state.st_mtime_ns} {state.st_ino}")
    with contextlib.suppress(OSError):
        run = existing_run(folder)
        told.append("" if run is None else status_now(run)["status"])
    return "|".join(told)


def curves(folder: Path, after: int, file: str) -> dict[str, Any]:
    """The metrics as columns, from byte ``after`` on if the file is still the one called ``file``, else all anew."""
    path = folder / "metrics.jsonl"
    try:
        with path.open("rb") as opened:
            state = os.fstat(opened.fileno())
            evaluated = _size(folder / EVALUATIONS)
            version = f"{state.st_ino}-{evaluated}"  # figures of an older step may come later: then all is told anew
            fresh = file == version and after <= state.st_size
            opened.seek(after if fresh else 0)
            data = opened.read()
    except FileNotFoundError:
        return {
            "file": "",
            "at": 0,
            "fresh": False,
            "rows": 0,
            "every": 1,
            "step": [],
            "time": [],
            "values": {},
            "lost": {},
            "about": {},
        }
    whole = data[: data.rfind(b"\n") + 1]
    lines = whole.splitlines()
    every = math.ceil(len(lines) / MOST_ROWS) or 1
    rows = [row for row in map(_metrics_row, lines[::-every][::-1]) if row is not None]
    rows = rows if fresh or not evaluated else _with_evaluations(folder, rows)
    names = sorted({name for row in rows for name in row} - {"step", "time"})
    values = {name: [_short(row.get(name)) for row in rows] for name in names}
    last = rows[-1] if rows else {}
    lost = {name: _since(rows, name) for name in names if name in last and not _is_number(last[name])}
    return {
        **{"file": version, "at": (after if fresh else 0) + len(whole), "fresh": fresh, "rows": len(rows)},
        **{"every": every, "step": [row["step"] for row in rows], "time": [_time(row.get("time")) for row in rows]},
        "values": {name: column for name, column in values.items() if any(value is not None for value in column)},
        "lost": lost,
        "about": {} if fresh else {name: list(metric) for name in names if (metric := explain(name)) is not None},
    }


def _with_evaluations(folder: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with what `tandem eval --follow` measured at their steps, and more rows for steps without one."""
    by_step = {row["step"]: row for row in rows}
    for row in rows_of(folder / EVALUATIONS):
        if type(row.get("step")) is int:
            by_step[row["step"]] = row | by_step.get(row["step"], {})
    return [by_step[step] for step in sorted(by_step)]


def _since(rows: list[dict[str, Any]], name: str) -> int:
    """The first step of the last ones in which a metric is written and is no number: NaN or infinite."""
    without = itertools.takewhile(lambda row: name in row and not _is_number(row[name]), reversed(rows))
    return int(list(without)[-1]["step"])


def _metrics_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def _short(value: Any) -> float | None:
    return float(f"{value:.6g}") if _is_number(value) else None


def _time(value: Any) -> float | None:
    return value if _is_number(value) else None


def facts(folder: Path) -> dict[str, Any]:
    """Environment, ends, resumptions and changes of a run."""
    size = sum(_size(Path(place, name)) for place, _, names in os.walk(folder) for name in names)
    return {"info": run_info(folder), "changes": list(rows_of(folder / "control.jsonl"))[-500:], "bytes": size}


def timeline(folder: Path, step: int) -> list[list[tuple[str, str, float, float]]]:
    """The spans of each rank in a step: (role, stage, begin, end), in seconds after the first one; empty where none is
    recorded, as in runs of before there was a timeline."""
    line = b""
    with contextlib.suppress(OSError), (folder / TIMELINE).open("rb") as file:
        for text in file:
            line = text if text.startswith(b'{"step": %d,' % step) else line  # of a step made again, the last one counts
    try:
        ranks = json.loads(line)["ranks"]
        spans = [[(str(role), str(stage), float(a), float(b)) for role, stage, a, b in rank] for rank in ranks]
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):  # none, or torn
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
    """The logs of a run by name: its own, and those of the servers that it started."""
    own = {"log.txt": folder / "log.txt"} if (folder / "log.txt").is_file() else {}
    own |= {file.stem: file for file in sorted(folder.glob("servers-logs/*.log"))}
    elsewhere = sorted(folder.glob(f"{MACHINE}*/servers-logs/*.log"))
    found = own | {f"{file.parts[-3]}/{file.stem}": file for file in elsewhere}
    return {name: file for name, file in found.items() if _is_inside(file, folder)}


def _is_inside(file: Path, folder: Path) -> bool:
    """False for a link that leads out of a run, or nowhere."""
    try:
        return file.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a loop of links
        return False


def log_entries(folder: Path, name: str) -> dict[str, Any]:
    """The end of one of a run's logs: entries with time, level and place where it has them, else lines.

    Raises:
        ConfigError: there is no such log.
    """
    there = logs(folder)
    if name not in there:
        return {"logs": list(there), "entries": [], "cut": False}
    with there[name].open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LOG_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    entries: list[dict[str, str]] = []
    for line in lines[1 if size > LOG_BYTES else 0 :]:
        found = _LOG_LINE.fullmatch(line)
        if found:
            entries.append({"time": found[1], "level": found[2], "who": found[3], "text": found[4]})
        elif entries and entries[-1]["level"]:
            entries[-1]["text"] += f"\n{line}"  # of a traceback
        elif line:
            entries.append({"time": "", "level": "", "who": "", "text": line})
    return {"logs": list(there), "entries": entries, "cut": size > LOG_BYTES}


def config_text(folder: Path) -> str:
    """The configuration as it was written; empty where there is none."""
    file = folder / "config.yaml"
    return (
        file.read_text(encoding="utf-8", errors="replace")[:LOG_BYTES] if file.is_file() and _is_inside(file, folder) else ""
    )


def config_differences(one: Path, other: Path) -> list[dict[str, str]]:
    """The keys in which two runs' configurations differ, with both values as text."""
    found = differences(_config(one), _config(other), {})
    return [{"key": each.key, "one": _yaml(each.before), "other": _yaml(each.now)} for each in found]


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, allow_unicode=True, default_flow_style=True).removesuffix("...\n").strip()
