"""Writes and reads checkpoints: Hugging Face folders that appear atomically, so that none is ever incomplete.

Each has a manifest (the run, and size and SHA-256 of each file), by which the newest intact checkpoint is found.
"""

import contextlib
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError

from tandem.api.activity import did
from tandem.api.shared_files import sync
from tandem.api.team import Team
from tandem.config.errors import ConfigError, TandemError, kind_and_text
from tandem.config.experiment import CheckpointConfig
from tandem.state.existing import checkpoints, step_of
from tandem.state.machine import GIB
from tandem.state.run_folder import RunFolder

log = logging.getLogger(__name__)

FORMAT = 1
STATE = "state"
"""Subfolder of a checkpoint with Tandem's own files; the files beside it are a Hugging Face model folder."""

FILE = f"{STATE}/manifest.json"
MAX_BYTES = 2**26
THREADS = 2
"""Number of threads that hash files; hashing releases the GIL."""


@dataclass(frozen=True)
class Manifest:
    """The manifest of one checkpoint."""

    run: str
    step: int
    files: Mapping[str, tuple[int, str]]
    """Path below the checkpoint → (bytes, SHA-256)."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Finite metrics of the step after which the checkpoint was saved."""

    format: int = FORMAT


class InvalidCheckpoint(ValueError):
    """A folder is not a checkpoint that can be resumed. The text continues the folder's name, such as "is torn: …"."""


def write_manifest(folder: Path, run: str, step: int, metrics: Mapping[str, float]) -> None:
    """Hashes all files in the folder and writes `state/manifest.json`, the last file of a checkpoint."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    manifest = Manifest(run, step, _hashed(folder, names), {k: float(v) for k, v in metrics.items() if v - v == 0})
    body = asdict(manifest)
    (folder / FILE).write_text(json.dumps(body | {"digest": digest_of(body)}, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest and checks its own digest; the files are not read.

    Raises:
        InvalidCheckpoint: the manifest is missing, torn, changed or of another format.
    """
    path = folder / FILE
    if not path.is_file():
        raise InvalidCheckpoint(
            "has a model and no state: saved by an older version, by a script, or with checkpoint.resumable=false"
            if (folder / "config.json").is_file()
            else f"has no {FILE}"
        )
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InvalidCheckpoint(f"has a {FILE} of {path.stat().st_size} bytes; at most {MAX_BYTES} are allowed")
        body = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(body, dict):
            raise InvalidCheckpoint(f"has a {FILE} that is not a manifest")
        digest = body.pop("digest", None)
        if body.get("format") != FORMAT:
            raise InvalidCheckpoint(f"has format {body.get('format')!r}, and this version reads format {FORMAT}")
        if digest != digest_of(body):
            raise InvalidCheckpoint(f"has a {FILE} that was changed after it was written")
        files = {_checked(name): (int(size), str(sha)) for name, (size, sha) in body["files"].items()}
        return Manifest(str(body["run"]), int(body["step"]), files, body["metrics"])
    except InvalidCheckpoint:
        raise
    except (OSError, KeyError, TypeError, AttributeError, RecursionError, ValueError) as error:
        raise InvalidCheckpoint(f"has a {FILE} that cannot be read ({kind_and_text(error)})") from error


def verify(folder: Path, run: str | None = None) -> Manifest:
    """Reads every file of a checkpoint and compares it with the manifest. ``run``: id of the run that must have written it;
    None: any run.

    Raises:
        InvalidCheckpoint: names the first difference.
    """
    manifest = read_manifest(folder)
    if manifest.step != step_of(folder):
        raise InvalidCheckpoint(f"is of step {manifest.step}, and its name says {step_of(folder)}")
    if run is not None and manifest.run != run:
        raise InvalidCheckpoint(f"is foreign: made by the run {manifest.run}; this is the run {run}")
    for name, (size, _) in manifest.files.items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            raise InvalidCheckpoint(f"lacks {name}")
        if path.stat().st_size != size:
            raise InvalidCheckpoint(f"is torn: {name} has {path.stat().st_size} of {size} bytes")
    paths = (path for path in (folder / STATE).rglob("*") if path.is_symlink() or not path.is_dir())
    names = {path.relative_to(folder).as_posix() for path in paths} - {FILE}
    if names - manifest.files.keys():
        raise InvalidCheckpoint(f"has {min(names - manifest.files.keys())}, which its manifest does not name")
    try:
        hashes = _hashed(folder, list(manifest.files))
    except OSError as error:
        raise InvalidCheckpoint(f"cannot be read: {error}") from error
    for name, (_, sha) in hashes.items():
        if sha != manifest.files[name][1]:
            raise InvalidCheckpoint(f"is damaged: {name} is not what was written (SHA-256 {sha[:12]}…)")
    return manifest


