"""Other systems' names for Tandem's keys: the tables of coming_from.md, which are read when a user writes such a name.

The page is data of the package; docs/coming_from.md is a copy, made by python -m tandem.config.coming_from.
"""

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tandem.config.errors import OTHER_WORDS

PAGE = Path(__file__).with_suffix(".md")

_CELLS = re.compile(r"(?<!\\) ?\| ?")
_THEIRS = re.compile(r"`-{0,2}(\.?[a-z][\w.]*\*?)`(?: \(([^;,)]*))?")
_OURS = re.compile(r"`([a-z_.0-9]+(?:=\w+)?)`(?: \([^)]*\))?")
_LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")
_VALUES = re.compile(r"`(?:(\w+)=)?([\w+-]+)` is `([^`]+)`")


class ForeignName(NamedTuple):
    """A name of another system.

    Example: ``ForeignName("verl", "rollout.n", ("gconfig.n_samples",), "")``
    """

    system: str
    name: str
    ours: tuple[str, ...]
    """Tandem's keys for it, some as ``key=value``; empty if there are none."""

    differs: str
    """The difference in meaning."""

    default: str = ""
    """The other system's default as the page writes it: `off`, `1e-6`; empty if the page does not say."""

    values: tuple[tuple[str, str], ...] = ()
    """The other system's value → value of Tandem's key, or ``key=value``."""

    alone: bool = True
    """False if other names in its row stand for the same keys, so that its value cannot be copied alone."""

    section: str = ""
    """The class whose table lists it, such as `SFTConfig`; empty in the system's main table."""


@functools.cache
def foreign_names() -> tuple[ForeignName, ...]:
    """All names of the page, in its order."""
    found: list[ForeignName] = []
    system = section = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            system, section = line.removeprefix("## "), ""
        elif line.startswith("### "):
            section = line.removeprefix("### ").strip("`")
        cells = _CELLS.split(line.strip().removeprefix("|").removesuffix("|").strip(" "))
        if system and line.startswith("|") and len(cells) == 3 and "Tandem" not in cells[1]:
            found += [f._replace(section=section) for f in _of_row(system, *cells)]
    return tuple(found)


def _of_row(system: str, theirs: str, ours: str, differs: str) -> list[ForeignName]:
    """The names of one row. With equally many names on both sides the n-th stands for the n-th; otherwise each stands for
    all. A name that begins with a dot belongs to the section of the name before it."""
    names, keys = _THEIRS.findall(theirs), tuple(_OURS.findall(ours))
    told = _LINK.sub(r"\1", differs).replace("`", "").replace("**", "").strip()
    alike, values = len(names) == len(keys), _VALUES.findall(differs)
    found: list[ForeignName] = []
    for i, (name, default) in enumerate(names):
        last = name.rpartition(".")[2]
        whole = found[-1].name.rpartition(".")[0] + name if name.startswith(".") else name
        own = tuple((value, ours) for of, value, ours in values if of == last or (not of and len(names) == 1))
        found.append(ForeignName(system, whole, keys[i : i + 1] if alike else keys, told, default, own, alike))
    return found


def hint(key: str, keys: Sequence[str]) -> str:
    """Says which system calls a key ``key``, which of ``keys`` it means, and where it is explained; empty if no system does.

    Empty also for a name that every system uses, or that is the end of one of ``keys``.
    """
    own, there_are = {k.rpartition(".")[2] for k in keys} | OTHER_WORDS.keys(), set(keys)
    known = {k for f in foreign_names() for k in f.ours if _with_parent(k) & there_are}  # a knob's parent is its choice
    fit = [f for f in foreign_names() if not f.ours or known & set(f.ours)]
    closeness = {f: _closeness(f.name, key, own) for f in fit}
    closest = max(closeness.values(), default=0)
    if closest == 0:
        return ""
    there = [f for f in fit if closeness[f] == closest]
    first = there[0]
    owners = " and ".join(dict.fromkeys(f"{f.system}'s" for f in there if f.ours == first.ours))
    ours = " ".join(k if "=" in k else f"{k}=…" for k in dict.fromkeys(first.ours) if k in known)
    why = f" ({first.differs})" if first.differs else ""
    said = f"{first.name} is {owners}: use {ours}" if ours else f"{first.name} is {owners}, and no key here{why}"
    return f"{said}; see docs/coming_from.md"


def _with_parent(ours: str) -> set[str]:
    key = ours.partition("=")[0]
    return {key, key.rpartition(".")[0]}


def _closeness(name: str, key: str, own: set[str]) -> int:
    """Rates how surely ``key`` is this name: highest if equal, lower if the name is the end of ``key`` or ends with it; 0:
    it is not."""
    if name == key and ("." in name or name not in own):
        return 1000
    if name.rpartition(".")[2] in own:
        return 0
    if key.endswith(f".{name}"):
        return 10 + len(name)
    return 1 if name.endswith(f".{key}") else 0


if __name__ == "__main__":
    print(PAGE.read_text(encoding="utf-8"), end="")
