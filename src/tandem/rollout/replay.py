"""Replay: groups of earlier batches that are trained on again."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from tandem.api.requests import StopReason
from tandem.api.workflow import Group, Sample, Trajectory
from tandem.config.data import EPOCH, INDEX
from tandem.config.rollout import ReplayConfig

NOT_SAVED = ("messages", "conversations", "words", "timings", "failure_words")
"""Fields of a group and its samples that are for the record only, and not saved in a checkpoint."""


def plain_group(group: Group) -> dict[str, Any]:
    """Converts a group to plain data for `group_of`. Only epoch and index of the row are stored, because the data set has
    the rest."""
    place = {name: group.data[name] for name in (EPOCH, INDEX) if isinstance(group.data.get(name), int)}
    return _plain(replace(group, data=place))


def group_of(state: Mapping[str, Any]) -> Group:
    """Converts the plain data of `plain_group` back to a group, with copies of the tensors."""
    samples = tuple(
        Sample(**{**sample, "trajectories": tuple(map(_trajectory, sample["trajectories"]))}) for sample in state["samples"]
    )
    return Group(**{**state, "samples": samples, "failures": tuple(state["failures"])})


def _trajectory(state: Mapping[str, Any]) -> Trajectory:
    values = {name: value.clone() if hasattr(value, "clone") else value for name, value in state.items()}
    return Trajectory(**{**values, "stop_reason": StopReason(state["stop_reason"])})


def _plain(value: Any) -> Any:
    """Converts data classes and mappings to dicts, and tuples to lists."""
    if isinstance(value, (Group, Sample, Trajectory)):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value) if f.name not in NOT_SAVED}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return int(value) if isinstance(value, StopReason) else value


@dataclass
class ReplayableGroup:
    """A group that was trained on and may be replayed."""

    group: Group
    oldest: int
    """The version of the group's oldest trained token."""

    uses: int = 0
    """Number of replays so far."""


class Replay:
    """Keeps trained groups and returns some of them for later batches: those whose trained tokens are all at most
    ``max_age`` versions old and that were replayed fewer than ``max_uses`` times.

    The choice is random without replacement and depends only on the seed and the version, so that a repeated run makes the
    same one. Groups that can never be returned again, and groups without a trained token, are not kept.
    """

    def __init__(self, config: ReplayConfig, *, seed: int = 0):
        self.config, self.seed = config, seed
        self.reused = 0  # number of replays since the start
        self._entries: dict[int, ReplayableGroup] = {}
        self._last: list[ReplayableGroup] = []

    def __len__(self) -> int:
        """Returns the number of kept groups."""
        return len(self._entries)

    def draw(self, version: int) -> tuple[Group, ...]:
        """Returns up to `groups` groups for the batch that is trained at ``version``, in the order in which they were
        made."""
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
                self._entries[group.group_id] = ReplayableGroup(group, min(versions))

    def metrics(self, version: int) -> dict[str, float]:
        """Returns metrics of the last draw and the count since the start; empty if replay is off."""
        if not self.config.groups:
            return {}
        return {
            "replay/groups": float(len(self._last)),
            "replay/reused": float(self.reused),
            "replay/age_max": float(max((version - entry.oldest for entry in self._last), default=0)),
            "replay/kept": float(len(self._entries)),
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns the kept groups as plain data and tensors."""
        groups = [[plain_group(entry.group), entry.oldest, entry.uses] for entry in self._entries.values()]
        return {"reused": self.reused, "kept": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the contents by a saved state."""
        self.reused, self._last = int(state["reused"]), []
        entries = [ReplayableGroup(group_of(group), int(oldest), int(uses)) for group, oldest, uses in state["kept"]]
        self._entries = {entry.group.group_id: entry for entry in entries}
