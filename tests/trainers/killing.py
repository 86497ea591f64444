"""A run in a process of its own that kills itself at a named instant, as often as a test wants."""

import importlib
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

from tandem.config.experiment import BaseConfig, SFTConfig, TrainConfig
from tandem.config.load import load_config
from tandem.config.preference import DistillConfig, PreferenceConfig, RewardModelConfig

KINDS: dict[str, tuple[type[BaseConfig], str]] = {
    "rl": (TrainConfig, "tandem.trainers.loop"),
    "sft": (SFTConfig, "tandem.trainers.recipes"),
    "preference": (PreferenceConfig, "tandem.trainers.recipes"),
    "reward": (RewardModelConfig, "tandem.trainers.recipes"),
    "distill": (DistillConfig, "tandem.trainers.distill"),
}

INSTANTS: dict[str, tuple[str, str, str]] = {
    # name: (module, attribute, before or after it)
    "before the optimizer step": ("tandem.engines.train.optimizer", "Optimizer.step", "before"),
    "after the optimizer step": ("tandem.engines.train.optimizer", "Optimizer.step", "after"),
    "before publishing": ("tandem.weights.publisher", "WeightPublisher.publish", "before"),
    "between prepared and committed weights": ("tandem.weights.publisher", "WeightPublisher._commit", "before"),
    "after publishing": ("tandem.weights.publisher", "WeightPublisher.publish", "after"),
    "before the ledger's commit": ("tandem.state.ledger", "LedgerFile.commit", "before"),
    "after the ledger's commit": ("tandem.state.ledger", "LedgerFile.commit", "after"),
    "before evaluation": ("tandem.trainers.start", "Run.evaluate_if_due", "before"),
    "after evaluation": ("tandem.trainers.start", "Run.evaluate_if_due", "after"),
    "before the line of metrics": ("tandem.tracking.tracker", "Tracker.log", "before"),
    "after the line of metrics": ("tandem.tracking.tracker", "Tracker.log", "after"),
    "when the state is to be copied": ("tandem.state.snapshot", "Snapshots.take", "before"),
    "when a save was handed to its thread": ("tandem.lifecycle.saving", "BackgroundSave.start", "after"),
    "when a save is waited for": ("tandem.lifecycle.saving", "BackgroundSave.take", "before"),
    "when a save begins": ("tandem.state.checkpoint", "_begin", "after"),
    "between model and state": ("tandem.lifecycle.recovery", "Recovery.write", "before"),
    "between state and manifest": ("tandem.state.checkpoint", "write_manifest", "before"),
    "between manifest and rename": ("tandem.state.checkpoint", "_publish", "before"),
    "after the rename": ("tandem.state.checkpoint", "_publish", "after"),
    "between two prunings": ("tandem.state.checkpoint", "prune", "before"),
    "when recovery looks for a checkpoint": ("tandem.lifecycle.recovery", "newest_valid", "before"),
    "when recovery has read the state": ("tandem.state.tree", "read_tree", "after"),
    "between two parts of recovery": ("tandem.lifecycle.recovery", "load_part", "after"),
    "when recovery took the ledger back": ("tandem.state.ledger", "LedgerFile.roll_back", "after"),
    "when recovery delivers the weights": ("tandem.weights.publisher", "WeightPublisher.load_state_dict", "before"),
    "when recovery cut the metrics": ("tandem.tracking.tracker", "Tracker.load_state_dict", "after"),
}


def die() -> None:
    """At once, as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def train(kind: str, items: Sequence[str], instant: str | None, nth: int = 1, override: bool = False) -> None:
    """Trains; at the ``nth`` time of the instant the process is gone."""
    if instant is not None:
        module, attribute, when = INSTANTS[instant]
        holder: Any = importlib.import_module(module)
        *outer, name = attribute.split(".")
        for part in outer:
            holder = getattr(holder, part)
        setattr(holder, name, _fatal(getattr(holder, name), when, nth))
    config, trainer = KINDS[kind]
    importlib.import_module(trainer).train(load_config(config, None, list(items)), override=override)


def _fatal(function: Callable[..., Any], when: str, nth: int) -> Callable[..., Any]:
    count = 0

    def called(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count == nth and when == "before":
            die()
        result = function(*arguments, **named)
        if count == nth:
            die()
        return result

    return called
