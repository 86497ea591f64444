"""The interface of launchers, and the function that supervises a launcher.

A launcher starts groups of ranks on one or several machines (`tandem launch ranks …`, which watches its ranks as on one
machine) and reports when all have ended. Each group writes the output of its ranks (`LOG`) and how it ended (`END`) into the
folder of the attempt. So the output, and the rank that failed first, are shown in the same way for every launcher. To add a
launcher, write a file in this folder with a subclass of `Launcher` under the name `LAUNCHER`.
"""

import argparse
import contextlib
import importlib
import json
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tandem.config.errors import ConfigError
from tandem.launch.local import EXIT_INTERRUPTED, each_request_once
from tandem.launch.watch import LaunchEnd

FOLDER = "launch"
"""Name of the subfolder of a run's folder that holds one folder for each attempt."""

LOG, END = "rank-{rank}.log", "end-{rank}.json"
ATTEMPT = "TANDEM_ATTEMPT"
"""Environment variable with the folder of the attempt."""

HELD = "TANDEM_HELD"
"""Environment variable that tells a group to end when its standard input is closed, because then its launcher has ended."""

SHOWN_LINES = 40
LOOK_S = 0.2


@dataclass(frozen=True)
class LaunchJob:
    """One run for a launcher to start."""

    name: str
    folder: Path
    """The folder `FOLDER` in the run's folder, as an absolute path."""

    words: tuple[str, ...]
    """The configuration or the script with its overrides, as after ``tandem launch NAME``."""

    ranks: int
    grace_s: float = 30.0
    max_restarts: int = 0
    prefix: tuple[str, ...] = ()
    """A program with arguments that starts each group, such as ``("nice", "-n", "5")``. It must replace itself by the
    group's command, as `exec` does, or pass on signals and standard input."""

    def command(self, python: str = sys.executable) -> list[str]:
        """Returns the command of one group. ``python``: the interpreter."""
        return [*self.prefix, python, "-P", "-m", "tandem", "launch", "ranks", *self.words]


class Launcher(ABC):
    """Starts the groups of its jobs, and reports when they have ended."""

    detaches = False
    """True if jobs go on after this process has ended."""

    restarts = False
    """True if `start` may be called again after a failure; otherwise the launcher restarts jobs itself, or never."""

    def __init__(self, jobs: Sequence[LaunchJob], options: argparse.Namespace):
        """Starts nothing. ``options``: values of the options from `add_arguments`. Raises `ConfigError` for invalid jobs or
        options."""
        self.jobs, self.options = jobs, options

    @staticmethod
    def add_arguments(parser: Any) -> None:
        """Adds the launcher's own options."""

    @abstractmethod
    def describe(self) -> str:
        """Describes as text what `start` would start."""

    @abstractmethod
    def start(self) -> None:
        """Starts all jobs. Raises `TandemError`."""

    @abstractmethod
    def poll(self) -> int | None:
        """Returns None while a job runs; then the exit status: 0, or that of a failed job."""

    @abstractmethod
    def signal(self, number: int) -> None:
        """Sends a signal to all ranks."""

    @abstractmethod
    def attempt(self, job: LaunchJob) -> Path | None:
        """Returns the folder of the job's newest attempt, or None if it has not started."""

    def groups(self, job: LaunchJob) -> Sequence[int]:
        """Returns the first rank of each of the job's groups. By default each rank is a separate group."""
        return range(job.ranks)

    def close(self) -> None:
        """Ends jobs that still run, unless the launcher detaches, and releases resources; idempotent."""


def launcher_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def launcher_class(name: str) -> type[Launcher]:
    return importlib.import_module(f"{__name__}.{name}").LAUNCHER


