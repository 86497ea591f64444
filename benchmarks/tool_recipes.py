"""The record of docs/recipes/calculator.md and search_agent.md: gathered from the folders that their commands leave.

python benchmarks/tool_recipes.py --recipe calculator --folder FOLDER    # FOLDER/runs and FOLDER/evaluations: the record
python benchmarks/tool_recipes.py --render                               # tables and pictures of the pages
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
PAGES = {
    "calculator": ROOT / "docs" / "recipes" / "calculator.md",
    "search": ROOT / "docs" / "recipes" / "search_agent.md",
}
"""Recipe, which is also the name of its experiment → its page."""
BLOCK = re.compile(r"(<!-- measured -->\n).*?(<!-- end -->)", re.S)
LABELS = {
    "after_sft": "after imitation",
    "after_grpo": "after GRPO",
    "without_tool": "after GRPO, without the tool",
    "untrained": "the model as it comes, without the tool",
}
TRIALS = {"grpo": ("GRPO", "#2563eb"), "control": ("control", "#a1a1aa")}
KEPT = (
    "step",
    "loss",
    "reward/mean",
    "accuracy",
    "eval/accuracy",
    "completion_length/mean",
    "tools/malformed",
    "tools/calls",
    "time/step_s",
    "tokens_per_s/train",
    "memory/peak_gib",
)


def gather(folder: Path, recipe: str) -> dict[str, Any]:
    """Everything that a page shows, from the folders `runs` and `evaluations`: of the parts that are there."""
    steps, evaluations = {}, {}
    for trial in ("sft", *TRIALS):
        file = folder / "runs" / recipe / trial / "metrics.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        if lines:
            steps[trial] = [{key: row[key] for key in KEPT if row.get(key) is not None} for row in map(json.loads, lines)]
            for row in steps[trial]:
                if "reward/mean" in row:
                    row.setdefault("accuracy", row["reward/mean"])  # a reward of 1 or 0 that names no accuracy
    for label in LABELS:
        file = folder / "evaluations" / label / "results.json"
        if file.exists():
            (evaluations[label],) = json.loads(file.read_text(encoding="utf-8"))["data"].values()
    return {"steps": steps, "evaluations": evaluations}


def table(record: dict[str, Any], picture: Path) -> str:
    """A page's tables and its picture; or that nothing was measured yet."""
    if not record:
        return "Not measured yet.\n"
    lines: list[str] = []
    if record["evaluations"]:
        first = next(iter(record["evaluations"].values()))
        asked = f"{first['rows']} test questions, {first['samples']} answers each at temperature 1"
        lines += [f"| {asked} | right | cut off | tokens |", "|---|---|---|---|"]
    for label, data in record["evaluations"].items():
        value, low, high = (100 * data["measures"]["accuracy"][key] for key in ("value", "low", "high"))
        cells = f"{value:.0f} % ({low:.0f} … {high:.0f}) | {100 * data['truncated']:.0f} % | {data['completion_length']:.0f}"
        lines.append(f"| {LABELS[label]} | {cells} |")
    lines += ["", "| by step | right in training, last three steps | right on test questions |", "|---|---|---|"]
    for trial in (trial for trial in TRIALS if trial in record["steps"]):
        rows, name = record["steps"][trial], TRIALS[trial][0]
        trained = [row for row in rows if "accuracy" in row]
        for row in (row for row in rows if "eval/accuracy" in row):
            before = [one["accuracy"] for one in trained if row["step"] - 3 < one["step"] <= row["step"]]
            shown = f"{100 * sum(before) / len(before):.0f} %" if before else "–"
            lines.append(f"| {name}, step {row['step']} | {shown} | {100 * row['eval/accuracy']:.0f} % |")
    lines += ["", f"![Right answers by step](../pictures/{picture.name})"]
    return "\n".join(lines) + "\n"


def with_table(page: str, record: dict[str, Any], picture: Path) -> str:
    """The page with the record's tables in their place."""
    return BLOCK.sub(lambda found: found[1] + table(record, picture) + found[2], page)


def picture_of(recipe: str) -> Path:
    """The file of the picture on a recipe's page."""
    return ROOT / "docs" / "pictures" / f"{PAGES[recipe].stem}.png"


def draw(record: dict[str, Any], path: Path) -> None:
    """Right answers in training, and on test questions before, in the middle and at the end."""
    figure = Figure(figsize=(8, 3), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for trial, (name, colour) in TRIALS.items():
        for axes, key in ((left, "accuracy"), (right, "eval/accuracy")):
            rows = [row for row in record["steps"].get(trial, ()) if key in row]
            if not rows:
                continue
            places, values = [row["step"] for row in rows], [100 * row[key] for row in rows]
            axes.plot(places, values, color=colour, marker="o", ms=4, label=name)
    left.set(title="right in training, %", xlabel="step of 4 questions, 8 answers each", ylim=(-3, 103))
    right.set(title="right on test questions, %", xlabel="step", ylim=(-3, 103))
    right.legend(frameon=False, loc="center right")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=PAGES, help="with --folder: whose record is written")
    parser.add_argument("--folder", type=Path, help="where the commands were run")
    parser.add_argument("--render", action="store_true", help="put the record into the pages and draw their pictures")
    options = parser.parse_args()
    if (options.recipe is None) != (options.folder is None) or not (options.recipe or options.render):
        parser.error("give --recipe and --folder together, or --render")
    records = json.loads(RECORD.read_text(encoding="utf-8"))
    if options.recipe:
        records[options.recipe] = gather(options.folder, options.recipe)
        RECORD.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    for recipe, page in PAGES.items():
        record, picture = records.get(recipe, {}), picture_of(recipe)
        if options.render:
            page.write_text(with_table(page.read_text(encoding="utf-8"), record, picture), encoding="utf-8")
            if record:
                draw(record, picture)
        print(table(record, picture))


if __name__ == "__main__":
    main()
