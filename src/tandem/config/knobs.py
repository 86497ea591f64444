"""The knobs of every named choice, with defaults and bounds, as data.

A test compares this table with the signatures of the registered functions: `config/` never imports them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tandem.config.algorithm import Knob


@dataclass(frozen=True)
class KnobRule:
    """One knob: its default, and the values that it may have."""

    default: Knob | None
    """None: filled in from the rest of the configuration, see ``meaning``."""

    low: float | None = None
    """Smallest value."""

    high: float | None = None
    """Largest value."""

    above: float | None = None
    """The value must be greater than this."""

    also: tuple[float, ...] = ()
    """Single values outside the bounds that are fine too, such as 0 for off."""

    integer: bool = False
    """Whole numbers only."""

    choices: tuple[str, ...] = ()
    """The words that it may be, instead of a number."""

    boolean: bool = False
    """true or false, instead of a number."""

    text: bool = False
    """Any text, instead of a number."""

    meaning: str = ""
    """One sentence."""

    def rule(self) -> str:
        """The bounds in words, empty if there are none."""
        if self.choices or self.boolean or self.text:
            return "true or false" if self.boolean else "text" if self.text else f"one of {', '.join(self.choices)}"
        parts = ["a whole number"] if self.integer else ["a number"]
        bounds = {"above": self.above, "at least": self.low, "at most": self.high}
        parts += [f"{word} {_shown(bound)}" for word, bound in bounds.items() if bound is not None]
        return ", ".join(parts) + "".join(f", or {value:g}" for value in self.also)

    def allows(self, value: Knob) -> bool:
        """Whether the value is of the right kind and inside the bounds."""
        if self.choices or self.text:
            return isinstance(value, str) and (self.text or value in self.choices)
        if self.boolean:
            return isinstance(value, bool)
        if isinstance(value, (bool, str)) or (self.integer and value != int(value)):
            return False
        if value in self.also:
            return True
        return (
            (self.above is None or value > self.above)
            and (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
        )


def _shown(bound: float) -> str:
    """Whole numbers with all their digits."""
    return str(int(bound)) if bound == int(bound) else f"{bound:g}"


Knobs = Mapping[str, KnobRule]

ADVANTAGES: Mapping[str, Knobs] = {
    "gae": {
        "gamma": KnobRule(1.0, low=0.0, high=1.0, meaning="Discount of later rewards, per trained token."),
        "lam": KnobRule(1.0, low=0.0, high=1.0, meaning="λ: 1 is the return minus the value, 0 the error of one token."),
        "whitened": KnobRule(
            True, boolean=True, meaning="Bring advantages to mean 0 and variance 1 over the batch's tokens."
        ),
    },
    "grpo": {},
    "dr_grpo": {},
    "rloo": {},
    "lite_ppo": {},
    "reinforce_pp": {},
    "reinforce_pp_baseline": {},
    "remax": {},
    "opo": {},
    "max_rl": {},
    "gdpo": {
        "weights": KnobRule(
            "", text=True, meaning="Weights of the named rewards, `correctness=1,format=0.5`; one left out counts 1."
        )
    },
    "cpgd": {
        "weighting": KnobRule(
            "std",
            choices=("std", "groups", "none"),
            meaning="Divide by the group's spread; or multiply all by groups ÷ groups with spread, at most 3; or neither.",
        )
    },
    "reinforce": {},
}

GROUP_RELATIVE = (
    "grpo",
    "dr_grpo",
    "rloo",
    "lite_ppo",
    "reinforce_pp_baseline",
    "opo",
    "max_rl",
    "gdpo",
    "cpgd",
)
"""Advantages that compare the samples of a prompt: with one sample they are 0."""


def _clip(low: float, high: float) -> dict[str, KnobRule]:
    return {
        "clip_low": KnobRule(low, low=0.0, high=1.0, meaning="The ratio is clipped at 1 − clip_low from below."),
        "clip_high": KnobRule(high, low=0.0, meaning="The ratio is clipped at 1 + clip_high from above."),
    }


def _share(meaning: str) -> KnobRule:
    return KnobRule(2e-4, above=0.0, high=1.0, meaning=meaning)


POLICY_LOSSES: Mapping[str, Knobs] = {
    "ppo_clip": {
        **_clip(0.2, 0.2),
        "dual_clip": KnobRule(0.0, above=1.0, also=(0.0,), meaning="Cap of the loss where A < 0, in |A|; 0 is off."),
        "two_sided": KnobRule(0.0, above=1.0, also=(0.0,), meaning="Cap of the ratio on the unclipped branch; 0 is off."),
    },
    "gspo": _clip(3e-4, 4e-4),
    "gspo_token": _clip(3e-4, 4e-4),
    "luspo": _clip(2e-3, 2.5e-3),
    "gmpo": {"clip": KnobRule(0.4, above=0.0, meaning="Bound of each token's log-ratio, on the side that A pushes to.")},
    "cispo": _clip(1.0, 4.0),
    "sapo": {
        "tau_positive": KnobRule(1.0, above=0.0, meaning="Sharpness of the gate where A > 0."),
        "tau_negative": KnobRule(1.05, above=0.0, meaning="Sharpness of the gate elsewhere."),
    },
    "m2po": {
        "threshold": KnobRule(
            0.04, low=0.0, meaning="Largest mean of (proximal − rollout)² over the candidates that are kept."
        )
    },
    "cpgd": {
        "clip": KnobRule(
            0.2, above=0.0, high=0.999, meaning="The log-probability is clipped at ln(1 ± clip) off the proximal one."
        ),
        "drift": KnobRule(1e-3, low=0.0, meaning="Weight of the pull back to the proximal policy."),
        "drift_cap": KnobRule(2.0, low=0.0, meaning="Largest ρ − 1 in that pull."),
    },
    "dppo": {
        "divergence": KnobRule("tv", choices=("tv", "kl"), meaning="Distance between the token's probabilities."),
        "threshold": KnobRule(
            None, above=0.0, meaning="Tokens further away are dropped; unset takes 0.15 for tv, 0.05 for kl."
        ),
    },
    "vespo": {
        "power_positive": KnobRule(2.0, low=0.0, meaning="k where A ≥ 0."),
        "rate_positive": KnobRule(3.0, above=0.0, meaning="λ where A ≥ 0."),
        "power_negative": KnobRule(3.0, low=0.0, meaning="k where A < 0."),
        "rate_negative": KnobRule(2.0, above=0.0, meaning="λ where A < 0."),
    },
    "reinforce": {},
    "clip_cov": {
        **_clip(0.2, 0.2),
        "share": _share("Part of the tokens whose loss is set to 0; at least one."),
        "low": KnobRule(1.0, meaning="Tokens of a smaller covariance are left alone."),
        "high": KnobRule(5.0, meaning="Tokens of a larger covariance are left alone."),
    },
    "kl_cov": {
        "share": _share("Part of the tokens that are held back; at least one."),
        "coefficient": KnobRule(1.0, low=0.0, meaning="Weight of |log ρ| there."),
    },
}

TOKEN_FILTERS: Mapping[str, Knobs] = {
    "none": {},
    "top_entropy": {
        "share": KnobRule(0.2, above=0.0, high=1.0, meaning="Part of the batch's trained tokens that is kept, rounded up.")
    },
}

AGGREGATIONS: Mapping[str, Knobs] = {
    "token_mean": {},
    "sequence_mean": {},
    "sequence_sum": {},
    "constant": {"max_tokens": KnobRule(None, low=1, integer=True, meaning="Divisor; unset takes gconfig.max_new_tokens.")},
}

SHAPING: Mapping[str, Knobs] = {
    "scale": {"factor": KnobRule(1.0, meaning="The reward is multiplied by this.")},
    "bias": {"offset": KnobRule(0.0, meaning="This is added to the reward.")},
    "clip": {
        "low": KnobRule(-1.0, meaning="Smallest reward."),
        "high": KnobRule(1.0, meaning="Largest reward."),
    },
    "overlong": {
        "max_tokens": KnobRule(
            None, low=1, integer=True, meaning="Length of the full penalty; unset takes gconfig.max_new_tokens."
        ),
        "buffer_tokens": KnobRule(
            None,
            low=1,
            integer=True,
            meaning="The penalty grows over so many tokens before; unset takes a fifth of max_tokens.",
        ),
    },
    "mask_truncated": {},
    "penalize_truncated": {"penalty": KnobRule(1.0, low=0.0, meaning="Subtracted from the reward of truncated samples.")},
}

FILTERS: Mapping[str, Knobs] = {
    "none": {},
    "dynamic_sampling": {
        "max_draws": KnobRule(10, low=1, integer=True, meaning="Draws of one batch after which the run stops.")
    },
    "accuracy_band": {
        "low": KnobRule(0.1, low=0.0, high=1.0, meaning="Lowest mean accuracy of a group that is kept."),
        "high": KnobRule(0.9, low=0.0, high=1.0, meaning="Highest mean accuracy of a group that is kept."),
    },
}

REJECTIONS: Mapping[str, Knobs] = {
    "none": {},
    "product": {
        "low": KnobRule(0.5, low=0.0, high=1.0, meaning="Smallest product of exp(proximal − rollout) that is kept."),
        "high": KnobRule(2.0, low=1.0, meaning="Largest product that is kept."),
    },
    "geometric": {
        "low": KnobRule(
            0.999, low=0.0, high=1.0, meaning="Smallest geometric mean of exp(proximal − rollout) that is kept."
        ),
        "high": KnobRule(1.001, low=1.0, meaning="Largest geometric mean that is kept."),
    },
    "negative_drift": {
        "threshold": KnobRule(0.5, low=0.0, meaning="Mean of (rollout − policy) above which bad answers are dropped.")
    },
}

CHOICES: Mapping[str, Mapping[str, Knobs]] = {
    "advantage": ADVANTAGES,
    "policy_loss": POLICY_LOSSES,
    "aggregation": AGGREGATIONS,
    "shaping": SHAPING,
    "filter": FILTERS,
    "token_filter": TOKEN_FILTERS,
    "correction.reject": REJECTIONS,
}
"""Field of `AlgorithmConfig` → its choices → their knobs."""
