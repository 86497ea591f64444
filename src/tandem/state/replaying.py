"""A step of a run again: a folder in which it can be run without touching the first one, and what came out otherwise."""

import copy
import fcntl
import json
import shutil
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

from tandem.config.errors import ConfigError
from tandem.config.resume import Difference, differences
from tandem.state.existing import checkpoints, run_info, step_of
from tandem.state.ledger import FILE as LEDGER
from tandem.state.weight_digests import FILE as WEIGHTS
from tandem.state.weight_digests import read_digests

CLOCK = ("time", "tokens_per_s/", "memory/", "recover/", "checkpoint/")
"""Beginnings of the metrics that measure the machine, or what befell the run on it: no two runs have them in common."""

_KEPT = ("id", "command", "started")
"""Of `run.json`, in the folder of a replay."""

SHOWN = 5
"""Differences of each kind that are told."""


@dataclass(frozen=True)
class Outcome:
    """What a step that was run again came to."""

    step: int
    begun_from: str
    """The checkpoint, or `the beginning`."""

    tensors: int
    metrics: int
    samples: int
    differences: tuple[str, ...]
    """In words, one a kind; empty where the step came out the same."""

    def describe(self) -> str:
        """For people."""
        counted = f"{self.tensors} tensors, {self.metrics} metrics, {self.samples} samples"
        told = f"Step {self.step}, run again from {self.begun_from}: "
        if not self.differences:
            return f"{told}the same ({counted})."
        return f"{told}DIFFERENT ({counted} compared)." + "".join(f"\n  {line}" for line in self.differences)


def refuse_replay(folder: Path, step: int, given: Mapping[str, Any]) -> None:
    """Raises `ConfigError` where that step of the run cannot be run again; says what to do. ``given``: keys that the replay
    has other values of."""
    if _is_held(folder / ".lock"):
        raise ConfigError(f"{folder} is being written by its run; wait until it has ended")
    if read_digests(folder, step) is None or _row(folder, step) is None:
        known = sorted(_recorded(folder))
        there = f"steps {known[0]} to {known[-1]} are there" if known else "it has no step yet, or an older version made it"
        raise ConfigError(f"{folder} has no record of step {step} in metrics.jsonl and {WEIGHTS}: {there}")
    for time in run_info(folder).get("resumed", []):
        if "before" in time:
            continue  # `legs` knows what each step ran under
        keys = {text.partition(":")[0]: text for text in time.get("changed", [])}
        changed = [text for key, text in keys.items() if key not in given and not Difference(key, None, None).is_free]
        if changed and time.get("steps", 0) >= step:
            raise ConfigError(
                f"the configuration of {folder} was changed after step {step}: {'; '.join(changed)}. Give the values of "
                "then as key=value"
            )


@dataclass(frozen=True)
class Leg:
    """Steps of a replay that ran under one configuration."""

    last: int
    config: Mapping[str, Any]
    """As plain data."""


def legs(folder: Path, step: int, config: Mapping[str, Any], given: Container[str] = ()) -> list[Leg]:
    """What the steps from the newest whole checkpoint before ``step`` up to it ran under: `run.json` says from which
    checkpoint the run went on each time, and what was otherwise before. ``config``: the newest; ``given``: keys that stay as
    they are there."""
    first = max([0, *(step_of(path) for path in _before(folder, step))])
    found, config = [Leg(step, config)], copy.deepcopy(dict(config))
    for time in reversed(run_info(folder).get("resumed", [])):
        at = time.get("from")
        if at is None:
            continue  # it was ended before it went on
        if at <= first:
            break  # all later steps were done since
        for key, value in time.get("before", {}).items():
            if key not in given:
                _set(config, key.split("."), value)
        older = Leg(min(at, found[0].last), copy.deepcopy(config))
        found = [older, *(found[1:] if older.last == found[0].last else found)]
    return [leg for leg, after in zip_longest(found, found[1:]) if after is None or _differ(leg, after)]


def _differ(one: Leg, other: Leg) -> bool:
    return any(not difference.is_free for difference in differences(one.config, other.config, {}))


def _set(config: Any, path: list[str], value: Any) -> None:
    *outer, last = path
    for name in outer:
        config = config[name]
    config[last] = value


