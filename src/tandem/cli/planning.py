"""Implements `tandem plan`: predicts a run's memory and time, and proposes changes if the run does not fit."""

import argparse
import functools
import json
from dataclasses import replace
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
from tandem.engines.inference.build import installed_servers
from tandem.flow.process import backend_line, decided
from tandem.models.shape import read_shape
from tandem.planning.fit import Plan, Report, fitting
from tandem.planning.job import job_of
from tandem.planning.machine import Machine, device, this_machine
from tandem.trainers.lengths import RunLengths, known_lengths

DOES_NOT_FIT = 1
DOES_NOT_RUN = "Time of a step: not measured, for the run does not fit"
NOT_MEASURED = "Time of a step: --measure runs three steps here and says how long each part of them takes"


def run(arguments: argparse.Namespace) -> int:
    """Runs `tandem plan`; returns 1 if the run does not fit, else 0."""
    report = make_report(arguments)
    print(json.dumps(report.data(), ensure_ascii=False) if arguments.json else report.text())
    return 0 if report.plan.fits else DOES_NOT_FIT


def make_report(arguments: argparse.Namespace) -> Report:
    """Returns the report for these arguments of the command line."""
    file, _ = split_arguments(arguments.arguments)
    resolved = resolve(arguments, KINDS[arguments.kind])
    machine = _machine(arguments, resolved.config)
    resolved = decided(resolved, machine=_seats(resolved.config, machine))
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


def _seats(config: Any, machine: Machine) -> allocation.BackendMachine:
    """Returns the properties of the machine that decide which engine generates."""
    if machine.cpu or not hasattr(config, "rollout"):
        return allocation.BackendMachine()
    ranks = parse_layout(config.actor.backend).ranks
    return allocation.BackendMachine(machine.count, ranks, installed_servers(config.rollout))
