"""The recorded run of `tandem profile`, its table, and advice about the largest entries."""

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from tandem.cli.main import import_object
from tandem.cli.running import TRAINING, resolve
from tandem.config.arithmetic import folder_of
from tandem.config.devices import usable_cores
from tandem.config.load import KINDS
from tandem.engines.inference.embedded import EmbeddedProcess
from tandem.flow.plan import plan_run
from tandem.flow.session import TrainingSession
from tandem.tracking.profile import BEFORE, GIB, MIB, Profiler, ProfileTable, counters, joined, tabulate, text, write

LARGE = 0.1
"""Smallest share of a step's time for which a stage gets advice."""


def profile(arguments: argparse.Namespace) -> int:
    """Records the steps on this rank and writes its trace; rank 0 prints the table."""
    resolved = resolve(arguments, KINDS[arguments.kind])
    rank = int(os.environ.get("RANK", "0"))
    profiler = Profiler(f"rank {rank}")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        engine_trace = Path(folder, "engine.json")

        def watch(numbers: Iterable[int], session: TrainingSession) -> Iterator[int]:
            engine = getattr(getattr(session, "meter", None), "engine", None)
            if not isinstance(engine, EmbeddedProcess):
                return profiler.steps(numbers)
            return profiler.steps(numbers, engine.profile, lambda: engine.profile(engine_trace))

        train = import_object(TRAINING[arguments.kind].loop).train
        train(resolved, until=BEFORE + arguments.steps, watch=watch)
        if engine_trace.exists():
            joined(profiler.trace, orjson.loads(engine_trace.read_bytes()))
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
    """Returns the mean number of bytes that each stage moves in a recorded step, from the metrics of the run."""
    file = folder_of(config) / "metrics.jsonl"
    all_rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in all_rows if row["step"] in recorded]
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
    which_rank = f", on rank 0 (of {ranks}; the other ranks have their own traces)" if ranks > 1 else ""
    where = "its GPU" if table.on_gpu else "a core" if cores == 1 else f"{cores:g} cores"
    first, last = profiler.recorded[0], profiler.recorded[-1]
    steps = f"Step {first}" if first == last else f"Means of steps {first} to {last}"
    yield f"{steps}{which_rank}. Idle: the share in which {where} did nothing for this run."
    if profiler.plain is None:
        yield f"A step took {table.step_s:.3f} s with the profiler; the run has too few steps to time one without it."
        return
    plain = profiler.steps_s[profiler.plain]
    yield f"A step took {table.step_s:.3f} s with the profiler; step {profiler.plain} took {plain:.3f} s without it."


def _remedies(config: Any) -> Iterator[tuple[str, str]]:
    """Yields the beginning of a stage's name, and a change that certainly makes such a stage shorter."""
    yield "wake: ", "raise memory_limit_gib, so that less state is moved out of memory (`tandem plan` shows the whole need)"
    yield "verify", "raise rollout.verify.every_steps, so that fewer steps verify"
    yield "record", "lower tracking.trajectories_per_step (0: nothing is recorded)"
    if config.actor.gradient_checkpointing:
        yield "update", "actor.gradient_checkpointing=false saves a forward pass, and takes more memory (`tandem plan`)"


def _advice(table: ProfileTable, config: Any) -> Iterator[str]:
    """Yields lines of advice: only changes that certainly make one of the largest stages shorter."""
    lines = [
        f"{stage.name} takes {stage.seconds / table.step_s:.0%} of a step: {remedy}."
        for stage in table.stages
        for name, remedy in _remedies(config)
        if stage.name.startswith(name) and stage.seconds >= LARGE * table.step_s
    ]
    cores = usable_cores()
    if not table.on_gpu and config.threads and config.threads < cores:
        unused = f"{cores - config.threads} of {cores} cores unused"
        lines.append(f"threads={config.threads} leaves {unused}; without this key the run takes all.")
    if lines:
        yield from ["What helps for certain:", *(f"- {line}" for line in lines), ""]
    else:
        yield "Nothing here is certain to make a step shorter; docs/profile.md says what to try, by stage."


def _end(file: Path) -> Iterator[str]:
    yield f"Trace: {file}"
    yield "Open it at https://ui.perfetto.dev or chrome://tracing; it is read in the browser, and sent nowhere."
