"""The catalogue of metrics: unit, meaning, and advice for bad values; read from the tables of catalog.md.

catalog.md is part of the package; docs/metrics.md is a copy, printed by ``python -m tandem.tracking.catalog``. A part of a
name in angle brackets stands for any text: ``episodes/dropped/<reason>``.
"""

import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).with_suffix(".md")

_ROW = re.compile(r"\| `([^`]+)` \| (.*?) \| (.*?) \| (.*?) \|")


class Metric(NamedTuple):
    """One row of a table: the unit, meaning and advice of a metric."""

    unit: str
    meaning: str
    advice: str


def _sections() -> dict[str, dict[str, Metric]]:
    sections: dict[str, dict[str, Metric]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = sections[line.removeprefix("## ")] = {}
        elif row := _ROW.fullmatch(line):
            name, *cells = row.groups()
            section[name] = Metric(*cells)
    return sections


SECTIONS = _sections()
"""Heading of a section → its metrics by name."""

METRICS = {name: metric for section in SECTIONS.values() for name, metric in section.items()}


def explain(name: str) -> Metric | None:
    """Returns the row for a metric's name, or None if the tables have none, as for a workflow's own metrics."""
    if name in METRICS:
        return METRICS[name]
    for pattern, metric in METRICS.items():
        literal = re.sub(r"\\?<\w+\\?>", ".+", re.escape(pattern))
        if "<" in pattern and re.fullmatch(literal, name):
            return metric
    return None


def markdown() -> str:
    return PAGE.read_text(encoding="utf-8")


if __name__ == "__main__":
    print(markdown(), end="")
