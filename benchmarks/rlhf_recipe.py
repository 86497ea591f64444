"""The record of docs/recipes/rlhf_on_a_laptop.md: gathered from the run folders of its commands, and shown in the page.

python benchmarks/rlhf_recipe.py --runs runs/rlhf_laptop    # writes the part `with_sft` of rlhf_recipe.json
python benchmarks/rlhf_recipe.py --render                   # tables and pictures of the page

The part `without_sft` is of the recipe as it was first, which began with the instruct model and had 16 steps of PPO. The
part `balanced` is of a control whose labels were shuffled more carefully: the page says how, and shows no table of it.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "recipes" / "rlhf_on_a_laptop.md"
PICTURES = {"with_sft": "rlhf_on_a_laptop.png", "without_sft": "rlhf_without_sft.png"}
"""Part of the record → its picture, in docs/pictures."""
BLOCK = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- end -->)", re.S)
POLICIES = {
    "ppo": ("PPO", "#2563eb"),
    "ppo_weak_kl": ("KL penalty of 0.05", "#dc2626"),
    "ppo_shuffled": ("control", "#a1a1aa"),
    "ppo_turned": ("control, turned round", "#f59e0b"),
}
"""Trial → its name in the page, and its colour."""
SIDES = ("ppo_shuffled", "ppo_turned")
"""Both sides of the control's coin; nothing rises in their mean unless something other than the labels teaches it."""
BOTH_SIDES = "control, mean of both sides"
BEFORE = "before: SmolLM2-135M-Instruct as it comes"
JUDGES = {"reward": "reward model", "reward_shuffled": "control: shuffled labels"}
KEPT = (
    "step",
    "loss",
    "accuracy",
    "reward/mean",
    "kl/reference",
    "completion_length/mean",
    "truncated",
    "value/explained_variance",
    "eval/accuracy",
    "eval/reward",
    "eval/completion_length",
    "eval/truncated",
    "tokens_per_s/train",
    "time/step_s",
    "time/generate_s",
    "time/train_s",
    "memory/peak_gib",
)
SMOOTHED, WINDOW = 3, 3


def gather(runs: Path) -> dict[str, list[dict[str, float]]]:
    """The lines of `metrics.jsonl` that the page shows, by trial; `before` is the evaluation of the model before SFT."""
    evaluated = runs.parents[1] / "evaluations" / "rlhf_before" / "results.json"
    figures = json.loads(evaluated.read_text(encoding="utf-8"))["data"]["test"]
    before = {"eval/accuracy": figures["measures"]["accuracy"]["value"]}
    found = {"before": [before | {f"eval/{key}": figures[key] for key in ("completion_length", "truncated")}]}
    for trial in ("sft", *JUDGES, *POLICIES):
        file = runs / trial / "metrics.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        if lines:
            found[trial] = [{key: row[key] for key in KEPT if row.get(key) is not None} for row in map(json.loads, lines)]
    return found


def table(record: dict[str, Any]) -> str:
    """The page's tables: how well the reward models rank, and what became of the policies."""
    lines = ["| reward model | held-out pairs ranked as labelled |", "|---|---|"]
    for trial, name in JUDGES.items():
        ranked = [row for row in record.get(trial, ()) if "eval/accuracy" in row]
        if ranked and ranked[-1]["step"]:
            lines.append(f"| {name}, step {ranked[-1]['step']} | {100 * ranked[-1]['eval/accuracy']:.0f} % |")
    lines += ["", "| policy | questions | true preference | score | tokens | KL of an answer |", "|---|---|---|---|---|---|"]
    for before in record.get("before", ()):
        lines.append(_line(BEFORE, "held out", before["eval/accuracy"], None, before["eval/completion_length"], None))
    start, begun = True, "after SFT" if "sft" in record else BEFORE
    for trial, (name, _) in POLICIES.items():
        rows = record.get(trial, [])
        for row in [row for row in rows if "eval/accuracy" in row and (row["step"] or start)]:
            who = f"{name}, step {row['step']}" if row["step"] else begun
            distance = answer_kl(row) if row["step"] else 0.0
            lines.append(
                _line(who, "held out", row["eval/accuracy"], row["eval/reward"], row["eval/completion_length"], distance)
            )
            start = False
        windows = [rows[i : i + WINDOW] for i in range(1, len(rows) - WINDOW + 1)]
        best = max(windows, key=lambda window: _mean(window, "accuracy"), default=[])
        for window in ([best] if windows and best is not windows[-1] else []) + windows[-1:]:
            who = f"{name}, steps {window[0]['step']} to {window[-1]['step']}"
            means = [_mean(window, key) for key in ("accuracy", "reward/mean", "completion_length/mean")]
            lines.append(_line(who, "training", *means, sum(map(answer_kl, window)) / WINDOW))
    for step, (preferred, length) in both_sides(record).items():
        if step:
            lines.append(_line(f"{BOTH_SIDES}, step {step}", "held out", preferred, None, length, None))
    return "\n".join(lines) + "\n"


