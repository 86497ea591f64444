"""Algorithm presets as data: what `algorithm.preset=NAME` stands for. Sources of the formulas: docs/algorithms.md."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


def _data(**values: Any) -> Mapping[str, Any]:
    return MappingProxyType(values)


DECOUPLED_PPO = _data(correction={"weight": "mask", "level": "token"})
"""AReaL's decoupled objective: tokens keep their weight exp(proximal − rollout), above 5 they are dropped (2505.24298)."""

TRUNCATED = _data(correction={"weight": "truncate", "level": "token"})
"""Weights of more than 2 become 2."""

SEQUENCES = _data(correction={"weight": "truncate", "level": "sequence"})
"""The same with the product over the trajectory, for losses with one ratio for all of it."""

REJECTED = _data(correction={"reject": {"name": "product", "low": 0.5, "high": 2.0}})
"""No weight; trajectories that have become twice or half as likely are dropped."""

ITSELF = _data()
"""The loss looks at the sampler's log-probabilities itself."""


@dataclass(frozen=True)
class Preset:
    """Values of the `algorithm` section, in the form that YAML has."""

    summary: str
    """One line for `tandem config` and the docs."""

    values: Mapping[str, Any]
    """The values that the preset sets."""

    asynchronous: Mapping[str, Any] | None = field(default_factory=lambda: DECOUPLED_PPO)
    """Set in addition when training is asynchronous or replays: the behaviour correction. None: never asynchronous."""

    run: Mapping[str, Any] = field(default_factory=_data)
    """The values that it sets outside of the `algorithm` section."""


def _ppo_clip(low: float = 0.2, high: float = 0.2) -> Mapping[str, Any]:
    return {"name": "ppo_clip", "clip_low": low, "clip_high": high}