def _hashed(folder: Path, names: list[str]) -> dict[str, tuple[int, str]]:
    def hashed(name: str) -> tuple[int, str]:
        with (folder / name).open("rb") as file:
            sha = hashlib.file_digest(file, "sha256").hexdigest()
            did("save", "build")
            return os.fstat(file.fileno()).st_size, sha

    with ThreadPoolExecutor(THREADS, "checkpoint-hash") as pool:
        return dict(zip(names, pool.map(hashed, names), strict=True))


def _checked(name: str) -> str:
    """Checks that a name is a path inside the checkpoint, and returns it."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or str(path) != name or "\0" in name:
        raise InvalidCheckpoint(f"names a file outside of itself: {name!r}")
    return name


def digest_of(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


class NothingToResume(ConfigError):
    """There are checkpoints, but none can be resumed."""


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint from which a run resumes."""

    path: Path
    manifest: Manifest
    skipped: tuple[tuple[Path, str], ...] = ()
    """Newer folders that are not valid checkpoints of this run, each with the reason."""

    def set_skipped_aside(self) -> None:
        """Renames the skipped folders, so that their steps can be saved again. Nothing is deleted."""
        for path, _ in self.skipped:
            names = (f"{path.name}.skipped" + (f".{number}" if number else "") for number in itertools.count())
            os.rename(path, next(aside for name in names if not (aside := path.with_name(name)).exists()))

    @property
    def step(self) -> int:
        return self.manifest.step


def newest_valid(folder: Path, run: str | None) -> ResumePoint | None:
    """Returns the newest intact checkpoint in ``folder``; None if there are no checkpoints.

    ``run``: id of the run that must have written it; None: unknown.

    Raises:
        NothingToResume: there are checkpoints, and none is valid; the message names each with its fault.
    """
    skipped: list[tuple[Path, str]] = []
    for path in reversed(checkpoints(folder)):
        try:
            return ResumePoint(path, verify(path, run), tuple(skipped))
        except InvalidCheckpoint as reason:
            skipped.append((path, str(reason)))
    if not skipped:
        return None
    reasons = "; ".join(f"{path.name} {why}" for path, why in skipped)
    raise NothingToResume(
        f"no checkpoint in {folder} can be resumed: {reasons}. Nothing was changed. Begin another run with "
        "trial_name=…, from the weights of a checkpoint with actor.path=FOLDER, or move this folder away."
    )


class CheckpointFailed(TandemError, OSError):
    """A checkpoint could not be written; earlier checkpoints are unchanged."""


def save_checkpoint(
    team: Team,
    run: RunFolder | None,
    step: int,
    write_model: Callable[[Path], None],
    save_tokenizer: Callable[[Path], object],
    options: CheckpointConfig,
    *,
    write_state: Callable[[Path], None] | None = None,
    metrics: Mapping[str, float] | None = None,
) -> Path | None:
    """Saves `checkpoints/step_<step>/` and returns its path; then removes the checkpoints that are not kept (`prune`).

    ``write_model`` and ``save_tokenizer`` write into a hidden folder beside the checkpoints, which is flushed to disk and
    then renamed, so an incomplete checkpoint never appears. ``write_state`` writes the state for resuming into its subfolder
    `state/`, which also gets a manifest of all files. A step that is already saved is not written again. Leftovers of a
    killed save are removed first. ``metrics``: of this step.

    Collective: every rank of ``team`` calls it, ranks other than 0 with ``run=None``, and these get None. ``write_model``
    and ``write_state`` are called on all ranks, ``save_tokenizer`` on rank 0.

    Raises:
        CheckpointFailed: raised on all ranks if the disk is full or fails; earlier checkpoints are unchanged.
    """
    temporary = team.share(lambda: _begin(run, step))
    if temporary is not None:
        mine = None if run is None else run.checkpoints  # other ranks write nothing but their part of the state
        try:
            # a failure of one rank ends the others before their next collective call
            with team.together(), _explained(mine, step):
                write_model(temporary)
            if write_state is not None:
                with team.together(), _explained(temporary.parent, step):
                    write_state(temporary / STATE)
            with team.together(), _explained(mine, step):
                if run is not None:
                    save_tokenizer(temporary)
                    if write_state is not None:
                        write_manifest(temporary, run.id, step, metrics or {})
                    _publish(run, step, temporary)
                    prune(run.checkpoints, options)
        except BaseException:
            if run is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
    return None if run is None else run.checkpoints / f"step_{step}"


