"""Writes and reads the record of a step: its samples as lines of text, and its trained batch as tensors.

`trajectories/step_N.jsonl` has one JSON object a sample, `batches/step_N.safetensors.gz` the packed batch of the same
samples. The lines are written last; a step without them does not count as recorded.

`StepRecorder` writes during training in a thread, with a short queue and a limit of disk space.
"""

import contextlib
import gzip
import json
import logging
import math
import queue
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from tensordict import TensorDict

from tandem.api.batch import check, select, unpack
from tandem.api.media import written
from tandem.api.requests import RequestTiming, StopReason
from tandem.api.shared_files import json_line, write_atomically
from tandem.api.weights import WeightVersion
from tandem.api.workflow import Dropped, Group, Sample
from tandem.config.errors import ConfigError
from tandem.tracking.record_files import LINES, TENSORS, TIMES, TIMES_OF, lines_path, recorded_steps, tensors_path


@dataclass(frozen=True)
class Pick:
    """A sample that was chosen to be recorded."""

    group: Group
    index: int
    """Index of the sample in the group."""

    sample_id: int
    """Number of the sample in the batch."""

    @property
    def sample(self) -> Sample:
        """The chosen sample."""
        return self.group.samples[self.index]


def choose(groups: Iterable[Group], count: int | None) -> list[Pick]:
    """Chooses up to ``count`` samples (None: all): the best and the worst of each group first, then the others."""
    ends, others, first = [], [], 0
    for group in groups:
        order = sorted(range(len(group.samples)), key=lambda i: -group.samples[i].reward)
        picks = [Pick(group, i, first + i) for i in order]
        ends += picks if len(picks) < 2 else [picks[0], picks[-1]]
        others += picks[1:-1]
        first += len(order)
    return (ends + others)[:count]


def choose_dropped(dropped: Iterable[Dropped], count: int | None) -> list[Dropped]:
    """Chooses up to ``count`` dropped prompts (None: all): the first of each reason, then the second of each, and so on."""
    seen: Counter[str] = Counter()
    ranked = []
    for prompt in dropped:
        ranked.append((seen[prompt.reason], prompt))
        seen[prompt.reason] += 1
    return [prompt for _, prompt in sorted(ranked, key=lambda pair: pair[0])][:count]


def _version_runs(sample: Sample, history: Mapping[int, WeightVersion]) -> list[list[dict[str, Any]]]:
    """Returns for each trajectory the runs of trained tokens that the same weight version generated, in order."""
    runs_by_trajectory = []
    for trajectory in sample.trajectories:
        runs: list[dict[str, Any]] = []
        for number in trajectory.versions[trajectory.loss_mask].tolist():
            if not runs or runs[-1]["version"] != number:
                digest = history[number].digest if number in history else ""
                runs.append({"version": number, "tokens": 0} | ({"digest": digest} if digest else {}))
            runs[-1]["tokens"] += 1
        runs_by_trajectory.append(runs)
    return runs_by_trajectory


def _of_group(step: int, group: Group) -> dict[str, Any]:
    failures = [*group.failure_words, *group.failures[len(group.failure_words) :]]
    return {
        "step": step,
        "group": group.group_id,
        "source": group.source,
        "answer": group.data.get("answer"),
        "failures": failures,
    }


def _of_sample(sample: Sample, index: int, history: Mapping[int, WeightVersion]) -> dict[str, Any]:
    return {
        "sample": index,
        "prompt": sample.prompt_text,
        "completion": sample.completion_text,
        "messages": written(sample.messages),
        "conversations": [written(messages) for messages in sample.conversations],
        "reward": float(sample.reward),
        "rewards": dict(sample.rewards),
        "raw_rewards": dict(sample.raw_rewards),
        "accuracy": sample.accuracy,
        "extracted_answer": sample.answer,
        "judges": dict(sample.words),
        "in_loss": sample.in_loss,
        "greedy": sample.greedy,
        "tokens": sample.num_trained_tokens,
        "stop_reason": [StopReason(trajectory.stop_reason).name.lower() for trajectory in sample.trajectories],
        "versions": _version_runs(sample, history),
    }


