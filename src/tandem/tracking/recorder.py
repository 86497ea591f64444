"""Writes the records of steps beside training: a thread, a short queue, a budget of disk."""

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tensordict import TensorDict

from tandem.api.batch import select
from tandem.api.samples import Dropped, Group
from tandem.api.weights import WeightVersion
from tandem.tracking.record_files import LINES, TENSORS, lines_path, recorded_steps, tensors_path
from tandem.tracking.records import (
    Pick,
    choose,
    choose_dropped,
    describe,
    describe_dropped,
    mean_advantages,
    packed_lines,
    packed_tensors,
)

log = logging.getLogger(__name__)

GIB = 2**30
QUEUED_STEPS = 2
"""Steps that may wait for the disk; a step that finds no place is not recorded."""

FLUSH_S = 60.0
"""Seconds that a checkpoint, or the end of the run, waits for the disk."""


@dataclass(frozen=True)
class _Step:
    """A step that the thread makes a record of; its tensors are its own."""

    step: int
    picks: list[Pick]
    batch: dict[str, torch.Tensor]
    dropped: list[Dropped]
    history: dict[int, WeightVersion]


class StepRecorder:
    """Takes each step as it was trained, and writes it in a thread of its own.

    Training waits for nothing but a copy of the chosen sequences: where the disk is slower than training, a step is left
    out. Where it refuses, recording stops. Either way one warning says so. A record is whole or not there; one that is made
    again replaces the old one. With a budget, the records of the oldest steps make room. Not for several threads at once.
    """

    def __init__(self, run: Path, per_step: int | None, budget_gib: float | None):
        """``per_step``: how many samples, None: all. ``budget_gib``: of disk, None: no limit."""
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
        """Takes a step: the groups of its batch in order, the batch as it was trained, and the prompts that were dropped
        while it was collected."""
        picks, failed = choose(groups, self._per_step), choose_dropped(dropped, self._per_step)
        if self._stopped or not (picks or failed):
            return
        if self._queue.full():
            self._warn("slow", "the disk is slower than training: steps are left out of %s", self._run / LINES)
            return
        taken = {} if batch is None else _sequences_of(batch, picks, everything=self._per_step is None)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="recorder", daemon=True)
            self._thread.start()
        self._queue.put(_Step(step, picks, taken, failed, dict(history)))

    def flush(self) -> None:
        """Waits until all that was taken is on the disk, at most `FLUSH_S`."""
        with self._queue.all_tasks_done:
            if not self._queue.all_tasks_done.wait_for(lambda: not self._queue.unfinished_tasks, FLUSH_S):
                self._warn("flush", "%s was not written within %g s; training goes on", self._run / LINES, FLUSH_S)

    def forget_after(self, step: int) -> None:
        """Removes the records of later steps, which are made again."""
        self.flush()
        for later in [one for one in self._sizes if one > step]:
            self._remove(later)

    def close(self) -> None:
        """Writes what was taken, and ends the thread; idempotent."""
        self.flush()
        if self._thread is not None:
            with contextlib.suppress(queue.Full):  # a disk that hangs: the thread dies with the process
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
                words = "step %d could not be recorded: %s. Recording stops here, training goes on; free some space"
                self._warn("refused", words, item.step, error)
            except Exception as error:  # the boundary of a sink: the row of a user may hold anything
                self._warn("failed", "step %d could not be recorded: %s: %s", item.step, type(error).__name__, error)
                log.info("cause", exc_info=error)  # to log.txt
            finally:
                self._queue.task_done()
        self._queue.task_done()

    def _write(self, item: _Step) -> None:
        advantages = mean_advantages(item.batch)
        lines = [describe(item.step, pick, item.history, advantages) for pick in item.picks]
        lines += [describe_dropped(item.step, one, item.history) for one in item.dropped]
        text = packed_lines(lines)
        tensors = packed_tensors(item.batch, item.picks) if item.batch else b""
        if not self._make_room(item.step, len(text) + len(tensors)):
            return
        for folder in (LINES, TENSORS):
            (self._run / folder).mkdir(exist_ok=True)
        lines_path(self._run, item.step).unlink(missing_ok=True)  # first: no old lines beside new tensors
        tensors_path(self._run, item.step).unlink(missing_ok=True)
        if tensors:
            self._put(tensors_path(self._run, item.step), tensors)
        self._put(lines_path(self._run, item.step), text)
        self._sizes[item.step] = len(text) + len(tensors)

    def _put(self, path: Path, data: bytes) -> None:
        """The whole file or none, under its own name. Half of it is in the other folder, which nobody reads lines from."""
        partial = self._run / TENSORS / f".{path.name}.partial"
        try:
            with partial.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)

    def _make_room(self, step: int, size: int) -> bool:
        """Removes the oldest records until this one fits into the budget; False if it never does."""
        if self._budget is None:
            return True
        if size > self._budget:
            words = "step %d takes %.3f GiB, more than tracking.trajectories_gib: it is not recorded"
            self._warn("budget", words, step, size / GIB)
            return False
        while sum(self._sizes.values()) - self._sizes.get(step, 0) + size > self._budget:
            self._remove(min(one for one in self._sizes if one != step))
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
        """Removes what a kill left: halves of files, and tensors without lines."""
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
    """A copy of the sequences of the chosen samples, in their order; of all, replayed ones among them, if ``everything``."""
    numbers = torch.tensor([pick.sample_id for pick in picks], device=batch["sample_id"].device)
    chosen = torch.ones_like(batch["in_loss"]) if everything else torch.isin(batch["sample_id"], numbers)
    taken = select(batch, chosen)
    return {str(name): taken[name].detach().clone().cpu().contiguous() for name in taken.keys()}
