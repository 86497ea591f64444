"""The samples at the end of an episode: each is checked, and enough of them must be left to make a group.

No invalid value may reach a batch or a metric. A value that is not finite is a failure of the row; a wrong type or shape is
an error of the workflow.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch

from tandem.api.failures import DataFailure, EpisodeFailure, InfrastructureFailure, WrongWorkflow, as_failure
from tandem.api.workflow import Group, RolloutWorkflow, Sample, Trajectory

logger = logging.getLogger("tandem.rollout")


def sample_of(result: Any, workflow: RolloutWorkflow) -> Sample:
    """Returns the sample that a workflow of one sample has returned.

    Raises:
        DataFailure: the workflow returned None, or a sample with a number that is not finite (see `check_sample`).
        WrongWorkflow: the workflow returned several samples, or something else.
    """
    if result is None:
        raise DataFailure("workflow_returned_none")
    if isinstance(result, Group):
        if len(result.samples) != 1:
            raise WrongWorkflow(
                f"{described(workflow)} returned a group of {len(result.samples)} samples, but it runs gconfig.n_samples "
                "times, for one sample each; if it makes the whole group itself, set its class attribute "
                "`makes_group = True`"
            )
        result = result.samples[0]
    if not isinstance(result, Sample):
        raise WrongWorkflow(
            f"{described(workflow)} must return a Sample, or None to drop the prompt; it returned a "
            f"{type(result).__name__}. `chat.sample(reward)` makes one"
        )
    check_sample(result)
    return result


def failures_of(results: Sequence[object]) -> list[EpisodeFailure]:
    """Returns the failures among the results of a prompt's samples. Raises the first one of the infrastructure or of the
    whole workflow."""
    failures = []
    for result in results:
        if isinstance(result, (InfrastructureFailure, WrongWorkflow)):
            raise result
        if isinstance(result, BaseException):
            failures.append(as_failure(result))
    return failures


def check_sample(sample: Any) -> None:
    """Raises an error for a sample that cannot be trained on or averaged.

    Raises:
        DataFailure: `empty_group`: the sample has no trajectory; `reward_not_finite`, `metric_not_finite`, or
            `logprob_not_finite` (of a trained token).
        WrongWorkflow: not a `Sample`; not a number; per-token rewards, masks or media numbers of a wrong shape or type.
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
    mask, earned = trajectory.loss_mask, trajectory.token_rewards
    media = trajectory.media
    is_tensor = isinstance(media, torch.Tensor)
    if media is not None and not (is_tensor and media.dtype == torch.int64 and media.shape == mask.shape):
        raise WrongWorkflow(
            f"Trajectory.media must be media numbers, int64, one a token ([{len(mask)}]); the workflow gave "
            f"{media.dtype if is_tensor else type(media).__name__}"
        )
    if media is not None and bool((mask & (media != 0)).any()):
        raise WrongWorkflow("Trajectory.media has a medium at a token that is trained: a model generates only text")
    if mask.dtype != torch.bool:
        raise WrongWorkflow(f"Trajectory.loss_mask must be bool, one flag a token; the workflow gave {mask.dtype}")
    logprobs = trajectory.rollout_logprobs[mask]
    if not bool(logprobs.isfinite().all()):
        worst = logprobs[~logprobs.isfinite()][0].item()
        raise DataFailure("logprob_not_finite", f"the workflow gave a trained token the log-probability {worst}")
    if earned is None:
        return
    if not isinstance(earned, torch.Tensor) or earned.shape != trajectory.input_ids.shape or not earned.is_floating_point():
        shape = f"{earned.dtype} {list(earned.shape)}" if isinstance(earned, torch.Tensor) else f"a {type(earned).__name__}"
        raise WrongWorkflow(
            f"Trajectory.token_rewards must be floats, one a token ([{len(trajectory.input_ids)}]); "
            f"the workflow gave {shape}"
        )
    if not bool(earned.isfinite().all()):
        where = int((~earned.isfinite()).nonzero()[0])
        raise DataFailure("reward_not_finite", f"the workflow gave token {where} the reward {earned[where].item()}")


def least_samples(min_group_size: int | None, n: int) -> int:
    """Returns the smallest number of samples, of ``n``, that make a group: ``min_group_size``, or half of ``n``, rounded up;
    at least 1."""
    return max(1, math.ceil(n / 2)) if min_group_size is None else min_group_size


def too_few(failures: Sequence[EpisodeFailure], n: int, least: int) -> DataFailure:
    """Returns the failure of a group that lost too many samples. Its reason is the most common one, its cause the first
    failure with that reason."""
    ((reason, _),) = Counter(failure.reason for failure in failures).most_common(1)
    first = next(failure for failure in failures if failure.reason == reason)
    failure = DataFailure(
        reason,
        f"{len(failures)} of {n} samples failed, and a group needs {least} (rollout.min_group_size); the first of these: "
        f"{first}",
    )
    failure.__cause__, failure.words, failure.num_left = first, first.words, n - len(failures)
    return failure


@contextmanager
def counted(reasons: tuple[str, ...]) -> Iterator[None]:
    """Adds ``reasons`` (failures of single samples) to a failure of the whole group, so that these are counted too."""
    try:
        yield
    except EpisodeFailure as failure:
        failure.failed_samples = reasons
        raise


class FailureLog:
    """Logs a warning for the first failure of each reason; its traceback goes to log.txt."""

    def __init__(self) -> None:
        self._reasons: set[str] = set()

    def warn(self, failures: Sequence[EpisodeFailure]) -> None:
        """Logs the failures of one group's samples."""
        for failure in failures:
            if failure.reason not in self._reasons:
                self._reasons.add(failure.reason)
                logger.warning(
                    "a sample failed and is missing in its group (%s); samples/failed/%s counts the others",
                    failure,
                    failure.reason,
                )
                logger.info("cause", exc_info=failure)  # into log.txt only


def described(workflow: RolloutWorkflow) -> str:
    """Returns the workflow's name for errors."""
    return f"workflow {name_of(workflow)}"


def name_of(workflow: RolloutWorkflow) -> str:
    """Returns the name of the workflow's class or function; a wrapper has the name of the wrapped workflow."""
    return str(getattr(workflow, "name", type(workflow).__name__))
