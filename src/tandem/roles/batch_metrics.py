"""Metrics of a training batch beside those of its optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.algorithms.kl import k1
from tandem.api.batch import per_token, select
from tandem.api.lazy_torch import TensorDict, torch
from tandem.roles.samples import samples_of, trained_tokens


def reward_metrics(batch: TensorDict, *, shaped: bool) -> dict[str, float]:
    """Groups that teach nothing; ``shaped``: and the mean of the rewards as the shaping left them."""
    samples = samples_of(batch)
    rewards = batch["shaped_reward"][samples.first]
    counts = batch["in_statistics"][samples.first]
    groups = batch["group_id"][samples.first]
    flat = [len(rewards[counts & (groups == i)].unique()) < 2 for i in groups.unique()]
    metrics = {"groups/without_spread": sum(flat) / max(1, len(flat))}
    return metrics | ({"reward/shaped_mean": float(rewards.mean())} if shaped else {})


def dropped_metrics(batch: TensorDict, drops: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """For each rule the share of the trained tokens in the loss that it takes out; ``drops``: rule → ``[T]`` bool."""
    inside = trained_tokens(batch) & per_token(batch, batch["in_loss"])
    total = max(1, int(inside.sum()))
    return {f"dropped/{rule}": int((dropped & inside).sum()) / total for rule, dropped in drops.items()}


def sample_kl(batch: TensorDict) -> tuple[float, int]:
    """KL to the reference summed over a sample's tokens (k1), mean over the samples in the loss, and their number."""
    inside = select(batch, batch["in_loss"])
    of_token = k1(inside["proximal_logprobs"], inside["reference_logprobs"], trained_tokens(inside))
    count = len(samples_of(inside).first)
    return float(of_token.double().sum()) / max(1, count), count