def describe(step: int, pick: Pick, history: Mapping[int, WeightVersion], advantages: Mapping[int, float]) -> dict[str, Any]:
    """Returns the line of a trained sample, as a dict. ``advantages``: from `mean_advantages`."""
    trained = {"sample_id": pick.sample_id, "advantage": advantages.get(pick.sample_id), "dropped": None, "why": None}
    return _of_group(step, pick.group) | _of_sample(pick.sample, pick.index, history) | trained


def describe_dropped(step: int, dropped: Dropped, history: Mapping[int, WeightVersion]) -> dict[str, Any]:
    """Returns the line of a prompt that was not trained, as a dict: its best sample, or the prompt alone if there are no
    samples."""
    reason = {"sample_id": None, "advantage": None, "dropped": dropped.reason, "why": dropped.words or None}
    picks = choose([dropped.group], 1)
    if picks:
        return _of_group(step, dropped.group) | _of_sample(picks[0].sample, picks[0].index, history) | reason
    empty, messages = dict.fromkeys(sorted(FROM_LINES)), dropped.group.data.get("messages") or []
    return empty | _of_group(step, dropped.group) | {"messages": written(messages)} | reason


def mean_advantages(batch: Mapping[str, torch.Tensor]) -> dict[int, float]:
    """Returns the mean advantage of each sample over its trained tokens, by ``sample_id``; empty without advantages. Uses
    numpy, because torch would start more threads."""
    if "advantages" not in batch:
        return {}
    sums: dict[int, tuple[float, int]] = {}
    advantages, mask, bounds = (batch[name].numpy() for name in ("advantages", "loss_mask", "cu_seqlens"))
    for number, start, end in zip(batch["sample_id"].tolist(), bounds, bounds[1:], strict=False):
        trained = advantages[start:end][mask[start:end]]
        total, count = sums.get(number, (0.0, 0))
        sums[number] = (total + float(trained.sum(dtype="float64")), count + len(trained))
    means = {number: total / count for number, (total, count) in sums.items() if count}
    return {number: mean for number, mean in means.items() if math.isfinite(mean)}


def packed_lines(lines: Iterable[Mapping[str, Any]]) -> bytes:
    """Encodes the lines as JSON lines, in a form that libraries for tables can read too."""
    packed = []
    for line in lines:
        text = json_line(line)
        packed.append(json_line(_for_tables(line)) if _ODD_NUMBER.search(text) else text)
    return "".join(text + "\n" for text in packed).encode("utf-8", errors="replace")


_ODD_NUMBER = re.compile(r"NaN|Infinity|\d{19}")
"""Finds lines that may hold a number that tables cannot store. A match within a text does no harm."""


