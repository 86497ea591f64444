"""The rows of the table of memory: who holds how much in a phase, and where."""

from dataclasses import dataclass
from typing import Literal

GIB = 2**30

Place = Literal["device", "host"]

COLUMNS = {
    "weights": (
        "parameters",
        "parameters, rounded",
        "masters",
        "gathered parameters",
        "shared weights",
        "kept versions",
        "files of the base",
    ),
    "optimizer": ("optimizer",),
    "gradients": (
        "gradients",
        "gradient of the head",
        "gradient of the embedding",
        "norm of the gradients",
        "buffer of gradients",
        "buckets",
    ),
    "activations": ("activations",),
    "logits": ("logits",),
    "KV cache": ("KV cache",),
    "staged": (
        "staged weights",
        "rounded weights",
        "one whole tensor",
        "adapter",
        "weights before",
        "weights to write",
        "copy that is saved",
    ),
}
"""Heading → what is added up under it; the rest is under `other`."""


@dataclass(frozen=True)
class MemoryItem:
    """Bytes that somebody holds."""

    role: str
    what: str
    num_bytes: float
    """In the memory that is looked at: a CPU's, or the first GPU's, or the host's beside GPUs."""

    place: Place = "device"
    devices: int = 1
    """GPUs that hold as much each."""

    first: int = 0
    """The first of these GPUs; 0 on a CPU."""

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

    def columns(self, device: int = 0) -> dict[str, float]:
        """GiB of one GPU under each heading of `COLUMNS`, and `other`."""
        found = dict.fromkeys([*COLUMNS, "other"], 0.0)
        for item in self.items:
            if item.on(device):
                found[next((head for head, kinds in COLUMNS.items() if item.what in kinds), "other")] += item.num_bytes / GIB
        return found


@dataclass(frozen=True)
class Room:
    """The memory of the ranks of a run, or of a model: on a CPU one for all, else a device each, beside host memory."""

    ranks: int
    shared: bool
    first: int = 0
    """The first of these ranks."""

    def item(self, role: str, what: str, each: float, place: Place = "device") -> MemoryItem:
        """An item that each of these ranks holds, ``each`` bytes."""
        if self.shared or place == "host":
            return self.one(role, what, each * self.ranks, place)
        return MemoryItem(role, what, each, devices=self.ranks, first=self.first)

    def one(self, role: str, what: str, num_bytes: float, place: Place = "device") -> MemoryItem:
        """An item that the first rank alone holds, or all of them together."""
        return MemoryItem(role, what, num_bytes, "device" if self.shared else place)