def start_group(command: list[str], attempt: Path, first: int, variables: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Starts a group of ranks on this machine; the group ends when its standard input is closed.

    Args:
        command: the command of the group.
        attempt: the folder of the attempt, which gets the group's log.
        first: number of the group's first rank.
        variables: further environment variables for the group.
    """
    with (attempt / LOG.format(rank=first)).open("wb") as log:
        return subprocess.Popen(
            command,
            env=os.environ | variables | {ATTEMPT: str(attempt), HELD: "1", "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the group only through this process, once
        )


def new_attempt(job: LaunchJob) -> Path:
    """Creates the folder of a new attempt, which only this user can read."""
    job.folder.mkdir(parents=True, exist_ok=True)
    numbers = (path.name.rpartition("-")[2] for path in job.folder.glob("attempt-*"))
    number = 1 + max((int(text) for text in numbers if text.isdecimal()), default=0)
    while True:
        folder = job.folder / f"attempt-{number}"
        with contextlib.suppress(FileExistsError):  # another machine has just created this folder
            folder.mkdir(mode=0o700)
            return folder
        number += 1


def write_end(folder: Path, group: int, code: int, ended: LaunchEnd | None) -> None:
    """Writes how a group ended into the attempt's folder.

    Args:
        folder: the folder of the attempt.
        group: number of the group's first rank.
        code: exit status of the group.
        ended: the failure, if it failed.
    """
    end = ended or LaunchEnd(code, rank=group, may_pass=True, at=time.time())
    facts = {name: getattr(end, name) for name in ("rank", "at", "may_pass", "cause")}
    partial = folder / f".{END.format(rank=group)}"
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        json.dump({"group": group, "code": code} | facts, file)
    partial.rename(folder / END.format(rank=group))


def ends(folder: Path | None) -> list[Mapping[str, Any]]:
    """Reads the ends of the groups of an attempt; the group that failed first comes first."""
    group_ends = []
    for path in folder.glob(END.format(rank="*")) if folder is not None else ():
        with contextlib.suppress(OSError, ValueError):
            group_ends.append(json.loads(path.read_text(encoding="utf-8")))
    return sorted(group_ends, key=lambda end: (end["code"] in (0, EXIT_INTERRUPTED), end["at"], end["group"]))


def outcome(folder: Path | None, code: int) -> int:
    """Returns the exit status of an attempt: that of the first group that failed, otherwise ``code`` from the launcher."""
    codes = [end["code"] for end in ends(folder)]
    return next((status for status in codes if status not in (0, EXIT_INTERRUPTED)), code or max(codes, default=0))


def explain(folder: Path | None, groups: Sequence[int]) -> str:
    """Describes a failed attempt: the rank that failed first, the last lines of its log, and the groups that wrote no end.
    ``groups``: the first rank of each group."""
    if folder is None:
        return "it never started"
    group_ends = ends(folder)
    missing = sorted(set(groups) - {end["group"] for end in group_ends})
    failed = [end for end in group_ends if end["code"] not in (0, EXIT_INTERRUPTED)]
    unknown = {"group": (missing or groups)[0], "rank": (missing or groups)[0], "cause": ""}
    first = failed[0] if failed else unknown
    log = folder / LOG.format(rank=first["group"])
    log_lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    lines = [f"rank {first['rank']} failed first: {first['cause'] or 'it left no message'}", f"the end of {log}:"]
    lines += [f"  {line}" for line in log_lines[-SHOWN_LINES:]]
    if missing:
        numbers = ", ".join(map(str, missing))
        lines.append(f"killed with their supervisors, or on a machine that cannot be reached any more: rank {numbers}")
    return "\n".join(lines)


def logs(folder: Path) -> list[Path]:
    """Returns the logs of an attempt, in order of ranks."""
    return sorted(folder.glob(LOG.format(rank="*")), key=lambda path: int(path.stem.rpartition("-")[2]))


class LogReader:
    """Copies the log of each job's first group to ``out`` as it grows."""

    def __init__(self, out: TextIO):
        self._out = out
        self._read: dict[Path, int] = {}

    def show(self, folder: Path | None, name: str = "") -> None:
        """Copies new text of an attempt's log. ``name``: a prefix of each line; with it only complete lines are copied."""
        paths = logs(folder) if folder is not None else []
        if not paths:
            return
        with (path := paths[0]).open("rb") as file:
            file.seek(self._read.get(path, 0))
            new = file.read()
        text = new[: new.rfind(b"\n") + 1] if name else new
        self._read[path] = self._read.get(path, 0) + len(text)
        for line in text.decode(errors="replace").splitlines(keepends=True):
            print(f"{name}{line}", end="", file=self._out, flush=True)


def supervise(launcher: Launcher, out: TextIO, *, every_s: float = LOOK_S) -> int:
    """Starts the jobs, shows their output until they end, and returns the exit status. Ends all jobs if an error occurs.

    After Ctrl-C or SIGTERM (as `KeyboardInterrupt`) jobs save and end; a second signal ends them at once. With
    `Launcher.detaches`, a signal only ends this function and the jobs go on.
    """
    reader, interrupted, restarts = LogReader(out), False, 0
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
                    max_restarts = launcher.jobs[0].max_restarts if launcher.restarts and not interrupted else 0
                    if code in (0, EXIT_INTERRUPTED) or not (_explained(launcher) and restarts < max_restarts):
                        return code
                    restarts += 1
                    print(f"starting again, restart {restarts} of {max_restarts}", file=sys.stderr)
                    launcher.start()
                except KeyboardInterrupt:
                    if interrupted or launcher.detaches:
                        raise
                    interrupted = True
                    launcher.signal(signal.SIGTERM)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        launcher.close()


def _explained(launcher: Launcher) -> bool:
    """Prints why jobs failed. Returns True if a restart may help all of them."""
    may_pass = True
    for job in launcher.jobs:
        folder = launcher.attempt(job)
        if folder is None or outcome(folder, 0) or len(ends(folder)) < len(launcher.groups(job)):
            print(f"error: {job.name}: {explain(folder, launcher.groups(job))}", file=sys.stderr)
            may_pass = may_pass and all(end["may_pass"] for end in ends(folder))
    return may_pass


def needed(program: str, what: str) -> str:
    """Returns the path of a program. Raises `ConfigError` if it is missing; ``what``: the advice in the message."""
    path = shutil.which(program)
    if path is None:
        raise ConfigError(f"there is no {program} on this machine: {what}")
    return path
