"""The plan of `tandem plan`, with what to change where it does not fit."""

import argparse
import functools
import json
from dataclasses import replace
from typing import Any

from tandem.cli.arguments import split_arguments
from tandem.cli.probe import describe, measure
from tandem.cli.running import resolve
from tandem.config import choose_backend
from tandem.config.arithmetic import arithmetic, total_steps
from tandem.config.backend import parse_layout
from tandem.config.commands import KINDS
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.engines.inference.check import installed_servers
from tandem.flow.process import backend_line, decided
from tandem.models.shape import read_shape
from tandem.planning.fit import fitting
from tandem.planning.job import job_of, seats_of
from tandem.planning.machine import Machine, device, this_machine
from tandem.planning.plan import make_plan
from tandem.planning.report import Report
from tandem.trainers.lengths import Known, known_lengths

DOES_NOT_FIT = 1
DOES_NOT_RUN = "Time of a step: not measured, for the run does not fit"
NOT_MEASURED = "Time of a step: --measure runs three steps here and says how long each part of them takes"


def run(arguments: argparse.Namespace) -> int:
    """`tandem plan`; 1 where it does not fit."""
    report = make_report(arguments)
    print(json.dumps(report.data(), ensure_ascii=False) if arguments.json else report.text())
    return 0 if report.plan.fits else DOES_NOT_FIT


def make_report(arguments: argparse.Namespace) -> Report:
    """The plan of these arguments."""
    file, _ = split_arguments(arguments.arguments)
    resolved = resolve(arguments, KINDS[arguments.kind])
    machine = _machine(arguments, resolved.config)
    resolved = decided(resolved, machine=_seats(resolved.config, machine))
    config = resolved.config
    on_gpus = machine.kind == "gpu" and isinstance(config, TrainConfig)
    if on_gpus:
        seats_of(config, machine)  # more than there are: refused
    known, read = known_lengths(config, prompt=arguments.prompt_tokens), functools.cache(read_shape)
    config = replace(config, actor=fitting(config, machine, read))
    plan = make_plan(job_of(config, machine, known.lengths, read, rows=known.rows), machine)
    timed = measure(arguments.kind, arguments.arguments) if arguments.measure and plan.fits else {}
    steps = config.total_train_steps if known.rows is None else total_steps(config, known.rows)
    return Report(
        title=f"Plan of {file or 'this configuration'}",
        plan=plan,
        lengths=known.said,
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


def _arithmetic(config: Any, known: Known) -> str:
    if known.rows is not None:
        return arithmetic(config, known.rows)
    one = config.rollout.batch_size if hasattr(config, "rollout") else config.batch_size
    lines = arithmetic(config, one).splitlines()
    return "\n".join(line for line in lines if not line.startswith(("Epoch", "Run")))


def _seats(config: Any, machine: Machine) -> choose_backend.BackendMachine:
    """The machine, as far as it decides which engine generates."""
    if machine.kind != "gpu" or not hasattr(config, "rollout"):
        return choose_backend.BackendMachine()
    ranks = parse_layout(config.actor.backend).ranks
    return choose_backend.BackendMachine(machine.count, ranks, installed_servers(config.rollout))
