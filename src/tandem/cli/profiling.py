"""The recorded run of `tandem profile`, its table, and what to do about the largest entries."""

import argparse
import contextlib
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from tandem.cli.running import TRAINING, resolve
from tandem.config.commands import KINDS
from tandem.config.cores import usable_cores
from tandem.engines.inference.embedded import EmbeddedProcess
from tandem.flow.plan import plan_run
from tandem.flow.training import TrainingSession
from tandem.state.run_folder import run_path
from tandem.tracking.profile_table import GIB, MIB, ProfileTable, tabulate, text
from tandem.tracking.profiler import BEFORE, Profiler, counters, joined, write

LARGE = 0.1
"""The share of a step from which on a remedy is named."""


def profile(arguments: argparse.Namespace) -> int:
    """Records the steps on this rank and writes its trace; rank 0 prints the table."""
    resolved = resolve(arguments, KINDS[arguments.kind])
    rank = int(os.environ.get("RANK", "0"))
    profiler = Profiler(f"rank {rank}")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        other = Path(folder, "engine.json")

        def watch(numbers: Iterable[int], session: TrainingSession) -> Iterator[int]:
            engine = getattr(getattr(session, "meter", None), "engine", None)
            if not isinstance(engine, EmbeddedProcess):
                return profiler.steps(numbers)
            return profiler.steps(numbers, engine.profile, lambda: engine.profile(other))

        train = importlib.import_module(TRAINING[arguments.kind].loop).train
        train(resolved, until=BEFORE + arguments.steps, watch=watch)
        if other.exists():
            joined(profiler.trace, orjson.loads(other.read_bytes()))
    counters(profiler.trace, profiler.uses)
    file = arguments.into / f"rank{rank}.json.gz"
    write(profiler.trace, file)
    if rank == 0:
        cores = usable_cores() / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        table = tabulate(profiler.trace, profiler.uses, cores, _moved(resolved.config, profiler.recorded))
        print("\n".join([*_head(profiler, cores, table), "", text(table), ""]))
        print("\n".join([*_advice(table, resolved.config), *_end(file)]))
    return 0


def _moved(config: Any, recorded: Iterable[int]) -> dict[str, float]:
    """Bytes of a step by stage, from the metrics of the run."""
    file = run_path(config.run.root, config.experiment_name, config.trial_name) / "metrics.jsonl"
    every = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in every if row["step"] in recorded]
    moved: dict[str, float] = {}
    for stage in plan_run(config).stages:
        key = stage.name.replace(": ", "_").replace(" ", "_")
        if stage.kind == "deliver":
            moved[stage.name] = _mean(rows, "weights/delivered_mib") * MIB
        moved[f"wake: {stage.name}"] = _mean(rows, f"memory/moved_gib/{key}") * GIB
    return moved


def _mean(rows: list[Mapping[str, Any]], name: str) -> float:
    return sum(row.get(name) or 0.0 for row in rows) / len(rows)


def _head(profiler: Profiler, cores: float, table: ProfileTable) -> Iterator[str]:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    of = f", of rank 0 (of {ranks}; the others are in their traces)" if ranks > 1 else ""
    where = "its GPU" if table.on_gpu else "a core" if cores == 1 else f"{cores:g} cores"
    first, last = profiler.recorded[0], profiler.recorded[-1]
    steps = f"Step {first}" if first == last else f"Means of steps {first} to {last}"
    yield f"{steps}{of}. Idle: the share in which {where} did nothing for this run."
    if profiler.plain is None:
        yield f"A step took {table.step_s:.3f} s with the profiler; the run has too few steps to time one without it."
        return
    plain = profiler.steps_s[profiler.plain]
    yield f"A step took {table.step_s:.3f} s with the profiler; step {profiler.plain} took {plain:.3f} s without it."


def _remedies(config: Any) -> Iterator[tuple[str, str]]:
    """The beginning of a stage's name, and what makes it shorter for certain."""
    yield "wake: ", "raise memory_limit_gib, so that less sleeps: `tandem plan` says what all of it needs"
    yield "verify", "raise rollout.verify.every_steps, and fewer steps have it"
    yield "record", "lower tracking.trajectories_per_step (0: nothing is recorded)"
    if config.actor.gradient_checkpointing:
        yield "update", "actor.gradient_checkpointing=false saves a forward pass, and takes more memory (`tandem plan`)"


def _advice(table: ProfileTable, config: Any) -> Iterator[str]:
    """Lines about what makes the largest stages shorter for certain; nothing else."""
    told = [
        f"{stage.name} takes {stage.seconds / table.step_s:.0%} of a step: {remedy}."
        for stage in table.stages
        for name, remedy in _remedies(config)
        if stage.name.startswith(name) and stage.seconds >= LARGE * table.step_s
    ]
    cores = usable_cores()
    if not table.on_gpu and config.threads and config.threads < cores:
        unused = f"{cores - config.threads} of {cores} cores unused"
        told.append(f"threads={config.threads} leaves {unused}; without this key the run takes all.")
    if told:
        yield from ["What helps for certain:", *(f"- {line}" for line in told), ""]
    else:
        yield "Nothing here is certain to make a step shorter; docs/profile.md says what to try, by stage."


def _end(file: Path) -> Iterator[str]:
    yield f"Trace: {file}"
    yield "Open it at https://ui.perfetto.dev or chrome://tracing; it is read in the browser, and sent nowhere."
