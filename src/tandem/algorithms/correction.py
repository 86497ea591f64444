"""Behaviour correction: importance weights for tokens sampled by another policy, and rules that drop whole sequences.

A dropped token has weight 0 and stays in the denominators. Only this file defines the gap between the log-probabilities of
the engine that samples and of the trainer.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.algorithms.kl import MAX_LOG_RATIO, log_ratio, mean_by_sequence, sum_by
from tandem.algorithms.registry import IMPORTANCE_WEIGHTS, REJECTIONS
from tandem.api.lazy_torch import torch
from tandem.config.parts import KnobRule


def behaviour_ratio(
    proximal: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, sequence: torch.Tensor, level: str
) -> torch.Tensor:
    """exp(proximal − rollout) ``[T]``, no gradient: per token, or the product over its trajectory if ``level`` is
    ``sequence``."""
    d = log_ratio(proximal.detach(), rollout, mask)
    if level == "sequence":
        # clamped again: each log-ratio is clamped, but the sum of a thousand would overflow exp
        d = sum_by(d, sequence).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return d.exp()


@IMPORTANCE_WEIGHTS.register("none")
def no_weight(ratio: torch.Tensor) -> torch.Tensor:
    """Weight 1 for all tokens, also for those that older weights sampled."""
    return torch.ones_like(ratio)


@IMPORTANCE_WEIGHTS.register("truncate", knobs={"high": KnobRule(above=0.0, meaning="Largest weight.")})
def truncate(ratio: torch.Tensor, *, high: float = 2.0) -> torch.Tensor:
    """L_t × min(w, high), truncated importance sampling."""
    return ratio.clamp(max=high)


@IMPORTANCE_WEIGHTS.register(
    "mask",
    "2505.24298",
    "2510.18855",
    knobs={
        "low": KnobRule(low=0.0, meaning="Tokens of a smaller ratio are dropped."),
        "high": KnobRule(above=0.0, meaning="Tokens of a larger ratio are dropped."),
    },
    drops_outside=True,
)
def mask_outside(ratio: torch.Tensor, *, low: float = 0.0, high: float = 5.0) -> torch.Tensor:
    """L_t × w where low ≤ w ≤ high, × 0 elsewhere: IcePop; with `high` alone, decoupled PPO."""
    # weight 0 instead of removal: the token stays in the denominators, so dropping tokens does not enlarge the step
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


@REJECTIONS.register("none")
def keep_all(mask: torch.Tensor) -> torch.Tensor:
    """Keeps all trajectories."""
    return torch.ones_like(mask)


@REJECTIONS.register(
    "product",
    knobs={
        "low": KnobRule(low=0.0, high=1.0, meaning="Smallest product of exp(proximal − rollout) that is kept."),
        "high": KnobRule(low=1.0, meaning="Largest product that is kept."),
    },
)
def product(
    proximal: torch.Tensor,
    rollout: torch.Tensor,
    mask: torch.Tensor,
    sequence: torch.Tensor,
    *,
    low: float = 0.5,
    high: float = 2.0,
) -> torch.Tensor:
    """Keeps trajectories whose product of w lies in [low, high]."""
    ratio = behaviour_ratio(proximal, rollout, mask, sequence, "sequence")
    return (ratio >= low) & (ratio <= high)


@REJECTIONS.register(
    "geometric",
    knobs={
        "low": KnobRule(low=0.0, high=1.0, meaning="Smallest geometric mean of exp(proximal − rollout) that is kept."),
        "high": KnobRule(low=1.0, meaning="Largest geometric mean of exp(proximal − rollout) that is kept."),
    },
)
def geometric(
    proximal: torch.Tensor,
    rollout: torch.Tensor,
    mask: torch.Tensor,
    sequence: torch.Tensor,
    *,
    low: float = 0.999,
    high: float = 1.001,
) -> torch.Tensor:
    """Keeps trajectories whose geometric mean of w lies in [low, high]."""
    ratio = mean_by_sequence(log_ratio(proximal.detach(), rollout, mask), mask, sequence).exp()
    return (ratio >= low) & (ratio <= high)


@REJECTIONS.register(
    "negative_drift",
    "2512.02556",
    knobs={
        "threshold": KnobRule(
            low=0.0, meaning="Mean of (rollout − policy) above which the tokens with A < 0 of a trajectory are dropped."
        )
    },
)
def negative_drift(
    policy: torch.Tensor,
    rollout: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    sequence: torch.Tensor,
    *,
    threshold: float = 0.5,
) -> torch.Tensor:
    """Drops tokens with A < 0 if the mean of (rollout − policy) over their trajectory is above the threshold."""
    # good answers are always kept: a step towards them is safe, however far the policy has moved away
    drift = mean_by_sequence(log_ratio(rollout, policy.detach(), mask), mask, sequence)
    return ~((advantages < 0) & (drift > threshold))


def gap(scored: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """|scored − rollout| where ``mask`` is true, else 0; all ``[T]``, log-probabilities of the same tokens in nats."""
    return (scored - rollout).abs().masked_fill(~mask, 0.0)


MOST_OF_ONE = 0.5
"""Largest share of the fit's sum of squares that one sequence may have; above it, `Evidence.sigmas` is 0."""


