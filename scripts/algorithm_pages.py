"""Writes what is known from the code into docs/algorithms.md and its pages, between markers; the rest is left alone.

python scripts/algorithm_pages.py            # rewrite; a preset without a page gets one with empty sections
python scripts/algorithm_pages.py --check    # exit 1 where a page is not up to date
"""

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tandem.algorithms.presets.notes import NOTES
from tandem.algorithms.presets.pages import NOTATION, algorithm, as_yaml, refusals
from tandem.cli.algorithms import metric
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.config.parts import PARTS, PartRecord
from tandem.config.presets import PRESETS
from tandem.flow.draw import text as graph
from tandem.flow.plan import plan_run

DOCS = Path(__file__).resolve().parents[1] / "docs"
BLOCK = re.compile(r"(<!-- from the code: ([\w.]+) -->\n).*?(<!-- end -->)", re.S)
PART_NAMES = {
    "labels": "labels",
    "shaping": "shaping",
    "filter": "groups",
    "advantage": "advantage",
    "whitening": "whitening",
    "policy_loss": "loss of a token",
    "token_filter": "tokens",
    "aggregation": "loss of the batch",
    "correction.reject": "trajectories",
    "correction": "correction",
    "kl": "KL",
    "entropy": "entropy",
}
EMPTY = """# {name}

<!-- from the code: facts -->
<!-- end -->

## Formula

<!-- from the code: formula -->
<!-- end -->

## When to use it

## Defaults and their source

<!-- from the code: values -->
<!-- end -->

## Metrics to watch

<!-- from the code: metrics -->
<!-- end -->

## Run it

<!-- from the code: run -->
<!-- end -->

## Limits

<!-- from the code: refusals -->
<!-- end -->
"""


def paper(number: str) -> str:
    """A link to arXiv."""
    return f"[{number}](https://arxiv.org/abs/{number})"


def blocks(name: str) -> dict[str, str]:
    """Block name → text, of one preset's page."""
    return {
        "facts": "\n".join(_facts(name)),
        "formula": "\n".join(["```text", *_formula(name), "```"]),
        "values": "\n".join(_values(name)),
        "metrics": "\n".join(_metrics(name)),
        "run": "\n".join(_run(name)),
        "refusals": "\n".join(_refusals(name)),
    }


def arguments(name: str) -> list[str]:
    """The arguments that the page gives to `tandem train`."""
    return ["examples/addition_grpo.yaml", f"trial_name={name}", f"algorithm={name}", *NOTES[name].run]


def _facts(name: str) -> Iterator[str]:
    found = algorithm(name)
    yield f"In one line: {found.summary}."
    yield ""
    title = f"{found.note.title}, {paper(found.note.arxiv)}" if found.note.arxiv else found.note.title
    yield f"Paper: {title}. Needs: {', '.join(found.needs) or 'nothing but the actor'}."


def _formula(name: str) -> Iterator[str]:
    formulas = algorithm(name).formulas
    width = max(len(PART_NAMES[part.partition(":")[0]]) for part in formulas)
    for part, text in formulas.items():
        yield from _hanging(PART_NAMES[part.partition(":")[0]].ljust(width), text)


def _hanging(label: str, text: str) -> Iterator[str]:
    lines = [line for clause in text.replace("; ", ";\n").splitlines() for line in textwrap.wrap(clause, 100)]
    yield f"{label}  {lines[0]}"
    yield from (f"{' ' * len(label)}  {line.strip()}" for line in lines[1:])


def _values(name: str) -> Iterator[str]:
    found = algorithm(name)
    yield from (
        f"What `algorithm={name}` stands for, with the defaults of the knobs:",
        "",
        "```yaml",
        as_yaml(found.shown()),
        "```",
        "",
    )
    if found.outside:
        outside = ", ".join(f"`{key}={value}`" for key, value in found.outside.items())
        yield f"Outside of that section it sets {outside}."
        yield ""
    if isinstance(found.asynchronous, str):
        yield f"Asynchronous training is refused: {found.asynchronous.removesuffix('.')}."
    elif found.asynchronous:
        added = ", ".join(f"`{key}={value}`" for key, value in found.asynchronous.items())
        yield f"Asynchronous training adds {added}."
    else:
        yield "Asynchronous training changes nothing of it."


