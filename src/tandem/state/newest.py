"""Which checkpoint a run goes on from: the newest that is whole; those that are not are named."""

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.config.errors import ConfigError
from tandem.state.existing import checkpoints, step_of
from tandem.state.manifest import Invalid, Manifest, verify


class NothingToResume(ConfigError):
    """There are checkpoints, and none of them can be resumed."""


@dataclass(frozen=True)
class Found:
    """The checkpoint to go on from."""

    path: Path
    manifest: Manifest
    skipped: tuple[tuple[Path, str], ...] = ()
    """Newer folders that are no checkpoints of this run, each with the reason."""

    def set_skipped_aside(self) -> None:
        """Renames them, so that their steps can be saved again. Nothing is removed: somebody may want to look."""
        for path, _ in self.skipped:
            for number in itertools.count():
                aside = path.with_name(f"{path.name}.skipped" + (f".{number}" if number else ""))
                if not aside.exists():
                    os.rename(path, aside)
                    break

    @property
    def step(self) -> int:
        return self.manifest.step


def newest_valid(folder: Path, run: str | None) -> Found | None:
    """The newest checkpoint in ``folder`` whose every byte is as it was written; None where there is none of any kind.

    ``run``: whose it must be; None: that is not known.

    Raises:
        NothingToResume: there are some, and none is whole. Names each with what is wrong with it.
    """
    found, skipped = newest_of(checkpoints(folder), run)
    if found is not None or not skipped:
        return found
    told = "; ".join(f"{path.name} {why}" for path, why in skipped)
    raise NothingToResume(
        f"no checkpoint in {folder} can be resumed: {told}. Nothing of it was changed. Begin another run with "
        "trial_name=…, from the weights of a checkpoint with actor.path=FOLDER, or move this folder away."
    )


def newest_of(paths: Sequence[Path], run: str | None) -> tuple[Found | None, tuple[tuple[Path, str], ...]]:
    """The last of these checkpoints that is whole, and those after it that are not, each with the reason."""
    skipped: list[tuple[Path, str]] = []
    for path in reversed(paths):
        try:
            return Found(path, verify(path, step_of(path), run), tuple(skipped)), tuple(skipped)
        except Invalid as reason:
            skipped.append((path, str(reason)))
    return None, tuple(skipped)
