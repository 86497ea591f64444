"""Makes docs/presets.md from config/presets.yaml and the records of the parts, and the tables between the markers of
docs/algorithms.md, whose rest is left alone.

python scripts/algorithm_pages.py            # rewrite
python scripts/algorithm_pages.py --check    # exit 1 where a page is not up to date
"""

import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

from tandem.cli.algorithms import NOTATION, about, asynchronous_words, preset_config, shown
from tandem.config.algorithm import PRESETS
from tandem.config.errors import ConfigError
from tandem.config.parts import PARTS, PartRecord

DOCS = Path(__file__).resolve().parents[1] / "docs"
BLOCK = re.compile(r"(<!-- from the code: ([\w.]+) -->\n).*?(<!-- end -->)", re.S)
PART_NAMES = {
    "filter": "groups",
    "policy_loss": "loss of a token",
    "token_filter": "tokens",
    "aggregation": "loss of the batch",
    "correction.reject": "trajectories",
    "kl": "KL",
}
HEAD = """# Presets

Made by `python scripts/algorithm_pages.py` from `src/tandem/config/presets.yaml`; do not edit.

Each row is a value of `algorithm`: a named combination of parts, all of which can be changed
(`algorithm=gspo algorithm.policy_loss.clip_high=5e-4`). `tandem algorithms NAME key=value …` says the same with your
changes, `tandem graph FILE algorithm=NAME` says what runs in a step. The parts and the symbols of the formulas are explained
in [algorithms.md](algorithms.md), the metrics in [metrics.md](metrics.md). What each preset does to one small task is in
[comparison.md](comparison.md).

| preset | what it is | when to use it | needs | paper |
|---|---|---|---|---|
{rows}
"""
SECTION = """
## {name}

{text}

Paper: {paper}. Needs: {needs}.

```text
{formulas}
```

```yaml
{values}
```

{outside}Asynchronous training {asynchronous}. Where the defaults come from:

{defaults}

Metrics to watch:

{watch}

{limits}Try it:

```bash
.venv/bin/tandem train {command}
```
"""


def paper(number: str) -> str:
    """A link to arXiv."""
    return f"[{number}](https://arxiv.org/abs/{number})" if number else "—"


def page() -> str:
    """docs/presets.md."""
    rows = []
    for name, preset in PRESETS.items():
        needs = ", ".join(about(name)["needs"]) or "—"
        rows.append(f"| [`{name}`](#{name}) | {preset.summary} | {preset.when} | {needs} | {paper(preset.arxiv)} |")
    return HEAD.format(rows="\n".join(rows)) + "".join(map(section, PRESETS))


def section(name: str) -> str:
    """The part of the page about one preset."""
    preset, found = PRESETS[name], about(name)
    outside = ", ".join(f"`{key}={value}`" for key, value in found["outside"].items())
    limits = [preset.limits] * bool(preset.limits) + [f"- Refused: `{what}`: {why}" for what, why in refusals(name)]
    return SECTION.format(
        name=name,
        text=preset.text,
        paper=preset.title + (f", {paper(preset.arxiv)}" if preset.arxiv else ""),
        needs=", ".join(found["needs"]) or "nothing but the actor",
        formulas="\n".join(_formulas(found["formulas"])),
        values=shown(found["algorithm"]),
        outside=f"Outside of that section it sets {outside}. " if outside else "",
        asynchronous=re.sub(r"(?<=^adds )(.*)", r"`\1`", asynchronous_words(found["asynchronous"])).removesuffix("."),
        defaults=preset.defaults,
        watch="\n".join(f"- `{key}`: {advice}" for key, advice in preset.watch.items()),
        limits="Limits:\n\n" + "\n".join(limits) + "\n\n" if limits else "",
        command=" ".join(arguments(name)),
    )


def refusals(name: str) -> Iterator[tuple[str, str]]:
    """The changes that a preset is refused with, and the messages; the message is empty where it is not refused."""
    for changes in PRESETS[name].refused:
        try:
            preset_config(name, changes.split())
            yield changes, ""
        except ConfigError as error:
            yield changes, str(error).replace("\n", "\n  ")


def arguments(name: str) -> list[str]:
    """The arguments that the page gives to `tandem train`."""
    return ["examples/addition_grpo.yaml", f"trial_name={name}", f"algorithm={name}", *PRESETS[name].example.split()]


def _formulas(formulas: Mapping[str, str]) -> Iterator[str]:
    names = {part: PART_NAMES.get(part, part.partition(":")[0]) for part in formulas}
    width = max(map(len, names.values()))
    for part, text in formulas.items():
        lines = [line for clause in text.replace("; ", ";\n").splitlines() for line in textwrap.wrap(clause, 100)]
        yield f"{names[part].ljust(width)}  {lines[0]}"
        yield from (f"{' ' * width}  {line.strip()}" for line in lines[1:])


def index() -> dict[str, str]:
    """Blocks of docs/algorithms.md."""
    renamed = {"correction.weight": "correction", "kl.estimator": "kl"}
    tables = {renamed.get(kind, kind): "\n".join(_parts(kind, parts)) for kind, parts in PARTS.items()}
    return {"notation": NOTATION} | tables


def _parts(kind: str, parts: dict[str, PartRecord]) -> Iterator[str]:
    plain = kind in ("correction.weight", "kl.estimator")  # whose knobs are keys of their own, if they have any
    columns = ["name", "formula", *([] if plain else ["knobs"]), "source"]
    yield from (f"| {' | '.join(columns)} |", "|---" * len(columns) + "|")
    for name, part in parts.items():
        knobs = [f"`{knob}`" + (f" {rule.default}" if rule.default is not None else "") for knob, rule in part.knobs.items()]
        cells = [f"`{name}`", part.formula.replace("|", "\\|"), *([] if plain else [", ".join(knobs) or "—"])]
        yield f"| {' | '.join(cells)} | {', '.join(map(paper, part.sources)) or '—'} |"


def pages() -> dict[Path, str]:
    """Both pages as they should be."""
    values, path = index(), DOCS / "algorithms.md"
    filled = BLOCK.sub(lambda found: f"{found[1]}\n{values[found[2]]}\n\n{found[3]}", path.read_text())
    return {DOCS / "presets.md": page(), path: filled}


def main() -> int:
    """Writes the pages, or checks them."""
    stale = {path: text for path, text in pages().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        print(path.relative_to(DOCS.parent), *["is not up to date"] * ("--check" in sys.argv))
        if "--check" not in sys.argv:
            path.write_text(text)
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