def _metrics(name: str) -> Iterator[str]:
    yield from ("| metric | what it is | what to do |", "|---|---|---|")
    for key, advice in algorithm(name).note.watch.items():
        yield f"| `{key}` | {metric(key).meaning} | {advice} |"


def _refusals(name: str) -> Iterator[str]:
    for overrides, message in refusals(name):
        yield f"- `{overrides}`: " + message.replace("\n", "\n  ")


def _run(name: str) -> Iterator[str]:
    file, *overrides = arguments(name)
    config = load_config(TrainConfig, DOCS.parent / file, overrides).config
    yield from ("```bash", f".venv/bin/tandem train {file} {' '.join(overrides)}", "```", "")
    yield "What runs in a step, in order (`.venv/bin/tandem graph` with the same arguments prints it):"
    yield from ("", "```text", graph(plan_run(config)), "```")
    within = {"filter": config.algorithm.filter.name != "none", "shaping": bool(config.algorithm.shaping)}
    places = {"filter": "`generate`", "shaping": "`advantages`"}
    if told := [f"`algorithm.{part}` is part of {places[part]}" for part, is_there in within.items() if is_there]:
        yield from ("", f"{', '.join(told)}.")


def index() -> dict[str, str]:
    """Blocks of docs/algorithms.md."""
    renamed = {"correction.weight": "correction", "kl.estimator": "kl"}
    tables = {renamed.get(kind, kind): "\n".join(_parts(kind, parts)) for kind, parts in PARTS.items()}
    return {"presets": "\n".join(_presets()), "notation": NOTATION} | tables


def _presets() -> Iterator[str]:
    yield from ("| preset | what it is | needs | paper |", "|---|---|---|---|")
    for name in PRESETS:
        found = algorithm(name)
        link = paper(found.note.arxiv) if found.note.arxiv else "—"
        yield f"| [`{name}`](algorithms/{name}.md) | {found.summary} | {', '.join(found.needs) or '—'} | {link} |"


def _parts(kind: str, parts: dict[str, PartRecord]) -> Iterator[str]:
    plain = kind in ("correction.weight", "kl.estimator")  # whose knobs are keys of their own, if they have any
    yield from (
        ("| name | formula | source |", "|---|---|---|")
        if plain
        else (
            "| name | formula | knobs | source |",
            "|---|---|---|---|",
        )
    )
    for name, part in parts.items():
        knobs = [f"`{knob}`" + (f" {rule.default}" if rule.default is not None else "") for knob, rule in part.knobs.items()]
        cells = [f"`{name}`", _cell(part.formula), *([] if plain else [", ".join(knobs) or "—"])]
        yield f"| {' | '.join(cells)} | {', '.join(map(paper, part.sources)) or '—'} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def filled(text: str, values: dict[str, str]) -> str:
    """The page with its blocks made anew."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{values[found[2]]}\n\n{found[3]}", text)


def pages() -> dict[Path, str]:
    """Every page as it should be."""
    made = {}
    for name in PRESETS:
        path = DOCS / "algorithms" / f"{name}.md"
        made[path] = filled(path.read_text() if path.exists() else EMPTY.format(name=name), blocks(name))
    path = DOCS / "algorithms.md"
    return made | {path: filled(path.read_text(), index())}


def main() -> int:
    """Writes the pages, or checks them."""
    check = "--check" in sys.argv[1:]
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text() != text]
    if check:
        print(
            "\n".join(f"{path.relative_to(DOCS.parent)} is not up to date" for path in stale) or "all pages are up to date"
        )
        return 1 if stale else 0
    texts = pages()
    (DOCS / "algorithms").mkdir(exist_ok=True)
    for path in stale:
        path.write_text(texts[path])
        print(path.relative_to(DOCS.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
