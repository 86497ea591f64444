"""Runs that save on as many ranks as there are; importable by child processes."""

import json
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tandem.api.failures import RankFailed
from tandem.api.state import Parted, TensorPart
from tandem.api.team import Team
from tandem.config.experiment import SFTConfig
from tandem.config.load import load_config
from tandem.config.train_engine import LoRAConfig
from tandem.lifecycle.recovery import Progress, Recovery
from tandem.lifecycle.saving import Saving
from tandem.state.checkpoint import CheckpointFailed
from tandem.state.run_folder import RunFolder
from tandem.state.snapshot import MARK_BYTES
from tandem.state.tree import read_tree, write_tree
from tests.engines_train.layouts import batch_of_prompts, engine_on
from tests.trainers.killing import train

LAYOUTS = {
    1: ("d1 scalar adapted", "d1 both adapted"),
    2: ("d1t2 lm", "d2 lm adapted"),
}
MORE = ("d2 both", "d1r2 lm", "d1c2 lm", "d2 offloaded lm")
ZERO = ("zero1:d2 lm", "zero2:d2 lm", "zero3:d2 scalar")


def loss(outputs, view):
    """One that moves every head that there is."""
    given = [values for values in (outputs.scores, outputs.logprobs) if values is not None and len(values)]
    return -sum(given) * view["loss_mask"], {}


class Run:
    """A run that saves after each of ten steps; rank 0 writes when it may."""

    def __init__(self, root: Path, model: Path, layout: str, trial: str, **wish):
        items = ["train_dataset.path=addition", "checkpoint.every_steps=1", "checkpoint.keep_last=null"]
        config = load_config(SFTConfig, None, items).config
        *spread, head = layout.removesuffix(" adapted").split()
        torch.manual_seed(0)
        lora = LoRAConfig(rank=4) if "adapted" in layout else LoRAConfig()
        dtype = "float32" if "zero1" in layout else "bfloat16"  # which that refuses
        self.engine = engine_on(model, " ".join(spread), head, dtype=dtype, lora=lora)
        main = not dist.is_initialized() or dist.get_rank() == 0
        self.folder = RunFolder.open(root, "exp", trial, config_text="") if main else None
        self.progress, self.may_write = Progress(), threading.Event()
        self.may_write.set()
        self.refuses = False  # whether the disk has no room for a save
        recovery = Recovery(self.folder, {"progress": self.progress, "trainer": self.engine}, self.progress, Team())
        late = lambda states: self.engine.late_writer(states["trainer"])  # noqa: E731
        rules = replace(config.checkpoint, **wish)
        self.saving = Saving(rules, self.folder, 10, self.engine.save, self.tokenizer, recovery, late)

    def tokenizer(self, folder: Path) -> None:
        assert self.may_write.wait(30)
        if self.refuses:
            raise OSError(28, "No space left on device")
        (folder / "tokenizer.json").write_text("{}")

    def step(self) -> None:
        self.progress.step += 1
        self.engine.train_batch(batch_of_prompts(), loss)

    def after_step(self) -> None:
        if self.saving.is_due(self.progress.step):
            self.saving.save(self.progress.step, {"loss": float(self.progress.step)})

    def saved(self) -> list[str]:
        return [] if self.folder is None else sorted(path.name for path in self.folder.checkpoints.iterdir())

    def files(self, step: int) -> dict[str, bytes]:
        if self.folder is None:
            return {}
        folder = self.folder.checkpoints / f"step_{step}"
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def end(self) -> None:
        self.saving.finish()
        if self.folder is not None:
            self.folder.close()


def both_ways(model: Path, root: Path, ranks: int):
    """See `compared`, `failing`, `tolerant`."""
    found = compared(model, root, LAYOUTS[ranks], ranks)
    found = {"saved": found, "failed": failing(root, model, ranks), "tolerated": tolerant(root, model, ranks)}
    found |= {"waited": waited_for(root, model), "unlike": unlike(root)} if ranks > 1 else {}
    return found | {"poor": poor(root, model, ranks) if ranks > 1 else baseless(root, model)}


def compared(model: Path, root: Path, layouts: tuple[str, ...], ranks: int):
    """By layout: what was there while the weights moved on, the files of a save that was waited for and of one beside
    training, and which of them differ."""
    torch.set_num_threads(1)
    found = {}
    for layout in layouts:
        runs = {}
        for beside in (False, True):
            trial = f"{layout}-{ranks}-{beside}".replace(" ", "-").replace(":", "-")
            run = runs[beside] = Run(root, model, layout, trial, asynchronous=beside)
            run.step()
            if beside:
                run.may_write.clear()
            run.after_step()
            if beside:
                run.step()
                meanwhile = started(run), run.saving.beside
                run.may_write.set()
            run.saving.finish()
        one, two = (run.files(1) for run in runs.values())
        found[layout] = (
            meanwhile,
            sorted(one),
            sorted(two),
            [name for name in one if not same(name, one[name], two.get(name))],
        )
        for run in runs.values():
            run.end()
    return found


