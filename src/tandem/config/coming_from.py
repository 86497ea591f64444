"""Names that are no keys of Tandem, for messages when a user writes one: other systems' names, and keys of older versions.

Other systems' names are read from the tables of coming_from.md. The page is a data file of the package; docs/coming_from.md
is a copy, made by python -m tandem.config.coming_from. Keys of older versions are read from removed.yaml; they are answered
for one version.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tandem.config.errors import OTHER_WORDS
from tandem.config.yaml_file import packaged


class Removed(NamedTuple):
    """The end of a key."""

    was: Any
    """The value that left all as it is now. A configuration that sets it is read as if it did not."""

    now: str
    """The behaviour now, and the remedy, for the message about any other value."""

    lasts: bool = False
    """True if the saved state of a run depends on the value: a run that began with another one cannot be resumed."""


REMOVED: Mapping[str, Removed] = {key: Removed(**end) for key, end in packaged("removed.yaml").items()}
"""Removed key → its end."""


PAGE = Path(__file__).with_suffix(".md")

_CELLS = re.compile(r"(?<!\\) ?\| ?")
_THEIRS = re.compile(r"`-{0,2}(\.?[a-z][\w.]*\*?)`(?: \(([^;,)]*))?")
_OURS = re.compile(r"`([a-z_.0-9]+(?:=\w+)?)`(?: \([^)]*\))?")
_LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")
_VALUES = re.compile(r"`(?:(\w+)=)?([\w+-]+)` is `([^`]+)`")


class ForeignName(NamedTuple):
    """A configuration key of another system.

    Example: ``ForeignName("verl", "rollout.n", ("gconfig.n_samples",), "")``
    """

    system: str
    name: str
    ours: tuple[str, ...]
    """Tandem's keys with the same meaning, some as ``key=value``; empty if there are none."""

    differs: str
    """The difference in meaning, as text."""

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
    """Returns all names of the page, in its order."""
    names: list[ForeignName] = []
    system = section = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            system, section = line.removeprefix("## "), ""
        elif line.startswith("### "):
            section = line.removeprefix("### ").strip("`")
        cells = _CELLS.split(line.strip().removeprefix("|").removesuffix("|").strip(" "))
        if system and line.startswith("|") and len(cells) == 3 and "Tandem" not in cells[1]:
            names += [name._replace(section=section) for name in _of_row(system, *cells)]
    return tuple(names)


def _of_row(system: str, theirs: str, ours: str, differs: str) -> list[ForeignName]:
    """Returns the names of one row. If both columns have equally many names, the n-th name means the n-th key; otherwise
    each name means all keys. A name that begins with a dot belongs to the section of the name before it."""
    names, keys = _THEIRS.findall(theirs), tuple(_OURS.findall(ours))
    text = _LINK.sub(r"\1", differs).replace("`", "").replace("**", "").strip()
    alike, values = len(names) == len(keys), _VALUES.findall(differs)
    row: list[ForeignName] = []
    for i, (name, default) in enumerate(names):
        last = name.rpartition(".")[2]
        whole = row[-1].name.rpartition(".")[0] + name if name.startswith(".") else name
        mapped = tuple((value, ours) for of, value, ours in values if of == last or (not of and len(names) == 1))
        row.append(ForeignName(system, whole, keys[i : i + 1] if alike else keys, text, default, mapped, alike))
    return row


def hint(key: str, keys: Sequence[str]) -> str:
    """Returns a text that says which system has a key ``key``, which of ``keys`` replaces it, and where this is explained.

    Empty if no system has such a key, if every system uses the name, or if one of ``keys`` ends with it.
    """
    endings, existing = {k.rpartition(".")[2] for k in keys} | OTHER_WORDS.keys(), set(keys)
    known = {k for f in foreign_names() for k in f.ours if _with_parent(k) & existing}  # a knob's parent is its component
    fit = [f for f in foreign_names() if not f.ours or known & set(f.ours)]
    closeness = {f: _closeness(f.name, key, endings) for f in fit}
    closest = max(closeness.values(), default=0)
    if closest == 0:
        return ""
    matches = [f for f in fit if closeness[f] == closest]
    first = matches[0]
    owners = " and ".join(dict.fromkeys(f"{f.system}'s" for f in matches if f.ours == first.ours))
    ours = " ".join(k if "=" in k else f"{k}=…" for k in dict.fromkeys(first.ours) if k in known)
    why = f" ({first.differs})" if first.differs else ""
    text = f"{first.name} is {owners}: use {ours}" if ours else f"{first.name} is {owners}, and no key here{why}"
    return f"{text}; see docs/coming_from.md"


def _with_parent(ours: str) -> set[str]:
    key = ours.partition("=")[0]
    return {key, key.rpartition(".")[0]}


def _closeness(name: str, key: str, endings: set[str]) -> int:
    """Rates how likely ``key`` is meant as this name: highest if equal, lower if one ends with the other, 0 if not.
    ``endings``: last parts of Tandem's keys, which give no hint."""
    if name == key and ("." in name or name not in endings):
        return 1000
    if name.rpartition(".")[2] in endings:
        return 0
    if key.endswith(f".{name}"):
        return 10 + len(name)
    return 1 if name.endswith(f".{key}") else 0


if __name__ == "__main__":
    print(PAGE.read_text(encoding="utf-8"), end="")
