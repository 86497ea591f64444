"""The table of hostile programs, read from hostile.txt."""

import re
from dataclasses import dataclass
from pathlib import Path

TEXT = Path(__file__).with_name("hostile.txt")


@dataclass(frozen=True)
class Hostile:
    """One program."""

    group: str
    name: str
    source: str
    ends: frozenset[str]
    wall_s: float


def read_table() -> list[Hostile]:
    """All of them, each with the prelude before it."""
    table = []
    for section in TEXT.read_text().split("\n## ")[1:]:
        group, _, programs = section.partition("\n")
        for name, ends, wall_s, source in re.findall(r"^# (.+) \| (.+) \| (.+) s\n((?:(?!# ).*\n?)*)", programs, re.M):
            table.append(Hostile(group, name, source.strip() + "\n", frozenset(ends.split()), float(wall_s)))
    prelude, *rest = table
    return [Hostile(h.group, h.name, prelude.source + h.source, h.ends, h.wall_s) for h in rest]