def same(name: str, one: bytes, two: bytes | None) -> bool:
    """Of a manifest the files alone, which differ in the run's own name. The library writes metadata, of which an adapter's
    file has three, in any order, and so its hash is another one each time."""
    if two is None or not name.endswith(("manifest.json", "adapter_model.safetensors")):
        return one == two
    if name.endswith("json"):
        files = [{path: size for path, (size, _) in json.loads(each)["files"].items()} for each in (one, two)]
        return files[0] == files[1]
    ends = [8 + int.from_bytes(each[:8], "little") for each in (one, two)]
    heads = [json.loads(each[8:end]) for each, end in zip((one, two), ends, strict=True)]
    return heads[0] == heads[1] and one[ends[0] :] == two[ends[1] :]


def started(run: Run) -> list[str]:
    """What is there once the thread has begun to write, on rank 0."""
    deadline = time.monotonic() + 30
    while run.folder is not None and not run.saved() and time.monotonic() < deadline:
        time.sleep(0.01)
    return run.saved()


def failing(root: Path, model: Path, ranks: int):
    """What each rank hears of a save that failed beside training, and what is there after the next one."""
    run = Run(root, model, f"d{ranks} lm", f"failing-{ranks}")
    run.step()
    run.after_step()
    run.saving.finish()
    run.refuses = True
    run.step()
    run.after_step()
    with pytest.raises(CheckpointFailed, match=r"step 2 could not be saved: .*No space left") as caught:
        run.saving.finish()
    heard = str(caught.value)
    run.refuses = False
    run.after_step()
    run.end()
    return heard, run.saved()


def tolerant(root: Path, model: Path, ranks: int):
    """The same where training may go on, and two saves that follow each other at once."""
    run = Run(root, model, f"d{ranks} lm", f"tolerant-{ranks}", on_error="continue")
    run.refuses = True
    run.step()
    run.after_step()
    run.saving.finish()
    run.refuses = False
    run.may_write.clear()
    run.step()
    run.after_step()
    run.step()
    threading.Timer(0.5, run.may_write.set).start()
    run.after_step()  # waits for the one before
    waited = run.saving.metrics().get("time/save_wait_s", 0.0)
    run.end()
    return run.saved(), waited, run.folder.failed_saves if run.folder else 1


def waited_for(root: Path, model: Path):
    """What each rank hears of a save that is waited for where one has a full disk; then what there is, and what differs
    where rank 0 writes everything, as over several machines, from a save where each rank writes its part."""
    run = Run(root, model, "d2 lm", "waited", asynchronous=False)
    run.step()

    def refuse(descriptor: int, data: memoryview, place: int) -> int:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(os, "pwrite", refuse)
        with pytest.raises(CheckpointFailed, match=r"step 1 could not be saved: .*No space left") as caught:
            run.after_step()
    run.after_step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tandem.state.tree._seen_from_here", lambda file: f"machine {dist.get_rank()}")
        if dist.get_rank() == 1:
            patch.setattr(os, "pwrite", refuse)  # this one writes nothing
        run.progress.step += 1
        run.after_step()
    run.end()
    one, two = (run.files(step) for step in (1, 2))
    differ = sorted(name for name in one if one[name] != two[name])
    return str(caught.value), run.saved(), differ


def unlike(root: Path):
    """What is read of a state whose first model rank 0 has alone, written by each rank and, as over several machines, by
    rank 0; then what each rank hears where the part of the last one cannot be had."""
    rank = dist.get_rank()
    spread = torch.arange(6.0).view(3, 2)
    part = TensorPart(spread.t()[rank : rank + 1], (rank, 0), (2, 3))  # strided, with a dimension of one entry
    alone = TensorPart(spread[:1, 0], (0,), (1,))
    tree = {"alone": {"x": Parted("x", lambda: [alone])} if rank == 0 else {}, "both": Parted("y", lambda: [part])}
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("one", "several"):
            write_tree(Team(), root / name, tree)
            read = read_tree(root / name) if rank == 0 else None
            found.append(read and (read["alone"]["x"].tolist(), read["both"].tolist()))
            patch.setattr("tandem.state.tree._seen_from_here", lambda file: f"machine {rank}")
        missing = Parted("y", lambda: [part] if rank == 0 else [][0])
        with pytest.raises((RankFailed, IndexError), match="list index out of range"):
            write_tree(Team(), root / "failed", {"both": missing})
    return found


def poor(root: Path, model: Path, ranks: int):
    """What is there, and whether each save was waited for, where the last rank has no memory for its copy."""
    run = Run(root, model, f"d{ranks} lm", "poor")
    run.step()

    def refuse(descriptor: int, start: int, num_bytes: int) -> None:
        if num_bytes > MARK_BYTES:
            raise OSError(12, "Cannot allocate memory")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == ranks - 1:
            patch.setattr(os, "posix_fallocate", refuse)
        run.after_step()
    waited = not run.saving.beside
    run.end()
    return run.saved(), waited


def baseless(root: Path, model: Path):
    """The same where the files of an adapter's base are gone."""
    base = root.parent / "base"
    shutil.copytree(model, base)
    run = Run(root, base, "d1 lm adapted", "baseless")
    run.step()
    run.after_step()
    run.saving.finish()
    base.rename(root.parent / "gone")
    run.step()
    run.after_step()
    waited = not run.saving.beside
    run.end()
    return run.saved(), waited


def trained(items: list[str], root: Path, instant: str | None, nth: int, ranks: int):
    """Trains on all ranks; rank 0 is gone at the ``nth`` time of the instant."""
    rank = dist.get_rank()
    os.environ |= {"WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    train("sft", [*items, f"actor.backend=fsdp:d{ranks}", f"run.root={root}"], instant if rank == 0 else None, nth)
    return True
