"""The presets on the same small task: one-digit addition, the real 135M model, the same budget of steps for each.

    python benchmarks/compare_algorithms.py --out results                      # all, one after the other, a few minutes each
    python benchmarks/compare_algorithms.py --out results grpo rloo --seeds 0 1
    python benchmarks/compare_algorithms.py --out results --shuffled grpo      # the negative control
    python benchmarks/compare_algorithms.py --out results --render             # table and picture for docs/comparison.md

Each run leaves one JSON file and is not run again, so that the whole can be done in pieces. What is measured: accuracy of
sampled answers (T = 1) to questions of the training split, every three steps; a run ends when 95 % of them are right.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tandem.config.presets import PRESETS  # noqa: E402
from tests.learning.addition import Curve, learn  # noqa: E402

ENOUGH = 0.95
"""A run ends when so many answers are right; from then on its last measurement counts."""

PAGE = ROOT / "docs" / "comparison.md"
PICTURE = ROOT / "docs" / "pictures" / "comparison.png"
BLOCK = re.compile(r"(<!-- measured -->\n).*?(<!-- end -->)", re.S)


def path_of(out: Path, preset: str, seed: int, shuffled: bool) -> Path:
    """Where a run's result is kept."""
    return out / f"{preset}-{seed}{'-shuffled' if shuffled else ''}.json"


def run_all(out: Path, presets: Sequence[str], seeds: Sequence[int], *, steps: int, shuffled: bool) -> None:
    """Runs what has no result yet."""
    out.mkdir(parents=True, exist_ok=True)
    for preset in presets:
        for seed in seeds:
            path = path_of(out, preset, seed, shuffled)
            if path.exists():
                continue
            curve = learn(preset, steps=steps, seed=seed, shuffled=shuffled, stop_at=ENOUGH)
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(asdict(curve), indent=1))
            partial.replace(path)
            print(
                f"{path.name}: {curve.first:.2f} → {curve.last:.2f} in {curve.steps} steps, {curve.seconds:.0f} s",
                flush=True,
            )


def results(out: Path) -> list[Curve]:
    """All results, in the order of the presets."""
    curves = []
    for path in out.glob("*.json"):
        data = json.loads(path.read_text())
        data["measured"] = {int(step): value for step, value in data["measured"].items()}
        curves.append(Curve(**data))
    order = list(PRESETS)
    return sorted(curves, key=lambda curve: (order.index(curve.preset), curve.shuffled, curve.seed))


def reached(curve: Curve, goal: float = 0.8) -> int | None:
    """The step at which the goal was first measured."""
    return next((step for step, value in sorted(curve.measured.items()) if value >= goal), None)


def _span(values: Sequence[float]) -> str:
    return f"{values[0]:.2f}" if len(values) == 1 else f"{statistics.mean(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def table(curves: Sequence[Curve]) -> Iterator[str]:
    """One row for each preset: means and ranges over the seeds."""
    yield "| preset | seeds | before | after | step of ≥ 0.8 | mean of all measurements | s a step | with shuffled rewards |"
    yield "|---|---|---|---|---|---|---|---|"
    for preset in dict.fromkeys(curve.preset for curve in curves):
        own = [curve for curve in curves if curve.preset == preset]
        real, control = [c for c in own if not c.shuffled], [c for c in own if c.shuffled]
        if not real:
            continue
        when = [reached(curve) for curve in real]
        area = [statistics.mean(curve.over_the_budget().values()) for curve in real]
        cells = [
            f"[`{preset}`](algorithms/{preset}.md)",
            str(len(real)),
            _span([curve.first for curve in real]),
            _span([curve.last for curve in real]),
            ", ".join("not reached" if step is None else str(step) for step in when),
            _span(area),
            f"{statistics.median(curve.seconds / curve.steps for curve in real):.1f}",
            _span([curve.last for curve in control]) if control else "—",
        ]
        yield "| " + " | ".join(cells) + " |"


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Small multiples: each preset's seeds in front of all others, the control dashed."""
    names = list(dict.fromkeys(curve.preset for curve in curves))
    columns = min(6, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(2.3 * columns, 1.9 * rows), dpi=110, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat
    for axes, name in zip(grid, names, strict=False):
        for curve in curves:
            points = sorted(curve.over_the_budget().items())
            steps, values = [step for step, _ in points], [value for _, value in points]
            if curve.preset != name and not curve.shuffled:
                axes.plot(steps, values, color="#d4d4d8", linewidth=0.7, zorder=1)
            elif curve.preset == name:
                style = {"color": "#6b7280", "linestyle": "--"} if curve.shuffled else {"color": "#2563eb"}
                axes.plot(steps, values, linewidth=1.6, zorder=2, **style)
        axes.set_title(name, fontsize=9)
        axes.set_ylim(0, 1)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in list(grid)[len(names) :]:
        axes.set_axis_off()
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("accuracy of sampled answers", fontsize=9)
    FigureCanvasAgg(figure).print_png(str(path))


def render(out: Path) -> None:
    """Puts the table into docs/comparison.md and draws its picture."""
    curves = results(out)
    if not curves:
        sys.exit(f"{out} has no results yet")
    text = "\n".join(table(curves))
    PAGE.write_text(
        BLOCK.sub(lambda found: f"{found[1]}\n{text}\n\n![curves](pictures/comparison.png)\n\n{found[2]}", PAGE.read_text())
    )
    draw(curves, PICTURE)
    print(text)


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", choices=[*PRESETS, []], metavar="PRESET", help="all of them by default")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument(
        "--shuffled", action="store_true", help="the negative control: rewards dealt out anew among the samples"
    )
    parser.add_argument("--render", action="store_true", help="only the table and the picture")
    arguments = parser.parse_args()
    if not arguments.render:
        presets = arguments.presets or list(PRESETS)
        run_all(arguments.out, presets, arguments.seeds, steps=arguments.steps, shuffled=arguments.shuffled)
    render(arguments.out)


if __name__ == "__main__":
    main()
