"""Checks of a workflow's samples, made once, where the episode ends, so nothing odd reaches a batch or a metric.

A value that is not finite is a failure of this row; one of the wrong type or shape is a mistake of the workflow.
"""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch

from tandem.api.failures import DataFailure, WrongWorkflow
from tandem.api.samples import Sample, Trajectory


def check_sample(sample: Any) -> None:
    """Passes what can be trained on and averaged.

    Raises:
        DataFailure: `empty_group` for a sample without a trajectory; `reward_not_finite`, `metric_not_finite` or
            `logprob_not_finite` (of a trained token).
        WrongWorkflow: not a `Sample`; a number that is none; per-token rewards, masks or media numbers that do not fit.
    """
    if not isinstance(sample, Sample):
        raise WrongWorkflow(f"a workflow must return samples, each a Sample; it returned a {type(sample).__name__}")
    if not sample.trajectories:
        raise DataFailure("empty_group", "a group needs at least one sample, a sample at least one trajectory")
    _finite("reward", sample.reward, "reward_not_finite")
    for kind in ("rewards", "raw_rewards"):
        for name, value in _items(kind, getattr(sample, kind)):
            _finite(f"{kind}[{name!r}]", value, "reward_not_finite")
    if sample.accuracy is not None:
        _finite("accuracy", sample.accuracy, "reward_not_finite")
    for name, value in _items("metrics", sample.metrics):
        _finite(f"metrics[{name!r}]", value, "metric_not_finite")
    for trajectory in sample.trajectories:
        _check_trajectory(trajectory)


def _items(name: str, values: Any) -> list[tuple[str, Any]]:
    if not isinstance(values, Mapping):
        raise WrongWorkflow(f"Sample.{name} must map names to numbers; the workflow gave a {type(values).__name__}")
    return list(values.items())


def _finite(name: str, value: Any, reason: str) -> None:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, Real):
        raise WrongWorkflow(f"Sample.{name} must be a number; the workflow gave {value!r:.80} ({type(value).__name__})")
    if not math.isfinite(value):
        raise DataFailure(reason, f"the workflow gave a sample {name} = {value}")


def _check_trajectory(trajectory: Trajectory) -> None:
    mask, given = trajectory.loss_mask, trajectory.token_rewards
    media = trajectory.media
    is_tensor = isinstance(media, torch.Tensor)
    if media is not None and not (is_tensor and media.dtype == torch.int64 and media.shape == mask.shape):
        raise WrongWorkflow(
            f"Trajectory.media must be media numbers, int64, one a token ([{len(mask)}]); the workflow gave "
            f"{media.dtype if is_tensor else type(media).__name__}"
        )
    if media is not None and bool((mask & (media != 0)).any()):
        raise WrongWorkflow("Trajectory.media has a medium at a token that is trained: a model makes text alone")
    if mask.dtype != torch.bool:
        raise WrongWorkflow(f"Trajectory.loss_mask must be bool, one flag a token; the workflow gave {mask.dtype}")
    logprobs = trajectory.rollout_logprobs[mask]
    if not bool(logprobs.isfinite().all()):
        worst = logprobs[~logprobs.isfinite()][0].item()
        raise DataFailure("logprob_not_finite", f"the workflow gave a trained token the log-probability {worst}")
    if given is None:
        return
    if not isinstance(given, torch.Tensor) or given.shape != trajectory.input_ids.shape or not given.is_floating_point():
        shape = f"{given.dtype} {list(given.shape)}" if isinstance(given, torch.Tensor) else f"a {type(given).__name__}"
        raise WrongWorkflow(
            f"Trajectory.token_rewards must be floats, one a token ([{len(trajectory.input_ids)}]); "
            f"the workflow gave {shape}"
        )
    if not bool(given.isfinite().all()):
        where = int((~given.isfinite()).nonzero()[0])
        raise DataFailure("reward_not_finite", f"the workflow gave token {where} the reward {given[where].item()}")
