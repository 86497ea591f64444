"""The rows of the table of memory: who holds how much in a phase, and where."""

from dataclasses import dataclass
from typing import Literal

GIB = 2**30

Place = Literal["device", "host"]


@dataclass(frozen=True)
class MemoryItem:
    """Bytes that somebody holds."""

    role: str
    what: str
    num_bytes: float
    """In the memory that is looked at: a CPU's, or the first GPU's, or the host's beside GPUs."""

    place: Place = "device"
    holders: int = 1
    """Ranks that hold this together in that memory, each as much."""

    devices: int = 1
    """GPUs that hold as much each."""

    first: int = 0
    """The first of these GPUs; 0 on a CPU."""

    @property
    def each(self) -> float:
        """Bytes of one rank."""
        return self.num_bytes / self.holders

    @property
    def every_rank(self) -> bool:
        """True if it is not the first rank's alone."""
        return self.holders > 1 or self.devices > 1

    def on(self, device: int) -> bool:
        """True if a GPU, or a CPU's memory (0), holds it."""
        return self.place == "device" and self.first <= device < self.first + self.devices


@dataclass(frozen=True)
class Instant:
    """The items of one phase, at its worst moment, on the device (or machine) that holds most."""

    phase: str
    items: tuple[MemoryItem, ...]

    def total(self, place: Place = "device") -> float:
        """Bytes, of the first GPU where they are a device's."""
        if place == "host":
            return sum(item.num_bytes for item in self.items if item.place == "host")
        return self.on(0)

    def on(self, device: int) -> float:
        """Bytes that one GPU holds."""
        return sum(item.num_bytes for item in self.items if item.on(device))

    @property
    def of_first_rank(self) -> float:
        """Bytes of the rank that holds most: the first one has an embedded engine as well."""
        return sum(item.each for item in self.items if item.on(0))

    @property
    def of_machine(self) -> float:
        """Bytes of all devices together; on a CPU they are one."""
        return sum(item.num_bytes * item.devices for item in self.items if item.place == "device")


@dataclass(frozen=True)
class Room:
    """The memory of the ranks of a run, or of a model: on a CPU one for all, else a device each, beside host memory."""

    ranks: int
    shared: bool
    first: int = 0
    """The first of these ranks."""

    def item(self, role: str, what: str, each: float, place: Place = "device") -> MemoryItem:
        """An item that each of these ranks holds, ``each`` bytes."""
        if self.shared:
            return MemoryItem(role, what, each * self.ranks, holders=self.ranks)
        if place == "host":
            return MemoryItem(role, what, each * self.ranks, "host", holders=self.ranks)
        return MemoryItem(role, what, each, devices=self.ranks, first=self.first)

    def one(self, role: str, what: str, num_bytes: float, place: Place = "device") -> MemoryItem:
        """An item that the first rank alone holds, or all of them together."""
        return MemoryItem(role, what, num_bytes, "device" if self.shared else place)
