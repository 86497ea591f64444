"""The manifest of a checkpoint (each file's size, SHA-256 and owner), and the choice of the newest intact checkpoint to
resume from. Imports no torch."""

import hashlib
import itertools
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from tandem.api.activity import did
from tandem.config.errors import ConfigError, kind_and_text
from tandem.state.existing import checkpoints, step_of

FORMAT = 1
STATE = "state"
"""Folder in a checkpoint for Tandem alone; the files beside it are a Hugging Face folder."""

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
    """The reason why a folder is no checkpoint that can be resumed; the text continues the sentence "it …"."""


def write_manifest(folder: Path, run: str, step: int, metrics: Mapping[str, float]) -> None:
    """Hashes all files below the folder and writes `state/manifest.json`, the last file of a checkpoint."""
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
            raise InvalidCheckpoint(f"has a {FILE} of {path.stat().st_size} bytes, which none of ours has")
        body = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(body, dict):
            raise InvalidCheckpoint(f"has a {FILE} that is no manifest")
        digest = body.pop("digest", None)
        if body.get("format") != FORMAT:
            raise InvalidCheckpoint(f"has format {body.get('format')!r}, and this version reads format {FORMAT}")
        if digest != digest_of(body):
            raise InvalidCheckpoint(f"has a {FILE} that was changed after it was written")
        files = {_checked(name): (int(size), str(sha)) for name, (size, sha) in body["files"].items()}
        return Manifest(str(body["run"]), int(body["step"]), files, body["metrics"])
    except (OSError, KeyError, TypeError, AttributeError, RecursionError, ValueError) as error:
        if isinstance(error, InvalidCheckpoint):
            raise
        raise InvalidCheckpoint(f"has a {FILE} that cannot be read ({kind_and_text(error)})") from error


def verify(folder: Path, step: int, run: str | None) -> Manifest:
    """Reads every file of a checkpoint and compares it with the manifest. ``run``: the run that must have written it; None:
    any.

    Raises:
        InvalidCheckpoint: the first difference.
    """
    manifest = read_manifest(folder)
    if manifest.step != step:
        raise InvalidCheckpoint(f"is of step {manifest.step}, and its name says {step}")
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
    def one(name: str) -> tuple[int, str]:
        with (folder / name).open("rb") as file:
            sha = hashlib.file_digest(file, "sha256").hexdigest()
            did("save", "build")
            return os.fstat(file.fileno()).st_size, sha

    with ThreadPoolExecutor(THREADS, "checkpoint-hash") as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


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
    """Newer folders that are no valid checkpoints of this run, each with the reason."""

    def set_skipped_aside(self) -> None:
        """Renames the skipped folders, so that their steps can be saved again. Nothing is deleted."""
        for path, _ in self.skipped:
            names = (f"{path.name}.skipped" + (f".{number}" if number else "") for number in itertools.count())
            os.rename(path, next(aside for name in names if not (aside := path.with_name(name)).exists()))

    @property
    def step(self) -> int:
        return self.manifest.step


def newest_valid(folder: Path, run: str | None) -> ResumePoint | None:
    """The newest checkpoint in ``folder`` with every byte as it was written; None if there are no checkpoints.

    ``run``: the run that must have written it; None: unknown.

    Raises:
        NothingToResume: there are checkpoints, and none is valid. Names each with its fault.
    """
    skipped: list[tuple[Path, str]] = []
    for path in reversed(checkpoints(folder)):
        try:
            return ResumePoint(path, verify(path, step_of(path), run), tuple(skipped))
        except InvalidCheckpoint as reason:
            skipped.append((path, str(reason)))
    if not skipped:
        return None
    reasons = "; ".join(f"{path.name} {why}" for path, why in skipped)
    raise NothingToResume(
        f"no checkpoint in {folder} can be resumed: {reasons}. Nothing of it was changed. Begin another run with "
        "trial_name=…, from the weights of a checkpoint with actor.path=FOLDER, or move this folder away."
    )
