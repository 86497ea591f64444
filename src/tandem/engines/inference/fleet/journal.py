"""What happened to each server: the log, and the rows of `fleet.jsonl`, see docs/fleet.md."""

import json
import logging
import time
from pathlib import Path

from tandem.engines.inference.fleet.health import Health, State

logger = logging.getLogger("tandem.fleet")


class Journal:
    """Begins the file anew; None writes to the log alone."""

    def __init__(self, file: Path | None):
        self._file = file
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("", encoding="utf-8")

    def write(
        self, server: str, before: str, after: Health, why: str, moved: int, silent_s: float | None, *, alarming: bool
    ) -> None:
        """One change: the state before (empty: it is new), requests that moved, seconds since its last token.

        ``alarming``: trouble is a warning; at the fleet's own end it is none.
        """
        trouble = after.state in (State.SUSPECT, State.FENCED)
        logger.log(
            logging.WARNING if trouble and alarming else logging.INFO,
            "server %s: %s → %s (%s)%s",
            server,
            before or "new",
            after.state,
            why,
            f", {moved} requests move" if moved else "",
        )
        if self._file is None:
            return
        row = {
            "time": round(time.time(), 3),
            "server": server,
            "from": before,
            "to": after.state,
            "why": why,
            "moved": moved,
            "incarnation": after.incarnation,
        }
        if silent_s is not None:
            row["silent_s"] = round(silent_s, 3)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
