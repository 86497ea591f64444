"""Every preset by name through the trainer, and a loss and an advantage of one's own."""

import math

import pytest

from tandem.config.algorithm import PRESETS
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.trainers.loop import train

OWN = """
def parts(completion_ids):
    return {"even": float(sum(t % 2 == 0 for t in completion_ids)), "small": float(sum(t < 99 for t in completion_ids))}

def loss(policy, advantages, mask, *, strength=1.0):
    return (-strength * advantages * policy).masked_fill(~mask, 0.0), {"policy_of_mine": policy.detach()}

def advantage(rewards, lengths, *, offset=0.0):
    return rewards - rewards.mean() + offset * lengths
"""
SMALL = ["rollout.batch_size=2", "gconfig.n_samples=4", "gconfig.max_new_tokens=6", "total_train_steps=1"]


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py"


def run(overrides, *more):
    """Trains; the last of two equal keys counts."""
    keys = {item.partition("=")[0]: item for item in [*overrides, *SMALL, *more]}
    return train(load_config(TrainConfig, None, list(keys.values()))).metrics


FAST = ("luspo", "m2po", "gdpo", "ttrl")
"""Those whose step has a part of its own that no other test of the trainer takes; the others are slow-marked."""


@pytest.mark.parametrize("preset", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in PRESETS])
def test_each_preset_takes_a_step(overrides, own, preset):
    more = [f"algorithm={preset}", f"reward={own}:parts", "actor.optimizer.lr=0.01"]
    if preset == "ttrl":
        more += ["algorithm.update_samples=2", "reward=math"]
        overrides = [item for item in overrides if not item.startswith("reward=")]
    metrics = run(overrides, *more)
    assert math.isfinite(metrics["loss"])
    if preset != "ttrl":  # a random model's answers hold no number to vote for
        assert metrics["grad_norm"] > 0


def test_a_loss_and_an_advantage_of_ones_own_are_used_with_their_knobs(overrides, own):
    mine = [f"algorithm.policy_loss={own}:loss", f"algorithm.advantage={own}:advantage"]
    plain = run(overrides, *mine, "deterministic=true")
    strong = run(
        [item.replace("/trial", "/other") for item in overrides],
        *mine,
        "deterministic=true",
        "trial_name=strong",
        "algorithm.policy_loss.strength=2",
    )
    other = run(overrides, *mine, "deterministic=true", "trial_name=other", "algorithm.advantage.offset=0.5")
    assert strong["grad_norm"] == pytest.approx(2 * plain["grad_norm"], rel=1e-4)
    assert plain["policy_of_mine"] < 0
    assert other["grad_norm"] != pytest.approx(plain["grad_norm"], rel=1e-2)
