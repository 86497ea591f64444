"""The tracker writes the metrics and samples of each step to files, sinks, pictures and the terminal, where it shows one
line a step and a bar with the remaining time."""

import copy
import itertools
import json
import logging
import math
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TextIO, get_type_hints

import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text
from tensordict import TensorDict

from tandem.api.services import Services, check_methods, factory_of
from tandem.api.shared_files import append_line, json_object, not_written, sync, write_atomically
from tandem.api.weights import WeightVersion
from tandem.api.workflow import Dropped, Group
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrackingConfig
from tandem.config.terms import read_term
from tandem.tracking.health import HealthWatch
from tandem.tracking.record_files import LINES, TIMELINE
from tandem.tracking.records import FROM_LINES, RecordedSample, StepRecorder
from tandem.tracking.sinks import Sink, SinkRun
from tandem.tracking.statistics import Span

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
"""(metric, format) of each metric in the line of a step, in this order; all others are only in metrics.jsonl."""

WRONG = (("truncated", 0.2, "{:.0%} truncated"), ("groups/without_spread", 0.5, "{:.0%} of groups without spread"))
"""(metric, bound, format) of metrics that the line shows after an exclamation mark if they reach the bound."""

ETA_STEPS = 10
"""Number of last steps from whose duration the remaining time is computed."""