PRESETS: Mapping[str, Preset] = _data(
    ppo=Preset(
        "a critic's values, generalised advantages, clipped ratio (arXiv:1707.06347)",
        _data(
            advantage={"name": "gae", "gamma": 1.0, "lam": 1.0, "whitened": True},
            policy_loss=_ppo_clip(),
            aggregation="token_mean",
        ),
    ),
    grpo=Preset(
        "group-normalised advantages, clipped ratio, every answer counts the same (arXiv:2402.03300)",
        _data(advantage="grpo", policy_loss=_ppo_clip(), aggregation="sequence_mean"),
    ),
    dapo=Preset(
        "grpo with clip-higher, token mean, dynamic sampling and a soft penalty for long answers (arXiv:2503.14476)",
        _data(
            advantage="grpo",
            policy_loss=_ppo_clip(0.2, 0.28),
            aggregation="token_mean",
            shaping=["overlong"],
            filter="dynamic_sampling",
        ),
    ),
    dr_grpo=Preset(
        "advantages without the division by the spread, tokens divided by a constant (arXiv:2503.20783)",
        _data(advantage="dr_grpo", policy_loss=_ppo_clip(), aggregation="constant"),
    ),
    gspo=Preset(
        "grpo with one ratio for the whole answer, clipped closely (arXiv:2507.18071)",
        _data(
            advantage="grpo",
            policy_loss={"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
            aggregation="sequence_mean",
        ),
        SEQUENCES,
    ),
    luspo=Preset(
        "gspo times the answer's length, so that short ones are not favoured (arXiv:2602.05261)",
        _data(
            advantage="grpo",
            policy_loss={"name": "luspo", "clip_low": 2e-3, "clip_high": 2.5e-3},
            aggregation="sequence_mean",
        ),
        SEQUENCES,
    ),
    rloo=Preset(
        "reward minus the mean of the other samples of the group (arXiv:2402.14740)",
        _data(advantage="rloo", policy_loss="reinforce", aggregation="sequence_sum"),
        TRUNCATED,
    ),
    reinforce_pp=Preset(
        "reward minus a KL penalty, whitened over the batch's tokens, clipped ratio; no groups (arXiv:2501.03262)",
        _data(
            advantage="reinforce_pp",
            policy_loss=_ppo_clip(),
            aggregation="token_mean",
            kl={"coefficient": 0.01, "where": "reward"},
        ),
    ),
    reinforce_pp_baseline=Preset(
        "reward minus the group's mean, whitened over the batch, clipped ratio (arXiv:2501.03262)",
        _data(advantage="reinforce_pp_baseline", policy_loss=_ppo_clip(), aggregation="token_mean"),
    ),
    lite_ppo=Preset(
        "reward minus the group's mean, divided by the spread of the batch, token mean (arXiv:2508.08221)",
        _data(advantage="lite_ppo", policy_loss=_ppo_clip(), aggregation="token_mean"),
    ),
    remax=Preset(
        "reward minus that of a greedy answer to the same prompt (arXiv:2310.10505)",
        _data(advantage="remax", policy_loss="reinforce", aggregation="sequence_sum"),
        TRUNCATED,
    ),
    opo=Preset(
        "reward minus its mean weighted by length, the baseline of least variance; on-policy only (arXiv:2505.23585)",
        _data(advantage="opo", policy_loss="reinforce", aggregation="token_mean"),
        None,
    ),
    cispo=Preset(
        "clipped ratios as weights, so that no token's gradient is lost (arXiv:2506.13585)",
        _data(
            advantage="grpo",
            policy_loss={"name": "cispo", "clip_low": 1.0, "clip_high": 4.0},
            aggregation="token_mean",
        ),
    ),
    sapo=Preset(
        "grpo with a soft gate in place of the clip (arXiv:2511.20347)",
        _data(
            advantage="grpo",
            policy_loss={"name": "sapo", "tau_positive": 1.0, "tau_negative": 1.05},
            aggregation="sequence_mean",
        ),
        REJECTED,
    ),
    gmpo=Preset(
        "grpo with the geometric mean of an answer's clipped ratios (arXiv:2507.20673)",
        _data(advantage="grpo", policy_loss={"name": "gmpo", "clip": 0.4}, aggregation="sequence_mean"),
        SEQUENCES,
    ),
    m2po=Preset(
        "for stale data: drops the few tokens that move furthest from the sampler (arXiv:2510.01161)",
        _data(advantage="grpo", policy_loss={"name": "m2po", "threshold": 0.04}, aggregation="token_mean"),
        ITSELF,
    ),
    cpgd=Preset(
        "policy gradient clipped in log-probability, with a pull back to the last policy (arXiv:2505.12504)",
        _data(
            advantage={"name": "cpgd", "weighting": "std"},
            policy_loss={"name": "cpgd", "clip": 0.2, "drift": 1e-3, "drift_cap": 2.0},
            aggregation="token_mean",
        ),
    ),
    dppo=Preset(
        "drops tokens whose probability has left a region around the sampler's (arXiv:2602.04879)",
        _data(advantage="grpo", policy_loss={"name": "dppo", "divergence": "tv"}, aggregation="token_mean"),
        TRUNCATED,
    ),
    vespo=Preset(
        "answers weighted by how likely they still are, smoothly and on both sides (arXiv:2602.10693)",
        _data(advantage="grpo", policy_loss="vespo", aggregation="token_mean"),
        ITSELF,
    ),
    max_rl=Preset(
        "reward minus the group's mean, divided by that mean: rare successes count most (arXiv:2602.02710)",
        _data(advantage="max_rl", policy_loss=_ppo_clip(), aggregation="token_mean"),
    ),
    gdpo=Preset(
        "several rewards, each normalised in its group before they are added (arXiv:2601.05242)",
        _data(advantage="gdpo", policy_loss=_ppo_clip(), aggregation="sequence_mean"),
    ),
    ttrl=Preset(
        "no labels: the majority of the answers is taken for the truth (arXiv:2504.16084)",
        _data(
            advantage="grpo",
            policy_loss=_ppo_clip(),
            aggregation="sequence_mean",
            kl={"coefficient": 0.001, "where": "loss"},
            labels="majority",
            update_samples=32,
        ),
        run=_data(gconfig={"n_samples": 64, "temperature": 1.0}, actor={"optimizer": {"lr": 5e-7}}),
    ),
    reinforce=Preset(
        "the reward itself, one update for each batch",
        _data(advantage="reinforce", policy_loss="reinforce", aggregation="token_mean"),
        TRUNCATED,
    ),
)
