"""The record of docs/recipes/gsm8k_on_a_laptop.md: gathered from the folders that its commands leave, and shown in the page.

python benchmarks/laptop_recipe.py --runs runs/gsm8k_laptop --evaluations evaluations    # writes laptop_recipe.json
python benchmarks/laptop_recipe.py --render                                               # table and picture of the page
"""

import argparse
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tandem.evaluation.compare import compare, open_recorded

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "recipes" / "gsm8k_on_a_laptop.md"
PICTURE = ROOT / "docs" / "pictures" / "gsm8k_on_a_laptop.png"
BLOCK = re.compile(r"(<!-- measured -->\n).*?(<!-- end -->)", re.S)
LABELS = {"before": "SmolLM2-135M-Instruct as it comes", "after_sft": "after imitation", "after_grpo": "after GRPO"}
PAIRS = (("before", "after_sft"), ("after_sft", "after_grpo"))
MEASURES = ("accuracy", "pass@8", "maj@8")
KEPT = (
    "step",
    "loss",
    "eval/loss",
    "reward/mean",
    "time/step_s",
    "tokens_per_s/train",
    "completion_length/mean",
    "episodes/dropped/filter/none_correct",
    "memory/peak_gib",
)


def gather(runs: Path, evaluations: Path) -> dict[str, Any]:
    """Everything that the page shows, from the folders of the runs and of the evaluations."""
    steps = {}
    for part in ("sft", "grpo"):
        lines = (runs / part / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        steps[part] = [{key: row[key] for key in KEPT if key in row} for row in map(json.loads, lines)]
    figures = {}
    for label in LABELS:
        results = json.loads((evaluations / label / "results.json").read_text(encoding="utf-8"))
        (figures[label],) = results["data"].values()
    tests = []
    for first, second in PAIRS:
        found = compare(open_recorded(evaluations / first), open_recorded(evaluations / second))
        tests += [asdict(one) | {"from": first, "to": second} for one in found.differences if one.measure in MEASURES]
    return {"steps": steps, "evaluations": figures, "tests": tests}


def table(record: dict[str, Any]) -> str:
    """The page's two tables."""
    lines = ["| 400 test questions, 8 answers each | accuracy | pass@8 | maj@8 | cut off |", "|---|---|---|---|---|"]
    for label, name in LABELS.items():
        data = record["evaluations"][label]
        cells = [_with_interval(data["measures"][measure]) for measure in MEASURES]
        lines.append(f"| {name} | {' | '.join(cells)} | {100 * data['truncated']:.0f} % |")
    lines += ["", "| difference on the same questions | accuracy | p | pass@8 | p |", "|---|---|---|---|---|"]
    for first, second in PAIRS:
        cells = []
        for measure in ("accuracy", "pass@8"):
            (test,) = [t for t in record["tests"] if (t["from"], t["to"], t["measure"]) == (first, second, measure)]
            change, low, high = (100 * test[key] for key in ("difference", "low", "high"))
            cells += [f"{change:+.1f} ({low:+.1f} … {high:+.1f})", f"{test['p_value']:.2g}"]
        lines.append(f"| {LABELS[second]}, against {LABELS[first]} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _with_interval(measure: dict[str, Any]) -> str:
    value, low, high = (100 * measure[key] for key in ("value", "low", "high"))
    return f"{value:.1f} % ({low:.1f} … {high:.1f})"


def with_table(page: str, record: dict[str, Any]) -> str:
    """The page with the record's tables in their place."""
    return BLOCK.sub(lambda found: found[1] + table(record) + found[2], page)


def draw(record: dict[str, Any], path: Path) -> None:
    """Loss of imitation, reward of GRPO, and the three evaluations."""
    figure = Figure(figsize=(11, 3.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    rows = record["steps"]["sft"]
    left.plot(*_series(rows, "loss"), color="#93c5fd", lw=1, label="training")
    left.plot(*_series(rows, "eval/loss"), color="#2563eb", marker="o", ms=4, label="32 test rows")
    left.set(title="imitation: loss a token", xlabel="step of 16 rows", ylim=(0, None))
    left.legend(frameon=False)
    middle.plot(*_series(record["steps"]["grpo"], "reward/mean"), color="#2563eb", marker="o", ms=4)
    middle.set(title="GRPO: right answers of kept groups", xlabel="step of 8 prompts × 8", ylim=(0, None))
    for shift, measure, colour in ((-0.2, "accuracy", "#2563eb"), (0.2, "pass@8", "#d97706")):
        found = [record["evaluations"][label]["measures"][measure] for label in LABELS]
        values = [100 * one["value"] for one in found]
        below = [100 * (one["value"] - one["low"]) for one in found]
        above = [100 * (one["high"] - one["value"]) for one in found]
        places = [i + shift for i in range(len(found))]
        right.bar(places, values, 0.38, color=colour, label=measure, yerr=[below, above], ecolor="#52525b", capsize=3)
    right.set(title="400 test questions, %", ylim=(0, None))
    right.set_xticks(range(3), ["before", "imitation", "GRPO"])
    right.legend(frameon=False)
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _series(rows: list[dict[str, float]], key: str) -> tuple[list[float], list[float]]:
    kept = [row for row in rows if row.get(key) is not None]
    return [row["step"] for row in kept], [row[key] for row in kept]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="folder of the runs sft and grpo; with --evaluations writes the record")
    parser.add_argument("--evaluations", type=Path, help="folder of the evaluations before, after_sft and after_grpo")
    parser.add_argument("--render", action="store_true", help="put the record into the page and draw its picture")
    options = parser.parse_args()
    if (options.runs is None) != (options.evaluations is None) or not (options.runs or options.render):
        parser.error("give --runs and --evaluations together, or --render")
    if options.runs:
        RECORD.write_text(json.dumps(gather(options.runs, options.evaluations), indent=1) + "\n", encoding="utf-8")
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    if options.render:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")
        draw(record, PICTURE)
    print(table(record), end="")


if __name__ == "__main__":
    main()
