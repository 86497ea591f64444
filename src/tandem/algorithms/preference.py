"""Preference losses: from judged completions, without a reward.

A completion enters with the sum of the log-probabilities of its trained tokens. Losses are per pair ``[P]``, or per
completion ``[N]`` where there are no pairs. Δ is the policy's sum minus the frozen reference's.

Each function returns the losses and what they compare, detached: a *score* for the better and one for the worse side.
"""

import math

import torch
from torch.nn.functional import logsigmoid

from tandem.algorithms.registry import Function, Registry

PAIRED: dict[str, str] = {
    "chosen": "[P] log-probability of the better completion, summed over its trained tokens; has the gradient",
    "rejected": "[P] of the worse one; has the gradient",
    "chosen_reference": "[P] of the better one by the frozen reference",
    "rejected_reference": "[P] of the worse one by the frozen reference",
    "chosen_length": "[P] trained tokens of the better one",
    "rejected_length": "[P] trained tokens of the worse one",
}
UNPAIRED: dict[str, str] = {
    "policy": "[N] log-probability of the completion, summed over its trained tokens; has the gradient",
    "reference": "[N] by the frozen reference",
    "desirable": "[N] bool, the completion is a good one",
    "baseline": "[N] or one number: KTO's z, see `mismatch_baseline`",
}

PREFERENCE_LOSSES: Registry[Function] = Registry("preference loss", PAIRED | UNPAIRED)
"""→ losses, and scores of the better and of the worse side (paired) or of each completion twice (unpaired)."""

Losses = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
MOST_CERTAIN = -1e-6
"""Largest mean log-probability whose odds are computed: those of certainty are infinite."""


def is_paired(function: Function) -> bool:
    """Whether a loss compares two completions of one prompt."""
    return "chosen" in PREFERENCE_LOSSES.asked(function)


def needs_reference(function: Function) -> bool:
    """Whether a loss asks for log-probabilities of the frozen reference."""
    return not {"reference", "chosen_reference", "rejected_reference"}.isdisjoint(PREFERENCE_LOSSES.asked(function))


def needs_baseline(function: Function) -> bool:
    """Whether a loss asks for the mean log-ratio of mismatched completions."""
    return "baseline" in PREFERENCE_LOSSES.asked(function)


@PREFERENCE_LOSSES.register("dpo")
def dpo(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    chosen_reference: torch.Tensor,
    rejected_reference: torch.Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Losses:
    """−(1−ε) log σ(βh) − ε log σ(−βh), h = Δ_chosen − Δ_rejected (arXiv:2305.18290; ε: a label is wrong). ``[P]``."""
    better, worse = beta * (chosen - chosen_reference), beta * (rejected - rejected_reference)
    h = better - worse
    losses = -(1 - label_smoothing) * logsigmoid(h) - label_smoothing * logsigmoid(-h)
    return losses, better.detach(), worse.detach()


@PREFERENCE_LOSSES.register("ipo")
def ipo(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    chosen_reference: torch.Tensor,
    rejected_reference: torch.Tensor,
    chosen_length: torch.Tensor,
    rejected_length: torch.Tensor,
    *,
    beta: float = 0.1,
) -> Losses:
    """(h̄ − 1/(2β))², h̄ the difference of the mean Δ a token (arXiv:2310.12036). ``[P]``.

    With means, not sums, the aim 1/(2β) does not depend on how long completions are.
    """
    better = (chosen - chosen_reference) / chosen_length
    worse = (rejected - rejected_reference) / rejected_length
    return (better - worse - 1 / (2 * beta)).square(), beta * better.detach(), beta * worse.detach()


@PREFERENCE_LOSSES.register("simpo")
def simpo(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    chosen_length: torch.Tensor,
    rejected_length: torch.Tensor,
    *,
    beta: float = 2.5,
    gamma: float = 1.375,
) -> Losses:
    """−log σ(β(mean log p_chosen − mean log p_rejected) − γ), without a reference (arXiv:2405.14734). ``[P]``."""
    better, worse = beta * chosen / chosen_length, beta * rejected / rejected_length
    return -logsigmoid(better - worse - gamma), better.detach(), worse.detach()


@PREFERENCE_LOSSES.register("orpo")
def orpo(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    chosen_length: torch.Tensor,
    rejected_length: torch.Tensor,
    *,
    odds_weight: float = 0.1,
) -> Losses:
    """NLL of the better completion, mean over its tokens, − λ log σ(log odds_chosen − log odds_rejected) (arXiv:2403.07691).

    Odds are of the mean log-probability lp: log odds = lp − log(1 − e^lp). ``odds_weight`` is λ. ``[P]``.
    """
    likelihood = chosen / chosen_length
    better, worse = _log_odds(likelihood), _log_odds(rejected / rejected_length)
    return -likelihood - odds_weight * logsigmoid(better - worse), better.detach(), worse.detach()


@PREFERENCE_LOSSES.register("kto")
def kto(
    policy: torch.Tensor,
    reference: torch.Tensor,
    desirable: torch.Tensor,
    baseline: torch.Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Losses:
    """1 − σ(β(Δ − z)) of a desirable completion, 1 − σ(β(z − Δ)) of an undesirable one (arXiv:2402.01306). ``[N]``."""
    delta, z = policy - reference, torch.as_tensor(baseline).detach()
    gain = torch.where(desirable, delta - z, z - delta)
    weight = torch.where(desirable, desirable_weight, undesirable_weight).to(delta.dtype)
    score = beta * delta.detach()
    return weight * torch.sigmoid(-beta * gain), score, score


def mismatch_baseline(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """KTO's z: max(0, mean Δ) over completions put behind *other* prompts, ``[M]`` sums; without gradient. One number.

    An estimate of the KL to the reference, over the whole batch. Without any mismatched pair it is 0.
    """
    if not len(policy):
        return policy.new_zeros(())
    return (policy - reference).detach().mean().clamp(min=0)


def _log_odds(mean_logprob: torch.Tensor) -> torch.Tensor:
    """lp − log(1 − e^lp), with the form of log(1 − e^x) that is exact on either side of −ln 2."""
    lp = mean_logprob.clamp(max=MOST_CERTAIN)
    near, far = lp.clamp(min=-math.log(2)), lp.clamp(max=-math.log(2))
    return lp - torch.where(lp > -math.log(2), torch.log(-torch.expm1(near)), torch.log1p(-torch.exp(far)))
