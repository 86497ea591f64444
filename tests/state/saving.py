"""A process that saves, and dies at one of the writes, renames and flushes that a save is made of."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tandem.api.state import State
from tandem.api.team import Team
from tandem.api.weights import save_tensors
from tandem.config.experiment import CheckpointConfig
from tandem.lifecycle.saving import BackgroundSave
from tandem.state import tree
from tandem.state.checkpoint import STATE, ResumePoint, newest_valid, save_checkpoint, verify
from tandem.state.existing import existing_run
from tandem.state.resuming import Going
from tandem.state.run_folder import RunFolder
from tandem.state.snapshot import Snapshots
from tests.trainers.killing import die

CHANGES = ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.truncate")


def state_of(step: int) -> State:
    return {"a": {"x": torch.full((64,), float(step)), "step": step}, "b": [torch.arange(step + 1), None]}


class Deadly:
    """Counts what changes the disk from `armed` on, and ends the process at the ``nth``."""

    def __init__(self, nth: int):
        self.nth, self.count, self.armed = nth, 0, False

    def event(self) -> bool:
        self.count += self.armed
        return self.armed and self.count == self.nth

    def audit(self, name: str, arguments: tuple[Any, ...]) -> None:
        written = name == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if (written or name in CHANGES) and self.event():
            die()

    def fsync(self, descriptor: int) -> None:
        if self.event():
            die()
        REAL_FSYNC(descriptor)

    def pwrite(self, descriptor: int, data: memoryview, place: int) -> int:
        """Dies with half of the tensor written."""
        dies = self.event()
        count = REAL_PWRITE(descriptor, data[: len(data) // 2] if dies else data, place)
        if dies:
            die()
        return count

    def save_tensors(self, tensors: Any, path: Path) -> None:
        """Rust writes it, which no hook of Python's sees: it dies with half of the file written."""
        save_tensors(tensors, path)
        if self.event():
            os.truncate(path, path.stat().st_size // 2)
            die()


REAL_FSYNC, REAL_PWRITE = os.fsync, os.pwrite


def save(root: str, step: int, nth: int, beside: bool) -> None:
    """Saves the step; ``nth`` 0: lives, and writes how many events there were. ``beside``: from a copy, in the background,
    while the state that was copied changes."""
    deadly = Deadly(nth)
    run = RunFolder.open(root, "exp", "trial", config_text="", examine=_goes_on)
    sys.addaudithook(deadly.audit)
    os.fsync, os.pwrite = deadly.fsync, deadly.pwrite  # type: ignore[assignment]
    deadly.armed = True
    state = state_of(step)
    kept = Snapshots(Team()).take(state) if beside else state
    work = partial(
        save_checkpoint,
        Team(),
        run,
        step,
        lambda folder: deadly.save_tensors({"w": torch.full((64,), float(step))}, folder / "model.safetensors"),
        lambda folder: (folder / "config.json").write_text("{}"),
        CheckpointConfig(keep_last=1),
        write_state=lambda folder: tree.write_tree(Team(), folder, kept),
        metrics={"loss": 1.0},
    )
    if beside:
        background = BackgroundSave()
        background.start("the checkpoint", work)
        state["a"]["x"].fill_(-1)
        assert background.take() is not None
    else:
        work()
    deadly.armed = False
    if not nth:
        Path(root, "events").write_text(str(deadly.count))
    run.finish("finished")


def _goes_on(folder: Path) -> Going | None:
    found = existing_run(folder)
    return None if found is None else Going(found)


def whole(root: Path) -> ResumePoint:
    """The newest checkpoint, every byte of it as it was saved."""
    found = newest_valid(root / "exp" / "trial" / "checkpoints", None)
    assert found is not None and found.skipped == ()
    assert verify(found.path)
    state = tree.read_tree(found.path / STATE)
    assert state["a"]["step"] == found.step and torch.equal(state["a"]["x"], state_of(found.step)["a"]["x"])
    return found
