"""The algorithm, as parts that have names."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Knob = float | int | bool | str


@dataclass(frozen=True)
class Component:
    """A named choice and its knobs: `policy_loss=ppo_clip`, `policy_loss.clip_high=0.28`."""

    name: str
    """Registered name, or `my_file.py:function`."""

    knobs: Mapping[str, Knob] = field(default_factory=dict)
    """Keyword arguments of the choice that differ from its defaults."""


@dataclass(frozen=True)
class KLConfig:
    """Penalty for leaving the reference policy."""

    coefficient: float = 0.0
    """Weight of the penalty; 0 needs no reference model."""

    where: Literal["loss", "reward"] = "loss"
    """Add it to the loss, or subtract it from the reward of each token."""

    estimator: Literal["k1", "k2", "k3", "k3_plus"] | None = None
    """Form of the penalty per token, see docs/algorithms.md; null takes k3 in the loss and k1 in the reward."""

    importance: bool = False
    """In the loss: weight each token by exp(policy − rollout), so that tokens of older policies count as they should."""

    target: float | None = None
    """Wished KL of a sample, in nats over all its tokens: the coefficient follows it; null keeps the coefficient."""

    horizon: float = 10000.0
    """How slowly the coefficient follows `target`: in so many samples it changes by at most a fifth."""


HIGHEST = {"truncate": 2.0, "mask": 5.0}
"""Upper bound of a correction's weights where none is given: 2 is usual for truncated importance sampling, 5 that of AReaL's
decoupled objective (arXiv:2505.24298) and of IcePop (arXiv:2510.18855)."""


@dataclass(frozen=True)
class CorrectionConfig:
    """Behaviour correction: importance weights for tokens that another version sampled."""

    weight: Literal["none", "truncate", "mask"] = "none"
    """What exp(proximal − rollout) does: nothing, multiply up to `high`, or multiply inside [low, high] and drop outside."""

    level: Literal["token", "sequence"] = "token"
    """Ratio of each token, or the product over the sequence."""

    low: float = 0.0
    """Lower bound of `mask`."""

    high: float | None = None
    """Cap of `truncate` and upper bound of `mask`; null takes 2 for `truncate` and 5 for `mask`."""

    reject: Component = field(default_factory=lambda: Component("none"))
    """Rule that drops whole sequences that drifted too far from the policy that sampled them."""

    @property
    def highest(self) -> float:
        """`high`, or what it is where nothing was given."""
        return HIGHEST.get(self.weight, math.inf) if self.high is None else self.high


@dataclass(frozen=True)
class AlgorithmConfig:
    """A preset, and the parts of it that were changed."""

    preset: str = "grpo"
    """Named combination that the other fields start from."""

    advantage: Component = field(default_factory=lambda: Component("grpo"))
    """How rewards become advantages."""

    whitening: Literal["none", "group", "batch"] = "none"
    """Bring the advantages of all trained tokens to mean 0 and variance 1 within each group, or over the batch, whatever
    `advantage` made them; `none` leaves them as they are."""

    policy_loss: Component = field(default_factory=lambda: Component("ppo_clip"))
    """Loss of each token."""

    aggregation: Component = field(default_factory=lambda: Component("sequence_mean"))
    """Weight of each token in the global batch."""

    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """Off-policy correction."""

    kl: KLConfig = field(default_factory=KLConfig)
    """Penalty against the reference."""

    shaping: tuple[Component, ...] = ()
    """Changes to each reward, in order: `scale`, `bias`, `clip`, `overlong`, `mask_truncated`, `penalize_truncated`."""

    filter: Component = field(default_factory=lambda: Component("none"))
    """Which groups are trained on; `dynamic_sampling` keeps drawing until the batch is full."""

    labels: Literal["reward", "majority"] = "reward"
    """What a sample is judged by: the run's `reward`, or agreement with the majority of its group (TTRL), which never sees
    the expected answer."""

    update_samples: int | None = None
    """Samples of each group that are trained on and enter its statistics, the first ones; null takes all of them."""

    token_filter: Component = field(default_factory=lambda: Component("none"))
    """Which tokens of the batch are trained on: `top_entropy` keeps those at which the policy is least certain."""

    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""

    allow_truncated_sampling: bool = False
    """Train on samples drawn with top-p < 1 or top-k, although log-probabilities are those of the whole distribution."""
