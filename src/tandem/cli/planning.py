"""Implements `tandem plan`: predicts a run's memory and time, and proposes changes if the run does not fit.

In the report every figure has a unit: in the text after the figure, in the data in the key.
"""

import argparse
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.cli.arguments import split_arguments
from tandem.cli.profile import describe, measure
from tandem.cli.running import resolve
from tandem.config import allocation
from tandem.config.arithmetic import arithmetic, total_steps
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import KINDS
from tandem.config.train_engine import parse_layout
from tandem.engines.inference.check import installed_servers
from tandem.flow.process import backend_line, decided
from tandem.flow.sleep_plan import describe_sleep
from tandem.models.shape import read_shape
from tandem.planning.fit import RESERVE, SMALL_GIB, DeviceUse, Plan, cells, drawing, fitting, uses
from tandem.planning.job import checkpoint_of, job_of
from tandem.planning.machine import Machine, device, this_machine
from tandem.planning.memory import GIB, HEADINGS, Instant
from tandem.planning.planned_model import PlannedModel
from tandem.trainers.lengths import RunLengths, known_lengths

DOES_NOT_FIT = 1
DOES_NOT_RUN = "Time of a step: not measured, for the run does not fit"
NOT_MEASURED = "Time of a step: --measure runs three steps here and says how long each part of them takes"


def run(arguments: argparse.Namespace) -> int:
    """Runs `tandem plan`; returns 1 if the run does not fit, else 0."""
    report = make_report(arguments)
    print(json.dumps(report.data(), ensure_ascii=False) if arguments.json else report.text())
    return 0 if report.plan.fits else DOES_NOT_FIT


def make_report(arguments: argparse.Namespace) -> "Report":
    """Returns the report for these arguments of the command line."""
    file, _ = split_arguments(arguments.arguments)
    resolved = resolve(arguments, KINDS[arguments.kind])
    machine = _machine(arguments, resolved.config)
    resolved = decided(resolved, machine=_backend_machine(resolved.config, machine))
    config = resolved.config
    on_gpus = not machine.cpu and isinstance(config, TrainConfig)
    known, read = known_lengths(config, prompt=arguments.prompt_tokens), functools.cache(read_shape)
    config = replace(config, actor=fitting(config, machine, read))
    plan = Plan(job_of(config, machine, known.lengths, read, rows=known.rows), machine)
    timed = measure(arguments.kind, arguments.arguments) if arguments.measure and plan.fits else {}
    steps = config.total_train_steps if known.rows is None else total_steps(config, known.rows)
    return Report(
        title=f"Plan of {file or 'this configuration'}",
        plan=plan,
        lengths=known.source,
        arithmetic="\n".join([_arithmetic(config, known), *([backend_line(resolved)] if on_gpus else [])]),
        time=describe(timed, steps) if timed else "" if arguments.device else NOT_MEASURED if plan.fits else DOES_NOT_RUN,
        measured=timed,
    )


def _machine(arguments: argparse.Namespace, config: Any) -> Machine:
    if arguments.device is not None:
        if arguments.measure:
            raise ConfigError("--measure runs three steps on this machine, and --device is another one; give one of them")
        return device(arguments.device, arguments.count or 1)
    if arguments.count is not None:
        raise ConfigError("--count goes with --device: how many of those devices there are")
    return this_machine(device=config.device, threads=config.threads)


def _arithmetic(config: Any, known: RunLengths) -> str:
    if known.rows is not None:
        return arithmetic(config, known.rows)
    one = config.rollout.batch_size if hasattr(config, "rollout") else config.batch_size
    lines = arithmetic(config, one).splitlines()
    return "\n".join(line for line in lines if not line.startswith(("Epoch", "Run")))


def _backend_machine(config: Any, machine: Machine) -> allocation.BackendMachine:
    """Returns what `rollout.backend=auto` chooses by: the numbers of GPUs and ranks, and the installed servers."""
    if machine.cpu or not hasattr(config, "rollout"):
        return allocation.BackendMachine()
    ranks = parse_layout(config.actor.backend).ranks
    return allocation.BackendMachine(machine.count, ranks, installed_servers(config.rollout))


