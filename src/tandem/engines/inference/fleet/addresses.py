"""The file, or the folder of files, that lists the attached servers: read by the fleet, written by `tandem fleet`.

Each line is ``KIND=URL``; ``-NAME`` asks a server that the run started itself to leave; ``#`` begins a comment.
"""

import fcntl
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tandem.api.shared_files import write_atomically
from tandem.config.errors import ConfigError
from tandem.config.fleet import Address, parse_address

JOURNAL_NAME = "fleet.jsonl"

DEFAULT_NAME = "servers"
"""The file in the run folder that is watched unless `rollout.fleet.watch` names another."""


@dataclass(frozen=True)
class Wanted:
    """The contents of the lines: servers to attach, and names of servers that are asked to leave."""

    servers: tuple[Address, ...] = ()
    leaving: frozenset[str] = frozenset()
    problems: tuple[str, ...] = ()
    """Lines that cannot be read, each with the reason; other lines are not affected."""


def read_addresses(path: Path) -> Wanted:
    """Reads the file, or all files of the folder whose names do not begin with a dot. A missing file is empty.

    Raises:
        OSError: a file cannot be read.
    """
    files = sorted(f for f in path.iterdir() if f.is_file() and not f.name.startswith(".")) if path.is_dir() else [path]
    servers: dict[Address, None] = {}
    leaving, problems = set(), []
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            continue
        for number, line in enumerate(lines, 1):
            text = line.partition("#")[0].strip()
            if text.startswith("-"):
                leaving.add(text[1:].strip())
            elif text:
                try:
                    servers[parse_address(text)] = None
                except ConfigError as error:
                    problems.append(f"{file.name}, line {number}: {error}")
    return Wanted(tuple(a for a in servers if str(a) not in leaving), frozenset(leaving), tuple(problems))


def add_address(path: Path, address: Address) -> bool:
    """Adds a line (in a folder: a file). Returns False if the address was listed already."""
    with _locked(path):
        if address in read_addresses(path).servers:
            return False
        _drop(path, f"-{address}")
        _append(path, str(address))
        return True


def remove_address(path: Path, name: str) -> bool:
    """Removes the lines of an attached server, named ``KIND=URL`` or by its URL alone. Returns False if there were none."""
    with _locked(path):
        names = [str(a) for a in read_addresses(path).servers if name.rstrip("/") in (str(a), a.url)]
        for text in names:
            _drop(path, text)
        return bool(names)


def ask_to_leave(path: Path, name: str) -> None:
    """Adds the line that asks a server to leave: one that the run started, or that `rollout.fleet.servers` names."""
    with _locked(path):
        if name not in read_addresses(path).leaving:
            _append(path, f"-{name}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Admits one writer at a time. The lock is a hidden file beside the path."""
    folder = path if path.is_dir() else path.parent
    with (folder / f".{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _append(path: Path, line: str) -> None:
    if path.is_dir():
        write_atomically(path / re.sub(r"[^A-Za-z0-9]+", "-", line).strip("-"), f"{line}\n")
        return
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    write_atomically(path, before + ("" if not before or before.endswith("\n") else "\n") + f"{line}\n")


def _drop(path: Path, wanted: str) -> None:
    for file in [f for f in path.iterdir() if f.is_file() and f.name[0] != "."] if path.is_dir() else [path]:
        if not file.exists():
            continue
        lines = file.read_text(encoding="utf-8").splitlines()
        others = [line for line in lines if not _says(line, wanted)]
        if not others and path.is_dir():
            file.unlink()
        elif others != lines:
            write_atomically(file, "".join(f"{line}\n" for line in others))


def _says(line: str, wanted: str) -> bool:
    text = line.partition("#")[0].strip()
    return text == wanted or (not text.startswith("-") and text.rstrip("/") == wanted)
