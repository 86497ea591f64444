"""The contract of launchers, and the supervisor above them.

A launcher starts groups of ranks somewhere (`tandem launch ranks …`, which watches its ranks as on one machine) and says
when all have ended. Each group writes into the folder of the attempt: the words of its ranks (`LOG`), and its end (`END`).
So what is shown, and who failed first, is the same for every launcher. A new one is a file in ``launchers/`` with a subclass
of `Launcher`, its `LAUNCHER`.
"""

import argparse
import contextlib
import importlib
import json
import os
import pkgutil
import shutil
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tandem.config.errors import ConfigError
from tandem.launch import launchers
from tandem.launch.requests import each_request_once
from tandem.launch.watch import LaunchEnd

FOLDER = "launch"
"""In the run's folder: one folder an attempt."""

LOG, END = "rank-{rank}.log", "end-{rank}.json"
ATTEMPT = "TANDEM_ATTEMPT"
"""The variable that names the folder of the attempt."""

HELD = "TANDEM_HELD"
"""The variable that tells a group to end when its standard input is closed: its launcher is gone."""

SHOWN_LINES = 40
LOOK_S = 0.2
EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class LaunchJob:
    """One run, ready to be started."""

    name: str
    folder: Path
    """`FOLDER` of the run, absolute."""

    words: tuple[str, ...]
    """The configuration or the script, as after ``tandem launch NAME``."""

    ranks: int
    grace_s: float = 30.0
    max_restarts: int = 0
    prefix: tuple[str, ...] = ()
    """A program that starts each group, and its words: ``("nice", "-n", "5")``. It must become the command that it starts,
    as `exec` does, or pass signals and standard input on."""

    def command(self, python: str = sys.executable) -> list[str]:
        """The command of one group."""
        return [*self.prefix, python, "-P", "-m", "tandem", "launch", "ranks", *self.words]


class Launcher(ABC):
    """Starts the groups of its jobs, and knows when they have ended."""

    detaches = False
    """True if jobs go on without this process."""

    restarts = False
    """True if `start` may be called again after a failure; else the launcher restarts by itself, or never."""

    def __init__(self, jobs: Sequence[LaunchJob], options: argparse.Namespace):
        """``options``: the launcher's own. Starts nothing. Raises `ConfigError` for what cannot be."""
        self.jobs, self.options = jobs, options

    @staticmethod
    def add_arguments(parser: Any) -> None:
        """Adds the launcher's own options."""

    @abstractmethod
    def describe(self) -> str:
        """The text of what `start` would start."""

    @abstractmethod
    def start(self) -> None:
        """Starts all jobs. Raises `TandemError`."""

    @abstractmethod
    def poll(self) -> int | None:
        """Exit status once all have ended: 0, or that of a job that failed."""

    @abstractmethod
    def signal(self, number: int) -> None:
        """Passes a signal on to all ranks."""

    @abstractmethod
    def attempt(self, job: LaunchJob) -> Path | None:
        """The folder of the job's newest attempt, if it has begun."""

    def groups(self, job: LaunchJob) -> Sequence[int]:
        """The first ranks of the job's groups: each rank is a group of its own."""
        return range(job.ranks)

    def close(self) -> None:
        """Ends what is left; idempotent."""


def launcher_names() -> list[str]:
    return sorted(found.name for found in pkgutil.iter_modules(launchers.__path__))


def launcher_class(name: str) -> type[Launcher]:
    return importlib.import_module(f"{launchers.__name__}.{name}").LAUNCHER


def new_attempt(job: LaunchJob) -> Path:
    """An empty folder for this user alone."""
    job.folder.mkdir(parents=True, exist_ok=True)
    numbers = (one.name.rpartition("-")[2] for one in job.folder.glob("attempt-*"))
    number = 1 + max((int(one) for one in numbers if one.isdecimal()), default=0)
    while True:
        folder = job.folder / f"attempt-{number}"
        with contextlib.suppress(FileExistsError):  # another machine made it at this moment
            folder.mkdir(mode=0o700)
            return folder
        number += 1


def write_end(folder: Path, group: int, code: int, ended: LaunchEnd | None) -> None:
    """Writes how a group ended, by the number of its first rank. ``ended``: where it failed."""
    words = {"group": group, "code": code, "rank": group, "at": time.time(), "may_pass": True, "cause": ""}
    if ended is not None:
        words |= {"rank": ended.rank, "at": ended.at, "may_pass": ended.may_pass, "cause": ended.cause}
    partial = folder / f".{END.format(rank=group)}"
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        json.dump(words, file)
    partial.rename(folder / END.format(rank=group))