def _publish(run: RunFolder, step: int, temporary: Path) -> None:
    """Flushes the temporary folder to disk and renames it to the checkpoint's name."""
    for path in [*temporary.rglob("*"), temporary]:  # otherwise a power cut after the rename could leave empty files
        sync(path)
        did("save")
    os.rename(temporary, run.checkpoints / f"step_{step}")
    sync(run.checkpoints)
    log.info("saved %s", run.checkpoints / f"step_{step}")


def _begin(run: RunFolder | None, step: int) -> Path | None:
    """Makes the empty temporary folder of a checkpoint, on rank 0; returns None if the step is already saved."""
    assert run is not None, "rank 0 has the run folder"
    folder, temporary = run.checkpoints, run.checkpoints / f".step_{step}.partial"
    if (folder / f"step_{step}").is_dir():
        return None
    with _explained(folder, step):
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        _check_space(folder)
        temporary.mkdir()
    return temporary


def remove_leftovers(folder: Path) -> None:
    """Removes the incomplete folders of interrupted saves among the checkpoints in ``folder``.

    Raises:
        OSError: removing failed.
    """
    for leftover in folder.glob(".step_*.partial"):
        log.warning("removing %s, left by a save that was cut off", leftover.name)
        shutil.rmtree(leftover)


@contextlib.contextmanager
def _explained(folder: Path | None, step: int) -> Iterator[None]:
    """Turns a disk error in the block into `CheckpointFailed`. ``folder``: that of the checkpoints; None: this rank writes
    nothing, so that an error is none of the checkpoint's disk."""
    try:
        yield
    except Exception as error:  # libraries raise different errors for a full disk
        if folder is not None and _is_disk_error(error):
            complete = checkpoints(folder)
            before = f"the newest complete checkpoint is {complete[-1]}" if complete else "there is no earlier checkpoint"
            raise CheckpointFailed(
                f"the checkpoint of step {step} could not be saved: {error}. Nothing of it was left behind; {before}. "
                "Free some space, lower checkpoint.keep_last, or put run.root on a larger disk."
            ) from error
        raise


def best_of(paths: Sequence[Path], metric: str) -> Path | None:
    """Returns the checkpoint with the best value of a metric, the latest one of equals; None if no checkpoint has the
    metric. A minus sign before the name means that lower is better."""
    sign, name = (-1.0, metric[1:]) if metric.startswith("-") else (1.0, metric)
    values: list[tuple[float, int, Path]] = []
    for path in paths:
        with contextlib.suppress(InvalidCheckpoint):
            value = read_manifest(path).metrics.get(name)
            values += [(sign * value, step_of(path), path)] if value is not None else []
    return max(values)[2] if values else None


def prune(folder: Path, options: CheckpointConfig) -> None:
    """Removes checkpoints, except those that `keep_last`, `keep_every` and `keep_best` name. If one cannot be removed, only
    warns."""
    if options.keep_last is None:
        return
    paths, every = checkpoints(folder), options.keep_every
    best = best_of(paths, options.keep_best) if options.keep_best else None
    for old in paths[: -max(1, options.keep_last)]:
        if old == best or (every and step_of(old) % every == 0):
            continue
        doomed = old.with_name(f".{old.name}.partial")  # renamed first, so that a kill leaves no incomplete checkpoint
        try:
            os.rename(old, doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            log.warning("the old checkpoint %s could not be removed: %s", old, error)


def _check_space(folder: Path) -> None:
    """Raises `OSError` if the disk has less free space than the newest checkpoint takes."""
    previous = checkpoints(folder)
    if previous:
        needed = sum(path.stat().st_size for path in previous[-1].rglob("*") if path.is_file())
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise OSError(f"a checkpoint needs about {needed / GIB:.2f} GiB and {free / GIB:.2f} GiB are free")


def _is_disk_error(error: Exception) -> bool:
    """Tells whether an error comes from the disk. The Rust libraries below transformers raise their own exceptions, with the
    system's error number in the text."""
    return isinstance(error, (OSError, SafetensorError)) or (re.search(r"\(os error \d+\)", str(error)) is not None)