@dataclass(frozen=True)
class Evidence:
    """Tokens that show whether the sampler had received the last update. All tensors are ``[K]``, log-probabilities in nats.

    For each token let r be the log-probability that the sampler reported, s the trainer's under the version that the sampler
    names, and o the trainer's under the version before. A least-squares fit of r − s to o − s gives the share of the update
    that the sampler lacks: 0 none, 1 all of it. Rounding noise in s is on both sides of the fit and pulls the share towards
    ½, but never across: the share is ½ + (|r − s|² − |r − o|²) / 2|s − o|², and if s and o are equally noisy, the noise
    cancels in the numerator. The test is therefore on which side of ½ the share lies. The size of the share is only
    meaningful if s and o are exact.
    """

    residual: torch.Tensor
    """r − s, how far the reported log-probabilities are from the trainer's."""

    step: torch.Tensor
    """o − s, the last update of the log-probabilities with the sign reversed."""

    sequence: torch.Tensor
    """The sequence of each token, int64. Noise is independent between sequences, not quite within one."""

    @classmethod
    def of(cls, rollout: torch.Tensor, scored: torch.Tensor, older: torch.Tensor, sequence: torch.Tensor) -> Evidence:
        """Makes evidence from r (``rollout``), s (``scored``) and o (``older``), ``[K]`` each."""
        return cls((rollout - scored).double(), (older - scored).double(), sequence)

    @classmethod
    def pooled(cls, several: list[Evidence]) -> Evidence:
        """Joins the tokens of several verifications; sequences of different verifications stay different."""
        sequences, offset = [], 0
        for evidence in several:
            sequences.append(evidence.sequence + offset)
            offset += int(evidence.sequence.max()) + 1 if len(evidence) else 0
        residuals, steps = [evidence.residual for evidence in several], [evidence.step for evidence in several]
        return cls(torch.cat(residuals), torch.cat(steps), torch.cat(sequences))

    def __len__(self) -> int:
        return len(self.step)

    @property
    def missing_share(self) -> float:
        """The share of the update that the sampler lacks; ½ (no evidence) if the update changes no token."""
        square = float(self.step.square().sum())
        return float((self.residual * self.step).sum()) / square if square else 0.5

    @property
    def sigmas(self) -> float:
        """The number of standard errors by which the share lies below ½: positive if the update arrived, negative if it is
        missing.

        The standard error is the larger of two estimates, one for independent tokens and one for independent sequences. Both
        are sandwich estimates in which each residual is divided by 1 − leverage (MacKinnon and White 1985, HC3; by sequence
        CR3), so that tokens of high leverage are not overrated. The result is 0 (no evidence) if one sequence has more than
        `MOST_OF_ONE` of the sum of squares, because the other sequences then cannot show how noisy it is.
        """
        square = self.step.square()
        total = float(square.sum())
        if not total:
            return 0.0
        share = self.missing_share
        scores = self.step * (self.residual - share * self.step)
        leverage = square / total
        of_sequence = self._by_sequence(square) / total
        if float(of_sequence.max()) > MOST_OF_ONE:
            return 0.0
        by_token = float((scores / (1 - leverage)).square().sum())
        by_sequence = float((self._by_sequence(scores) / (1 - of_sequence)).square().sum())
        return (0.5 - share) * total / max(by_token, by_sequence, 1e-20) ** 0.5

    def _by_sequence(self, values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(int(self.sequence.max()) + 1).index_add(0, self.sequence, values)