def ends(folder: Path | None) -> list[Mapping[str, Any]]:
    """The ends of the groups of an attempt; the first that failed comes first."""
    found = []
    for path in folder.glob(END.format(rank="*")) if folder is not None else ():
        with contextlib.suppress(OSError, ValueError):
            found.append(json.loads(path.read_text(encoding="utf-8")))
    return sorted(found, key=lambda end: (end["code"] in (0, EXIT_INTERRUPTED), end["at"], end["group"]))


def outcome(folder: Path | None, code: int) -> int:
    """Exit status of an attempt, from what its groups wrote; ``code``: what the launcher knows, where they wrote nothing."""
    found = [end["code"] for end in ends(folder)]
    return next((one for one in found if one not in (0, EXIT_INTERRUPTED)), code or max(found, default=0))


def explain(folder: Path | None, groups: Sequence[int]) -> str:
    """Who failed first, its last lines, and who left no word. ``groups``: their first ranks."""
    if folder is None:
        return "it never began"
    found = ends(folder)
    mute = sorted(set(groups) - {end["group"] for end in found})
    failed = [end for end in found if end["code"] not in (0, EXIT_INTERRUPTED)]
    nobody = {"group": (mute or groups)[0], "rank": (mute or groups)[0], "cause": ""}
    first = failed[0] if failed else nobody
    log = folder / LOG.format(rank=first["group"])
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    said = [f"rank {first['rank']} failed first: {first['cause'] or 'it left no word'}", f"the end of {log}:"]
    said += [f"  {line}" for line in lines[-SHOWN_LINES:]]
    if mute:
        said.append(f"killed with their supervisors, or on a machine that is gone: rank {', '.join(map(str, mute))}")
    return "\n".join(said)


def logs(folder: Path) -> list[Path]:
    """Logs of an attempt, by rank."""
    return sorted(folder.glob(LOG.format(rank="*")), key=lambda path: int(path.stem.rpartition("-")[2]))


class LogReader:
    """Copies the words of the first rank of each job as they come."""

    def __init__(self, out: TextIO):
        self._out = out
        self._read: dict[Path, int] = {}

    def show(self, folder: Path | None, name: str = "") -> None:
        """Copies what is new; ``name`` stands before each line."""
        there = logs(folder) if folder is not None else []
        if not there:
            return
        with (path := there[0]).open("rb") as file:
            file.seek(self._read.get(path, 0))
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1] if name else new
        self._read[path] = self._read.get(path, 0) + len(whole)
        for line in whole.decode(errors="replace").splitlines(keepends=True):
            print(f"{name}{line}", end="", file=self._out, flush=True)


def supervise(launcher: Launcher, out: TextIO, *, every_s: float = LOOK_S) -> int:
    """Starts the jobs, shows what they say, and ends all of them whatever happens; returns the exit status.

    Ctrl-C and SIGTERM (as `KeyboardInterrupt`) let them save and end, a second one ends them at once. Where jobs
    `Launcher.detaches`, it only leaves them alone.
    """
    reader, asked, restarts = LogReader(out), False, 0
    try:
        with each_request_once():
            launcher.start()
            while True:
                try:
                    code = launcher.poll()
                    for job in launcher.jobs:
                        reader.show(launcher.attempt(job), f"[{job.name}] " if len(launcher.jobs) > 1 else "")
                    if code is None:
                        time.sleep(every_s)
                        continue
                    most = launcher.jobs[0].max_restarts if launcher.restarts and not asked else 0
                    if code in (0, EXIT_INTERRUPTED) or not (_told(launcher) and restarts < most):
                        return code
                    restarts += 1
                    print(f"starting again, restart {restarts} of {most}", file=sys.stderr)
                    launcher.start()
                except KeyboardInterrupt:
                    if asked or launcher.detaches:
                        raise
                    asked = True
                    launcher.signal(signal.SIGTERM)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        launcher.close()


def _told(launcher: Launcher) -> bool:
    """Says why jobs failed; True if all of them may go better when they are started again."""
    passes = True
    for job in launcher.jobs:
        folder = launcher.attempt(job)
        if folder is None or outcome(folder, 0) or len(ends(folder)) < len(launcher.groups(job)):
            print(f"error: {job.name}: {explain(folder, launcher.groups(job))}", file=sys.stderr)
            passes = passes and all(end["may_pass"] for end in ends(folder))
    return passes


def needed(program: str, what: str) -> str:
    """The path of a program. Raises `ConfigError` where it is missing."""
    found = shutil.which(program)
    if found is None:
        raise ConfigError(f"there is no {program} on this machine: {what}")
    return found
