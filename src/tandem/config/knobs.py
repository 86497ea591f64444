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

    meaning: str = ""
    """One sentence."""

    def rule(self) -> str:
        """The bounds in words, empty if there are none."""
        parts = ["a whole number"] if self.integer else ["a number"]
        bounds = {"above": self.above, "at least": self.low, "at most": self.high}
        parts += [f"{word} {_shown(bound)}" for word, bound in bounds.items() if bound is not None]
        return ", ".join(parts) + "".join(f", or {value:g}" for value in self.also)

    def allows(self, value: Knob) -> bool:
        """Whether the value is of the right kind and inside the bounds."""
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

ADVANTAGES: Mapping[str, Knobs] = {"grpo": {}, "dr_grpo": {}, "rloo": {}, "reinforce": {}}

GROUP_RELATIVE = ("grpo", "dr_grpo", "rloo")
"""Advantages that compare the samples of a prompt: with one sample they are 0."""

POLICY_LOSSES: Mapping[str, Knobs] = {
    "ppo_clip": {
        "clip_low": KnobRule(0.2, low=0.0, high=1.0, meaning="The ratio is clipped at 1 − clip_low from below."),
        "clip_high": KnobRule(0.2, low=0.0, meaning="The ratio is clipped at 1 + clip_high from above."),
        "dual_clip": KnobRule(0.0, above=1.0, also=(0.0,), meaning="Cap of the loss where A < 0, in |A|; 0 is off."),
    },
    "reinforce": {},
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
        "low": KnobRule(0.5, low=0.0, high=1.0, meaning="Smallest product of the ratios that is kept."),
        "high": KnobRule(2.0, low=1.0, meaning="Largest product that is kept."),
    },
    "geometric": {
        "low": KnobRule(0.999, low=0.0, high=1.0, meaning="Smallest geometric mean of the ratio that is kept."),
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
    "correction.reject": REJECTIONS,
}
"""Field of `AlgorithmConfig` → its choices → their knobs."""
