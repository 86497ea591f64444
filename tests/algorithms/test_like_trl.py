"""The same loss and gradient as TRL's own code on the same tensors; scripts/trl_fixtures.py made the numbers."""

import json
from pathlib import Path

import pytest
import torch

from tandem.algorithms.correction import negative_drift
from tandem.algorithms.kl import k3, log_ratio
from tandem.algorithms.losses import constant, sequence_mean, token_mean
from tandem.algorithms.policy_losses import cispo, gspo, luspo, ppo_clip, sapo, vespo

DATA = json.loads((Path(__file__).parents[1] / "data_files/trl/grpo.json").read_text())
MASK = torch.tensor(DATA["inputs"]["mask"], dtype=torch.bool)
SIZES = MASK.sum(1)
SAMPLE = torch.repeat_interleave(torch.arange(len(SIZES)), SIZES)
ALL = torch.ones(len(SAMPLE), dtype=torch.bool)
BETA = 0.1


def packed(name):
    """``[B, S]`` → ``[T]``."""
    return torch.tensor(DATA["inputs"][name])[MASK]


ADVANTAGES = torch.tensor(DATA["inputs"]["advantages"])[SAMPLE]
PROXIMAL, ROLLOUT, REFERENCE = packed("proximal"), packed("rollout"), packed("reference")
TOKEN = {"proximal": PROXIMAL, "advantages": ADVANTAGES, "mask": ALL}
SEQUENCE = TOKEN | {"sequence": SAMPLE}


def with_k3(policy, ratio=None):
    losses, _ = ppo_clip(policy, **TOKEN)
    return losses + BETA * k3(policy, REFERENCE, ALL, ratio), {}


def without_drift(policy):
    losses, _ = ppo_clip(policy, **TOKEN)
    return losses * negative_drift(policy, ROLLOUT, ADVANTAGES, ALL, SAMPLE, threshold=0.05), {}


LOSSES = {
    "grpo": lambda policy: ppo_clip(policy, **TOKEN),
    "bnpo": lambda policy: ppo_clip(policy, **TOKEN),
    "dapo": lambda policy: ppo_clip(policy, **TOKEN, clip_high=0.28),
    "dr_grpo": lambda policy: ppo_clip(policy, **TOKEN),
    "two_sided": lambda policy: ppo_clip(policy, **TOKEN, two_sided=1.5),
    "cispo": lambda policy: cispo(policy, **TOKEN, clip_high=0.5),  # TRL's bound is the ratio itself, 1.5
    "gspo": lambda policy: gspo(policy, **SEQUENCE, clip_low=0.03, clip_high=0.04),
    "luspo": lambda policy: luspo(policy, **SEQUENCE, sample_lengths=SIZES[SAMPLE], clip_low=0.03, clip_high=0.04),
    "sapo": lambda policy: sapo(policy, **TOKEN),
    "vespo": lambda policy: vespo(policy, PROXIMAL, ADVANTAGES, ALL, SAMPLE),  # TRL's sampler, without vLLM
    "k3": with_k3,
    "k3_times_ratio": lambda policy: with_k3(policy, log_ratio(policy, PROXIMAL, ALL).exp()),
    "negative_drift": without_drift,
}
BY_TOKEN = ("bnpo", "dapo", "cispo", "vespo")


def aggregation(name):
    if name in BY_TOKEN:
        return token_mean(ALL)
    return constant(ALL, SAMPLE, max_tokens=DATA["max_tokens"]) if name == "dr_grpo" else sequence_mean(ALL, SAMPLE)


def test_every_case_is_compared():
    assert set(LOSSES) == set(DATA["cases"])


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_are_those_of_trl(name):
    policy = packed("policy").requires_grad_()
    losses, _ = LOSSES[name](policy)
    loss = (losses * aggregation(name)).sum()
    slope = torch.autograd.grad(loss, policy)[0]
    expected = DATA["cases"][name]
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-6)
    assert torch.allclose(slope, torch.tensor(expected["gradient"])[MASK], atol=1e-6, rtol=0)
    assert slope.abs().max() > 1e-3
