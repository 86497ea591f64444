"""Requests for changes of a run that goes on: files in its folder.

`tandem control` writes a request, `control/ID.request`; the run answers with `control/ID.answer`, and writes each change
that it makes into `control.jsonl`, with the step before which it was made. A request is there until it has been answered,
and is known by its name: it is made once, also if the run is killed in between.
"""

import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.api.lines import append_line, sync
from tandem.config.changes import Change
from tandem.state.existing import rows_of
from tandem.state.run_folder import write_atomically

FOLDER = "control"
JOURNAL = "control.jsonl"


@dataclass(frozen=True)
class Request:
    """A request for a change; it may be older than the last kill of the run."""

    id: str
    change: Change | None
    """The change; None if the file cannot be read."""

    step: int | None = None
    """The step before which it was made in this run already, and is made again because the run goes on from a checkpoint."""

    @property
    def recorded(self) -> bool:
        """True if the change was made before the run was killed."""
        return self.step is not None


def ask(folder: Path, change: Change) -> str:
    """Asks the run in ``folder`` for a change; returns the request's name. Names are in the order of asking."""
    name = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
    mailbox = folder / FOLDER
    mailbox.mkdir(exist_ok=True)
    text = json.dumps({"action": change.action, "value": change.value}, ensure_ascii=False)
    write_atomically(mailbox / f"{name}.request", f"{text}\n")
    return name


def requests(folder: Path) -> list[Request]:
    """The requests that wait, oldest first."""
    mailbox = folder / FOLDER
    files = sorted(mailbox.glob("[0-9]*.request")) if mailbox.is_dir() else []
    return [Request(file.stem, _read(file)) for file in files]


def _read(file: Path) -> Change | None:
    try:
        change = json.loads(file.read_text(encoding="utf-8"))
        return Change(str(change["action"]), str(change["value"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # also a ConfigError: nothing of that name
        return None


def changes(folder: Path, run: str | None = None, reward: str | None = None) -> list[dict[str, Any]]:
    """The changes that a run has made, oldest first: ``step``, ``change``, ``reward``. ``run``: its own name; ``reward``:
    the one of its configuration, which the changes are changes of; None takes those of any."""
    rows = (row for row in rows_of(folder / JOURNAL) if {"step", "id", "action", "value"} <= set(row))
    return [row for row in rows if run in (None, row.get("run")) and reward in (None, row.get("of", reward))]


def take_answer(folder: Path, name: str, timeout_s: float, pause_s: float = 0.1) -> dict[str, Any] | None:
    """Waits for the answer to a request, and takes it away; None if there was none in time."""
    file, until = folder / FOLDER / f"{name}.answer", time.monotonic() + timeout_s
    while not file.is_file():
        if time.monotonic() > until:
            return None
        time.sleep(pause_s)
    answer: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    file.unlink(missing_ok=True)
    return answer


class Mailbox:
    """The run's side, on rank 0."""

    def __init__(self, folder: Path, run: str, reward: str):
        """``run``: its own name, which another run in the same folder does not have. ``reward``: with which it began, or now
        goes on; changes of another one are over."""
        self._folder, self._run, self._reward = folder, run, reward
        self._made = sorted(changes(folder, run, reward), key=lambda row: int(row["step"]))
        self._next = 0

    def due(self, step: int) -> Iterator[Request]:
        """Changes to make before ``step``: first those that were made there before a kill, then those that are asked for
        now."""
        while self._next < len(self._made) and int(self._made[self._next]["step"]) <= step:
            row = self._made[self._next]
            self._next += 1
            yield Request(str(row["id"]), Change(str(row["action"]), str(row["value"])), int(row["step"]))
        known = {str(row["id"]): row for row in self._made}
        for request in requests(self._folder):
            if request.id in known:  # made, and the run was killed before it could say so
                self.answer(request.id, {"step": known[request.id]["step"], "reward": known[request.id].get("reward")})
            else:
                yield request

    def record(self, request: Request, step: int, reward: str) -> None:
        """Writes down that the change counts from ``step`` on; ``reward``: as it is now.

        Raises:
            NotWritten: the disk refuses.
        """
        assert request.change is not None, "what cannot be read is refused"
        change = {"action": request.change.action, "value": request.change.value}
        row = {"step": step, "id": request.id, "run": self._run, "of": self._reward, **change, "reward": reward}
        row["time"] = round(time.time(), 3)
        path = self._folder / JOURNAL
        append_line(path, json.dumps(row, ensure_ascii=False))
        sync(path)
        self._made.insert(self._next, row)  # a run that went back has changes of later steps before it
        self._next += 1

    def answer(self, name: str, answer: dict[str, Any]) -> None:
        """Says what became of a request, which is gone then."""
        mailbox = self._folder / FOLDER
        write_atomically(mailbox / f"{name}.answer", json.dumps(answer, ensure_ascii=False) + "\n")
        (mailbox / f"{name}.request").unlink(missing_ok=True)
