"""A step of a run again: a folder in which it can be run without touching the first one, and what came out otherwise."""

import copy
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

from tandem.config.errors import ConfigError
from tandem.config.resume import differences, is_free
from tandem.state.control import JOURNAL
from tandem.state.existing import checkpoints, is_held, rows_of, run_info, step_of, times_resumed
from tandem.state.ledger import FILE as LEDGER
from tandem.state.manifest import newest_of
from tandem.state.weight_digests import FILE as WEIGHTS
from tandem.state.weight_digests import read_digests

CLOCK = ("time", "tokens_per_s/", "memory/", "recover/", "checkpoint/")
"""Beginnings of the metrics that measure the machine, or what befell the run on it: no two runs have them in common."""

COLUMNS = "columns"
"""The mapping below a data set in which a key may be missing."""

_KEPT = ("id", "command", "started", "kernels", "training_kernels")
"""Keys of `run.json` that the folder of a replay keeps."""

SHOWN = 5
"""Differences of each kind that are told."""


@dataclass(frozen=True)
class ReplayStart:
    """The beginning of a replay."""

    checkpoint: Path | None
    """The checkpoint that it begins from; None for the first step."""

    skipped: tuple[str, ...] = ()
    """Newer checkpoints before the step that are not whole, with the reason."""

    @property
    def step(self) -> int:
        """The last one that is not run again."""
        return 0 if self.checkpoint is None else step_of(self.checkpoint)

    @property
    def name(self) -> str:
        return "the beginning" if self.checkpoint is None else self.checkpoint.name


def start_of(folder: Path, step: int) -> ReplayStart:
    """The newest whole checkpoint before the step, whose every byte is read; or the beginning."""
    before = [path for path in checkpoints(folder / "checkpoints") if 0 < step_of(path) < step]
    found, skipped = newest_of(before, str(run_info(folder).get("id") or "") or None)
    return ReplayStart(found and found.path, tuple(f"{path.name} {reason}" for path, reason in skipped))


@dataclass(frozen=True)
class ReplayResult:
    """The result of a step that was run again."""

    step: int
    begun_from: str
    """The checkpoint, or `the beginning`."""

    skipped: tuple[str, ...]
    tensors: int
    metrics: int
    samples: int
    differences: tuple[str, ...]
    """In words, one a kind; empty where the step came out the same."""

    def describe(self) -> str:
        counted = f"{self.tensors} tensors, {self.metrics} metrics, {self.samples} samples"
        told = f"Step {self.step}, run again from {self.begun_from}: "
        if not self.differences:
            return f"{told}the same ({counted})."
        return f"{told}DIFFERENT ({counted} compared)." + "".join(f"\n  {line}" for line in self.differences)


def refuse_replay(folder: Path, step: int, given: Sequence[Sequence[str]]) -> None:
    """Raises `ConfigError` where that step of the run cannot be run again; says what to do. ``given``: paths of the keys
    that the replay has other values of."""
    if is_held(folder):
        raise ConfigError(f"{folder} is being written by its run; wait until it has ended")
    known = sorted(_recorded(folder))
    if step not in known:
        there = f"steps {known[0]} to {known[-1]} are there" if known else "it has no step yet, or an older version made it"
        raise ConfigError(f"{folder} has no record of step {step} in metrics.jsonl and {WEIGHTS}: {there}")
    for time in times_resumed(folder):
        if "before" in time:
            continue  # `legs` knows what each step ran under
        keys = {text.partition(":")[0]: text for text in time.get("changed", [])}
        changed = [text for key, text in keys.items() if not _overlaps(key.split("."), given) and not is_free(key)]
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


def legs(
    folder: Path, start: ReplayStart, step: int, config: Mapping[str, Any], given: Sequence[Sequence[str]] = ()
) -> list[Leg]:
    """The configurations under which the steps after ``start`` up to ``step`` ran: `run.json` says from which checkpoint the
    run went on each time, and what was otherwise before. ``config``: the newest; ``given``: paths of the keys that stay as
    they are there."""
    found, config = [Leg(step, config)], copy.deepcopy(dict(config))
    for time in reversed(times_resumed(folder)):
        at = time.get("from")
        if at is None:
            continue  # it was ended before it went on
        if at <= start.step:
            break  # all later steps were done since
        for key in _before(time):
            if not _overlaps(key["path"], given):
                _set_back(config, key)
        older = Leg(min(at, found[0].last), copy.deepcopy(config))
        found = [older, *(found[1:] if older.last == found[0].last else found)]
    return [leg for leg, after in zip_longest(found, found[1:]) if after is None or _differ(leg, after)]


def _differ(one: Leg, other: Leg) -> bool:
    return any(not difference.is_free for difference in differences(one.config, other.config, {}))


