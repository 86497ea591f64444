"""The plan as text and as plain data: who holds how much of which device, phase by phase, and whether it fits.

Every figure has its unit, in the text beside it and in the data in its key.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.flow.state_parts import describe_sleep
from tandem.planning.memory import COLUMNS, GIB, Instant
from tandem.planning.plan import RESERVE, Plan
from tandem.planning.planned_model import PlannedModel

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


@dataclass(frozen=True)
class Report:
    """A plan with all that is said beside it."""

    title: str
    plan: Plan
    lengths: str
    arithmetic: str
    time: str = ""
    """Lines about the time of a step."""

    measured: Mapping[str, float] = field(default_factory=dict)
    """Figures of a step that was measured; each name ends in its unit."""

    def text(self) -> str:
        """For people."""
        plan = self.plan
        each = " each" if plan.machine.count > 1 else ""
        blocks = [
            [f"{self.title} on {plan.machine.name}, {plan.machine.memory_gib:.1f} GiB{each}", *_model(self)],
            [*_memory(plan)],
            [*drawing(plan)],
            [*_sleep(plan)],
            [*_verdict(self)],
            [self.time],
            [*_disk(plan)],
            [self.arithmetic],
            ["Assumed:", *(f"  - {line}" for line in assumptions(self))],
        ]
        return "\n\n".join("\n".join(lines) for lines in blocks if any(lines))

    def data(self) -> dict[str, Any]:
        """For programs; keys end in their unit."""
        plan = self.plan
        return {
            "machine": plan.machine.name,
            "sources": list(plan.machine.sources),
            "parameters": plan.job.actor.shape.parameters(plan.job.actor.head),
            "fits": plan.fits,
            "problems": list(plan.problems),
            "advice": "" if plan.fits else plan.advice,
            "memory": {
                "available_gib": round(plan.machine.memory_gib, 4),
                "peak_gib": round(plan.peak_gib, 4),
                "host_gib": round(plan.host_gib, 4),
                "worst": plan.worst.phase,
                "phases": {instant.phase: _items(instant) for instant in plan.instants},
                "devices": [_use(plan, use) for use in uses(plan)],
            },
            "measured": {name: round(figure, 4) for name, figure in self.measured.items()},
            "disk": {
                "checkpoint_gib": round(plan.checkpoint.total / GIB, 4),
                "models_gib": round(plan.checkpoint.models / GIB, 4),
                "adapters_gib": round(plan.checkpoint.adapters / GIB, 4),
                "state_gib": round(plan.checkpoint.state / GIB, 4),
                "checkpoints": plan.job.saves.most,
            },
            "lengths": {
                "prompt_tokens": plan.job.lengths.prompt,
                "longest_tokens": plan.job.lengths.longest,
            },
            "assumptions": list(assumptions(self)),
        }


def _use(plan: Plan, use: DeviceUse) -> dict[str, Any]:
    phases = [instant.phase for instant in plan.instants]
    held = {
        f"{role}_gib": dict(zip(phases, (round(gib, 4) for gib in figures), strict=True))
        for role, figures in use.residents.items()
    }
    return {"devices": list(use.devices), "who": use.who, "residents": held}


def _items(instant: Instant) -> dict[str, float]:
    rows: dict[str, float] = {}
    for item in instant.items:
        name = f"{item.role}: {item.what}{' (host)' if item.place == 'host' else ''}_gib"
        rows[name] = rows.get(name, 0.0) + item.num_bytes / GIB
    return {name: round(gib, 4) for name, gib in rows.items()} | {"total_gib": round(instant.total() / GIB, 4)}


def _model(report: Report) -> Iterator[str]:
    for model in report.plan.job.models:
        shape = model.shape
        if not model.own:
            yield f"{model.role}: the actor's model without its adapters; it takes no memory of its own"
            continue
        yield (
            f"{model.role}: {model.parameters / 1e6:,.1f} M parameters ({shape.kind}, {shape.layers} layers of width "
            f"{shape.hidden}, {shape.vocab} tokens of vocabulary), {_trained(model)}, {model.dtype}, {_ranks(model.ranks)}"
            f"{'' if model.trunk_of is None else _shared(model)}"
        )


def _shared(model: PlannedModel) -> str:
    own = (model.masters + model.base) / 1e6
    return f"; its weights are those of {model.trunk_of}, in memory once, but for {own:,.2f} M of its head and adapters"


def _trained(model: PlannedModel) -> str:
    if not model.trained:
        return "frozen" if model.adapters is None else f"frozen with adapters of rank {model.adapters.rank}"
    if model.adapters is None:
        return "trained"
    return f"frozen beside adapters of rank {model.adapters.rank}, {model.masters / 1e6:,.2f} M parameters, trained"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _memory(plan: Plan) -> Iterator[str]:
    """A table by phase and kind, and who holds what at the worst instant."""
    heads = [*COLUMNS, "other", "total"]
    yield "Memory in GiB, by phase (* the worst instant)"
    yield f"  {'':<20}" + "".join(f"{head:>13}" for head in heads)
    for instant in plan.instants:
        found = instant.columns() | {"total": instant.total() / GIB}
        cells = "".join(("" if gib < SMALL_GIB else f"{gib:.2f}").rjust(13) for gib in found.values())
        yield f"{'*' if instant is plan.worst else ' '} {instant.phase:<20}{cells}"


def _sleep(plan: Plan) -> Iterator[str]:
    """Lines about the parts that sleep between the stages, under a memory limit."""
    if plan.job.sleeping is not None:
        yield describe_sleep(plan.job.sleeping)


def _verdict(report: Report) -> Iterator[str]:
    plan = report.plan
    if plan.fits:
        free = plan.machine.memory_gib - plan.peak_gib
        yield (
            f"It fits: {plan.peak_gib:.2f} GiB at the worst instant ({plan.worst.phase}), {free:.2f} GiB of "
            f"{plan.machine.memory_gib:.2f} GiB stay free."
        )
    else:
        yield f"It does not fit: {'; '.join(plan.problems)}."
        yield f"{plan.advice}."
    if plan.host_gib >= SMALL_GIB:
        yield f"Host memory beside the device: {plan.host_gib:.2f} GiB."


def _disk(plan: Plan) -> Iterator[str]:
    found, most = plan.checkpoint, plan.job.saves.most
    kinds = {"models": found.models, "adapters": found.adapters, "state to resume from": found.state}
    shares = ", ".join(f"{name} {num_bytes / GIB:.2f} GiB" for name, num_bytes in kinds.items() if num_bytes)
    yield f"Disk: {found.total / GIB:.2f} GiB for each checkpoint ({shares})."
    if most is None:
        yield "All that are made are kept, or many: set total_train_steps, and the plan adds them up."
    elif most == 0:
        yield "This run saves nothing."
    else:
        many = "1 checkpoint" if most == 1 else f"{most} checkpoints"
        yield f"At most {many} at a time: {most * found.total / GIB:.2f} GiB."


def assumptions(report: Report) -> Iterator[str]:
    """The assumptions behind the figures."""
    plan = report.plan
    yield report.lengths
    yield f"memory of the machine: {'; '.join(plan.machine.sources)}"
    yield f"{RESERVE:.0%} of the memory is left to others"
    if plan.machine.kind == "gpu":
        yield "whether it fits is said of the devices' memory; that of the host is told, and compared with nothing"
    if plan.job.generator is not None and plan.job.generator.foreign is not None:
        yield f"{plan.job.generator.foreign} servers take their share of memory, whatever they need of it"
    if plan.job.generator is not None:
        yield "every sequence has a gradient: groups without spread cost a forward pass only"
    if any(model.layout.zero is not None for model in plan.job.models):
        yield "DeepSpeed's buffers are those of its code"
