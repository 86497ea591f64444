"""Requests to change a running run, as files in its folder.

`tandem control` writes a request, `control/ID.request`. The run answers in `control/ID.answer`, and records each change in
`control.jsonl`, with the step before which it was made. A request's file remains until it is answered, and its id ensures
that the change is made only once, even if the run is killed in between.
"""

import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.api.shared_files import append_line, sync, write_atomically
from tandem.config.recipes import Change
from tandem.state.existing import rows_of

FOLDER = "control"
JOURNAL = "control.jsonl"


@dataclass(frozen=True)
class Request:
    """A request for a change; it may have been sent before the run was last killed."""

    id: str
    change: Change | None
    """The change; None if the file cannot be read."""

    step: int | None = None
    """The step before which this change was already made, if it must be repeated because the run was resumed; else None."""

    @property
    def recorded(self) -> bool:
        """True if the change was made before the run was killed."""
        return self.step is not None


def ask(folder: Path, change: Change) -> str:
    """Requests a change of the run in ``folder``; returns the request's name. Names sort in the order of requests."""
    name = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
    mailbox = folder / FOLDER
    mailbox.mkdir(exist_ok=True)
    text = json.dumps({"action": change.action, "value": change.value}, ensure_ascii=False)
    write_atomically(mailbox / f"{name}.request", f"{text}\n")
    return name


def requests(folder: Path) -> list[Request]:
    """Returns the pending requests, oldest first."""
    mailbox = folder / FOLDER
    files = sorted(mailbox.glob("[0-9]*.request")) if mailbox.is_dir() else []
    return [Request(file.stem, _read(file)) for file in files]


def _read(file: Path) -> Change | None:
    try:
        change = json.loads(file.read_text(encoding="utf-8"))
        return Change(str(change["action"]), str(change["value"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # includes ConfigError: an unknown action
        return None


def changes(folder: Path, run: str | None = None, reward: str | None = None) -> list[dict[str, Any]]:
    """Returns the changes that a run has made, oldest first, as the rows of `control.jsonl`. ``run``: only those of the run
    with this id; ``reward``: only those of a run that began with this reward. None: all."""
    rows = (row for row in rows_of(folder / JOURNAL) if {"step", "id", "action", "value"} <= set(row))
    return [row for row in rows if run in (None, row.get("run")) and reward in (None, row.get("of", reward))]


def take_answer(folder: Path, name: str, timeout_s: float, pause_s: float = 0.1) -> dict[str, Any] | None:
    """Waits for the answer to a request, removes its file and returns it; None after ``timeout_s`` seconds."""
    file, until = folder / FOLDER / f"{name}.answer", time.monotonic() + timeout_s
    while not file.is_file():
        if time.monotonic() > until:
            return None
        time.sleep(pause_s)
    answer: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    file.unlink(missing_ok=True)
    return answer


class Mailbox:
    """The run's side of the requests, on rank 0."""

    def __init__(self, folder: Path, run: str, reward: str):
        """``run``: the run's id, which differs from that of another run in the same folder. ``reward``: the configured
        reward; earlier changes of another reward are not repeated."""
        self._folder, self._run, self._reward = folder, run, reward
        self._made = sorted(changes(folder, run, reward), key=lambda row: int(row["step"]))
        self._next = 0

    def due(self, step: int) -> Iterator[Request]:
        """Yields the changes to make before ``step``: first those that were made up to there before a kill, then new
        requests."""
        while self._next < len(self._made) and int(self._made[self._next]["step"]) <= step:
            row = self._made[self._next]
            self._next += 1
            yield Request(str(row["id"]), Change(str(row["action"]), str(row["value"])), int(row["step"]))
        known = {str(row["id"]): row for row in self._made}
        for request in requests(self._folder):
            if request.id in known:  # made already, but the run was killed before it answered
                self.answer(request.id, {"step": known[request.id]["step"], "reward": known[request.id].get("reward")})
            else:
                yield request

    def record(self, request: Request, step: int, reward: str) -> None:
        """Records in `control.jsonl` that a change applies from ``step`` on. ``reward``: the changed reward.

        Raises:
            NotWritten: writing failed.
        """
        assert request.change is not None, "unreadable requests are refused"
        change = {"action": request.change.action, "value": request.change.value}
        row = {"step": step, "id": request.id, "run": self._run, "of": self._reward, **change, "reward": reward}
        row["time"] = round(time.time(), 3)
        path = self._folder / JOURNAL
        append_line(path, json.dumps(row, ensure_ascii=False))
        sync(path)
        self._made.insert(self._next, row)  # a resumed run may have recorded changes of later steps
        self._next += 1

    def answer(self, name: str, answer: dict[str, Any]) -> None:
        """Writes the answer to a request and removes the request."""
        mailbox = self._folder / FOLDER
        write_atomically(mailbox / f"{name}.answer", json.dumps(answer, ensure_ascii=False) + "\n")
        (mailbox / f"{name}.request").unlink(missing_ok=True)