def both_sides(record: dict[str, Any]) -> dict[int, tuple[float, float]]:
    """Step → true preference and tokens of held-out answers, means of both sides, of the steps that both have."""
    one, other = ({row["step"]: row for row in record.get(side, ()) if "eval/accuracy" in row} for side in SIDES)
    keys = ("eval/accuracy", "eval/completion_length")
    found = {step: [(one[step][key] + other[step][key]) / 2 for key in keys] for step in sorted(one.keys() & other.keys())}
    return {step: (preferred, length) for step, (preferred, length) in found.items()}


def _mean(rows: list[dict[str, float]], key: str) -> float:
    return sum(row[key] for row in rows) / len(rows)


def _line(who: str, questions: str, preferred: float, score: float | None, length: float, distance: float | None) -> str:
    scored, far = ("–" if score is None else f"{score:.2f}"), ("–" if distance is None else f"{distance:.1f}")
    return f"| {who} | {questions} | {100 * preferred:.0f} % | {scored} | {length:.0f} | {far} |"


def answer_kl(row: dict[str, float]) -> float:
    """KL to the reference summed over an answer, in nats: that of a token times the tokens of an answer."""
    return row["kl/reference"] * row["completion_length/mean"]


def with_table(page: str, record: dict[str, Any]) -> str:
    """The page with the record's tables in their place."""
    return BLOCK.sub(lambda block: block[1] + table(record[block[2]]) + block[3], page)


def draw(record: dict[str, Any], path: Path) -> None:
    """The score and the true preference by step, and the true preference by the distance to the reference."""
    figure = Figure(figsize=(11, 3.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    for trial, (name, colour) in POLICIES.items():
        rows = [row for row in record.get(trial, ()) if "reward/mean" in row]
        if not rows:
            continue
        steps = [row["step"] for row in rows]
        preferred = smooth([100 * row["accuracy"] for row in rows])
        left.plot(steps, smooth([row["reward/mean"] for row in rows]), color=colour, label=name)
        middle.plot(steps, preferred, color=colour, label=name)
        right.plot(smooth([answer_kl(row) for row in rows]), preferred, color=colour, marker="o", ms=2.5, label=name)
        examined = [row for row in record[trial] if "eval/accuracy" in row]
        middle.plot(
            [row["step"] for row in examined], [100 * row["eval/accuracy"] for row in examined], "D", color=colour, ms=5
        )
    lines = []
    if mean := both_sides(record):
        shares = [100 * preferred for preferred, _ in mean.values()]
        lines += middle.plot(list(mean), shares, color="#18181b", lw=1.5, ls="--", marker="D", ms=5, label=BOTH_SIDES)
    for before in record.get("before", ()):
        lines.append(middle.axhline(100 * before["eval/accuracy"], color="#71717a", lw=1, ls=":", label="before SFT"))
    if lines:
        middle.legend(handles=lines, frameon=False)
    left.set(title="score of the run's reward model", xlabel="step")
    middle.set(title="true preference, % (◆: held-out questions)", xlabel="step", ylim=(0, 100))
    right.set(title="true preference, %, by KL", xlabel="KL of an answer to the reference, nats", ylim=(0, 100))
    axes: Axes
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    figure.savefig(path)


def smooth(values: list[float]) -> list[float]:
    """Means of the last three values, fewer at the beginning."""
    windows = [values[max(0, i - SMOOTHED + 1) : i + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="folder of the runs; writes the record")
    parser.add_argument("--render", action="store_true", help="put the record into the page and draw its picture")
    options = parser.parse_args()
    if not (options.runs or options.render):
        parser.error("give --runs or --render")
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    if options.runs:
        record["with_sft"] = gather(options.runs)
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if options.render:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")
        for part, picture in PICTURES.items():
            draw(record[part], ROOT / "docs" / "pictures" / picture)
    print(*map(table, record.values()), sep="\n", end="")


if __name__ == "__main__":
    main()
