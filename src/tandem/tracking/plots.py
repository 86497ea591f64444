"""Draws two pictures of a run: `reward.png`, and `curves.png` with the other metrics worth watching."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Series = Mapping[str, Sequence[tuple[int, float]]]
"""Metric name → (step, value), in order of steps."""

BLUE, ORANGE, GREEN, GREY, PURPLE, RED = "#2563eb", "#ea580c", "#15803d", "#6b7280", "#7c3aed", "#be123c"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, GREY)

PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("loss", ("loss",)),
    ("gradient norm", ("grad_norm",)),
    ("learning rate", ("lr",)),
    ("entropy", ("entropy",)),
    ("KL", ("kl/rollout_proximal", "kl/reference")),
    ("clip fraction", ("clip_fraction",)),
    ("value loss", ("value/loss",)),
    ("explained variance of values", ("value/explained_variance",)),
    ("margin of pairs", ("margin",)),
    ("margin of held-out pairs", ("eval/margin",)),
    ("scores of pairs", ("score/chosen", "score/rejected")),
    ("KL to the teacher", ("kl/teacher",)),
    ("reward spread", ("reward/std",)),
    ("groups without spread", ("groups/without_spread",)),
    ("completion length", ("completion_length/mean", "completion_length/max")),
    ("truncated", ("truncated",)),
    ("staleness", ("staleness/mean", "staleness/max")),
    ("gap of log-probabilities", ("gap/mean", "gap/max")),
    ("seconds", ("time/step_s", "time/generate_s", "time/train_s", "time/update_weights_s", "time/evaluate_s")),
    ("tokens/s", ("tokens_per_s/generate", "tokens_per_s/train")),
    ("overlap", ("time/overlap",)),
    ("peak memory, GiB", ("memory/peak_gib",)),
)
"""Title and metrics of each panel; a panel without values is left out."""


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Returns for each value the mean of the last `window` values up to it; at the beginning, of the fewer values that
    exist."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def _finite(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    return [step for step, _ in finite], [value for _, value in finite]


def _style(axes: Axes) -> None:
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def _write(figure: Figure, path: Path) -> Path:
    """Writes the picture atomically, so that a reader never sees an incomplete file."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        FigureCanvasAgg(figure).print_png(str(temporary))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def draw_reward(series: Series, path: Path, title: str) -> Path | None:
    """Draws the mean reward of each step, its running mean, and the validation accuracy. Returns None without values."""
    steps, rewards = _finite(series.get("reward/mean", ()))
    eval_steps, accuracy = _finite(series.get("eval/accuracy", ()))
    if not steps and not eval_steps:
        return None
    figure = Figure(figsize=(7.2, 4.2), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    if steps:
        window = max(3, len(steps) // 20)
        faint: dict[str, Any] = {"alpha": 0.35, "linewidth": 1, "marker": "o", "markersize": 2.5}
        axes.plot(steps, rewards, color=BLUE, label="mean reward of the step", **faint)
        axes.plot(steps, running_mean(rewards, window), color=BLUE, linewidth=2.2, label=f"mean of the last {window} steps")
    if eval_steps:
        label = "greedy accuracy, validation" if steps else "accuracy, validation"  # the latter of pairs, for a reward model
        axes.plot(eval_steps, accuracy, color=ORANGE, marker="D", markersize=5, linewidth=1.4, label=label)
    axes.set(xlabel="step", ylabel="reward" if steps else "share", title=title)
    _style(axes)
    axes.legend(frameon=False, loc="best")
    return _write(figure, path)


def draw_curves(series: Series, path: Path, title: str) -> Path | None:
    """Draws one panel for each entry of `PANELS` that has values. Returns None if none has."""
    panels = []
    for name, metrics in PANELS:
        curves = [(metric, *_finite(series.get(metric, ()))) for metric in metrics]
        curves = [curve for curve in curves if curve[1]]
        if curves:
            panels.append((name, curves))
    if not panels:
        return None
    columns = min(4, len(panels))
    rows = math.ceil(len(panels) / columns)
    width, height = 3.4 * columns, 2.4 * rows + 0.5
    figure = Figure(figsize=(width, height), dpi=100)
    figure.suptitle(title, y=1 - 0.1 / height, va="top")
    # fixed margins, in inches: matplotlib's own layout would draw everything twice
    figure.subplots_adjust(
        left=0.6 / width, right=1 - 0.15 / width, bottom=0.35 / height, top=1 - 0.7 / height, wspace=0.27, hspace=0.33
    )
    grid = figure.subplots(rows, columns, squeeze=False).flat
    for (name, curves), axes in zip(panels, grid, strict=False):  # panels first: zip must not take one axes too many
        for (metric, steps, values), colour in zip(curves, COLOURS, strict=False):
            label = metric.rpartition("/")[2].removesuffix("_s")
            marker = "o" if len(steps) < 30 else None
            axes.plot(steps, values, color=colour, linewidth=1.4, marker=marker, markersize=2.5, label=label)
        axes.set_title(name, fontsize=10)
        axes.tick_params(labelsize=8)
        _style(axes)
        if all(value >= 0 for _, _, values in curves for value in values):
            axes.set_ylim(bottom=0)  # else autoscaling would make a flat line look wild
        if len(curves) > 1:
            bottom, top = axes.get_ylim()
            axes.set_ylim(bottom, top + 0.3 * (top - bottom))  # room for the legend
            axes.legend(frameon=False, fontsize=7, loc="upper center", ncols=2)
    for axes in list(grid):  # unused panels of the last row
        axes.set_axis_off()
    return _write(figure, path)
