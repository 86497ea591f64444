"""Disk: the files of a checkpoint, and how many of them a run keeps (`tandem.state.checkpoint`)."""

from collections.abc import Iterable
from dataclasses import dataclass

from tandem.config.arithmetic import total_steps
from tandem.config.experiment import BaseConfig
from tandem.models.footprint import FLOAT32
from tandem.models.shape import BYTES
from tandem.planning.planned_model import PlannedModel


@dataclass(frozen=True)
class CheckpointSchedule:
    """When checkpoints are made, and which of them stay."""

    every: int | None = None
    at_end: bool = True
    keep_last: int | None = 2
    keep_every: int | None = None
    keep_best: bool = False
    resumable: bool = True
    steps: int | None = None
    """Number of steps of the run; None if the data that they follow from is not known."""

    @property
    def due(self) -> list[int] | None:
        """Steps after which one is saved; None where nobody knows when the run ends, unless there are none."""
        if not self.every and not self.at_end:
            return []
        if self.steps is None:
            return None
        found = list(range(self.every, self.steps + 1, self.every)) if self.every else []
        return found if not self.at_end or self.steps in found else [*found, self.steps]

    @property
    def kept(self) -> int | None:
        """Checkpoints that lie there when the run ends; None where that grows with the run, and its end is not known."""
        due = self.due
        if due is None:
            return None if self.keep_last is None or self.keep_every else max(1, self.keep_last) + self.keep_best
        if self.keep_last is None:
            return len(due)
        stay = set(due[-max(1, self.keep_last) :]) | {
            step for step in due if self.keep_every and step % self.keep_every == 0
        }
        return min(len(due), len(stay) + self.keep_best)

    @property
    def most(self) -> int | None:
        """At one time: the next one is whole before an older one is removed."""
        kept, due = self.kept, self.due
        if kept is None:
            return None
        return kept + 1 if due is None else min(len(due), kept + 1)


def saves_of(config: BaseConfig, rows: int | None) -> CheckpointSchedule:
    """Those of a configuration, over so many rows of data."""
    wish = config.checkpoint
    known = rows is not None or (config.total_train_epochs is None and config.total_train_steps is not None)
    return CheckpointSchedule(
        every=wish.every_steps,
        at_end=wish.at_end,
        keep_last=wish.keep_last,
        keep_every=wish.keep_every,
        keep_best=wish.keep_best is not None,
        resumable=wish.resumable,
        steps=total_steps(config, rows or 0) if known else None,
    )


@dataclass(frozen=True)
class Checkpoint:
    """Bytes of one checkpoint, without its tokenizer and configuration."""

    models: float
    """Hugging Face folders, in the dtype of the computation; with adapters they are merged."""

    adapters: float = 0.0
    """Their folders, float32."""

    state: float = 0.0
    """Masters and both moments of what is trained."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.models + self.adapters + self.state


def checkpoint_of(models: Iterable[PlannedModel], saves: CheckpointSchedule) -> Checkpoint:
    """One checkpoint of the models that are trained; whatever the layout, it is whole."""
    trained = [model for model in models if model.trained]
    folders = adapters = state = 0.0
    for model in trained:
        head = model.shape.hidden if model.head == "both" else 0  # a file of its own, float32
        folders += BYTES[model.dtype] * (model.parameters - head) + FLOAT32 * head
        whole = model.parameters
        if model.adapters is not None:
            whole = model.masters
            adapters += FLOAT32 * (model.masters - head)  # a classifier's head lies beside its adapter, too
        state += 3 * FLOAT32 * whole if saves.resumable else 0
    return Checkpoint(folders, adapters, state)
