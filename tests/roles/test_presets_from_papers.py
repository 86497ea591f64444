"""Values of the presets as their papers state them, written down here by hand: docs and code are compared with this page."""

import math

import pytest
import torch

from tandem.algorithms.registry import ADVANTAGES, AGGREGATIONS, FILTERS, POLICY_LOSSES, SHAPING
from tandem.config.algorithm import PRESETS
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.roles.components import choose
from tandem.roles.parts import objective_of
from tests.roles.presets import algorithm_of

MAX_NEW_TOKENS = 20480
PPO_CLIP = {"policy_loss": "ppo_clip", "policy_loss.clip_low": 0.2, "policy_loss.clip_high": 0.2}
"""Proximal policy optimisation, 1707.06347, which the papers that give no range of their own build on."""

GRPO = {"advantage": "grpo", "aggregation": "sequence_mean"}
"""DeepSeekMath, 2402.03300: normalised in the group; 1/G Σ 1/|o_i| Σ."""

NO_KL = {"kl.coefficient": 0.0}

STATED = {
    # 1707.06347: the clipped range. γ 1: InstructGPT (2203.02155, appendix C.4: no discount); λ 1: Open-Reasoner-Zero
    # (2503.24290); whitened advantages: the implementation details of RLHF with PPO (2403.17031).
    "ppo": {
        "advantage": "gae",
        "advantage.gamma": 1.0,
        "advantage.lam": 1.0,
        "advantage.whitened": True,
        "aggregation": "token_mean",
        **PPO_CLIP,
        **NO_KL,
    },
    # 2402.03300; its k3 of 0.04 is left out, as docs/presets.md says.
    "grpo": {**GRPO, **PPO_CLIP, **NO_KL},
    # 2503.14476: ε 0.2 and 0.28, token-level loss, dynamic sampling, 20,480 tokens with a buffer of 4,096, no KL.
    "dapo": {
        "advantage": "grpo",
        "policy_loss": "ppo_clip",
        "policy_loss.clip_low": 0.2,
        "policy_loss.clip_high": 0.28,
        "aggregation": "token_mean",
        "shaping": "overlong",
        "overlong penalty at 16384": 0.0,
        "overlong penalty at 18432": -0.5,
        "overlong penalty at 20480": -1.0,
        "filter": "dynamic_sampling",
        **NO_KL,
    },
    # 2503.20783: neither the spread nor the answer's length divides; a constant, the generation budget, does.
    "dr_grpo": {
        "advantage": "dr_grpo",
        "aggregation": "constant",
        "aggregation.max_tokens": MAX_NEW_TOKENS,
        **PPO_CLIP,
        **NO_KL,
    },
    # 2507.18071, section 5.1: 3e-4 and 4e-4.
    "gspo": {**GRPO, "policy_loss": "gspo", "policy_loss.clip_low": 3e-4, "policy_loss.clip_high": 4e-4, **NO_KL},
    # 2602.05261: 2e-3 and 2.5e-3.
    "luspo": {**GRPO, "policy_loss": "luspo", "policy_loss.clip_low": 2e-3, "policy_loss.clip_high": 2.5e-3},
    # 2402.14740: REINFORCE on whole answers, whose log-probability is a sum.
    "rloo": {"advantage": "rloo", "policy_loss": "reinforce", "aggregation": "sequence_sum"},
    # 2501.03262: k1 in the reward of each token, coefficient 0.01, γ 1, whitened over the global batch.
    "reinforce_pp": {
        "advantage": "reinforce_pp",
        "aggregation": "token_mean",
        "kl.coefficient": 0.01,
        "kl.where": "reward",
        "kl in the loss": None,
        **PPO_CLIP,
    },
    # 2501.03262: the group's mean first, then whitened over the batch.
    "reinforce_pp_baseline": {"advantage": "reinforce_pp_baseline", "aggregation": "token_mean", **PPO_CLIP},
    # 2508.08221: the group's mean, the batch's spread, token-level loss.
    "lite_ppo": {"advantage": "lite_ppo", "aggregation": "token_mean", **PPO_CLIP, **NO_KL},
    # 2310.10505: REINFORCE on whole answers with a greedy baseline.
    "remax": {"advantage": "remax", "policy_loss": "reinforce", "aggregation": "sequence_sum"},
    # 2505.23585: no KL, no entropy bonus.
    "opo": {"advantage": "opo", "policy_loss": "reinforce", "entropy_coefficient": 0.0, **NO_KL},
    # 2506.13585: no bound from below, token mean, no KL; weights of at most 5: ScaleRL, 2510.13786.
    "cispo": {
        "advantage": "grpo",
        "policy_loss": "cispo",
        "policy_loss.clip_low": 1.0,
        "policy_loss.clip_high": 4.0,
        "aggregation": "token_mean",
        **NO_KL,
    },
    # 2511.20347: τ 1.0 for positive and 1.05 for negative advantages.
    "sapo": {**GRPO, "policy_loss": "sapo", "policy_loss.tau_positive": 1.0, "policy_loss.tau_negative": 1.05},
    # 2507.20673: ratios within e^±0.4.
    "gmpo": {**GRPO, "policy_loss": "gmpo", "policy_loss.clip": 0.4},
    # 2510.01161: second moment of at most 0.04.
    "m2po": {"advantage": "grpo", "policy_loss": "m2po", "preparation.threshold": 0.04, "aggregation": "token_mean"},
    # 2505.12504 and its authors' code.
    "cpgd": {
        "advantage": "cpgd",
        "advantage.weighting": "std",
        "policy_loss": "cpgd",
        "policy_loss.clip": 0.2,
        "policy_loss.drift": 1e-3,
        "policy_loss.drift_cap": 2.0,
    },
    # 2602.04879: total variation; its thresholds stand in `dppo` itself.
    "dppo": {"advantage": "grpo", "policy_loss": "dppo", "policy_loss.divergence": "tv", "policy_loss.threshold": None},
    # 2602.10693: (k, λ) = (2, 3) for positive advantages, (3, 2) for negative ones.
    "vespo": {
        "advantage": "grpo",
        "policy_loss": "vespo",
        "policy_loss.power_positive": 2.0,
        "policy_loss.rate_positive": 3.0,
        "policy_loss.power_negative": 3.0,
        "policy_loss.rate_negative": 2.0,
    },
    # 2602.02710: the divisor is the group's mean.
    "max_rl": {"advantage": "max_rl", **PPO_CLIP},
    # 2601.05242: each reward normalised in its group.
    "gdpo": {"advantage": "gdpo", "aggregation": "sequence_mean", **PPO_CLIP},
    # 2504.16084: 64 votes at temperature 1, 32 of them trained on, k3 in the loss with 0.001, learning rate 5e-7.
    "ttrl": {
        **GRPO,
        **PPO_CLIP,
        "kl.coefficient": 0.001,
        "kl.where": "loss",
        "kl in the loss": "k3",
        "labels": "majority",
        "update_samples": 32,
        "n_samples": 64,
        "temperature": 1.0,
        "lr": 5e-7,
    },
}

