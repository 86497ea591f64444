"""Names of other systems for what a key of ours sets: the tables of coming_from.md, read when somebody writes such a name.

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
    """Our keys for it, some as ``key=value``; empty if there are none."""

    differs: str
    """The difference in meaning."""

    default: str = ""
    """The default there, as the page writes it: `off`, `1e-6`; empty if it is not told."""

    values: tuple[tuple[str, str], ...] = ()
    """Value there → value of our key, or ``key=value``."""

    alone: bool = True
    """False if its row has other names for the same keys of ours, so that its value is not simply theirs."""

    section: str = ""
    """The class whose table it stands in, such as `SFTConfig`; empty in the table of the system."""


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
    """The names of one row: the n-th of theirs is the n-th of ours if there are as many, else all of ours. One that begins
    with a dot belongs to the section of the one before."""
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
    """Says whose name ``key`` is, which of ``keys`` it stands for, and the page that explains it; empty if it is nobody's.

    A name that one of ``keys`` ends with too, or that everybody uses, is nobody's in particular.
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
    """The certainty that ``key`` is this name: the same, the same with more before it, or a part of it; 0: it is not."""
    if name == key and ("." in name or name not in own):
        return 1000
    if name.rpartition(".")[2] in own:
        return 0
    if key.endswith(f".{name}"):
        return 10 + len(name)
    return 1 if name.endswith(f".{key}") else 0


if __name__ == "__main__":
    print(PAGE.read_text(encoding="utf-8"), end="")
