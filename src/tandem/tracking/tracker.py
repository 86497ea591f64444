"""The tracker: takes the metrics of each step and puts them where people look."""

import copy
import itertools
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TextIO, get_type_hints

import yaml
from tensordict import TensorDict

from tandem.api.lines import append_line, not_written, write_atomically
from tandem.api.samples import Dropped, Group
from tandem.api.services import Services, check_methods, factory_of
from tandem.api.weights import WeightVersion
from tandem.config.errors import ConfigError
from tandem.config.terms import read_term
from tandem.config.tracking import TrackingConfig
from tandem.tracking.health import HealthWatch
from tandem.tracking.progress import ProgressDisplay, line
from tandem.tracking.record_files import LINES, TIMELINE
from tandem.tracking.recorder import StepRecorder
from tandem.tracking.records import FROM_LINES, RecordedSample
from tandem.tracking.sinks.base import Sink, SinkRun
from tandem.tracking.statistics import Span

# The page that lets Hugging Face's `datasets` load the records of a run: `load_dataset("runs/addition/grpo")`. That library
# takes the types of the columns from the first lines that it sees, and a column that is empty there, such as `why`, could
# hold nothing later. The page names the types: one for each field of a `RecordedSample` that lines have.
_HEAD = "---\n# made by tandem: the types of the records, for Hugging Face's datasets\n"
"""The beginning of a page of ours: another one, which somebody wrote, stays as it is."""

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
"""Types of fields as that library writes them. The names in a dictionary differ from line to line: they are JSON."""


def columns() -> list[dict[str, Any]]:
    """The columns of the lines with their types, in order."""
    hints = get_type_hints(RecordedSample)
    types = ((name, _TYPES[hint]) for name, hint in hints.items() if name in FROM_LINES)
    return [{"name": name} | copy.deepcopy(kind) for name, kind in types]  # YAML would refer to one that is there twice


def write_card(run: Path, notes: Sequence[str] = ()) -> None:
    """Writes the page into the run's folder, unless there is one that is not ours. ``notes``: lines about the run.

    Raises:
        OSError: the disk refuses; there is no half of a page.
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
"""Ranks whose spans are in the timeline."""


def check_sinks(config: TrackingConfig) -> None:
    """Imports the libraries of all sinks; opens none.

    Raises:
        ConfigError: a sink that does not exist (tells the nearest), or is not installed (says what to install), or has no
            such knob.
    """
    for sink in config.sinks:
        term = read_term(sink, KEY)
        who, make = f"{KEY}={term.name}", factory_of("sink", term.name, KEY)
        Services().check(who, make, term.arguments, ("run",))
        check_methods(who, make, [name for name in ("log", "close") if isinstance(make, type) and not hasattr(make, name)])


def _row(text: str) -> dict[str, Any] | None:
    """The metrics of a line; None where it is none of ours."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(row, dict) and isinstance(row.get("step"), int)
    return row if whole and all(value is None or isinstance(value, (int, float)) for value in row.values()) else None


class Tracker:
    """Writes `metrics.jsonl`, the records of steps, the pictures and the sinks, and shows progress; a context manager.

    `metrics.jsonl` must work: an error there is raised. What else fails (a picture, a sink, a sample) is warned of once,
    with its cause, and training goes on.

    Raises:
        ConfigError: a sink that does not exist, is not installed, or refuses its knobs (a port that is taken), at
            construction.
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
        self._metrics = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        write_card(folder, notes)
        self._health = HealthWatch(folder)
        self._recorder = StepRecorder(folder, config.trajectories_per_step, config.trajectories_gib)
        if not self._metrics.tell():  # a run that begins, perhaps anew
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
        """Records one step. ``groups`` are those of its batch, ``history`` says which weights each version number was,
        ``batch`` is what was trained, with all fields, ``dropped`` what was not, and ``spans`` what each rank did when.

        Raises:
            NotWritten: the disk refuses the line of metrics; nothing of the step is recorded.
        """
        values = {name: float(value) for name, value in metrics.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        append_line(self.folder / "metrics.jsonl", json.dumps({"step": step, "time": round(time.time(), 3)} | finite))
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
        """A line of `timeline.jsonl`; a step that is made again has another line, and the last one counts."""
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
        """The part of `log` that records samples; alone, of a step that failed."""
        if self.config.trajectories_per_step != 0:
            self._try("recording", self._recorder.record, step, groups, batch, dropped, history or {})

    def state_dict(self) -> dict[str, Any]:
        """The position in `metrics.jsonl`. Everything logged and recorded before is on the disk from here on."""
        self._recorder.flush()
        try:
            os.fsync(self._metrics.fileno())
        except OSError as error:
            raise not_written(self.folder / "metrics.jsonl", error) from error
        return {"step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Cuts `metrics.jsonl` and the records after that step, for later ones are made again, and takes up the curves of
        before."""
        self._recorder.forget_after(int(state["step"]))
        self._health.forget_after(int(state["step"]))
        path, kept, damaged = self.folder / "metrics.jsonl", [], []
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        for number, text in enumerate(lines, 1):
            row = _row(text)
            if row is not None and row["step"] <= state["step"]:
                kept.append((text, row))
            elif row is None and text and number < len(lines):  # the last one may have been torn by a kill
                damaged.append(number)
        if damaged:
            aside = next(p for n in itertools.count(1) if not (p := path.with_name(f"metrics.damaged-{n}.jsonl")).exists())
            shutil.copyfile(path, aside)
            log.warning(
                "%s: %d damaged lines, the first is line %d; the curves lack those steps. The file as it was is %s",
                *(path, len(damaged), damaged[0], aside),
            )
        self._metrics.close()
        write_atomically(self.folder / "metrics.jsonl", "".join(f"{text}\n" for text, _ in kept))
        self._metrics = (self.folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._step = self._drawn_at = int(state["step"])
        self.series, self.last = {}, {}
        for _, row in kept:
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
        """Draws a last time, unless there are to be no pictures, and closes everything; idempotent."""
        if self._metrics.closed:
            return
        if self._display is not None:
            self._display.close()
        if draw and self.series and self.config.plot_every_steps:
            self.draw()
        for name, sink in self._sinks.items():
            self._try(f"sink {name}", sink.close)
        self._recorder.close()
        self._metrics.close()

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
        """Calls it; False and, the first time, a warning where it raises anything else than ``refused``.

        The one broad ``except`` of this room: libraries of sinks raise whatever they like, and none of it is worth a run.
        """
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
