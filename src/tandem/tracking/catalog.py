"""Every metric: its unit, what it is, and what to do when it looks wrong; read from the tables of catalog.md.

The page is data of the package; docs/metrics.md is a copy, made by python -m tandem.tracking.catalog. A name may hold one
part in angle brackets, which stands for any text: ``episodes/dropped/<reason>``.
"""

import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).with_suffix(".md")

_ROW = re.compile(r"\| `([^`]+)` \| (.*?) \| (.*?) \| (.*?) \|")


class Metric(NamedTuple):
    """One row of a table."""

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
"""Heading → metrics by name."""

METRICS = {name: metric for section in SECTIONS.values() for name, metric in section.items()}


def explain(name: str) -> Metric | None:
    """The row for a metric's name; None where the table has none (a workflow's own metrics, for example)."""
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
