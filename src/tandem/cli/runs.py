"""List the runs below a folder: how they ended, their last metrics, checkpoints and size. The folder is a run.root, an
experiment's folder in it, or a run's folder.

examples:
  tandem runs
  tandem runs other/root --json
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.api.lines import aligned
from tandem.config.errors import ConfigError
from tandem.config.state import RunConfig
from tandem.state.existing import SHOWN, ExistingRun, existing_run, run_folders, status_now

GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    root = RunConfig().root
    parser.add_argument("root", nargs="?", type=Path, default=Path(root), help=f"where they are (default: {root})")
    parser.add_argument("--json", action="store_true", help="one JSON object a run")


def run(arguments: argparse.Namespace) -> int:
    root = arguments.root.expanduser()
    if not root.is_dir():
        raise ConfigError(f"there is no folder {root}; give the run.root of the runs")
    found = list(entries(root.absolute()))
    if arguments.json:
        for one in found:
            print(json.dumps(one, ensure_ascii=False))
    else:
        print(table(found) if found else f"No run in {root}.")
    return 0


def entries(root: Path) -> Iterator[dict[str, Any]]:
    """Entries of all runs below a root: of an experiment's if the folder is one, or of the run that it is itself. What
    cannot be read is said."""
    for folder in run_folders(root):
        try:
            run = existing_run(folder)
            if run is not None:
                yield entry(run)
        except OSError as error:
            print(f"warning: {folder} cannot be read: {error.strerror or error}", file=sys.stderr)


def entry(run: ExistingRun) -> dict[str, Any]:
    """The facts about a run that the command shows; sizes in bytes."""
    return {
        "run": f"{run.folder.parent.name}/{run.folder.name}",
        **status_now(run),
        "steps": run.steps,
        "metrics": {name: run.metrics[name] for name in SHOWN if _is_finite(run.metrics.get(name))},
        "checkpoints": list(run.checkpoints),
        "bytes": sum(_size(Path(place, name)) for place, _, names in os.walk(run.folder) for name in names),
        "when": run.when,
    }


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and value - value == 0


def _size(path: Path) -> int:
    """0 of what is no file, or is gone by now: a run may be saving."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0


def _ago(seconds: float) -> str:
    """Such as `5 min`; a run that does not write for hours may still be in a long step."""
    units = (("d", 86400.0), ("h", 3600.0), ("min", 60.0))
    return next((f"{seconds / size:.0f} {unit}" for unit, size in units if seconds >= 2 * size), f"{seconds:.0f} s")


def table(found: list[dict[str, Any]]) -> str:
    lines = [("RUN", "STATUS", "STEPS", "CHECKPOINTS", "SIZE", "WHEN", "LAST METRICS")]
    for one in found:
        metrics = "  ".join(f"{name} {value:.4g}" for name, value in one["metrics"].items())
        newest = f"{len(one['checkpoints'])}, to {one['checkpoints'][-1]}" if one["checkpoints"] else "none"
        size = f"{one['bytes'] / GIB:.2f} GiB"
        status = one["status"] if "host" not in one else f"on {one['host']}, silent {_ago(one['silent_s'])}"
        lines.append((one["run"], status, str(one["steps"]), newest, size, one["when"], metrics))
    return "\n".join(aligned(lines))
