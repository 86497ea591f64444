"""Who holds how much of which device, phase by phase: one table for all ranks and servers of a run."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tandem.planning.items import GIB
from tandem.planning.plan import Plan

SMALL_GIB = 0.005
"""Items below this size are left out of the tables."""


@dataclass(frozen=True)
class DeviceUse:
    """Devices that hold the same."""

    devices: range
    who: str
    """The ranks and servers on them."""

    residents: dict[str, tuple[float, ...]]
    """Role → GiB in each phase of the plan."""

    @property
    def total(self) -> tuple[float, ...]:
        """GiB in each phase."""
        return tuple(map(sum, zip(*self.residents.values(), strict=True)))


def uses(plan: Plan) -> tuple[DeviceUse, ...]:
    """Every device of the plan in order; neighbours that hold the same are one row."""
    each = ((device, _residents(plan, device)) for device in range(plan.devices))
    found = []
    for residents, group in itertools.groupby(each, key=lambda one: one[1]):
        devices = [device for device, _ in group]
        found.append(DeviceUse(range(devices[0], devices[-1] + 1), _who(plan, devices), residents))
    return tuple(found)


def _residents(plan: Plan, device: int) -> dict[str, tuple[float, ...]]:
    held: dict[str, list[float]] = {}
    for phase, instant in enumerate(plan.instants):
        for item in instant.items:
            if item.on(device):
                held.setdefault(item.role, [0.0] * len(plan.instants))[phase] += item.num_bytes / GIB
    return {role: tuple(gib) for role, gib in held.items() if max(gib) >= SMALL_GIB}


def _who(plan: Plan, devices: Sequence[int]) -> str:
    if plan.machine.kind == "cpu":
        return ""
    ranks = [device for device in devices if device < max(model.ranks for model in plan.job.models)]
    there = [f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"] if ranks else []
    seats = plan.job.generator.seats if plan.job.generator is not None else ()
    return ", ".join([*there, *(seat.words() for seat in seats if set(devices) & set(seat.devices))])


def drawing(plan: Plan) -> Iterator[str]:
    """The table as text: device and resident down, time across, GiB in the cells."""
    phases = [instant.phase for instant in plan.instants]
    widths = [max(9, len(phase) + 2) for phase in phases]
    yield f"{'GiB of each device':<22}" + "".join(phase.rjust(width) for phase, width in zip(phases, widths, strict=True))

    def row(name: str, figures: tuple[float, ...]) -> str:
        cells = ("" if gib < SMALL_GIB else f"{gib:.2f}" for gib in figures)
        return f"  {name:<20}" + "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))

    for use in uses(plan):
        first, last = use.devices[0], use.devices[-1]
        if plan.machine.kind == "cpu":
            yield plan.machine.name
        elif first == last:
            yield f"GPU {first}: {use.who}"
        else:
            yield f"GPU {first} to {last}, each: {use.who}"
        yield from (row(role, gib).rstrip() for role, gib in use.residents.items())
        yield row(f"all, of {plan.machine.memory_gib:.1f}", use.total).rstrip()
