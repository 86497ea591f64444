"""Checkpoints: complete Hugging Face folders that are there whole or not at all."""

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from tandem.api.collective import from_main, together
from tandem.config.errors import TandemError
from tandem.state.existing import checkpoints
from tandem.state.run_folder import RunFolder

log = logging.getLogger(__name__)
GIB = 2**30


class CheckpointFailed(TandemError, OSError):
    """A checkpoint that could not be written; the ones before it are untouched."""


def save_checkpoint(
    run: RunFolder | None,
    step: int,
    write_model: Callable[[Path], None],
    save_tokenizer: Callable[[Path], object],
    keep_last: int | None,
) -> Path | None:
    """Saves `checkpoints/step_<step>/` and returns it; prunes all but the newest ``keep_last`` (None: keeps all).

    ``write_model`` and ``save_tokenizer`` write into the folder that they are given, which lies hidden beside the
    checkpoints, is flushed to disk and then renamed: nobody ever sees half a checkpoint. A step that is saved
    already is not written again. What a killed save has left is removed first.

    Collective: every rank calls it, those other than 0 with ``run=None``, and they get None. ``write_model`` is called on
    all ranks, ``save_tokenizer`` on rank 0.

    Raises:
        CheckpointFailed: on all ranks, the disk is full or refuses; earlier checkpoints are as they were.
    """
    temporary = from_main(lambda: _begin(run, step))
    if temporary is not None:
        with together():
            if run is None:
                write_model(temporary)
            else:
                with _all_or_nothing(run.checkpoints, step, temporary):
                    write_model(temporary)
                    save_tokenizer(temporary)
                    _flush(temporary)
                    os.rename(temporary, run.checkpoints / f"step_{step}")
                    _flush_entry(run.checkpoints)
                prune(run.checkpoints, keep_last)
                log.info("saved %s", run.checkpoints / f"step_{step}")
    return None if run is None else run.checkpoints / f"step_{step}"


def _begin(run: RunFolder | None, step: int) -> Path | None:
    """The empty folder to write to, on rank 0; None where the step is saved already."""
    assert run is not None, "rank 0 has the run folder"
    folder, temporary = run.checkpoints, run.checkpoints / f".step_{step}.partial"
    if (folder / f"step_{step}").is_dir():
        return None
    with _all_or_nothing(folder, step, temporary):
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".step_*.partial"):
            log.warning("removing %s, left by a save that was cut off", leftover.name)
            shutil.rmtree(leftover)
        _check_space(folder)
        temporary.mkdir()
    return temporary


@contextlib.contextmanager
def _all_or_nothing(folder: Path, step: int, temporary: Path) -> Iterator[None]:
    """What fails leaves nothing behind, and what the disk refuses is explained."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if _is_disk_error(error):
            raise CheckpointFailed(_explain(folder, step, error)) from error
        raise


def prune(folder: Path, keep_last: int | None) -> None:
    """Removes all but the newest ``keep_last`` checkpoints. One that cannot be removed is only warned about."""
    if keep_last is None:
        return
    for old in checkpoints(folder)[: -max(1, keep_last)]:
        doomed = old.with_name(f".{old.name}.partial")  # renamed first, so that a kill leaves no half checkpoint
        try:
            os.rename(old, doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            log.warning("the old checkpoint %s could not be removed: %s", old, error)


def _check_space(folder: Path) -> None:
    """Refuses early where the newest checkpoint shows that this one cannot fit."""
    previous = checkpoints(folder)
    if previous:
        needed = sum(path.stat().st_size for path in previous[-1].rglob("*") if path.is_file())
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise OSError(f"it needs about {needed / GIB:.2f} GiB and {free / GIB:.2f} GiB are free")


def _flush(folder: Path) -> None:
    """All files and folders in `folder` to disk, so that a power cut after the rename cannot leave empty files."""
    for path in [*folder.rglob("*"), folder]:
        _flush_entry(path)


def _flush_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_disk_error(error: BaseException) -> bool:
    """The Rust libraries below transformers report the system's errors as exceptions of theirs, the number in the text."""
    return isinstance(error, (OSError, SafetensorError)) or (
        isinstance(error, Exception) and re.search(r"\(os error \d+\)", str(error)) is not None
    )


def _explain(folder: Path, step: int, error: BaseException) -> str:
    kept = checkpoints(folder)
    before = f"the newest complete checkpoint is {kept[-1]}" if kept else "there is no earlier checkpoint"
    return (
        f"the checkpoint of step {step} could not be saved: {error}. Nothing of it was left behind; {before}. "
        "Free some space, lower checkpoint.keep_last, or put run.root on a larger disk."
    )
