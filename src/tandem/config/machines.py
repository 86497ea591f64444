"""The machines over which the ranks of a run are spread."""

import os
from dataclasses import dataclass

MACHINE = "machine-"
"""Folders of the run folder whose name begins so are for the servers of another machine than the first."""


@dataclass(frozen=True)
class Machines:
    """This machine among those of the run: each has as many ranks, numbered on from those of the machine before."""

    number: int = 0
    count: int = 1
    ranks: int = 1
    """Number of ranks on each machine."""

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first rank of each machine."""
        return tuple(range(0, self.count * self.ranks, self.ranks))

    @property
    def folder(self) -> str:
        """Folder in the run folder in which the servers of this machine have their files."""
        return f"{MACHINE}{self.number}" if self.number else ""


def machines() -> Machines:
    """This machine among the others, by the variables of a launcher or of torchrun; without them it is the only one."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return Machines(int(os.environ.get("RANK", 0)) // here, max(1, world // here), here)
