"""Computes metrics of a training batch, and metrics of a training step from those of its optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tandem.algorithms.kl import k1
from tandem.api.batch import per_token, select, trained_tokens
from tandem.api.lazy_torch import TensorDict, torch
from tandem.roles.credit import samples_of


def reward_metrics(batch: TensorDict, *, shaped: bool) -> dict[str, float]:
    """Returns the share of groups whose rewards are all equal. ``shaped``: also the mean of the shaped rewards."""
    samples = samples_of(batch)
    rewards = batch["shaped_reward"][samples.first]
    counts = batch["in_statistics"][samples.first]
    groups = batch["group_id"][samples.first]
    flat = [len(rewards[counts & (groups == i)].unique()) < 2 for i in groups.unique()]
    metrics = {"groups/without_spread": sum(flat) / max(1, len(flat))}
    return metrics | ({"reward/shaped_mean": float(rewards.mean())} if shaped else {})


def dropped_metrics(batch: TensorDict, drops: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Returns for each rule the share of trained tokens that it removes from the loss. ``drops``: rule → ``[T]`` bool."""
    inside = trained_tokens(batch) & per_token(batch, batch["in_loss"])
    total = max(1, int(inside.sum()))
    return {f"dropped/{rule}": int((dropped & inside).sum()) / total for rule, dropped in drops.items()}


def sample_kl(batch: TensorDict) -> tuple[float, int]:
    """Returns the KL to the reference (k1, summed over a sample's tokens, mean over samples in the loss) and the number of
    these samples."""
    inside = select(batch, batch["in_loss"])
    of_token = k1(inside["proximal_logprobs"], inside["reference_logprobs"], trained_tokens(inside))
    count = len(samples_of(inside).first)
    return float(of_token.double().sum()) / max(1, count), count


PER_STEP = ("loss", "grad_norm")


def step_metrics(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combines the metrics of a batch's optimizer steps.

    ``loss`` and ``grad_norm`` are means over the steps that were not skipped, ``lr`` is the last value, ``skipped`` a sum.
    Names that end in ``/max`` are maxima. All others are means over the tokens with weight.

    ``steps``: the results of `TrainEngine.train_batch` for an `Objective`, each with ``tokens``, the number of trained
    tokens over which the engine has averaged.
    """
    taken = [step for step in steps if not step["skipped"]] or list(steps)
    metrics = {name: sum(step[name] for step in taken) / len(taken) for name in PER_STEP}
    metrics |= {"lr": steps[-1]["lr"], "skipped": sum(step["skipped"] for step in steps)}
    kept = sum(step["tokens"] * step.get("kept", 0.0) for step in steps)
    done = set(metrics) | {"kept", "tokens"}
    for name in dict.fromkeys(name for step in steps for name in step if name not in done):
        if name.endswith("/max"):
            metrics[name] = max(step[name] for step in steps if name in step)
        elif kept:
            metrics[name] = sum(step["tokens"] * step[name] for step in steps if name in step) / kept
    return _derived(metrics)


def _derived(metrics: dict[str, float]) -> dict[str, float]:
    """Computes the metrics that are ratios of means: the effective sample size of the importance weights, and the mean gap
    of fresh tokens, those of the present version. Removes the means that only these ratios need."""
    square = metrics.pop("correction/square", None)
    if square:
        metrics["correction/ess"] = metrics["correction/mean"] ** 2 / square
    fresh = metrics.pop("gap/fresh", 0.0)
    if fresh:
        metrics["gap/mean"] /= fresh
    else:
        metrics.pop("gap/mean", None)
        metrics.pop("gap/max", None)
    return metrics
