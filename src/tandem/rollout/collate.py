"""Groups become a packed batch."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict

from tandem.api.batch import pack
from tandem.api.samples import Group, Sample, Trajectory


def collate(
    groups: Sequence[Group],
    *,
    version: int,
    max_head_offpolicyness: int,
    replayed: Sequence[Group] = (),
    max_age: int = 0,
) -> TensorDict:
    """One packed batch: sequences in the order of groups, samples and trajectories, replayed groups last.

    ``version`` is the trainer's at consumption: trained tokens more than ``max_head_offpolicyness`` behind it, in
    ``replayed`` groups more than ``max_age``, are ``expired``. ``sample_id`` counts the samples of the batch. Named rewards
    that a sample lacks are NaN; ``greedy`` is there where a sample is, ``replayed`` where a group is, ``media`` where a
    trajectory has them.
    """
    fresh, groups = len(groups), (*groups, *replayed)
    names = sorted({name for group in groups for sample in group.samples for name in sample.rewards})
    trajectories = [t for g in groups for s in g.samples for t in s.trajectories]
    token_rewards, media = (any(getattr(t, name) is not None for t in trajectories) for name in ("token_rewards", "media"))
    greedy = any(sample.greedy for group in groups for sample in group.samples)
    rows, sample_id = [], 0
    for i, group in enumerate(groups):
        oldest = version - (max_head_offpolicyness if i < fresh else max_age)
        for sample in group.samples:
            shared = _of_sample(sample, group.group_id, sample_id, names) | ({"greedy": sample.greedy} if greedy else {})
            shared |= {"replayed": i >= fresh} if replayed else {}
            for trajectory in sample.trajectories:
                row = {**shared, **_of_trajectory(trajectory, oldest)}
                if token_rewards:
                    row["token_rewards"] = _given(trajectory.token_rewards, trajectory, torch.float32)
                if media:
                    row["media"] = _given(trajectory.media, trajectory, torch.int64)
                rows.append(row)
            sample_id += 1
    return pack(rows)


def expired(trajectory: Trajectory, oldest: int) -> torch.Tensor:
    """Trained tokens made by a version below ``oldest``, ``[S]`` bool."""
    return trajectory.loss_mask & (trajectory.versions < oldest)


def _of_sample(sample: Sample, group_id: int, sample_id: int, names: Sequence[str]) -> dict[str, Any]:
    return {
        "reward": sample.reward,
        "accuracy": math.nan if sample.accuracy is None else sample.accuracy,
        "group_id": group_id,
        "sample_id": sample_id,
        "in_statistics": sample.in_statistics,
        "in_loss": sample.in_loss,
        **{f"rewards/{name}": sample.rewards.get(name, math.nan) for name in names},
    }


def _of_trajectory(trajectory: Trajectory, oldest: int) -> dict[str, Any]:
    return {
        "input_ids": trajectory.input_ids,
        "loss_mask": trajectory.loss_mask,
        "rollout_logprobs": trajectory.rollout_logprobs,
        "versions": trajectory.versions,
        "expired": expired(trajectory, oldest),
        "temperature": trajectory.temperature,
        "stop_reason": int(trajectory.stop_reason),
    }


def _given(values: torch.Tensor | None, trajectory: Trajectory, dtype: torch.dtype) -> torch.Tensor:
    """The values ``[S]``; zeros where the trajectory has none."""
    return torch.zeros(len(trajectory.input_ids), dtype=dtype) if values is None else values
