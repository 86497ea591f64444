"""Aggregations (weights by which losses per token are summed), and the losses of critics, supervised fine-tuning,
distillation and reward models.

An aggregation returns the weight of each token in an optimizer step. ``mask [T]`` has the tokens that count in denominators;
a token that is dropped later gets weight 0 and does not change the others' weights. ``sample [T]`` numbers the sample of
each token, from 0; a sample with several trajectories counts once.
"""

from __future__ import annotations

from tandem.algorithms.kl import sum_by
from tandem.algorithms.registry import AGGREGATIONS
from tandem.api.lazy_torch import torch
from tandem.config.parts import KnobRule


def _num_samples(mask: torch.Tensor, sample: torch.Tensor) -> int:
    """Returns N, the number of samples with at least one token in the mask."""
    return max(1, len(torch.unique(sample[mask])))


@AGGREGATIONS.register("token_mean", "2503.14476")
def token_mean(mask: torch.Tensor) -> torch.Tensor:
    """Σ over tokens of L_t / ΣT: every token counts the same."""
    return mask.float() / max(1, int(mask.sum()))


@AGGREGATIONS.register("sequence_mean", "2402.03300")
def sequence_mean(mask: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
    """Σ L_t / (N·T_i): every sample counts the same."""
    length = sum_by(mask.float(), sample).clamp(min=1)
    return mask / (_num_samples(mask, sample) * length)


@AGGREGATIONS.register("sequence_sum")
def sequence_sum(mask: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
    """Σ L_t / N: long samples count more, and the weights do not sum to 1."""
    return mask.float() / _num_samples(mask, sample)


@AGGREGATIONS.register(
    "constant",
    "2503.20783",
    knobs={"max_tokens": KnobRule(low=1, integer=True, meaning="Divisor; unset takes gconfig.max_new_tokens.")},
)
def constant(mask: torch.Tensor, sample: torch.Tensor, *, max_tokens: int) -> torch.Tensor:
    """Σ L_t / (N·max_tokens), max_tokens the longest answer allowed: `sequence_sum` on the scale of a mean."""
    return mask.float() / (_num_samples(mask, sample) * max_tokens)


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, *, clip: float | None = 0.2
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """½·max((V − R)², (V_old + clip(V − V_old, ±clip) − R)²), 0 outside the mask (arXiv:1707.06347). All ``[T]``.

    ``clip``: None gives ½(V − R)². Metrics: ``value_clip_fraction``, 1 where the clipped branch is the larger one.
    """
    values, old_values, returns = (x.masked_fill(~mask, 0.0) for x in (values, old_values, returns))
    plain = (values - returns).square()
    if clip is None:
        return plain / 2, {}
    near = old_values + (values - old_values).clamp(-clip, clip)
    bounded = (near - returns).square()
    return torch.maximum(plain, bounded) / 2, {"value_clip_fraction": (bounded > plain).float().detach()}


def negative_log_likelihood(logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """−log p of each trained token ``[T]``, 0 elsewhere."""
    return -logprobs.masked_fill(~mask, 0.0)


def distillation_advantages(teacher: torch.Tensor, policy: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """sg[teacher − policy] at each sampled token ``[T]``, 0 elsewhere; sg: stop gradient (arXiv:2306.13649).

    Used as the advantage of tokens that the policy itself sampled, it gives the gradient of −KL(policy ‖ teacher) per token.
    """
    return (teacher - policy).masked_fill(~mask, 0.0).detach()


def bradley_terry(chosen: torch.Tensor, rejected: torch.Tensor, margin: torch.Tensor) -> torch.Tensor:
    """−log σ(r_chosen − r_rejected − margin): the better side's score should be higher by the margin. All ``[P]``.

    The Bradley-Terry model of comparisons (arXiv:2203.02155), with a margin as in arXiv:2307.09288.
    """
    return -torch.nn.functional.logsigmoid(chosen - rejected - margin)


def safety_cost(
    safer: torch.Tensor, other: torch.Tensor, safer_is_safe: torch.Tensor, other_is_safe: torch.Tensor
) -> torch.Tensor:
    """−log σ(C_other − C_safer) − log σ(s_safer·C_safer) − log σ(s_other·C_other), s = −1 where safe, else 1; all ``[P]``.

    The cost model of Safe RLHF (arXiv:2310.12773): the less safe side has the higher cost, and unsafe completions have a
    positive cost.
    """
    logsigmoid = torch.nn.functional.logsigmoid
    signed = [torch.where(is_safe, -cost, cost) for cost, is_safe in ((safer, safer_is_safe), (other, other_is_safe))]
    return -logsigmoid(other - safer) - logsigmoid(signed[0]) - logsigmoid(signed[1])


def step_cross_entropy(scores: torch.Tensor, right: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """−log σ(±score) at the end of each judged step, 0 elsewhere (arXiv:2305.20050). All ``[T]``; ``right`` is bool."""
    target = right.to(scores.dtype)
    losses = torch.nn.functional.binary_cross_entropy_with_logits(scores.masked_fill(~mask, 0.0), target, reduction="none")
    return losses.masked_fill(~mask, 0.0)
