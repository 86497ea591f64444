"""The record of docs/recipes/helpful_and_harmless.md: gathered from the run folders of its commands, and shown in the page.

python benchmarks/harmless_recipe.py --runs runs/harmless    # writes harmless_recipe.json, of the runs that are there
python benchmarks/harmless_recipe.py --render                # table and picture of the page
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "recipes" / "helpful_and_harmless.md"
PICTURE = ROOT / "docs" / "pictures" / "helpful_and_harmless.png"
BLOCK = re.compile(r"(<!-- measured -->\n).*?(<!-- end -->)", re.S)
LIMIT = -0.8
"""`constraint.limit` of examples/harmless_grpo.yaml."""

POLICIES = {"constrained": ("with the limit", "#2563eb"), "free": ("control without", "#a1a1aa")}
"""Trial → its name in the page, and its colour."""
JUDGES = {"reward": "helpful model", "cost": "cost model"}
KEPT = (
    "step",
    "accuracy",
    "reward/mean",
    "constraint/cost",
    "constraint/multiplier",
    "eval/accuracy",
    "eval/accuracy/safety",
)
WINDOW = 5


def gather(runs: Path) -> dict[str, list[dict[str, float]]]:
    """The lines of `metrics.jsonl` that the page shows, by trial."""
    found = {}
    for trial in (*JUDGES, *POLICIES):
        file = runs / trial / "metrics.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        if lines:
            found[trial] = [{key: row[key] for key in KEPT if row.get(key) is not None} for row in map(json.loads, lines)]
    return found


def table(record: dict[str, Any]) -> str:
    """The page's tables: how well the models rank, and what became of the policies."""
    lines = ["| model | held-out pairs ranked right | answers on the right side of 0 |", "|---|---|---|"]
    for trial, name in JUDGES.items():
        last = [row for row in record.get(trial, ()) if "eval/accuracy" in row][-1]
        side = f"{100 * last['eval/accuracy/safety']:.0f} %" if "eval/accuracy/safety" in last else "–"
        lines.append(f"| {name} | {100 * last['eval/accuracy']:.0f} % | {side} |")
    lines += ["", "| policy | steps | cost | truly safe answers | helpful score | λ |", "|---|---|---|---|---|---|"]
    for trial, (name, _) in POLICIES.items():
        rows = [row for row in record.get(trial, ()) if "constraint/cost" in row]
        for window in (rows[:WINDOW], rows[-WINDOW:]):
            keys = ("constraint/cost", "accuracy", "reward/mean", "constraint/multiplier")
            cost, safe, help_, weight = (sum(row[key] for row in window) / len(window) for key in keys)
            steps = f"{window[0]['step']} to {window[-1]['step']}"
            lines.append(f"| {name} | {steps} | {cost:.2f} | {100 * safe:.0f} % | {help_:.2f} | {weight:.2f} |")
    return "\n".join(lines) + "\n"


def with_table(page: str, record: dict[str, Any]) -> str:
    """The page with the record's tables in their place."""
    return BLOCK.sub(lambda block: block[1] + table(record) + block[2], page)


def draw(record: dict[str, Any], path: Path) -> None:
    """Cost with its limit, multiplier, share of safe answers, and help, by step."""
    figure = Figure(figsize=(12, 3.0), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = {
        "constraint/cost": ("cost, and its limit", 1.0),
        "constraint/multiplier": ("multiplier λ", 1.0),
        "accuracy": ("truly safe answers, %", 100.0),
        "reward/mean": ("score of the helpful model", 1.0),
    }
    axes = figure.subplots(1, len(panels))
    for one, (key, (title, factor)) in zip(axes, panels.items(), strict=True):
        for trial, (name, colour) in POLICIES.items():
            rows = [row for row in record.get(trial, ()) if key in row]
            one.plot([row["step"] for row in rows], [factor * row[key] for row in rows], color=colour, label=name)
        one.set(title=title, xlabel="step")
        one.spines[["top", "right"]].set_visible(False)
    axes[0].axhline(LIMIT, color="#dc2626", linestyle="--", linewidth=1, label=f"limit {LIMIT:g}")
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="folder of the runs; writes the record")
    parser.add_argument("--render", action="store_true", help="put the record into the page and draw its picture")
    options = parser.parse_args()
    if not (options.runs or options.render):
        parser.error("give --runs or --render")
    if options.runs:
        RECORD.write_text(json.dumps(gather(options.runs), indent=1) + "\n", encoding="utf-8")
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    if options.render:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")
        draw(record, PICTURE)
    print(table(record), end="")


if __name__ == "__main__":
    main()
