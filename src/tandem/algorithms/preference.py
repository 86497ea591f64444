"""Preference losses: from judged completions, without a reward.

A completion enters with the sum of the log-probabilities of its trained tokens. Losses are per pair ``[P]``, or per
completion ``[N]`` where there are no pairs. Δ is the policy's sum minus the frozen reference's.

Each function returns the losses and what they compare, detached: a *score* for the better and one for the worse side.
"""

from __future__ import annotations

import math
from typing import TypeAlias

from tandem.algorithms.registry import Function, Registry
from tandem.api.lazy_torch import torch
from tandem.config.parts import KnobRule

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

PREFERENCE_LOSSES: Registry[Function] = Registry("preference loss", PAIRED | UNPAIRED, "loss")
"""→ losses, and scores of the better and of the worse side (paired) or of each completion twice (unpaired)."""

Losses: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"
BETA = KnobRule(
    above=0.0, meaning="Strength of the pull towards the reference, inverse: a small value lets the policy go far."
)
MOST_CERTAIN = -1e-6
"""Largest mean log-probability whose odds are computed: those of certainty are infinite."""


@PREFERENCE_LOSSES.register(
    "dpo",
    "2305.18290",
    knobs={
        "beta": BETA,
        "label_smoothing": KnobRule(
            low=0.0, high=0.5, meaning="Share of pairs that are believed to be the wrong way round."
        ),
    },
)
def dpo(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    chosen_reference: torch.Tensor,
    rejected_reference: torch.Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Losses:
    """−(1 − ε)·log σ(βh) − ε·log σ(−βh), h = Δ_chosen − Δ_rejected, ε = label_smoothing."""
    better, worse = beta * (chosen - chosen_reference), beta * (rejected - rejected_reference)
    # logsigmoid, not log of sigmoid: far from 0 the sigmoid rounds to 0 and its logarithm to −inf
    h = better - worse
    right, wrong = (torch.nn.functional.logsigmoid(x) for x in (h, -h))
    losses = -(1 - label_smoothing) * right - label_smoothing * wrong
    return losses, better.detach(), worse.detach()


@PREFERENCE_LOSSES.register(
    "ipo",
    "2310.12036",
    knobs={"beta": KnobRule(above=0.0, meaning="The difference of mean log-ratios is drawn to 1/(2·beta).")},
)
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
    """(h − 1/(2β))², h the difference of the mean Δ of a token.

    With means, not sums, the aim 1/(2β) does not depend on how long completions are.
    """
    better = (chosen - chosen_reference) / chosen_length
    worse = (rejected - rejected_reference) / rejected_length
    return (better - worse - 1 / (2 * beta)).square(), beta * better.detach(), beta * worse.detach()


@PREFERENCE_LOSSES.register(
    "simpo",
    "2405.14734",
    knobs={
        "beta": KnobRule(above=0.0, meaning="Scale of the mean log-probabilities."),
        "gamma": KnobRule(low=0.0, meaning="Margin by which the better side should lead."),
    },
)
def simpo(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    chosen_length: torch.Tensor,
    rejected_length: torch.Tensor,
    *,
    beta: float = 2.5,
    gamma: float = 1.375,
) -> Losses:
    """−log σ(β·(mean log p_chosen − mean log p_rejected) − γ)."""
    better, worse = beta * chosen / chosen_length, beta * rejected / rejected_length
    return -torch.nn.functional.logsigmoid(better - worse - gamma), better.detach(), worse.detach()


@PREFERENCE_LOSSES.register(
    "orpo",
    "2403.07691",
    knobs={"odds_weight": KnobRule(low=0.0, meaning="λ: weight of the odds ratio beside the likelihood.")},
)
def orpo(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    chosen_length: torch.Tensor,
    rejected_length: torch.Tensor,
    *,
    odds_weight: float = 0.1,
) -> Losses:
    """−mean log p_chosen − odds_weight·log σ(log odds_chosen − log odds_rejected), odds of the mean log p.

    Odds are of the mean log-probability lp: log odds = lp − log(1 − e^lp). ``odds_weight`` is λ. ``[P]``.
    """
    likelihood = chosen / chosen_length
    better, worse = _log_odds(likelihood), _log_odds(rejected / rejected_length)
    return -likelihood - odds_weight * torch.nn.functional.logsigmoid(better - worse), better.detach(), worse.detach()


@PREFERENCE_LOSSES.register(
    "kto",
    "2402.01306",
    knobs={
        "beta": BETA,
        "desirable_weight": KnobRule(low=0.0, meaning="Weight of completions with a true label."),
        "undesirable_weight": KnobRule(low=0.0, meaning="Weight of completions with a false label."),
    },
)
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
    """weight·(1 − σ(β(Δ − z))) of a desirable completion, weight·(1 − σ(β(z − Δ))) of another; z: mean Δ of mismatched
    completions, at least 0."""
    delta, z = policy - reference, torch.as_tensor(baseline).detach()
    # z is detached: it is a reference point, and pushing it would change completions that nobody labelled
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
    # Both branches are computed and one is chosen. Each is clamped into its own range first, or the unused one would put NaN
    # into the gradient.
    lp = mean_logprob.clamp(max=MOST_CERTAIN)
    near, far = lp.clamp(min=-math.log(2)), lp.clamp(max=-math.log(2))
    return lp - torch.where(lp > -math.log(2), torch.log(-torch.expm1(near)), torch.log1p(-torch.exp(far)))