DECOUPLED = ("mask", "token", 5.0, "none")
SEQUENCE_RATIO = ("truncate", "sequence", 2.0, "none")
ASYNCHRONOUS = {
    # AReaL's decoupled objective, 2505.24298: weights above 5 are dropped, token by token.
    **dict.fromkeys(("ppo", "grpo", "dapo", "dr_grpo", "reinforce_pp", "reinforce_pp_baseline", "lite_ppo"), DECOUPLED),
    **dict.fromkeys(("cispo", "cpgd", "max_rl", "gdpo", "ttrl"), DECOUPLED),
    # Truncated importance sampling at 2; where the ratio is that of a sequence, so is the weight.
    **dict.fromkeys(("rloo", "remax", "dppo", "reinforce"), ("truncate", "token", 2.0, "none")),
    **dict.fromkeys(("gspo", "luspo", "gmpo"), SEQUENCE_RATIO),
    "sapo": ("none", "token", math.inf, "product"),
    # 2510.01161 and 2602.10693: the loss itself has the ratio to the sampler.
    **dict.fromkeys(("m2po", "vespo"), ("none", "token", math.inf, "none")),
}
"""Weight, level, upper bound and rejection rule that asynchronous training adds. `opo` is on-policy only (2505.23585)."""


def in_effect(preset):
    """What the preset makes the parts of the algorithm, defaults of their knobs included."""
    config = load_config(TrainConfig, None, ["train_dataset.path=addition", f"algorithm={preset}"]).config
    algorithm, filled = config.algorithm, {"max_tokens": MAX_NEW_TOKENS}
    found = {
        "kl.coefficient": algorithm.kl.coefficient,
        "kl.where": algorithm.kl.where,
        "labels": algorithm.labels,
        "update_samples": algorithm.update_samples,
        "entropy_coefficient": algorithm.entropy_coefficient,
        "n_samples": config.gconfig.n_samples,
        "temperature": config.gconfig.temperature,
        "lr": config.actor.optimizer.lr,
    }
    parts = {"advantage": ADVANTAGES, "policy_loss": POLICY_LOSSES, "aggregation": AGGREGATIONS, "filter": FILTERS}
    for name, registry in parts.items():
        choice = choose(registry, getattr(algorithm, name), f"algorithm.{name}", filled)
        found |= {name: choice.name} | {f"{name}.{knob}": value for knob, value in choice.knobs.items()}
        if choice.preparation is not None:
            found |= {f"preparation.{knob}": value for knob, value in choice.preparation.knobs.items()}
    penalty = objective_of(algorithm).kl
    return found | {"kl in the loss": None if penalty is None else penalty.name} | shaping_of(algorithm, filled)


def shaping_of(algorithm, filled):
    if not algorithm.shaping:
        return {}
    (part,) = algorithm.shaping
    overlong = choose(SHAPING, part, "algorithm.shaping[0]", filled)
    lengths = torch.tensor([16384, 18432, 20480])
    penalties = overlong(rewards=torch.zeros(3), lengths=lengths).tolist()
    return {"shaping": part.name} | {
        f"overlong penalty at {length}": penalty for length, penalty in zip(lengths.tolist(), penalties, strict=True)
    }


@pytest.mark.parametrize("preset", STATED)
def test_a_preset_has_the_values_of_its_paper(preset):
    found = in_effect(preset)
    assert {name: found[name] for name in STATED[preset]} == STATED[preset]


@pytest.mark.parametrize("preset", ASYNCHRONOUS)
def test_asynchronous_training_adds_the_correction_of_the_paper(preset):
    found = algorithm_of(preset, "async_training=true").correction
    assert (found.weight, found.level, found.highest, found.reject.name) == ASYNCHRONOUS[preset]


def test_sapo_drops_what_has_become_twice_or_half_as_likely():
    assert algorithm_of("sapo", "async_training=true").correction.reject.knobs == {"low": 0.5, "high": 2.0}


def test_every_preset_stands_in_these_tables():
    assert set(STATED) == set(PRESETS) - {"reinforce"}  # of no paper
    assert set(ASYNCHRONOUS) == set(PRESETS) - {"opo"}
