"""Groups of earlier batches that are trained on again."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from tandem.api.requests import StopReason
from tandem.api.samples import Group, Sample, Trajectory
from tandem.config.data import EPOCH, INDEX
from tandem.config.rollout import ReplayConfig

FOR_THE_RECORD = ("messages", "conversations", "words", "timings")
"""Fields of a sample that a checkpoint does without."""


def plain_group(group: Group) -> dict[str, Any]:
    """The plain data that `group_of` takes. Of the row, epoch and index stay: the rest is for logs, and the data set has
    it."""
    state = _fields(group, ("samples", "data", "failure_words"))
    state["data"] = {name: group.data[name] for name in (EPOCH, INDEX) if isinstance(group.data.get(name), int)}
    return state | {"samples": [_plain_sample(sample) for sample in group.samples]}


def group_of(state: Mapping[str, Any]) -> Group:
    """The group that `plain_group` was given, its tensors copied."""
    samples = tuple(_sample(sample) for sample in state["samples"])
    return Group(**{**state, "samples": samples, "failures": tuple(state["failures"])})


def _plain_sample(sample: Sample) -> dict[str, Any]:
    trajectories = [
        _fields(trajectory, ("stop_reason",)) | {"stop_reason": int(trajectory.stop_reason)}
        for trajectory in sample.trajectories
    ]
    return _fields(sample, ("trajectories", *FOR_THE_RECORD)) | {"trajectories": trajectories}


def _sample(state: Mapping[str, Any]) -> Sample:
    return Sample(**{**state, "trajectories": tuple(_trajectory(trajectory) for trajectory in state["trajectories"])})


def _trajectory(state: Mapping[str, Any]) -> Trajectory:
    values = {name: value.clone() if hasattr(value, "clone") else value for name, value in state.items()}
    return Trajectory(**{**values, "stop_reason": StopReason(state["stop_reason"])})


def _fields(value: Any, but: tuple[str, ...]) -> dict[str, Any]:
    """Field → value, mappings and tuples as dicts and lists."""
    values = {field.name: getattr(value, field.name) for field in fields(value) if field.name not in but}
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


@dataclass
class Kept:
    """A group that was trained on."""

    group: Group
    oldest: int
    """Version of its oldest trained token."""

    uses: int = 0
    """Times that it was replayed."""


class Replay:
    """Keeps what was trained on, and gives some of it back: groups whose every trained token is at most ``max_age``
    versions old and which were replayed fewer than ``max_uses`` times.

    Which ones is drawn at random, without replacement, from the seed and the version alone, so that a run repeats it. A
    group that can never be given again is forgotten. Groups without a trained token are not kept.
    """

    def __init__(self, config: ReplayConfig, *, seed: int = 0):
        self.config, self.seed = config, seed
        self.reused = 0  # replays since the start
        self._entries: dict[int, Kept] = {}
        self._last: list[Kept] = []

    def __len__(self) -> int:
        """Groups kept."""
        return len(self._entries)

    def draw(self, version: int) -> tuple[Group, ...]:
        """Up to `groups` groups for the batch that is trained at ``version``, in the order in which they were made."""
        self._entries = {
            number: entry
            for number, entry in self._entries.items()
            if version - entry.oldest <= self.config.max_age and entry.uses < self.config.max_uses
        }
        numbers = sorted(self._entries)
        count = min(self.config.groups, len(numbers))
        chosen = sorted(random.Random(f"{self.seed}/replay {version}").sample(numbers, count))
        self._last = [self._entries[number] for number in chosen]
        for entry in self._last:
            entry.uses += 1
        self.reused += count
        return tuple(entry.group for entry in self._last)

    def add(self, groups: Sequence[Group]) -> None:
        """Keeps the new groups of a batch."""
        for group in groups if self.config.groups else ():
            versions = [
                int(t.versions[t.loss_mask].min())
                for sample in group.samples
                if sample.in_loss
                for t in sample.trajectories
                if bool(t.loss_mask.any())
            ]
            if versions:
                self._entries[group.group_id] = Kept(group, min(versions))

    def metrics(self, version: int) -> dict[str, float]:
        """Metrics of the last draw, and the count since the start; empty if replay is off."""
        if not self.config.groups:
            return {}
        return {
            "replay/groups": float(len(self._last)),
            "replay/reused": float(self.reused),
            "replay/age_max": float(max((version - entry.oldest for entry in self._last), default=0)),
            "replay/kept": float(len(self._entries)),
        }

    def state_dict(self) -> dict[str, Any]:
        """The groups that are kept, as plain data and tensors."""
        groups = [[plain_group(entry.group), entry.oldest, entry.uses] for entry in self._entries.values()]
        return {"reused": self.reused, "kept": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the place of what is here."""
        self.reused, self._last = int(state["reused"]), []
        entries = [Kept(group_of(group), int(oldest), int(uses)) for group, oldest, uses in state["kept"]]
        self._entries = {entry.group.group_id: entry for entry in entries}
