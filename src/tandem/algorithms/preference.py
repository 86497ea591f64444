"""Preference losses: learning from judged completions, without a reward.

The log-probability of a completion is the sum over its trained tokens. Δ is its log-probability under the policy minus that
under the frozen reference. Paired losses are per pair ``[P]``, unpaired losses per completion ``[N]``.

Each function returns the losses and two detached *scores* that the loss compares: of the better and of the worse side.
"""

from __future__ import annotations

import math
from typing import TypeAlias

from tandem.algorithms.registry import Function, Registry
from tandem.api.lazy_torch import torch
from tandem.config.parts import KnobRule

PAIRED: dict[str, str] = {
    "chosen": "[P] log-probability of the better completion, summed over its trained tokens; has the gradient",
    "rejected": "[P] log-probability of the worse completion; has the gradient",
    "chosen_reference": "[P] log-probability of the better completion by the frozen reference",
    "rejected_reference": "[P] log-probability of the worse completion by the frozen reference",
    "chosen_length": "[P] number of trained tokens of the better completion",
    "rejected_length": "[P] number of trained tokens of the worse completion",
}
UNPAIRED: dict[str, str] = {
    "policy": "[N] log-probability of the completion, summed over its trained tokens; has the gradient",
    "reference": "[N] by the frozen reference",
    "desirable": "[N] bool, the completion is a good one",
    "baseline": "[N] or one number: KTO's z, see `mismatch_baseline`",
}

PREFERENCE_LOSSES: Registry[Function] = Registry("preference loss", PAIRED | UNPAIRED, "loss")
"""→ (losses, scores, scores): paired ``[P]``, the scores of the better and of the worse side; unpaired ``[N]``, the score of
each completion, twice."""

Losses: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"
BETA = KnobRule(
    above=0.0, meaning="Strength of the pull towards the reference: a small value lets the policy move far from it."
)
MOST_CERTAIN = -1e-6
"""Upper bound to which mean log-probabilities are clamped before their odds are computed, because the odds of
log-probability 0 are infinite."""


@PREFERENCE_LOSSES.register(
    "dpo",
    "2305.18290",
    knobs={
        "beta": BETA,
        "label_smoothing": KnobRule(
            low=0.0, high=0.5, meaning="Assumed share of pairs in which the worse completion is marked as the better one."
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
    # logsigmoid, not log(sigmoid): for large negative values the sigmoid rounds to 0, and its logarithm would be −inf
    h = better - worse
    right, wrong = (torch.nn.functional.logsigmoid(x) for x in (h, -h))
    losses = -(1 - label_smoothing) * right - label_smoothing * wrong
    return losses, better.detach(), worse.detach()


@PREFERENCE_LOSSES.register(
    "ipo",
    "2310.12036",
    knobs={"beta": KnobRule(above=0.0, meaning="The target of the difference of mean log-ratios is 1/(2·beta).")},
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
    """(h − 1/(2β))², h = mean Δ per token of the chosen minus that of the rejected completion.

    With means instead of sums, the target 1/(2β) does not depend on the lengths of completions.
    """
    better = (chosen - chosen_reference) / chosen_length
    worse = (rejected - rejected_reference) / rejected_length
    return (better - worse - 1 / (2 * beta)).square(), beta * better.detach(), beta * worse.detach()


@PREFERENCE_LOSSES.register(
    "simpo",
    "2405.14734",
    knobs={
        "beta": KnobRule(above=0.0, meaning="Scale of the mean log-probabilities."),
        "gamma": KnobRule(low=0.0, meaning="Margin by which the better side's score should be higher."),
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
    knobs={"odds_weight": KnobRule(low=0.0, meaning="λ: weight of the odds-ratio term next to the likelihood term.")},
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

    For a mean log-probability lp per token, log odds = lp − log(1 − e^lp). ``odds_weight`` is the paper's λ.
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
    """weight·(1 − σ(β(Δ − z))) for a desirable completion, weight·(1 − σ(β(z − Δ))) for an undesirable one; z: mean Δ of
    mismatched completions, at least 0."""
    delta, z = policy - reference, torch.as_tensor(baseline).detach()
    # z is detached: its gradient would train on mismatched completions, which have no label
    gain = torch.where(desirable, delta - z, z - delta)
    weight = torch.where(desirable, desirable_weight, undesirable_weight).to(delta.dtype)
    score = beta * delta.detach()
    return weight * torch.sigmoid(-beta * gain), score, score


def mismatch_baseline(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """KTO's z, a scalar without gradient: max(0, mean Δ) over mismatched completions, each after *another* row's prompt.

    It estimates the KL to the reference over the whole batch. ``policy``, ``reference``: ``[M]`` log-probabilities of the
    mismatched completions; if there are none, z is 0.
    """
    if not len(policy):
        return policy.new_zeros(())
    return (policy - reference).detach().mean().clamp(min=0)


def _log_odds(mean_logprob: torch.Tensor) -> torch.Tensor:
    """lp − log(1 − e^lp), with a form of log(1 − e^x) on each side of x = −ln 2 that is accurate there."""
    # `where` computes both branches. Each is clamped to its own range first, because the unused branch would otherwise bring
    # NaN into the gradient.
    lp = mean_logprob.clamp(max=MOST_CERTAIN)
    near, far = lp.clamp(min=-math.log(2)), lp.clamp(max=-math.log(2))
    return lp - torch.where(lp > -math.log(2), torch.log(-torch.expm1(near)), torch.log1p(-torch.exp(far)))
