"""What whoever watches over a run writes into its folder, once nobody else does: how it failed, where its threads stood."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.state.existing import last_metrics, run_info
from tandem.state.run_folder import now, take_lock, write_atomically

STACKS = "stacks-{number}.txt"


def stacks_file(folder: Path) -> Path:
    """The next one that is not there."""
    return next(p for n in itertools.count(1) if not (p := folder / STACKS.format(number=n)).exists())


def record_failure(
    folder: Path, cause: str, *, keep: bool = False, stacks: str = "", restart: Mapping[str, Any] | None = None
) -> Path | None:
    """Writes down in `run.json` and `log.txt` that the run failed and why; returns the file with ``stacks`` where there are.

    ``keep``: an error that the run has written itself says more. ``restart``: what is said of the restart that follows.

    Raises:
        RunFolderInUse: another run holds the folder.
        OSError: the disk refuses.
    """
    with take_lock(folder):
        info, path = run_info(folder), None
        if info.get("status") == "finished":
            return None
        if stacks:
            path = stacks_file(folder)
            path.write_text(stacks, encoding="utf-8")
        if not (keep and info.get("status") == "failed"):
            info |= {"status": "failed", "error": cause, "ended": now(), "steps": last_metrics(folder).get("step", 0)}
        where = {} if path is None else {"stacks": path.name}
        if restart is not None:
            line = {"at": now(), "cause": cause, **restart, **where}
            info["restarts"] = [*info.get("restarts", []), line]
        write_atomically(folder / "run.json", json.dumps(info | where, indent=2, ensure_ascii=False) + "\n")
        with (folder / "log.txt").open("a", encoding="utf-8") as log:
            then = f"; restart {restart['number']} follows" if restart is not None else ""
            log.write(f"{now()} ERROR tandem.supervision: {cause}{then}{f' (see {path.name})' if path else ''}\n")
    return path
