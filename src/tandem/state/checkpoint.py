"""Checkpoints: complete Hugging Face folders that are there whole or not at all."""

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError

from tandem.api.activity import did
from tandem.api.lines import sync
from tandem.api.team import Team
from tandem.config.errors import TandemError
from tandem.state.existing import checkpoints, step_of
from tandem.state.manifest import STATE, InvalidCheckpoint, read_manifest, write_manifest
from tandem.state.run_folder import RunFolder

log = logging.getLogger(__name__)
GIB = 2**30


class CheckpointFailed(TandemError, OSError):
    """A checkpoint that could not be written; the ones before it are untouched."""


def save_checkpoint(
    team: Team,
    run: RunFolder | None,
    step: int,
    write_model: Callable[[Path], None],
    save_tokenizer: Callable[[Path], object],
    keep_last: int | None,
    *,
    write_state: Callable[[Path], None] | None = None,
    metrics: Mapping[str, float] | None = None,
    keep_every: int | None = None,
    keep_best: str | None = None,
) -> Path | None:
    """Saves `checkpoints/step_<step>/` and returns it; prunes all but those that `checkpoints_to_keep` names.

    ``write_model`` and ``save_tokenizer`` write into the folder that they are given, which lies hidden beside the
    checkpoints, is flushed to disk and then renamed: nobody ever sees half a checkpoint. ``write_state`` writes what
    resuming needs into its sub-folder `state/`, where a manifest of everything is laid too. A step that is saved
    already is not written again. What a killed save has left is removed first. ``metrics``: of this step.

    Collective: every rank of ``team`` calls it, those other than 0 with ``run=None``, and they get None. ``write_model`` and
    ``write_state`` are called on all ranks, ``save_tokenizer`` on rank 0.

    Raises:
        CheckpointFailed: on all ranks, the disk is full or refuses; earlier checkpoints are as they were.
    """
    temporary = team.share(lambda: _begin(run, step))
    if temporary is not None:
        for write in (write_model, write_state):
            if write is not None:  # a failure of one rank ends the others before their next collective call
                with _removed_on_failure(run, temporary), team.together(), _explained(run, step):
                    write(temporary if write is write_model else temporary / STATE)
        with _removed_on_failure(run, temporary), team.together(), _explained(run, step):
            if run is not None:
                save_tokenizer(temporary)
                if write_state is not None:
                    write_manifest(temporary, run.id, step, metrics or {})
                _publish(run, step, temporary)
                prune(run.checkpoints, keep_last, keep_every, keep_best)
    return None if run is None else run.checkpoints / f"step_{step}"


def _publish(run: RunFolder, step: int, temporary: Path) -> None:
    """The rename that makes it a checkpoint, once all of it is on the disk."""
    _flush(temporary)
    os.rename(temporary, run.checkpoints / f"step_{step}")
    sync(run.checkpoints)
    log.info("saved %s", run.checkpoints / f"step_{step}")


def _begin(run: RunFolder | None, step: int) -> Path | None:
    """The empty folder to write to, on rank 0; None where the step is saved already."""
    assert run is not None, "rank 0 has the run folder"
    folder, temporary = run.checkpoints, run.checkpoints / f".step_{step}.partial"
    if (folder / f"step_{step}").is_dir():
        return None
    with _explained(run, step):
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        _check_space(folder)
        temporary.mkdir()
    return temporary


def remove_leftovers(folder: Path) -> None:
    """Removes what a save that was cut off has left among the checkpoints in ``folder``.

    Raises:
        OSError: the disk refuses.
    """
    for leftover in folder.glob(".step_*.partial"):
        log.warning("removing %s, left by a save that was cut off", leftover.name)
        shutil.rmtree(leftover)


@contextlib.contextmanager
def _removed_on_failure(run: RunFolder | None, temporary: Path) -> Iterator[None]:
    """Removes the half-written folder after any failure, also one of another rank, which `Team.together` raises here."""
    try:
        yield
    except BaseException:
        if run is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextlib.contextmanager
def _explained(run: RunFolder | None, step: int) -> Iterator[None]:
    """A block in which a refusal of the disk becomes `CheckpointFailed`; on rank 0, which has the run."""
    try:
        yield
    except Exception as error:  # the libraries below have several kinds of errors for a full disk
        if run is not None and _is_disk_error(error):
            raise CheckpointFailed(_explain(run.checkpoints, step, error)) from error
        raise


def checkpoints_to_keep(
    folder: Path, keep_last: int | None, keep_every: int | None = None, keep_best: str | None = None
) -> set[Path]:
    """The newest ``keep_last`` checkpoints (None: all), those whose step is a multiple of ``keep_every``, and the one where
    the metric ``keep_best`` is highest, or lowest with a minus sign before its name."""
    paths = checkpoints(folder)
    if keep_last is None:
        return set(paths)
    chosen = set(paths[-max(1, keep_last) :])
    chosen |= {path for path in paths if keep_every and step_of(path) % keep_every == 0}
    best = best_of(paths, keep_best) if keep_best else None
    return chosen | ({best} if best is not None else set())


def best_of(paths: Sequence[Path], metric: str) -> Path | None:
    """The checkpoint with the best value, the latest of equals; None where none knows the metric."""
    sign, name = (-1.0, metric[1:]) if metric.startswith("-") else (1.0, metric)
    values: list[tuple[float, int, Path]] = []
    for path in paths:
        with contextlib.suppress(InvalidCheckpoint):
            value = read_manifest(path).metrics.get(name)
            values += [(sign * value, step_of(path), path)] if value is not None else []
    return max(values)[2] if values else None


def prune(folder: Path, keep_last: int | None, keep_every: int | None = None, keep_best: str | None = None) -> None:
    """Removes the checkpoints that `checkpoints_to_keep` does not name. One that cannot be removed is only warned about."""
    stays = checkpoints_to_keep(folder, keep_last, keep_every, keep_best)
    for old in [path for path in checkpoints(folder) if path not in stays]:
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
        sync(path)
        did("save")


def _is_disk_error(error: Exception) -> bool:
    """The Rust libraries below transformers report the system's errors as exceptions of theirs, the number in the text."""
    return isinstance(error, (OSError, SafetensorError)) or (re.search(r"\(os error \d+\)", str(error)) is not None)


def _explain(folder: Path, step: int, error: Exception) -> str:
    complete = checkpoints(folder)
    before = f"the newest complete checkpoint is {complete[-1]}" if complete else "there is no earlier checkpoint"
    return (
        f"the checkpoint of step {step} could not be saved: {error}. Nothing of it was left behind; {before}. "
        "Free some space, lower checkpoint.keep_last, or put run.root on a larger disk."
    )