@dataclass(frozen=True)
class Report:
    """A plan with the other texts and figures of its report."""

    title: str
    plan: Plan
    lengths: str
    arithmetic: str
    time: str = ""
    """Lines about the time of a step."""

    measured: Mapping[str, float] = field(default_factory=dict)
    """Figures of a measured step; each name ends in its unit."""

    def text(self) -> str:
        """Returns the report as text."""
        plan, machine = self.plan, self.plan.machine
        each = " each" if machine.count > 1 else ""
        blocks = [
            [f"{self.title} on {machine.words}, {machine.memory_gib:.1f} GiB{each}", *map(_model, plan.job.models)],
            [*_memory(plan)],
            [*drawing(plan)],
            [describe_sleep(plan.job.sleeping)] if plan.job.sleeping is not None else [],
            [*_verdict(plan)],
            [self.time],
            [*_disk(plan)],
            [self.arithmetic],
            ["Assumed:", *(f"  - {line}" for line in self.assumptions())],
        ]
        return "\n\n".join("\n".join(lines) for lines in blocks if any(lines))

    def data(self) -> dict[str, Any]:
        """Returns the report as data for programs; keys of figures with a unit end in the unit."""
        plan, job = self.plan, self.plan.job
        checkpoint = checkpoint_of(job.models, job.saves)
        kinds = {"checkpoint": sum(checkpoint.values())} | checkpoint
        return {
            "machine": plan.machine.words,
            "sources": list(plan.machine.sources),
            "parameters": job.actor.shape.parameters(job.actor.head),
            "fits": plan.fits,
            "problems": list(plan.problems),
            "advice": "" if plan.fits else plan.advice,
            "memory": {
                "available_gib": round(plan.machine.memory_gib, 4),
                "peak_gib": round(plan.peak_gib(), 4),
                "host_gib": round(plan.peak_gib(None), 4),
                "worst": plan.worst().phase,
                "phases": {instant.phase: _items(instant) for instant in plan.instants},
                "devices": [_use(plan, use) for use in uses(plan)],
            },
            "measured": {name: round(figure, 4) for name, figure in self.measured.items()},
            "disk": {f"{kind}_gib": round(num_bytes / GIB, 4) for kind, num_bytes in kinds.items()}
            | {"checkpoints": job.saves.most},
            "lengths": {"prompt_tokens": job.lengths.prompt, "longest_tokens": job.lengths.longest},
            "assumptions": list(self.assumptions()),
        }

    def assumptions(self) -> Iterator[str]:
        """Yields the assumptions behind the figures, as text."""
        machine, generator = self.plan.machine, self.plan.job.generator
        yield self.lengths
        yield f"memory of the machine: {'; '.join(machine.sources)}"
        yield f"{RESERVE:.0%} of the memory is left to others"
        if not machine.cpu:
            yield "whether it fits is said of the devices' memory; that of the host is told, and compared with nothing"
        if generator is not None and generator.foreign is not None:
            yield f"{generator.foreign} servers take their share of memory, whatever they need of it"
        if generator is not None:
            yield "every sequence has a gradient: groups without spread cost a forward pass only"
        if any(model.layout.zero is not None for model in self.plan.job.models):
            yield "DeepSpeed's buffers are those of its code"


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
        name = f"{item.role}: {item.what}{'' if item.devices else ' (host)'}_gib"
        rows[name] = rows.get(name, 0.0) + item.num_bytes / GIB
    return {name: round(gib, 4) for name, gib in rows.items()} | {"total_gib": round(instant.total() / GIB, 4)}


def _model(model: PlannedModel) -> str:
    shape, rank = model.shape, f"adapters of rank {model.adapters.rank}" if model.adapters is not None else ""
    if not model.own:
        return f"{model.role}: the actor's model without its adapters; it takes no memory of its own"
    kind = "trained" if model.trained else "frozen"
    if rank:
        kind = f"frozen with {rank}"
        if model.trained:
            kind = f"frozen beside {rank}, {model.masters / 1e6:,.2f} M parameters, trained"
    said = (
        f"{model.role}: {model.parameters / 1e6:,.1f} M parameters ({shape.kind}, {shape.layers} layers of width "
        f"{shape.hidden}, {shape.vocab} tokens of vocabulary), {kind}, {model.dtype}, "
        f"{'1 rank' if model.ranks == 1 else f'{model.ranks} ranks'}"
    )
    if model.trunk_of is None:
        return said
    own = (model.masters + model.base) / 1e6
    return (
        f"{said}; its weights are those of {model.trunk_of}, in memory once, but for {own:,.2f} M of its head and adapters"
    )


def _memory(plan: Plan) -> Iterator[str]:
    """Yields the lines of a table of GiB by phase and kind of memory; the phase with the largest use has a ``*``."""
    yield "Memory in GiB, by phase (* the worst instant)"
    yield f"  {'':<20}" + "".join(f"{head:>13}" for head in (*HEADINGS, "other", "total"))
    for instant in plan.instants:
        row = "".join(cell.rjust(13) for cell in cells([*instant.columns().values(), instant.total() / GIB]))
        yield f"{'*' if instant is plan.worst() else ' '} {instant.phase:<20}{row}"


def _verdict(plan: Plan) -> Iterator[str]:
    there, peak, host = plan.machine.memory_gib, plan.peak_gib(), plan.peak_gib(None)
    if plan.fits:
        worst = f"{peak:.2f} GiB at the worst instant ({plan.worst().phase})"
        yield f"It fits: {worst}, {there - peak:.2f} GiB of {there:.2f} GiB stay free."
    else:
        yield f"It does not fit: {'; '.join(plan.problems)}."
        yield f"{plan.advice}."
    if host >= SMALL_GIB:
        yield f"Host memory beside the device: {host:.2f} GiB."


def _disk(plan: Plan) -> Iterator[str]:
    found, most = checkpoint_of(plan.job.models, plan.job.saves), plan.job.saves.most
    names, each = {"state": "state to resume from"}, sum(found.values()) / GIB
    shares = ", ".join(f"{names.get(kind, kind)} {size / GIB:.2f} GiB" for kind, size in found.items() if size)
    yield f"Disk: {each:.2f} GiB for each checkpoint ({shares})."
    if most is None:
        yield "All that are made are kept, or many: set total_train_steps, and the plan adds them up."
    elif most == 0:
        yield "This run saves nothing."
    else:
        yield f"At most {most} checkpoint{'' if most == 1 else 's'} at a time: {most * each:.2f} GiB."
