"""The algorithm as named parts (the `algorithm` section), with a limit on the mean cost of samples (`constraint`).

Presets (`algorithm.preset=NAME`) and their documentation are read from presets.yaml.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from tandem.config.parts import Count, Knob, KnobRule, NotNegative, Positive, part_of
from tandem.config.yaml_file import packaged


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

    coefficient: NotNegative = 0.0
    """Weight of the penalty; with 0 no reference model is loaded."""

    where: Literal["loss", "reward"] = "loss"
    """Add it to the loss, or subtract it from the reward of each token."""

    estimator: Literal["k1", "k2", "k3", "k3_plus"] | None = None
    """Estimator of a token's penalty (docs/algorithms.md); null takes k3 in the loss and k1 in the reward."""

    importance: bool = False
    """In the loss: weight each token by exp(policy − rollout), which corrects the penalty for tokens of older policies."""

    target: Positive | None = None
    """Target KL of a sample, in nats, summed over its tokens; the coefficient is adapted to reach it. null: the coefficient
    is constant."""

    horizon: Positive = 10000.0
    """With `target`: number of samples over which the coefficient changes by at most a fifth."""

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
    """Weight of each token's loss from the ratio exp(proximal − rollout). `none`: 1; `truncate`: the ratio, at most `high`;
    `mask`: the ratio, and 0 outside of [low, high]; or `my_file.py:function`."""

    level: Literal["token", "sequence"] = "token"
    """`token`: each token has its own ratio; `sequence`: all tokens have the product of their sequence's ratios."""

    low: NotNegative = 0.0
    """Lower bound of `mask`."""

    high: Positive | None = None
    """Cap of `truncate` and upper bound of `mask`; null takes 2 for `truncate` and 5 for `mask`."""

    reject: Component = field(default_factory=lambda: Component("none"))
    """Rule that drops whole sequences if the policy has moved too far since they were sampled."""

    @property
    def highest(self) -> float:
        """`high`, or its default for this `weight`; infinity if the weight has no such knob."""
        rule = part_of("correction.weight", self.weight).knobs.get("high")
        bound = rule.default if self.high is None and rule is not None else self.high
        return float(bound) if isinstance(bound, int | float) else math.inf


@dataclass(frozen=True)
class AlgorithmConfig:
    """A preset, and the settings in which a run differs from it."""

    preset: str = "grpo"
    """Named algorithm: it sets the defaults of all other keys of this section (`tandem algorithms` lists them)."""

    advantage: Component = field(default_factory=lambda: Component("grpo"))
    """The function that computes advantages from rewards."""

    whitening: Literal["none", "group", "batch"] = "none"
    """Scale the advantages of all trained tokens to mean 0 and variance 1 within each group, or over the batch, after
    `advantage` has computed them; `none` does not."""

    policy_loss: Component = field(default_factory=lambda: Component("ppo_clip"))
    """Loss of each token."""

    aggregation: Component = field(default_factory=lambda: Component("sequence_mean"))
    """The rule by which the losses of tokens are averaged over the batch."""

    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """Off-policy correction."""

    kl: KLConfig = field(default_factory=KLConfig)
    """Penalty against the reference."""

    shaping: tuple[Component, ...] = ()
    """Changes to each reward, in order: `scale`, `bias`, `clip`, `overlong`, `mask_truncated`, `penalize_truncated`."""

    filter: Component = field(default_factory=lambda: Component("none"))
    """The rule that chooses the groups to train on; `dynamic_sampling` generates further groups until the batch is full."""

    labels: Literal["reward", "majority"] = "reward"
    """`reward`: samples are judged by the run's reward. `majority`: a sample is right if it agrees with the majority of its
    group (TTRL); expected answers are not used."""

    update_samples: Count | None = None
    """Use only this many samples of each group, the first ones, for training and for its statistics; null uses all."""

    token_filter: Component = field(default_factory=lambda: Component("none"))
    """The rule that chooses the tokens to train on; `top_entropy` keeps those where the policy is least certain."""

    entropy_coefficient: NotNegative = 0.0
    """Weight of the entropy bonus."""

    allow_truncated_sampling: bool = False
    """Allow training on samples drawn with `gconfig.top_p`, `top_k` or `min_new_tokens`, although log-probabilities are
    those of the whole distribution."""


MOST_MULTIPLIER = 10.0
"""Largest λ of a constraint, so that a limit that cannot be met does not outweigh the reward."""


@dataclass(frozen=True)
class ConstraintConfig:
    """A limit for one term of `reward`, which becomes a cost: its value times its weight is not rewarded, but its mean is
    kept at or below the limit by a Lagrange multiplier λ. The policy learns from (reward − λ·cost) / (1 + λ)
    (docs/constraints.md)."""

    cost: str | None = None
    """Name of the term in metrics: `safety` for `model(path=FOLDER, name=safety)`, `rude` for `my_file.py:rude`; null: no
    constraint."""

    limit: float = 0.0
    """Largest allowed mean cost of the samples: 0.1 allows a tenth of them to have a cost of 1."""

    step_size: NotNegative = 0.1
    """After each batch, λ changes by this × (mean cost − limit); 0 keeps λ constant."""

    multiplier: Annotated[float, KnobRule(low=0.0, high=MOST_MULTIPLIER)] = 1.0
    """λ before the first step; later λ lies between 0 and 10."""


@dataclass(frozen=True)
class Preset:
    """One preset, an entry of presets.yaml."""

    summary: str
    """Description in one line, for lists of presets."""

    title: str
    """Title of the paper, authors, year."""

    values: Mapping[str, Any]
    """The values of the `algorithm` section that the preset sets."""

    asynchronous: Mapping[str, Any] | None
    """Settings that are added for asynchronous training or replay (behaviour correction). None: neither is supported."""

    when: str
    """When to use it, one sentence."""

    text: str
    """Long description of the idea and when to use it. This and the next two fields are Markdown."""

    defaults: str
    """The source of each default."""

    watch: Mapping[str, str]
    """Name of a metric → what to do if it looks wrong with this algorithm."""

    limits: str = ""
    arxiv: str = ""
    """arXiv number of the paper; empty if there is none."""

    run: Mapping[str, Any] = field(default_factory=dict)
    """The values that the preset sets outside of the `algorithm` section."""

    refused: Sequence[str] = ()
    """Overrides with which the preset is refused, for the documentation."""

    example: str = ""
    """Overrides that the addition example needs besides `algorithm=NAME`."""


PRESETS: Mapping[str, Preset] = {name: Preset(**entry) for name, entry in packaged("presets.yaml").items()}
