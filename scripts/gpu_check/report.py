"""The checks' table and the page of results."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import resolve_name
from typing import Any

FIRST_S = 300


@dataclass(frozen=True)
class Check:
    """A line of the plan."""

    path: str
    """Module and function; a leading dot stands for this package. The function takes a `Place` and yields lines."""

    what: str
    about_s: int
    limit_s: int
    """It is killed after this time."""

    @property
    def name(self) -> str:
        """The function."""
        return self.path.rpartition(".")[2]

    @property
    def module(self) -> str:
        """The module, which is imported by the check's process."""
        return resolve_name(self.path.rpartition(".")[0], __package__)


def plan(checks: Sequence[Check]) -> str:
    """When each check begins if those before took as long as was estimated, its limit, and what it is."""
    lines, begins = ["The first five minutes (times are estimates):"], 0
    for check in checks:
        if begins >= FIRST_S and "Then:" not in lines:
            lines.append("Then:")
        lines.append(f"  {begins // 60}:{begins % 60:02d}  {check.name:25} at most {check.limit_s:3} s  {check.what}")
        begins += check.about_s
    return "\n".join(lines)


def page(rows: Sequence[dict[str, Any]], checks: Sequence[Check]) -> str:
    """Markdown: a table a check, in order; ``rows`` are the lines of results.jsonl."""
    ends = {row["check"]: row for row in rows if "ended" in row}
    to_come = [check.name for check in checks if check.name not in ends]
    lines = ["# Results of `python -m scripts.gpu_check`", "", time.strftime("%Y-%m-%d %H:%M UTC.", time.gmtime())]
    lines += ["", f"Not run: {', '.join(to_come)}."] if to_come else []
    for check in checks:
        if check.name in ends:
            end = ends[check.name]
            lines += ["", f"## {check.name}: {check.what}", "", f"{end['ended']}, {end['seconds']} s", ""]
            lines += ["| what | found | must be | |", "|---|---|---|---|"]
            marks = {True: "yes", False: "**NO**", None: ""}
            found = [row for row in rows if row["check"] == check.name and "what" in row]
            for row in found:
                cells = [*(_cell(row[key]) for key in ("what", "found", "limit")), marks[row["good"]]]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
