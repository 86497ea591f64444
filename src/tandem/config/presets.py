"""Algorithm presets as data: what `algorithm.preset=NAME` stands for. Sources of the formulas: docs/algorithms.md."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


def _data(**values: Any) -> Mapping[str, Any]:
    return MappingProxyType(values)


DECOUPLED_PPO = _data(correction={"weight": "mask", "level": "token", "low": 0.0, "high": 5.0})
"""AReaL's decoupled objective: tokens keep their weight exp(proximal − rollout), above 5 they are dropped (2505.24298)."""

TRUNCATED = _data(correction={"weight": "truncate", "level": "token", "high": 2.0})
"""Weights of more than 2 become 2."""


@dataclass(frozen=True)
class Preset:
    """Values of the `algorithm` section, in the form that YAML has."""

    summary: str
    """One line for `tandem config` and the docs."""

    values: Mapping[str, Any]
    """What the preset sets."""

    asynchronous: Mapping[str, Any] = field(default_factory=lambda: DECOUPLED_PPO)
    """Set in addition when training is asynchronous: the behaviour correction."""


PRESETS: Mapping[str, Preset] = _data(
    grpo=Preset(
        "group-normalised advantages, clipped ratio, every answer counts the same (arXiv:2402.03300)",
        _data(
            advantage="grpo",
            policy_loss={"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
            aggregation="sequence_mean",
        ),
    ),
    dapo=Preset(
        "grpo with clip-higher, token mean, dynamic sampling and a soft penalty for long answers (arXiv:2503.14476)",
        _data(
            advantage="grpo",
            policy_loss={"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28},
            aggregation="token_mean",
            shaping=["overlong"],
            filter="dynamic_sampling",
        ),
    ),
    dr_grpo=Preset(
        "advantages without the division by the spread, tokens divided by a constant (arXiv:2503.20783)",
        _data(
            advantage="dr_grpo",
            policy_loss={"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
            aggregation="constant",
        ),
    ),
    rloo=Preset(
        "reward minus the mean of the other samples of the group (arXiv:2402.14740)",
        _data(advantage="rloo", policy_loss="reinforce", aggregation="sequence_sum"),
        TRUNCATED,
    ),
    reinforce=Preset(
        "the reward itself, one update for each batch",
        _data(advantage="reinforce", policy_loss="reinforce", aggregation="token_mean"),
        TRUNCATED,
    ),
)
