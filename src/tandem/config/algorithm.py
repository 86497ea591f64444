"""The algorithm, as parts that have names."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tandem.config.parts import Knob, part_of


@dataclass(frozen=True)
class Component:
    """A named choice and its knobs: `policy_loss=ppo_clip`, `policy_loss.clip_high=0.28`."""

    name: str
    """Registered name, or `my_file.py:function`."""

    knobs: Mapping[str, Knob] = field(default_factory=dict)
    """Keyword arguments of the choice that differ from its defaults."""


@dataclass(frozen=True)
class KLConfig:
    """Penalty for moving away from the reference policy."""

    coefficient: float = 0.0
    """Weight of the penalty; with 0 no reference model is loaded."""

    where: Literal["loss", "reward"] = "loss"
    """Add it to the loss, or subtract it from the reward of each token."""

    estimator: Literal["k1", "k2", "k3", "k3_plus"] | None = None
    """Formula of the penalty of a token (docs/algorithms.md); null takes k3 in the loss and k1 in the reward."""

    importance: bool = False
    """In the loss: weight each token by exp(policy − rollout), which corrects the penalty for tokens of older policies."""

    target: float | None = None
    """Target KL of a sample, in nats, summed over its tokens; the coefficient is adapted to reach it. null: it is
    constant."""

    horizon: float = 10000.0
    """Samples over which the coefficient changes by at most a fifth."""

    @property
    def in_loss(self) -> bool:
        """True if the penalty is a term of the loss."""
        return self.coefficient > 0 and self.where == "loss"

    @property
    def in_reward(self) -> bool:
        """True if the penalty is subtracted from the reward."""
        return self.coefficient > 0 and self.where == "reward"


@dataclass(frozen=True)
class CorrectionConfig:
    """Behaviour correction: importance weights for tokens that were sampled by older weights."""

    weight: str = "none"
    """Use of the ratio exp(proximal − rollout), by name or `my_file.py:function`. `none`: not used; `truncate`: the loss is
    multiplied by it, at most by `high`; `mask`: the loss is multiplied by it, and tokens outside [low, high] leave it."""

    level: Literal["token", "sequence"] = "token"
    """`token`: each token has its ratio; `sequence`: the product of all ratios of a sequence."""

    low: float = 0.0
    """Lower bound of `mask`."""

    high: float | None = None
    """Cap of `truncate` and upper bound of `mask`; null takes 2 for `truncate` and 5 for `mask`."""

    reject: Component = field(default_factory=lambda: Component("none"))
    """Rule that drops whole sequences if the policy has moved too far since they were sampled."""

    @property
    def highest(self) -> float:
        """`high`, or what it is where nothing was given."""
        rule = part_of("correction.weight", self.weight).knobs.get("high")
        given = rule.default if self.high is None and rule is not None else self.high
        return float(given) if isinstance(given, int | float) else math.inf


@dataclass(frozen=True)
class AlgorithmConfig:
    """A preset, and the parts in which your run differs from it."""

    preset: str = "grpo"
    """Named algorithm: it sets the defaults of all other keys of this section (`tandem algorithms` lists them)."""

    advantage: Component = field(default_factory=lambda: Component("grpo"))
    """The function that makes advantages from rewards."""

    whitening: Literal["none", "group", "batch"] = "none"
    """Bring the advantages of all trained tokens to mean 0 and variance 1 within each group, or over the batch, whatever
    `advantage` made them; `none` leaves them as they are."""

    policy_loss: Component = field(default_factory=lambda: Component("ppo_clip"))
    """Loss of each token."""

    aggregation: Component = field(default_factory=lambda: Component("sequence_mean"))
    """The way in which the losses of tokens are averaged over the batch."""

    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """Off-policy correction."""

    kl: KLConfig = field(default_factory=KLConfig)
    """Penalty against the reference."""

    shaping: tuple[Component, ...] = ()
    """Changes to each reward, in order: `scale`, `bias`, `clip`, `overlong`, `mask_truncated`, `penalize_truncated`."""

    filter: Component = field(default_factory=lambda: Component("none"))
    """The rule for the groups that are trained on; `dynamic_sampling` keeps drawing until the batch is full."""

    labels: Literal["reward", "majority"] = "reward"
    """`reward`: samples are judged by the run's reward. `majority`: by agreement with most samples of their group (TTRL);
    expected answers are not used."""

    update_samples: int | None = None
    """Use only this many samples of each group, the first ones, for training and for its statistics; null uses all."""

    token_filter: Component = field(default_factory=lambda: Component("none"))
    """The rule for the tokens that are trained on: `top_entropy` keeps those where the policy is least certain."""

    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""

    allow_truncated_sampling: bool = False
    """Allow training on samples drawn with `gconfig.top_p`, `top_k` or `min_new_tokens`, although log-probabilities are
    those of the whole distribution."""
