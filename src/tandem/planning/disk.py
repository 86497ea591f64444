"""Disk: the files of a checkpoint, and how many of them there may be at a time (`tandem.state.checkpoint`)."""

from collections.abc import Iterable
from dataclasses import dataclass

from tandem.config.arithmetic import total_steps
from tandem.config.experiment import BaseConfig
from tandem.models.footprint import FLOAT32
from tandem.models.shape import BYTES
from tandem.planning.planned_model import PlannedModel


@dataclass(frozen=True)
class Saves:
    """Checkpoints of a run. Example: one every 10 of 100 steps, of which the last 2 stay: 3 at a time, for the next one is
    whole before an older one is removed."""

    resumable: bool = True
    most: int | None = None
    """At one time; None where that grows with the run, and its end is not known."""


def saves_of(config: BaseConfig, rows: int | None) -> Saves:
    """Those of a configuration, over so many rows of data."""
    wish = config.checkpoint
    known = rows is not None or (config.total_train_epochs is None and config.total_train_steps is not None)
    steps = total_steps(config, rows or 0) if known else None
    made: float = float("inf")
    if steps is not None or not wish.every_steps:
        often, rest = divmod(steps or 0, wish.every_steps) if wish.every_steps else (0, 1)
        made = often + (wish.at_end and (rest > 0 or not often))
    stay = float("inf")
    if wish.keep_last is not None and not (wish.keep_every and steps is None):
        ever = (steps or 0) // wish.keep_every if wish.keep_every else 0
        stay = max(1, wish.keep_last) + ever + (wish.keep_best is not None) + 1
    most = min(made, stay)
    return Saves(wish.resumable, None if most == float("inf") else int(most))


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


def checkpoint_of(models: Iterable[PlannedModel], saves: Saves) -> Checkpoint:
    """One checkpoint of the models that are trained; whatever the layout, it is whole."""
    folders = adapters = state = 0.0
    for model in models:
        if not model.trained:
            continue
        head = model.shape.hidden if model.head == "both" else 0  # a file of its own, float32
        folders += BYTES[model.dtype] * (model.parameters - head) + FLOAT32 * head
        whole = model.parameters
        if model.adapters is not None:
            whole = model.masters
            adapters += FLOAT32 * (model.masters - head)  # a classifier's head lies beside its adapter, too
        state += 3 * FLOAT32 * whole if saves.resumable else 0
    return Checkpoint(folders, adapters, state)
