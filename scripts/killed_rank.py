"""kill -9 to rank 0 of a run that starts its ranks again, and what became of its servers; for `train_on_servers.py`."""

import contextlib
import json
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import psutil

SETTINGS = ("recover.max_restarts=1", "checkpoint.every_steps=1")


@dataclass
class KilledRank:
    """Rank 0 of a run when it was killed, the servers that it had, and what came after."""

    pid: int
    at: float
    """When, in seconds since the epoch, as all times here."""

    step: int
    """The last that was done."""

    servers: dict[str, psutil.Process]
    """Name in the fleet → its process."""

    next_step: tuple[int, float] | None = None
    """The first step that the rank in its place made, and when it was done."""

    same: tuple[str, ...] = ()
    """Servers whose processes were still there then."""

    @classmethod
    def kill(cls, command: "subprocess.Popen[bytes]", root: Path, rows: list[dict[str, Any]]) -> Self | None:
        """Kills it once a step is done and a checkpoint is whole; None before."""
        folder = next(iter(file.parent for file in root.glob("*/*/config.yaml")), None)
        if folder is None or not rows or not list(folder.glob("checkpoints/step_*/state/manifest.json")):
            return None
        rank = _rank_0(command.pid)
        kept = {one[1]: int(one[2]) for _, one in _said(folder, r"(\S+) \(process (\d+)\) is kept")}
        if rank is None or not kept:
            return None
        servers = {name: psutil.Process(pid) for name, pid in kept.items()}
        rank.kill()
        return cls(rank.pid, time.time(), rows[-1]["step"], servers)

    def look(self, rows: list[dict[str, Any]]) -> None:
        """Notes the first step after it, and which servers were still there."""
        after = [row for row in rows if row["time"] > self.at]
        if self.next_step is None and after:
            self.next_step = after[0]["step"], after[0]["time"]
            self.same = tuple(name for name, server in self.servers.items() if _alive(server))

    def report(self, folder: Path, line: Callable[[bool, str], None]) -> None:
        """One line a check; ``folder`` is that of the run."""
        restarts = json.loads((folder / "run.json").read_text(encoding="utf-8")).get("restarts", [])
        line(len(restarts) == 1, f"kill -9 to rank 0, process {self.pid}, after step {self.step}: {len(restarts)} restart")
        for name, server in self.servers.items():
            taken = _said(folder, rf"{name} \(process {server.pid}\) is taken over")
            asked = [at for at, _ in _said(folder, f"server {name}: new → starting")]
            serves = [at for at, _ in _said(folder, f"server {name}: stale → healthy")]
            good = name in self.same and len(taken) == 1 and len(asked) == len(serves) == 2
            told = ", then ".join(f"{end - begin:.1f} s" for begin, end in zip(asked, serves, strict=False))
            told += (
                f", {serves[-1] - self.at:.1f} s after the kill" if good else ", which are not one start and one take-over"
            )
            line(good, f"{name} served after {told}; the same process {server.pid}: {'yes' if name in self.same else 'NO'}")
        number, at = self.next_step or (0, self.at)
        line(self.next_step is not None, f"the next step, {number}, was done {at - self.at:.1f} s after the kill")


def _alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _rank_0(command: int) -> psutil.Process | None:
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(command).children():
            with contextlib.suppress(psutil.Error):
                if child.environ().get("RANK") == "0":
                    return child
    return None


def _said(folder: Path, words: str) -> list[tuple[float, re.Match[str]]]:
    """Time and match of each line of the fleet's in the log that begins with these words."""
    pattern = re.compile(words)
    found = []
    for line in (folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines():
        at, told, said = line.partition(" INFO tandem.fleet: ")
        if told and (match := pattern.match(said)):
            found.append((datetime.strptime(at, "%Y-%m-%d %H:%M:%S,%f").timestamp(), match))
    return found
