"""The records of docs/recipes/number_game.md, repository_task.md, tldr_on_a_laptop.md and a_judge_that_compares.md: gathered
from the run folders of their commands.

python benchmarks/small_agents.py --runs runs    # puts the runs that are there into small_agents.json
python benchmarks/small_agents.py --render       # tables and pictures of the pages
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parents[1] / "docs"
RECORD = Path(__file__).with_suffix(".json")
BLOCK = re.compile(r"(<!-- measured -->\n).*?(<!-- end -->)", re.S)
RECIPES: dict[str, dict[str, Any]] = {
    "number_game": {
        "page": "number_game",
        "shows": "accuracy",
        "words": "known of the number after three guesses, %",
        "trials": {"turns": ("rewards by turn", "#2563eb"), "chance": ("control", "#a1a1aa")},
    },
    "mend": {
        "page": "repository_task",
        "shows": "reward/mean",
        "words": "samples whose module passes its tests, %",
        "trials": {"grpo": ("GRPO", "#2563eb"), "control": ("control", "#a1a1aa")},
    },
    "tldr_laptop": {
        "page": "tldr_on_a_laptop",
        "shows": "accuracy",
        "words": "summaries that are liked, %",
        "trials": {"grpo": ("GRPO", "#2563eb"), "grpo_shuffled": ("control", "#a1a1aa")},
    },
    "judge": {
        "page": "a_judge_that_compares",
        "shows": "accuracy",
        "words": "replies that are finished, %",
        "trials": {
            "grpo": ("the judge's verdicts", "#2563eb"),
            "grpo_shuffled": ("control: shuffled judgements", "#a1a1aa"),
            "grpo_lots": ("control: lots", "#d97706"),
        },
    },
}
"""Experiment → its page, the metric of training that is shown, and its trials with name and colour."""
KEPT = ("step", "accuracy", "reward/mean", "eval/accuracy", "time/step_s", "tokens_per_s/train", "memory/peak_gib")
Rows = list[dict[str, float]]


def gather(runs: Path) -> dict[str, dict[str, Rows]]:
    """The lines of `metrics.jsonl` that the pages show, by recipe and trial."""
    found: dict[str, dict[str, Rows]] = {}
    for recipe, facts in RECIPES.items():
        for trial in facts["trials"]:
            file = runs / recipe / trial / "metrics.jsonl"
            lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
            rows = [{key: row[key] for key in KEPT if row.get(key) is not None} for row in map(json.loads, lines)]
            if rows:
                found.setdefault(recipe, {})[trial] = rows
    return found


def points(rows: Rows, key: str) -> list[tuple[float, float]]:
    """Step and per cent, where the metric is there."""
    return [(row["step"], 100 * row[key]) for row in rows if key in row]


def table(recipe: str, trials: dict[str, Rows]) -> str:
    """The first three and the last three steps of training, and the held-out rows before and after."""
    facts = RECIPES[recipe]
    lines = [f"| {facts['words']} | steps | first three | last three | held out, before | held out, after |"]
    lines.append("|---|---|---|---|---|---|")
    for trial, rows in trials.items():
        seen, held = points(rows, facts["shows"]), points(rows, "eval/accuracy")
        means = [f"{sum(y for _, y in part) / len(part):.0f}" for part in (seen[:3], seen[-3:])]
        ends = [f"{held[0][1]:.0f}", f"{held[-1][1]:.0f}"] if held else ["–", "–"]
        lines.append(f"| {facts['trials'][trial][0]} | {seen[-1][0]:.0f} | {' | '.join([*means, *ends])} |")
    return "\n".join([*lines, "", f"![{facts['words']}, by step](../pictures/{facts['page']}.png)"]) + "\n"


def with_table(page: str, recipe: str, trials: dict[str, Rows]) -> str:
    """The page with the record's table in its place."""
    return BLOCK.sub(lambda found: found[1] + table(recipe, trials) + found[2], page)


def draw(recipe: str, trials: dict[str, Rows], path: Path) -> None:
    """Training (lines) and held-out rows (diamonds), by step."""
    facts = RECIPES[recipe]
    figure = Figure(figsize=(7.5, 3), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for trial, rows in trials.items():
        name, colour = facts["trials"][trial]
        for key, look in ((facts["shows"], {"lw": 1.5}), ("eval/accuracy", {"ls": "--", "marker": "D", "ms": 5})):
            if found := points(rows, key):
                where = "" if key == facts["shows"] else ", held out"
                axes.plot(*zip(*found, strict=True), color=colour, label=name + where, **look)
    axes.set(xlabel="step", ylim=(-3, 103))
    axes.set_title(facts["words"], fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=8, loc="outside right upper")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="folder of the runs; they are put into the record")
    parser.add_argument("--render", action="store_true", help="put the record into the pages and draw their pictures")
    options = parser.parse_args()
    if not (options.runs or options.render):
        parser.error("give --runs or --render")
    if options.runs:
        record = json.loads(RECORD.read_text(encoding="utf-8"))
        for recipe, trials in gather(options.runs).items():
            record[recipe] = record.get(recipe, {}) | trials
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for recipe, trials in json.loads(RECORD.read_text(encoding="utf-8")).items():
        if options.render:
            page = DOCS / "recipes" / f"{RECIPES[recipe]['page']}.md"
            page.write_text(with_table(page.read_text(encoding="utf-8"), recipe, trials), encoding="utf-8")
            draw(recipe, trials, DOCS / "pictures" / f"{RECIPES[recipe]['page']}.png")
        print(table(recipe, trials))


if __name__ == "__main__":
    main()
