"""The presets on the same small task: one-digit addition, the real 135M model, until 80 % of sampled answers are right.

    python benchmarks/compare_algorithms.py                        # what is missing in the records, about a minute each
    python benchmarks/compare_algorithms.py grpo rloo --seeds 0 1
    python benchmarks/compare_algorithms.py --shuffled grpo        # the negative control, as many steps as the run took
    python benchmarks/compare_algorithms.py --render               # table and picture of docs/comparison.md

The runs are those of tests/learning. Each adds one line to `compare_algorithms.jsonl` here and is not run again, so that the
whole can be done in pieces; delete a line to repeat its run.
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

from tandem.config.algorithm import PRESETS  # noqa: E402
from tandem.config.errors import TandemError  # noqa: E402
from tests.learning.addition import GOAL, OWN_GOAL, Curve, learn  # noqa: E402

RECORDS = Path(__file__).with_suffix(".jsonl")
PAGE = ROOT / "docs" / "comparison.md"
PICTURE = ROOT / "docs" / "pictures" / "comparison.png"
BLOCK = re.compile(r"(<!-- measured -->\n).*?(<!-- end -->)", re.S)

REAL, CONTROL, OTHERS = "#2563eb", "#d97706", "#d4d4d8"


def say(line: str) -> None:
    """Progress."""
    print(line, file=sys.stderr, flush=True)


def report(curve: Curve, metrics: dict[str, float]) -> None:
    """One line a step."""
    phases = " + ".join(f"{metrics[f'time/{name}_s']:.1f}" for name in ("generate", "train", "update_weights"))
    measured = f", measured {curve.last:.2f}" if curve.steps in curve.measured else ""
    length = metrics["completion_length/mean"]
    say(f"{curve.preset}, step {curve.steps}: {curve.batches[-1]:.2f} right{measured}, {length:.1f} tokens, {phases} s")


def records(path: Path = RECORDS) -> list[Curve]:
    """All recorded runs, in the order of the presets."""
    curves = []
    for line in path.read_text().splitlines() if path.exists() else ():
        data = json.loads(line)
        data["measured"] = {int(step): value for step, value in data["measured"].items()}
        data["settings"] = tuple(data["settings"])
        curves.append(Curve(**data))
    order = list(PRESETS)
    return sorted(curves, key=lambda curve: (order.index(curve.preset), curve.shuffled, curve.seed))


def find(curves: Sequence[Curve], preset: str, seed: int, shuffled: bool) -> Curve | None:
    """The recorded run of these, if there is one."""
    return next((c for c in curves if (c.preset, c.seed, c.shuffled) == (preset, seed, shuffled)), None)


def run_all(path: Path, presets: Sequence[str], seeds: Sequence[int], *, shuffled: bool) -> bool:
    """Runs what is not recorded; False where a run ended with an error, which is told."""
    everything_ran = True
    for preset, seed in [(preset, seed) for preset in presets for seed in seeds]:
        known = records(path)
        if find(known, preset, seed, shuffled) is not None:
            continue
        real = find(known, preset, seed, False)
        if shuffled and real is None:
            say(f"{preset}: run it without --shuffled first; the control takes as many steps")
            everything_ran = False
            continue
        try:
            if real is None:
                curve = learn(preset, seed=seed, observe=report)
            else:
                curve = learn(preset, seed=seed, shuffled=True, steps=real.steps, observe=report)
        except TandemError as error:
            say(f"{preset}: {error}")
            everything_ran = False
            continue
        with path.open("a") as file:
            file.write(json.dumps(rounded(curve)) + "\n")
        kind = "shuffled" if shuffled else "learnt"
        say(f"{preset} {kind}: {curve.first:.2f} → {curve.last:.2f} in {curve.steps} steps, {curve.seconds:.0f} s")
    return everything_ran


def rounded(curve: Curve) -> dict[str, object]:
    """A line of the records."""
    data = asdict(curve)
    data["batches"] = [round(value, 4) for value in curve.batches]
    data["measured"] = {step: round(value, 4) for step, value in curve.measured.items()}
    return data | {"step_s": round(curve.step_s, 2), "seconds": round(curve.seconds, 1)}


def _span(values: Sequence[float]) -> str:
    return f"{values[0]:.2f}" if len(values) == 1 else f"{statistics.mean(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def table(curves: Sequence[Curve]) -> Iterator[str]:
    """One row for each preset: means and ranges over the seeds."""
    yield "| preset | set beside the task's | steps to the goal | before | after | with shuffled rewards | s a step |"
    yield "|---|---|---|---|---|---|---|"
    for preset in dict.fromkeys(curve.preset for curve in curves):
        own = [curve for curve in curves if curve.preset == preset]
        real, control = [c for c in own if not c.shuffled], [c for c in own if c.shuffled]
        if not real:
            continue
        cells = [
            f"[`{preset}`](presets.md#{preset})",
            " ".join(f"`{setting}`" for setting in real[0].settings),
            ", ".join(str(curve.steps) if curve.reached else f"not in {curve.steps}" for curve in real),
            _span([curve.first for curve in real]),
            _span([curve.last for curve in real]),
            _span([curve.last for curve in control]) if control else "not run",
            f"{statistics.median(curve.step_s for curve in real):.1f}",
        ]
        yield "| " + " | ".join(cells) + " |"


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Small multiples: each preset and its control in front of all others; held-out pairs as dots, batches dotted."""
    names = list(dict.fromkeys(curve.preset for curve in curves))
    columns = min(6, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(2.1 * columns, 1.8 * rows), dpi=100, layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat)
    for axes, name in zip(grid, names, strict=False):
        for curve in curves:
            points = list(zip(*sorted(curve.measured.items()), strict=True))
            if curve.preset != name and not curve.shuffled:
                axes.plot(*points, color=OTHERS, linewidth=0.7, zorder=1)
            elif curve.preset == name:
                colour, order = (CONTROL, 3) if curve.shuffled else (REAL, 4)
                axes.plot(*points, "o-", color=colour, linewidth=1.5, markersize=3.5, zorder=order)
                axes.plot(range(curve.steps), curve.batches, ":", color=colour, linewidth=1.2, zorder=2)
        axes.axhline(OWN_GOAL.get(name, GOAL), color="#9ca3af", linewidth=0.6, zorder=0)
        axes.set_title(name, fontsize=9)
        axes.set_ylim(0, 1)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[len(names) :]:
        axes.set_axis_off()
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("right answers", fontsize=9)
    path.parent.mkdir(exist_ok=True)
    FigureCanvasAgg(figure).print_png(str(path))


def with_table(page: str, curves: Sequence[Curve]) -> str:
    """The page with the table of these runs."""
    text = "\n".join(table(curves))
    return BLOCK.sub(lambda found: f"{found[1]}\n{text}\n\n![curves](pictures/comparison.png)\n\n{found[2]}", page)


def main() -> int:
    """Runs the comparison and prints it; the top of the file says how."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", choices=[*PRESETS, []], metavar="PRESET", help="all of them by default")
    parser.add_argument("--records", type=Path, default=RECORDS, help="file of the runs, one a line")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--shuffled", action="store_true", help="the negative control: rewards dealt out anew among the samples"
    )
    parser.add_argument("--render", action="store_true", help="only the table and the picture")
    arguments = parser.parse_args()
    if not arguments.render:
        presets = arguments.presets or list(PRESETS)
        return 0 if run_all(arguments.records, presets, arguments.seeds, shuffled=arguments.shuffled) else 1
    curves = records(arguments.records)
    if not curves:
        sys.exit(f"{arguments.records} has no runs yet")
    PAGE.write_text(with_table(PAGE.read_text(), curves))
    draw(curves, PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