def _before(time: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The settings that differed before the run went on."""
    before = time.get("before", [])
    if isinstance(before, dict):  # as it was written at first
        return [{"path": key.split("."), "value": value} for key, value in before.items()]
    return list(before)


def _overlaps(path: Sequence[str], given: Sequence[Sequence[str]]) -> bool:
    """True if one of the keys is this one, below it, or above it."""
    return any(list(path[: len(key)]) == list(key[: len(path)]) for key in given)


def _set_back(config: Any, key: Mapping[str, Any]) -> None:
    """Makes a key what `run.json` says that it was before."""
    *outer, last = key["path"]
    for name in outer:
        config = config[name]
    # in the first form of these lines a column that was not named has the value None, which no name is
    if "value" not in key or (outer[-1:] == [COLUMNS] and key["value"] is None):
        config.pop(last, None)
    else:
        config[last] = copy.deepcopy(key["value"])


def prepare_replay(folder: Path, target: Path, start: ReplayStart) -> None:
    """Makes ``target`` a run folder that goes on from there; where that is the beginning, only what the run was changed by.

    Nothing is written below ``folder``: its checkpoint is linked. `write_leg` says how it goes on.
    """
    names: tuple[str, ...] = (JOURNAL, "run.json")
    if start.checkpoint is not None:
        (target / "checkpoints").mkdir(parents=True)
        (target / "checkpoints" / start.name).symlink_to(start.checkpoint.resolve(), target_is_directory=True)
        names = (*names, LEDGER, f"{LEDGER}-journal", "metrics.jsonl")
    elif not (folder / JOURNAL).is_file():
        return
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)


def write_leg(target: Path, leg: Leg, *, is_last: bool) -> Path:
    """Lets the run in ``target`` go on by a leg, or begin with it; returns the configuration for its command. What the run
    saves and draws is left out, but for the end of a leg that another one follows."""
    quiet = {
        "checkpoint": {"at_end": False} if is_last else {"every_steps": leg.last, "keep_last": None},
        "recover": leg.config.get("recover", {}) | {"max_restarts": 0},
        "tracking": {"trajectories_per_step": leg.config["tracking"]["trajectories_per_step"]},
    }
    named = {"run": {"root": str(target.parent.parent)}, "experiment_name": target.parent.name, "trial_name": target.name}
    text = yaml.safe_dump({**leg.config, **quiet, **named}, sort_keys=False)
    if target.is_dir():  # it goes on: with the same configuration, so that nothing is asked
        (target / "config.yaml").write_text(text, encoding="utf-8")
        kept = {name: value for name, value in run_info(target).items() if name in _KEPT}
        (target / "run.json").write_text(json.dumps(kept | {"status": "interrupted"}), encoding="utf-8")
    path = target.parent / f"{target.name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def compare_replay(folder: Path, replayed: Path, start: ReplayStart, step: int) -> ReplayResult:
    """Weights, metrics and samples of a step in two run folders. Raises `ConfigError` where the second did not reach it."""
    then, now = read_digests(folder, step), read_digests(replayed, step)
    if then is None or now is None:
        raise ConfigError(f"the replay did not reach step {step}: with the values that it was given it ends before")
    old, new = _measured(folder, step), _measured(replayed, step)
    texts = _samples(folder, step)  # none where the record made room for later ones
    again = _samples(replayed, step) if texts else []
    tensors = {name for name in {**then, **now} if then.get(name) != now.get(name)}
    metrics = {f"{name} {new.get(name)} (was {old.get(name)})" for name in {**old, **new} if old.get(name) != new.get(name)}
    samples = {f"number {i}" for i, (one, other) in enumerate(zip_longest(texts, again), 1) if one != other}
    differences = (
        *_told("tensors", tensors, len(then)),
        *_told("metrics", metrics, len(old)),
        *_told("samples", samples, len(texts)),
    )
    return ReplayResult(step, start.name, start.skipped, len(then), len(old), len(texts), differences)


def _told(what: str, different: set[str], total: int) -> Iterator[str]:
    if different:
        more = f", and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
        yield f"{what}: {len(different)} of {total} differ: {', '.join(sorted(different)[:SHOWN])}{more}"


def _recorded(folder: Path) -> set[int]:
    """The steps of which both files speak: one that a run went back behind is in the first alone."""
    digests = {row["step"] for row in rows_of(folder / WEIGHTS) if "tensors" in row and isinstance(row.get("step"), int)}
    return digests & {row["step"] for row in rows_of(folder / "metrics.jsonl") if isinstance(row.get("step"), int)}


def _row(folder: Path, step: int) -> dict[str, Any] | None:
    return next((row for row in rows_of(folder / "metrics.jsonl") if row.get("step") == step), None)


def _measured(folder: Path, step: int) -> dict[str, Any]:
    row = _row(folder, step) or {}
    return {name: value for name, value in row.items() if name != "step" and not name.startswith(CLOCK)}


def _samples(folder: Path, step: int) -> list[str]:
    path = folder / "trajectories" / f"step_{step}.jsonl"
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
