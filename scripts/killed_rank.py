"""kill -9 to rank 0 of a run that starts its ranks again, and what became of its servers; for `train_on_servers.py`."""

import contextlib
import json
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import psutil

SETTINGS = ("recover.max_restarts=1", "checkpoint.every_steps=1")
_LOGGED = r"^(?P<time>\S+ \S+) INFO tandem\.fleet: (?P<name>\S+) \(process (?P<pid>\d+)\) is "


@dataclass
class KilledRank:
    """What was there when rank 0 was killed, and what came after."""

    pid: int
    at: float
    """When, in seconds since the epoch, as all times here."""

    step: int
    """The last that was done."""

    servers: dict[str, psutil.Process]
    """Name in the fleet → its process."""

    started_s: dict[str, float]
    """Name → from the birth of its process until it made a token."""

    next_step: tuple[int, float] | None = None
    """The first step that the rank in its place made, and when it was done."""

    same: tuple[str, ...] = ()
    """Servers whose processes were still there then."""

    @classmethod
    def kill(cls, command: "subprocess.Popen[bytes]", root: Path, rows: list[dict[str, Any]]) -> Self | None:
        """Kills it once a step is done and its checkpoint is whole; None before."""
        folder = next(iter(file.parent for file in root.glob("*/*/config.yaml")), None)
        if folder is None or not rows or not list(folder.glob("checkpoints/*/state/manifest.json")):
            return None
        rank = _rank_0(command.pid)
        kept = {name: (pid, time) for name, pid, time in _said(folder, "kept")}
        if rank is None or not kept:
            return None
        servers, started_s = {}, {}
        for name, (pid, time) in kept.items():
            servers[name] = psutil.Process(pid)
            started_s[name] = time - servers[name].create_time()
        rank.kill()
        return cls(rank.pid, datetime.now().timestamp(), rows[-1]["step"], servers, started_s)

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
        taken = {(name, pid): time for name, pid, time in _said(folder, "taken over")}
        table = [json.loads(text) for text in (folder / "fleet.jsonl").read_text(encoding="utf-8").splitlines()]
        for name, server in self.servers.items():
            time, same = taken.get((name, server.pid)), name in self.same
            serves = _first(table, name, self.at)
            line(
                same and time is not None and serves is not None,
                f"{name}: started in {self.started_s[name]:.1f} s; taken over {_after(time, self.at)} after the kill, with "
                f"weights after {_after(serves, self.at)}; the same process {server.pid}: {'yes' if same else 'NO'}",
            )
        number, time = self.next_step or (0, None)
        line(time is not None, f"the next step, {number}, was done {_after(time, self.at)} after the kill")


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


def _said(folder: Path, what: str) -> list[tuple[str, int, float]]:
    """Name, process and time of each line of the log that says that a server is ``what``."""
    log = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
    return [
        (one["name"], int(one["pid"]), datetime.strptime(one["time"], "%Y-%m-%d %H:%M:%S,%f").timestamp())
        for one in re.finditer(f"{_LOGGED}{what}", log, re.MULTILINE)
    ]


def _first(table: list[Mapping[str, Any]], name: str, since: float) -> float | None:
    times = (row["time"] for row in table if row["server"] == name and row["to"] == "healthy" and row["time"] > since)
    return next(times, None)


def _after(time: float | None, since: float) -> str:
    return "never" if time is None else f"{time - since:.1f} s"
