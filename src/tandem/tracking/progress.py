"""The progress of a run: one line a step, and on a terminal a bar with the remaining time below."""

import time
from collections import deque
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

PARTS = (
    ("reward/mean", "reward {:.3f}"),
    ("loss", "loss {:.4f}"),
    ("eval/accuracy", "eval {:.1%}"),
    ("eval/accuracy/safety", "safe or not {:.1%}"),
    ("completion_length/mean", "length {:.0f}"),
    ("tokens_per_s/generate", "generate {:.0f} tok/s"),
    ("tokens_per_s/train", "train {:.0f} tok/s"),
    ("staleness/mean", "staleness {:.2f}"),
    ("episodes/dropped", "dropped {:.0f}"),
    ("samples/failed", "failed samples {:.0f}"),
    ("time/step_s", "{:.1f} s"),
)
"""The metrics that the line shows, in this order; all others are only in metrics.jsonl."""

WRONG = (("truncated", 0.2, "{:.0%} truncated"), ("groups/without_spread", 0.5, "{:.0%} of groups without spread"))
"""Metrics that the line shows only from a bound on, behind an exclamation mark."""

ETA_STEPS = 10


def duration(seconds: float) -> str:
    """2:03:04, or 3:04 below an hour."""
    minutes, second = divmod(int(seconds + 0.5), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def line(step: int, total_steps: int | None, metrics: Mapping[str, float]) -> str:
    """One step in one line. Metrics that are not there are left out."""
    known = dict(metrics)
    for counted in ("episodes/dropped", "samples/failed"):  # by reason; the line shows the sum
        total = sum(value for name, value in metrics.items() if name.startswith(f"{counted}/"))
        known |= {counted: total} if total else {}
    if "reward/mean" in known:
        known.pop("loss", None)  # in reinforcement learning its value says nothing at a glance
    if not known.get("staleness/mean"):
        known.pop("staleness/mean", None)
    shown = [form.format(known[name]) for name, form in PARTS if name in known]
    if wrong := [form.format(known[name]) for name, bound, form in WRONG if known.get(name, 0.0) >= bound]:
        shown.append("! " + ", ".join(wrong))
    of = f"/{total_steps}" if total_steps is not None else ""
    return f"step {step}{of}  " + "  ".join(shown)


class _Remaining(ProgressColumn):
    """The time left, as computed from the last steps."""

    def render(self, task: Task) -> Text:
        return Text(f"ETA {task.fields['eta']}")


class ProgressDisplay:
    """Prints steps. On a terminal a bar stays below the lines; elsewhere the ETA stands at the end of each line."""

    def __init__(self, total_steps: int | None, name: str, file: TextIO | None = None):
        self.total_steps = total_steps
        self.console = Console(file=file, highlight=False, soft_wrap=True)
        self._times: deque[float] = deque([time.monotonic()], maxlen=ETA_STEPS + 1)
        self._bar: Progress | None = None
        if self.console.is_terminal:
            # no refresh thread: it would compete with the computation for the cores, and nothing changes between steps
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total}"),
                _Remaining(),
            )
            self._bar = Progress(*columns, console=self.console, auto_refresh=False, transient=True)
            self._task = self._bar.add_task(name, total=total_steps, eta="…")
            self._bar.start()

    def eta_s(self, step: int) -> float | None:
        """Seconds left at the pace of the last steps; None where the end is not known."""
        if self.total_steps is None or len(self._times) < 2:
            return None
        pace = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        return max(0, self.total_steps - step) * pace

    def step(self, step: int, metrics: Mapping[str, float]) -> str:
        """Shows one step and returns its line."""
        self._times.append(time.monotonic())
        text, eta = line(step, self.total_steps, metrics), self.eta_s(step)
        left = "" if eta is None else duration(eta)
        if self._bar is not None:
            self.console.print(text, markup=False)
            self._bar.update(self._task, completed=step, eta=left)
            self._bar.refresh()
        else:
            print(text + (f"  ETA {left}" if left else ""), file=self.console.file, flush=True)
        return text

    def close(self) -> None:
        """Gives the terminal back; idempotent."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
