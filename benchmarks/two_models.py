"""The record of docs/recipes/two_models.md: gathered from the run folders of its commands, and shown in the page.

python benchmarks/two_models.py --runs runs    # puts the runs that are there into two_models.json
python benchmarks/two_models.py --render       # table and picture of the page
"""

import argparse
import json
import re
from math import sqrt
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "recipes" / "two_models.md"
PICTURE = ROOT / "docs" / "pictures" / "two_models.png"
BLOCK = re.compile(r"(<!-- measured -->\n).*?(<!-- end -->)", re.S)
RECIPES = {"planner": ("a planner with a worker", 192), "simulated_user": ("a simulated user", 96)}
"""Experiment → its name in the page, and the samples of one evaluation."""
TRIALS = {"grpo": ("GRPO", "#2563eb"), "control": ("control", "#a1a1aa")}
KEPT = (
    "step",
    "loss",
    "accuracy",
    "reward/mean",
    "eval/accuracy",
    "told",
    "completion_length/mean",
    "time/step_s",
    "tokens_per_s/train",
    "memory/peak_gib",
)


def gather(runs: Path, record: dict[str, Any]) -> None:
    """Put the lines of `metrics.jsonl` that the page shows into the record, by recipe and trial."""
    for recipe in RECIPES:
        for trial in TRIALS:
            file = runs / recipe / trial / "metrics.jsonl"
            lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
            rows = [{key: row[key] for key in KEPT if row.get(key) is not None} for row in map(json.loads, lines)]
            if rows:
                record.setdefault(recipe, {})[trial] = rows


def table(record: dict[str, Any]) -> str:
    """Right samples of test questions, by step, with their standard error as if the samples were independent."""
    lines = [
        "| recipe | run | step | right on test questions, % | right in training, last three steps, % |",
        "|---|---|---|---|---|",
    ]
    for recipe, trials in record.items():
        name, samples = RECIPES[recipe]
        for trial, rows in trials.items():
            for row in (row for row in rows if "eval/accuracy" in row):
                share, step = row["eval/accuracy"], row["step"]
                last = [one["accuracy"] for one in rows if step - 3 < one["step"] <= step and "accuracy" in one]
                trained = f"{100 * sum(last) / len(last):.0f}" if last else "–"
                right = f"{100 * share:.0f} ± {100 * sqrt(share * (1 - share) / samples):.0f}"
                lines.append(f"| {name} | {TRIALS[trial][0]} | {step:.0f} | {right} | {trained} |")
    return "\n".join([*lines, "", f"![Right samples by step](../pictures/{PICTURE.name})"]) + "\n"


def with_table(page: str, record: dict[str, Any]) -> str:
    """The page with the record's table in its place."""
    return BLOCK.sub(lambda found: found[1] + table(record) + found[2], page)


def draw(record: dict[str, Any], path: Path) -> None:
    """Right samples in training (lines) and of test questions (diamonds), by step."""
    figure = Figure(figsize=(8, 3), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (recipe, (title, _)) in zip(figure.subplots(1, len(RECIPES)), RECIPES.items(), strict=True):
        for trial, rows in record.get(recipe, {}).items():
            name, colour = TRIALS[trial]
            for key, look in (
                ("accuracy", {"lw": 1.2, "alpha": 0.6}),
                ("eval/accuracy", {"ls": "--", "marker": "D", "ms": 5}),
            ):
                points = [(row["step"], 100 * row[key]) for row in rows if key in row]
                where = "in training" if key == "accuracy" else "test questions"
                axes.plot(*zip(*points, strict=True), color=colour, label=f"{name}, {where}", **look)
        axes.set(title=f"{title}: right, %", xlabel="step of 4 questions × 8 samples", ylim=(-3, 103))
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="folder of the runs; writes the record")
    parser.add_argument("--render", action="store_true", help="put the record into the page and draw its picture")
    options = parser.parse_args()
    if not (options.runs or options.render):
        parser.error("give --runs or --render")
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    if options.runs:
        gather(options.runs, record)
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if options.render:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")
        draw(record, PICTURE)
    print(table(record), end="")


if __name__ == "__main__":
    main()