def _for_tables(value: Any) -> Any:
    """Replaces a number that is not finite by None, and an integer of more than 64 bits by its digits as text."""
    if isinstance(value, Mapping):
        return {name: _for_tables(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_for_tables(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, int) and not -(2**63) <= value < 2**63 else value


def packed_tensors(batch: Mapping[str, torch.Tensor], picks: Sequence[Pick]) -> bytes:
    """Encodes the fields of a batch and the times of the requests as safetensors in gzip, at the lowest compression level,
    because floats hardly shrink at higher levels."""
    times = [(pick.sample_id, timing) for pick in picks for timing in pick.sample.timings]
    columns = dict(batch)
    if times:
        columns[TIMES] = torch.tensor([timing for _, timing in times], dtype=torch.float32)
        columns[TIMES_OF] = torch.tensor([number for number, _ in times])
    return gzip.compress(safetensors.torch.save(columns), compresslevel=1, mtime=0)


# ---------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class RecordedSample:
    """One sample of a recorded step, trained or dropped."""

    step: int
    group: int
    """Number of the prompt's group, unique in the run."""

    sample: int | None = None
    """Index of the sample in the group; None if the episode failed and there is no sample."""

    sample_id: int | None = None
    """Number of the sample in the batch; None if it was not trained."""

    source: str = ""
    prompt: str = ""
    """The prompt's text as the model read it."""

    completion: str = ""
    """The last reply."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """The whole conversation: all turns, including tool calls."""

    conversations: list[list[dict[str, Any]]] = field(default_factory=list)
    """The conversation of each trajectory, if there are several because an agent rewrote its history or held several
    conversations. `messages` is the conversation in which the agent spoke last."""

    answer: Any = None
    """The expected answer from the row."""

    extracted_answer: str | None = None
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    """Parts of the reward by name."""

    raw_rewards: dict[str, float] = field(default_factory=dict)
    """The values of parts before weight, normalisation and clip, if they differ."""

    accuracy: float | None = None
    advantage: float | None = None
    """Mean advantage over the trained tokens."""

    judges: dict[str, str] = field(default_factory=dict)
    """The comments of judges, by the name of the reward."""

    in_loss: bool = True
    greedy: bool = False
    tokens: int = 0
    """Number of trained tokens."""

    stop_reason: list[str] = field(default_factory=list)
    """The stop reason of each trajectory."""

    versions: list[list[dict[str, Any]]] = field(default_factory=list)
    """For each trajectory, the weight versions and the number of trained tokens that each generated, in order."""

    dropped: str | None = None
    """The reason why the prompt was not trained; None if it was."""

    why: str | None = None
    """The message that explains `dropped`."""

    failures: list[str] = field(default_factory=list)
    """The failures of the group's samples that are missing because they failed."""

    timings: tuple[RequestTiming, ...] = ()
    """Timings of the sample's requests in order, if the engine measures them."""

    trajectories: tuple[dict[str, torch.Tensor], ...] = ()
    """The fields of the batch for each trajectory, ``[S]`` or one number each; empty if the sample was not trained."""


FROM_LINES = {field.name for field in fields(RecordedSample)} - {"timings", "trajectories"}
"""The fields that each line has. The other fields come from the tensors."""


def load_trajectories(run: Path | str, step: int | None = None, *, tensors: bool = True) -> Iterator[RecordedSample]:
    """Reads the recorded samples of a step, or of all steps in order. ``tensors``: whether to read `timings` and
    `trajectories` too.

    Example: ``best = max(load_trajectories("runs/addition/grpo", step=12), key=lambda sample: sample.reward or 0)``

    Raises:
        ConfigError: the folder does not exist, or the step is not recorded; the message names the recorded steps.
    """
    folder = Path(run).expanduser()
    steps = [require_step(folder, step)] if step is not None else recorded_steps(folder)
    if not steps:
        require_step(folder, 0)
    return (sample for number in steps for sample in _samples(folder, number, tensors))


def load_batch(run: Path | str, step: int) -> TensorDict:
    """Reads the recorded sequences of a step as a packed batch, bitwise equal to those that were trained; `actor.ppo_update`
    accepts it.

    It is the whole batch if `tracking.trajectories_per_step` is null.

    Raises:
        ConfigError: the step is not recorded, or has no tensors.
    """
    folder = Path(run).expanduser()
    columns, _ = _read_tensors(folder, require_step(folder, step))
    if not columns:
        raise ConfigError(f"{folder}: step {step} has no batch, because the training loop passed none to `Tracker.log`")
    return check(TensorDict(columns, batch_size=[]))


def require_step(folder: Path, step: int) -> int:
    """Returns ``step`` if it is recorded; otherwise raises `ConfigError` with the nearest recorded steps."""
    steps = recorded_steps(folder)
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; give the folder of a run, such as runs/addition/grpo")
    if not steps:
        raise ConfigError(
            f"{folder} has no recorded step: it is not a run folder, no step has ended, or "
            "tracking.trajectories_per_step was 0"
        )
    if step not in steps:
        near = sorted(steps, key=lambda other: abs(other - step))[:3]
        raise ConfigError(
            f"{folder} has no record of step {step}; it has {len(steps)} steps from {steps[0]} to {steps[-1]}, the nearest "
            f"{', '.join(map(str, sorted(near)))}"
        )
    return step


def _read_tensors(folder: Path, step: int) -> tuple[dict[str, torch.Tensor], dict[int, list[RequestTiming]]]:
    """Reads the fields of the batch, and the timings of requests by ``sample_id``; both are empty if there is no file."""
    path = tensors_path(folder, step)
    if not path.is_file():
        return {}, {}
    columns = safetensors.torch.load(gzip.decompress(path.read_bytes()))
    times: dict[int, list[RequestTiming]] = {}
    if TIMES in columns:
        for number, row in zip(columns.pop(TIMES_OF).tolist(), columns.pop(TIMES).tolist(), strict=True):
            times.setdefault(number, []).append(RequestTiming(*row))
    return columns, times


def _samples(folder: Path, step: int, tensors: bool) -> Iterator[RecordedSample]:
    columns, times = _read_tensors(folder, step) if tensors else ({}, {})
    sequences: dict[int, list[dict[str, torch.Tensor]]] = {}
    for sequence in unpack(TensorDict(columns, batch_size=[])) if columns else []:
        sequences.setdefault(int(sequence["sample_id"]), []).append(sequence)
    with lines_path(folder, step).open(encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            number = line.get("sample_id")
            values = {name: value for name, value in line.items() if name in FROM_LINES and value is not None}
            yield RecordedSample(
                **{"step": step, **values},
                timings=tuple(times.get(number, ())),
                trajectories=tuple(sequences.get(number, ())),
            )


log = logging.getLogger(__name__)

GIB = 2**30
QUEUED_STEPS = 2
"""Maximum number of steps that wait to be written. If the queue is full, the next step is not recorded."""

FLUSH_S = 60.0
"""Maximum time in seconds that a checkpoint, or the end of the run, waits for the disk."""


@dataclass(frozen=True)
class _Step:
    """A step for the thread to write; its tensors are copies."""

    step: int
    picks: list[Pick]
    batch: dict[str, torch.Tensor]
    dropped: list[Dropped]
    history: dict[int, WeightVersion]


class StepRecorder:
    """Writes the record of each step in a separate thread.

    Training only waits for a copy of the chosen sequences. If the disk is slower than training, steps are left out; if it
    cannot be written, recording stops. Both give one warning. A record is written atomically, and a step that is repeated
    replaces its old record. With a budget, the oldest records are removed to make room. Not thread-safe.
    """

    def __init__(self, run: Path, per_step: int | None, budget_gib: float | None):
        """``per_step``: maximum number of samples of a step; None: all. ``budget_gib``: disk space for all records in GiB;
        None: no limit."""
        self._run, self._per_step = run, per_step
        self._budget = None if budget_gib is None else int(budget_gib * GIB)
        self._sizes = {step: self._size(step) for step in recorded_steps(run)}
        self._queue: queue.Queue[_Step | None] = queue.Queue(QUEUED_STEPS)
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._warned: set[str] = set()
        self._remove_leftovers()

    def record(
        self,
        step: int,
        groups: Sequence[Group],
        batch: TensorDict | None,
        dropped: Sequence[Dropped],
        history: Mapping[int, WeightVersion],
    ) -> None:
        """Queues a step to be written.

        Args:
            step: number of the step.
            groups: the groups of the batch, in order.
            batch: the trained batch with all fields; None writes no tensors.
            dropped: the prompts that were dropped while the batch was collected.
            history: the weight version of each number.
        """
        picks, failed = choose(groups, self._per_step), choose_dropped(dropped, self._per_step)
        if self._stopped or not (picks or failed):
            return
        if self._queue.full():
            self._warn("slow", "the disk is slower than training: some steps are missing in %s", self._run / LINES)
            return
        tensors = {} if batch is None else _sequences_of(batch, picks, everything=self._per_step is None)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="recorder", daemon=True)
            self._thread.start()
        self._queue.put(_Step(step, picks, tensors, failed, dict(history)))

    def flush(self) -> None:
        """Waits until all queued steps are on the disk, for at most `FLUSH_S` seconds."""
        with self._queue.all_tasks_done:
            if not self._queue.all_tasks_done.wait_for(lambda: not self._queue.unfinished_tasks, FLUSH_S):
                self._warn("flush", "%s was not written within %g s; training goes on", self._run / LINES, FLUSH_S)

    def forget_after(self, step: int) -> None:
        """Removes the records of later steps, which will be written again."""
        self.flush()
        for later in [recorded for recorded in self._sizes if recorded > step]:
            self._remove(later)

    def close(self) -> None:
        """Writes all queued steps and ends the thread; idempotent."""
        self.flush()
        if self._thread is not None:
            with contextlib.suppress(queue.Full):  # the disk hangs; the thread ends with the process
                self._queue.put_nowait(None)
                self._thread.join(FLUSH_S)
            self._thread = None

    # ------------------------------------------------------------------ in the thread

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if not self._stopped:
                    self._write(item)
            except OSError as error:
                self._stopped = True
                words = "step %d could not be recorded: %s. Recording stops here, training goes on; free disk space"
                self._warn("refused", words, item.step, error)
            except Exception as error:  # boundary of a sink: a user's row may hold any object
                self._warn("failed", "step %d could not be recorded: %s: %s", item.step, type(error).__name__, error)
                log.info("cause", exc_info=error)  # to log.txt
            finally:
                self._queue.task_done()
        self._queue.task_done()

    def _write(self, item: _Step) -> None:
        advantages = mean_advantages(item.batch)
        lines = [describe(item.step, pick, item.history, advantages) for pick in item.picks]
        lines += [describe_dropped(item.step, dropped, item.history) for dropped in item.dropped]
        text = packed_lines(lines)
        tensors = packed_tensors(item.batch, item.picks) if item.batch else b""
        if not self._make_room(item.step, len(text) + len(tensors)):
            return
        for folder in (LINES, TENSORS):
            (self._run / folder).mkdir(exist_ok=True)
        lines_path(self._run, item.step).unlink(missing_ok=True)  # first, so that old lines never belong to new tensors
        tensors_path(self._run, item.step).unlink(missing_ok=True)
        if tensors:
            self._put(tensors_path(self._run, item.step), tensors)
        self._put(lines_path(self._run, item.step), text)
        self._sizes[item.step] = len(text) + len(tensors)

    def _put(self, path: Path, data: bytes) -> None:
        write_atomically(path, data, self._run / TENSORS)  # no reader looks for lines there

    def _make_room(self, step: int, size: int) -> bool:
        """Removes the oldest records until this record fits into the budget. Returns False if it never fits."""
        if self._budget is None:
            return True
        if size > self._budget:
            words = "step %d takes %.3f GiB, more than tracking.trajectories_gib: it is not recorded"
            self._warn("budget", words, step, size / GIB)
            return False
        while sum(self._sizes.values()) - self._sizes.get(step, 0) + size > self._budget:
            self._remove(min(recorded for recorded in self._sizes if recorded != step))
        return True

    def _remove(self, step: int) -> None:
        with contextlib.suppress(OSError):
            lines_path(self._run, step).unlink(missing_ok=True)
            tensors_path(self._run, step).unlink(missing_ok=True)
        self._sizes.pop(step, None)

    def _size(self, step: int) -> int:
        paths = (lines_path(self._run, step), tensors_path(self._run, step))
        return sum(path.stat().st_size for path in paths if path.is_file())

    def _remove_leftovers(self) -> None:
        """Removes what a killed process left: incomplete files, and tensors without lines."""
        for path in (self._run / TENSORS).glob("*"):
            name = path.name.removeprefix("step_").removesuffix(".safetensors.gz")
            if path.name.startswith(".") or (name.isdecimal() and int(name) not in self._sizes):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _warn(self, kind: str, words: str, *arguments: object) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning(words, *arguments)


def _sequences_of(batch: TensorDict, picks: Sequence[Pick], *, everything: bool) -> dict[str, torch.Tensor]:
    """Copies the sequences of the chosen samples, in the order of the batch. ``everything``: copies the whole batch, with
    replayed samples too."""
    numbers = torch.tensor([pick.sample_id for pick in picks], device=batch["sample_id"].device)
    chosen = torch.ones_like(batch["in_loss"]) if everything else torch.isin(batch["sample_id"], numbers)
    selected = select(batch, chosen)
    return {str(name): selected[name].detach().clone().cpu().contiguous() for name in selected.keys()}