def duration(seconds: float) -> str:
    """Formats a duration as 2:03:04, or as 3:04 if it is below an hour."""
    minutes, second = divmod(int(seconds + 0.5), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def line(step: int, total_steps: int | None, metrics: Mapping[str, float]) -> str:
    """Describes one step in one line. Missing metrics are left out."""
    known = dict(metrics)
    for counted in ("episodes/dropped", "samples/failed"):  # metrics by reason; the line shows their sum
        count = sum(value for name, value in metrics.items() if name.startswith(f"{counted}/"))
        known |= {counted: count} if count else {}
    if "reward/mean" in known:
        known.pop("loss", None)  # in reinforcement learning the value of the loss says little
    if not known.get("staleness/mean"):
        known.pop("staleness/mean", None)
    shown = [form.format(known[name]) for name, form in PARTS if name in known]
    wrong = [form.format(known[name]) for name, bound, form in WRONG if known.get(name, 0.0) >= bound]
    if wrong:
        shown.append("! " + ", ".join(wrong))
    total = f"/{total_steps}" if total_steps is not None else ""
    return f"step {step}{total}  " + "  ".join(shown)


class _Remaining(ProgressColumn):
    """The column of the bar with the remaining time."""

    def render(self, task: Task) -> Text:
        return Text(f"ETA {task.fields['eta']}")


class ProgressDisplay:
    """Prints a line for each step. On a terminal a bar stays below the lines; elsewhere each line ends with the ETA."""

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
        """Returns the remaining seconds at the pace of the last steps, or None if the number of steps is unknown."""
        if self.total_steps is None or len(self._times) < 2:
            return None
        pace = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        return max(0, self.total_steps - step) * pace

    def step(self, step: int, metrics: Mapping[str, float]) -> str:
        """Shows one step and returns its line."""
        self._times.append(time.monotonic())
        text, eta = line(step, self.total_steps, metrics), self.eta_s(step)
        remaining = "" if eta is None else duration(eta)
        if self._bar is not None:
            self.console.print(text, markup=False)
            self._bar.update(self._task, completed=step, eta=remaining)
            self._bar.refresh()
        else:
            print(text + (f"  ETA {remaining}" if remaining else ""), file=self.console.file, flush=True)
        return text

    def close(self) -> None:
        """Removes the bar from the terminal; idempotent."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


# The README.md that lets Hugging Face's `datasets` load the records of a run: `load_dataset("runs/addition/grpo")`. The
# library infers the types of columns from the first lines, so a column that is empty there, such as `why`, could hold no
# value later. README.md therefore gives the types: one for each field of a `RecordedSample` that lines have.
_HEAD = "---\n# made by tandem: the types of the records, for Hugging Face's datasets\n"
"""The beginning of each README.md that Tandem writes. A README.md with another beginning is the user's, and is not
changed."""

_TYPES: dict[Any, dict[str, Any]] = {
    bool: {"dtype": "bool"},
    int: {"dtype": "int64"},
    int | None: {"dtype": "int64"},
    float | None: {"dtype": "float64"},
    str: {"dtype": "string"},
    str | None: {"dtype": "string"},
    list[str]: {"list": "string"},
    list[dict[str, Any]]: {"list": "json"},
    list[list[dict[str, Any]]]: {"list": {"list": "json"}},
    dict[str, float]: {"dtype": "json"},
    dict[str, str]: {"dtype": "json"},
    Any: {"dtype": "json"},
}
"""Type of a field → type of `datasets`. Dictionaries are JSON, because their keys differ from line to line."""


def columns() -> list[dict[str, Any]]:
    """Returns (name, type) of each field in the lines of the records, as Hugging Face's datasets reads them in a README."""
    hints = get_type_hints(RecordedSample)
    types = ((name, _TYPES[hint]) for name, hint in hints.items() if name in FROM_LINES)
    return [
        {"name": name} | copy.deepcopy(kind) for name, kind in types
    ]  # copies: YAML would write a repeated object as a reference


def write_card(run: Path, notes: Sequence[str] = ()) -> None:
    """Writes README.md atomically into the run's folder, unless the user wrote one. ``notes``: lines about the run.

    Raises:
        OSError: the file cannot be written.
    """
    path = run / "README.md"
    files = [{"split": "train", "path": f"{LINES}/step_*.jsonl"}]
    card = {"configs": [{"config_name": "default", "data_files": files}], "dataset_info": {"features": columns()}}
    text = _HEAD + yaml.safe_dump(card, sort_keys=False) + "---\n\nThe recorded samples of this run: docs/records.md.\n"
    text += "".join(f"\n{note}\n" for note in notes)
    old = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else _HEAD
    if old.startswith(_HEAD) and old != text:
        write_atomically(path, text)


log = logging.getLogger(__name__)

KEY = "tracking.sinks"

MOST_RANKS = 64
"""Maximum number of ranks whose spans are in the timeline."""


def check_sinks(config: TrackingConfig) -> None:
    """Imports the libraries of all sinks without opening the sinks.

    Raises:
        ConfigError: a sink does not exist (the message suggests the nearest name), is not installed (the message says what
            to install), or lacks a knob or a method.
    """
    for sink in config.sinks:
        term = read_term(sink, KEY)
        label, make = f"{KEY}={term.name}", factory_of("sink", term.name, KEY)
        Services().check(label, make, term.arguments, ("run",))
        check_methods(label, make, [name for name in ("log", "close") if isinstance(make, type) and not hasattr(make, name)])


def _row(text: str) -> dict[str, Any] | None:
    """Reads a line of `metrics.jsonl`; None if it is damaged."""
    row = json_object(text) or {}
    are_numbers = all(value is None or isinstance(value, (int, float)) for value in row.values())
    return row if are_numbers and isinstance(row.get("step"), int) else None


class Tracker:
    """Writes `metrics.jsonl`, the records of steps, pictures and sinks, and shows progress. A context manager.

    An error of `metrics.jsonl` is raised. Any other error (a picture, a sink, a sample) gives one warning with its cause,
    and training goes on.

    Raises:
        ConfigError: at construction, a sink does not exist, is not installed, or refuses its knobs (a port is in use).
    """

    def __init__(
        self,
        folder: Path,
        config: TrackingConfig,
        *,
        total_steps: int | None = None,
        run_name: str = "",
        config_dict: Mapping[str, Any] | None = None,
        notes: Sequence[str] = (),
        progress: bool = True,
        file: TextIO | None = None,
    ):
        self.folder, self.config, self.total_steps = folder, config, total_steps
        self.run_name = run_name or folder.name
        self.series: dict[str, list[tuple[int, float]]] = {}
        self.last: dict[str, float] = {}
        self._warned: set[str] = set()
        check_sinks(config)  # all of them, before any is opened
        services = Services(run=SinkRun(folder, config.project, self.run_name, dict(config_dict or {})))
        self._sinks: dict[str, Sink] = {}
        for sink in config.sinks:
            self._try(f"sink {sink}", self._open, sink, services, refused=ConfigError)
        self._path, self._closed = folder / "metrics.jsonl", False
        self._path.open("a").close()  # a folder, or a file that may not be written, ends the start
        write_card(folder, notes)
        self._health = HealthWatch(folder)
        self._recorder = StepRecorder(folder, config.trajectories_per_step, config.trajectories_gib)
        if not self._path.stat().st_size:  # a new run, or one that starts from the beginning again
            self._recorder.forget_after(-1)
            self._health.forget_after(-1)
        self._display = ProgressDisplay(total_steps, self.run_name, file) if progress else None
        self._drawn_at = self._step = 0

    def log(
        self,
        step: int,
        metrics: Mapping[str, float],
        groups: Sequence[Group] = (),
        history: Mapping[int, WeightVersion] | None = None,
        batch: TensorDict | None = None,
        dropped: Sequence[Dropped] = (),
        spans: Sequence[Sequence[Span]] = (),
    ) -> None:
        """Records one step.

        Args:
            step: number of the step.
            metrics: name → value.
            groups: the groups of the batch.
            history: the weight version of each number.
            batch: the trained batch with all fields.
            dropped: prompts that were dropped while the batch was collected.
            spans: for each rank, the blocks that it ran.

        Raises:
            NotWritten: the line of metrics cannot be written; nothing of the step is recorded.
        """
        values = {name: float(value) for name, value in metrics.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        append_line(self._path, json.dumps({"step": step, "time": round(time.time(), 3)} | finite))
        for name, value in values.items():
            self.series.setdefault(name, []).append((step, value))
        self.last |= values
        self._step = step
        if spans:
            self._try("the timeline", self._keep_spans, step, spans)
        self.record(step, groups, history, batch, dropped)
        for name, sink in list(self._sinks.items()):
            if not self._try(f"sink {name}", sink.log, step, values):
                del self._sinks[name]
        text = self._display.step(step, values) if self._display else line(step, self.total_steps, values)
        log.info("%s", text)
        self._health.look(step, self.series)
        if self.config.plot_every_steps and step - self._drawn_at >= self.config.plot_every_steps:
            self.draw()

    def _keep_spans(self, step: int, spans: Sequence[Sequence[Span]]) -> None:
        """Appends a line to `timeline.jsonl`. A repeated step has several lines; the last counts."""
        ranks = [[(role, stage, round(a, 4), round(b, 4)) for role, stage, a, b in rank] for rank in spans[:MOST_RANKS]]
        append_line(self.folder / TIMELINE, json.dumps({"step": step, "ranks": ranks}))

    def record(
        self,
        step: int,
        groups: Sequence[Group] = (),
        history: Mapping[int, WeightVersion] | None = None,
        batch: TensorDict | None = None,
        dropped: Sequence[Dropped] = (),
    ) -> None:
        """Records only the samples of a step; arguments as for `log`. Called alone for a step that failed."""
        if self.config.trajectories_per_step != 0:
            self._try("recording", self._recorder.record, step, groups, batch, dropped, history or {})

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of the last step. Waits until all metrics and records so far are on the disk."""
        self._recorder.flush()
        try:
            sync(self._path)
        except OSError as error:
            raise not_written(self._path, error) from error
        return {"step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Removes metrics and records after the step of ``state``, because these steps will be repeated, and reads the
        earlier curves."""
        self._recorder.forget_after(int(state["step"]))
        self._health.forget_after(int(state["step"]))
        earlier, damaged = [], []
        lines = self._path.read_text(encoding="utf-8", errors="replace").split("\n")
        for number, text in enumerate(lines, 1):
            row = _row(text)
            if row is not None and row["step"] <= state["step"]:
                earlier.append((text, row))
            elif row is None and text and number < len(lines):  # the last line may be incomplete after a kill
                damaged.append(number)
        if damaged:
            aside = next(
                p for n in itertools.count(1) if not (p := self._path.with_name(f"metrics.damaged-{n}.jsonl")).exists()
            )
            shutil.copyfile(self._path, aside)
            log.warning(
                "%s: %d damaged lines, the first is line %d; the curves lack these steps. The old file is now %s",
                *(self._path, len(damaged), damaged[0], aside),
            )
        write_atomically(self._path, "".join(f"{text}\n" for text, _ in earlier))
        self._step = self._drawn_at = int(state["step"])
        self.series, self.last = {}, {}
        for _, row in earlier:
            values = {n: math.nan if v is None else v for n, v in row.items() if n not in ("step", "time")}
            self.last |= values
            for name, value in values.items():
                self.series.setdefault(name, []).append((row["step"], value))

    def draw(self) -> None:
        from tandem.tracking.plots import draw_curves, draw_reward  # noqa: PLC0415 - matplotlib takes a second to import

        self._drawn_at = self._step
        self._try("reward.png", draw_reward, self.series, self.folder / "reward.png", self.run_name)
        self._try("curves.png", draw_curves, self.series, self.folder / "curves.png", self.run_name)

    def close(self, *, draw: bool = True) -> None:
        """Draws the pictures a last time, unless ``draw`` is False or pictures are off, and closes all files and sinks.
        Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._display is not None:
            self._display.close()
        if draw and self.series and self.config.plot_every_steps:
            self.draw()
        for name, sink in self._sinks.items():
            self._try(f"sink {name}", sink.close)
        self._recorder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, sink: str, services: Services) -> None:
        term = read_term(sink, KEY)
        self._sinks[sink] = services.make(f"{KEY}={term.name}", factory_of("sink", term.name, KEY), term.arguments)

    def _try(
        self, what: str, function: Callable[..., object], *arguments: object, refused: type[Exception] | tuple[()] = ()
    ) -> bool:
        """Calls ``function``. An exception of type ``refused`` is raised. Any other exception makes it return False, because
        no failure of a sink may end the run; the first one for each ``what`` is logged as a warning."""
        try:
            function(*arguments)
        except refused:
            raise
        except Exception as error:  # the boundary of a sink: training goes on without it
            if what not in self._warned:
                self._warned.add(what)
                log.warning("%s failed, training goes on without it: %s: %s", what, type(error).__name__, error)
                log.info("cause", exc_info=error)  # to log.txt
            return False
        return True
