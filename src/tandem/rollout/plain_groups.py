"""Groups as plain data and tensors, for a checkpoint."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from tandem.api.requests import StopReason
from tandem.api.samples import Group, Sample, Trajectory
from tandem.config.data import EPOCH, INDEX

FOR_THE_RECORD = ("messages", "conversations", "words", "timings")
"""Fields of a sample that a checkpoint does without."""


def plain_group(group: Group) -> dict[str, Any]:
    """The plain data that `group_of` takes. Of the row, epoch and index stay: the rest is for logs, and the data set has
    it."""
    found = _fields(group, ("samples", "data", "failure_words"))
    found["data"] = {name: group.data[name] for name in (EPOCH, INDEX) if isinstance(group.data.get(name), int)}
    return found | {"samples": [_plain_sample(sample) for sample in group.samples]}


def group_of(state: Mapping[str, Any]) -> Group:
    """The group that `plain_group` was given, its tensors copied."""
    samples = tuple(_sample(sample) for sample in state["samples"])
    return Group(**{**state, "samples": samples, "failures": tuple(state["failures"])})


def _plain_sample(sample: Sample) -> dict[str, Any]:
    trajectories = [_fields(one, ("stop_reason",)) | {"stop_reason": int(one.stop_reason)} for one in sample.trajectories]
    return _fields(sample, ("trajectories", *FOR_THE_RECORD)) | {"trajectories": trajectories}


def _sample(state: Mapping[str, Any]) -> Sample:
    return Sample(**{**state, "trajectories": tuple(_trajectory(one) for one in state["trajectories"])})


def _trajectory(state: Mapping[str, Any]) -> Trajectory:
    own = {name: value.clone() if hasattr(value, "clone") else value for name, value in state.items()}
    return Trajectory(**{**own, "stop_reason": StopReason(state["stop_reason"])})


def _fields(value: Any, but: tuple[str, ...]) -> dict[str, Any]:
    """Field → value, mappings and tuples as dicts and lists."""
    found = {field.name: getattr(value, field.name) for field in fields(value) if field.name not in but}
    return {name: _plain(value) for name, value in found.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value
