"""Computes the metrics of a batch."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
from tensordict import TensorDict

from tandem.api.batch import per_token
from tandem.api.requests import StopReason
from tandem.api.workflow import Group


def mean(values: Sequence[float]) -> float:
    """Returns the mean; 0 for no values."""
    return sum(values) / len(values) if values else 0.0


def batch_metrics(groups: Sequence[Group], batch: TensorDict, *, version: int) -> dict[str, float]:
    """Computes the metrics of one batch. ``version``: the trainer's at consumption. Rewards are of ``in_statistics``
    samples.

    The metrics of staleness cover the tokens that are trained on; ``expired`` is the share of tokens that are too old.
    ``batch`` may contain replayed groups in addition to ``groups``; they are not counted.
    """
    samples = [sample for group in groups for sample in group.samples]
    rewards = [sample.reward for sample in samples if sample.in_statistics]
    lengths = [sample.num_trained_tokens for sample in samples]
    average = mean(rewards)
    metrics = {
        "reward/mean": average,
        "reward/std": mean([(reward - average) ** 2 for reward in rewards]) ** 0.5,
        "completion_length/mean": mean(lengths),
        "completion_length/max": float(max(lengths, default=0)),
        "truncated": mean([float(s.trajectories[-1].stop_reason == StopReason.LENGTH) for s in samples]),
        "groups/without_spread": mean([float(without_spread(group)) for group in groups]),
        "groups/size": mean([len(group.samples) for group in groups]),
    }
    texts = Counter(sample.completion_text for sample in samples if sample.completion_text)
    if len(groups) > 1 and texts:
        metrics["samples/same"] = texts.most_common(1)[0][1] / len(samples)
    accuracies = [sample.accuracy for sample in samples if sample.accuracy is not None and not sample.greedy]
    if accuracies:
        metrics["accuracy"] = mean(accuracies)
    extracted = [float(sample.extracted) for sample in samples if sample.extracted is not None]
    if extracted:
        metrics["extracted"] = mean(extracted)
    return metrics | _parts(groups) | _ages(groups, batch, version)


def without_spread(group: Group) -> bool:
    """True if all rewards of a group that count in its statistics are equal, so that its advantages are 0."""
    rewards = [sample.reward for sample in group.samples if sample.in_statistics]
    return not rewards or max(rewards) == min(rewards)


def _parts(groups: Sequence[Group]) -> dict[str, float]:
    """Returns means of rewards by source (if there are several), of named rewards, and of the workflow's own metrics."""
    values: dict[str, list[float]] = defaultdict(list)
    several = len({group.source for group in groups}) > 1
    for group in groups:
        for sample in group.samples:
            if several and sample.in_statistics:
                values[f"reward/{group.source}"].append(sample.reward)
            for name, value in sample.rewards.items():
                values[f"rewards/{name}"].append(value)
            for name, value in sample.raw_rewards.items():
                values[f"raw_rewards/{name}"].append(value)
            for name, value in sample.metrics.items():
                values[name].append(value)
    return {name: mean(numbers) for name, numbers in sorted(values.items())}


def _ages(groups: Sequence[Group], batch: TensorDict, version: int) -> dict[str, float]:
    fresh = torch.isin(batch["group_id"], torch.tensor([group.group_id for group in groups], dtype=torch.int64))
    produced, expired = batch["loss_mask"] & per_token(batch, fresh), batch["expired"] & per_token(batch, fresh)
    ages = (version - batch["versions"][produced & ~expired]).float()
    return {
        "staleness/mean": float(ages.mean()) if len(ages) else 0.0,
        "staleness/max": float(ages.max()) if len(ages) else 0.0,
        "expired": float(expired.sum() / torch.clamp(produced.sum(), min=1)),
    }
