"""Seconds, by what they are spent on."""

from collections.abc import Iterable
from dataclasses import dataclass

PRODUCTS, ATTENTION, MEMORY, OPERATIONS, RANKS, BETWEEN, HOST, HASHES = (
    "matrix products",
    "attention",
    "memory bandwidth",
    "operations",
    "communication",
    "communication inside of layers",
    "traffic with host memory",
    "digests",
)


@dataclass(frozen=True)
class Cost:
    """Seconds by what they are spent on."""

    parts: tuple[tuple[str, float], ...]

    @property
    def seconds(self) -> float:
        """In all."""
        return sum(seconds for _, seconds in self.parts)

    @property
    def bound(self) -> str:
        """The resource that takes most of its time."""
        return max(self.parts, key=lambda part: part[1])[0] if self.parts else "nothing"

    def __mul__(self, times: float) -> "Cost":
        return Cost(tuple((name, seconds * times) for name, seconds in self.parts))


def total(costs: Iterable[Cost]) -> Cost:
    """The sum, part by part."""
    found: dict[str, float] = {}
    for cost in costs:
        for name, seconds in cost.parts:
            found[name] = found.get(name, 0.0) + seconds
    return Cost(tuple(found.items()))


@dataclass(frozen=True)
class Phase:
    """One phase of a step."""

    name: str
    cost: Cost
    tokens: float = 0.0
    """Tokens that it computes or draws."""

    @property
    def seconds(self) -> float:
        """Its time."""
        return self.cost.seconds