def _before(folder: Path, step: int) -> list[Path]:
    """Checkpoints that a replay of the step may go on from."""
    return [path for path in checkpoints(folder / "checkpoints") if 0 < step_of(path) < step]


def write_leg(target: Path, leg: Leg, *, is_last: bool) -> None:
    """Lets the run in ``target`` go on by a leg. What the run saves and draws is left out, but for the end of a leg that
    another one follows."""
    quiet = {
        "checkpoint": {"at_end": False} if is_last else {"every_steps": leg.last, "keep_last": None},
        "tracking": {"trajectories_per_step": leg.config["tracking"]["trajectories_per_step"]},
    }
    named = {"run": {"root": str(target.parent.parent)}, "experiment_name": target.parent.name, "trial_name": target.name}
    text = yaml.safe_dump({**leg.config, **quiet, **named}, sort_keys=False)
    (target / "config.yaml").write_text(text, encoding="utf-8")
    kept = {name: value for name, value in run_info(target).items() if name in _KEPT}
    (target / "run.json").write_text(json.dumps(kept | {"status": "interrupted"}), encoding="utf-8")


def prepare_replay(folder: Path, target: Path, step: int) -> str:
    """Makes ``target`` a run folder that goes on from the newest whole checkpoint before ``step``; returns its name.

    Nothing is written below ``folder``: its checkpoints are linked. `write_leg` says how it goes on.
    """
    (target / "checkpoints").mkdir(parents=True)
    before = _before(folder, step)
    for path in before:
        (target / "checkpoints" / path.name).symlink_to(path.resolve(), target_is_directory=True)
    for name in (LEDGER, f"{LEDGER}-journal", *(("metrics.jsonl",) if before else ())):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)
    shutil.copyfile(folder / "run.json", target / "run.json")
    return before[-1].name if before else "the beginning"


def compare_replay(folder: Path, replayed: Path, step: int) -> Outcome:
    """Weights, metrics and samples of a step in two run folders. Raises `ConfigError` where the second did not reach it."""
    then, now = read_digests(folder, step), read_digests(replayed, step)
    if then is None or now is None:
        raise ConfigError(f"the replay did not reach step {step}")
    old, new = _measured(folder, step), _measured(replayed, step)
    texts, again = _samples(folder, step), _samples(replayed, step)
    tensors = {name for name in {**then, **now} if then.get(name) != now.get(name)}
    metrics = {f"{name} {new.get(name)} (was {old.get(name)})" for name in {**old, **new} if old.get(name) != new.get(name)}
    samples = {f"number {i}" for i, (one, other) in enumerate(zip_longest(texts, again), 1) if one != other}
    differences = (
        *_told("tensors", tensors, len(then)),
        *_told("metrics", metrics, len(old)),
        *_told("samples", samples, len(texts)),
    )
    first = min(_recorded(replayed))
    begun = [path.name for path in checkpoints(replayed / "checkpoints") if step_of(path) == first - 1]
    return Outcome(step, *(begun or ["the beginning"]), len(then), len(old), len(texts), differences)


def _is_held(lock: Path) -> bool:
    """Whether a run has the lock of its folder; nothing is written."""
    if not lock.is_file():
        return False
    with lock.open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _told(what: str, different: set[str], total: int) -> Iterator[str]:
    if different:
        more = f", and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
        yield f"{what}: {len(different)} of {total} differ: {', '.join(sorted(different)[:SHOWN])}{more}"


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:  # a line that a kill has torn
            continue
        if isinstance(row, dict):
            yield row


def _recorded(folder: Path) -> set[int]:
    """The steps of which `weights.jsonl` speaks."""
    return {row["step"] for row in _rows(folder / WEIGHTS) if isinstance(row.get("step"), int)}


def _row(folder: Path, step: int) -> dict[str, Any] | None:
    return next((row for row in _rows(folder / "metrics.jsonl") if row.get("step") == step), None)


def _measured(folder: Path, step: int) -> dict[str, Any]:
    row = _row(folder, step) or {}
    return {name: value for name, value in row.items() if name != "step" and not name.startswith(CLOCK)}


def _samples(folder: Path, step: int) -> list[str]:
    path = folder / "trajectories" / f"step_{step}.jsonl"
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
