"""List the algorithms, or say everything about one: values, formula, what asynchronous training adds, what to watch.

examples:
  tandem algorithms
  tandem algorithms gspo
  tandem algorithms gspo algorithm.policy_loss.clip_high=5e-4
  tandem algorithms --parts
  tandem algorithms --json
"""

import argparse
import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from tandem.algorithms.presets.notes import NOTES
from tandem.algorithms.presets.pages import NOTATION, Algorithm, algorithm, all_parts, as_yaml, summary
from tandem.config.errors import ConfigError
from tandem.config.presets import PRESETS
from tandem.tracking.catalog import SECTIONS, Metric

WIDTH = 118


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="one algorithm; without it, all are listed")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="parts of it that you would change")
    parser.add_argument("--parts", action="store_true", help="list every loss, advantage, correction … by itself instead")
    parser.add_argument("--json", action="store_true", help="print one JSON object, or a list of them without a name")


def run(arguments: argparse.Namespace) -> int:
    if arguments.parts:
        if arguments.name is not None:
            raise ConfigError(f"--parts lists the parts of all algorithms; leave {arguments.name!r} out")
        found_parts = list(all_parts())
        print(json.dumps(found_parts) if arguments.json else "\n".join(parts_text(found_parts)))
        return 0
    if arguments.name is None:
        print(json.dumps(overview(), ensure_ascii=False) if arguments.json else listing())
        return 0
    found = algorithm(arguments.name, arguments.changes)
    print(json.dumps(as_data(found), ensure_ascii=False) if arguments.json else "\n".join(text(found)))
    return 0


def metric(name: str) -> Metric:
    return next((rows[name] for rows in SECTIONS.values() if name in rows), Metric("", "", ""))


def overview() -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "summary": summary(name),
            "paper": NOTES[name].title,
            "arxiv": NOTES[name].arxiv,
            "needs": list(algorithm(name).needs),
        }
        for name in PRESETS
    ]


def listing() -> str:
    rows = [(row["name"], ", ".join(row["needs"]) or "—", row["arxiv"] or "—", row["summary"]) for row in overview()]
    rows.insert(0, ("name", "needs", "arXiv", "what it is"))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + f"  {row[3]}" for row in rows]
    more = "NAME says more, --parts lists what they are made of; tandem train FILE algorithm=NAME uses one."
    return "\n".join([*lines, "", f"tandem algorithms {more}"])


def parts_text(parts: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Every part, under the key that sets it."""
    key = ""
    for part in parts:
        if part["key"] != key:
            yield from ("", part["key"]) if key else (part["key"],)
            key = part["key"]
        knobs = f" [{', '.join(f'{name}={value}' for name, value in part['knobs'].items())}]" if part["knobs"] else ""
        sources = f" (arXiv:{', '.join(part['sources'])})" if part["sources"] else ""
        yield from _wrapped(f"  {part['name']}", f"{part['formula']}{knobs}{sources}")
    yield from ("", *textwrap.wrap(NOTATION, WIDTH))


def as_data(found: Algorithm) -> dict[str, Any]:
    return {
        "name": found.name,
        "summary": found.summary,
        "paper": found.note.title,
        "arxiv": found.note.arxiv,
        "needs": list(found.needs),
        "when": found.note.when,
        "formulas": dict(found.formulas),
        "algorithm": dict(found.values),
        "outside": dict(found.outside),
        "asynchronous": found.asynchronous if isinstance(found.asynchronous, str) else dict(found.asynchronous),
        "metrics": {name: {"meaning": metric(name).meaning, "advice": text} for name, text in found.note.watch.items()},
    }


def text(found: Algorithm) -> Iterator[str]:
    yield f"{found.name}: {found.summary}"
    yield from _wrapped("paper", found.note.title + (f", https://arxiv.org/abs/{found.note.arxiv}" * bool(found.note.arxiv)))
    yield from _wrapped("needs", ", ".join(found.needs) or "nothing but the actor")
    yield from _wrapped("when", found.note.when)
    yield from ("", as_yaml(found.shown()), "")
    if found.outside:
        yield from _wrapped("outside", " ".join(f"{key}={value}" for key, value in found.outside.items()))
    for part, formula in found.formulas.items():
        yield from _wrapped(part, formula)
    yield from ("", *textwrap.wrap(NOTATION, WIDTH), "")
    if isinstance(found.asynchronous, str):
        yield from _wrapped("asynchronous", f"refused: {found.asynchronous}")
    else:
        added = " ".join(f"{key}={value}" for key, value in found.asynchronous.items())
        yield from _wrapped("asynchronous", f"adds {added}" if added else "changes nothing")
    yield from ("", "watch")
    for name, advice in found.note.watch.items():
        yield from _wrapped(f"  {name}", f"{metric(name).meaning} {advice}")


def _wrapped(label: str, words: str) -> list[str]:
    return textwrap.wrap(f"{label}: {words}", WIDTH, subsequent_indent="    ")
