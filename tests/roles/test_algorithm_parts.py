"""What the actor adds to the formulas: tensors by name, choices over the whole batch, the KL controller, and metrics."""

import math

import pytest
import torch

from tandem.api.batch import num_sequences, pack, select, unpack
from tandem.api.engines import Outputs
from tandem.api.failures import BatchError, UserCodeFailed
from tandem.config.algorithm import Component, CorrectionConfig, KLConfig
from tandem.config.errors import ConfigError
from tandem.config.train_engine import ActorConfig
from tandem.roles.actor import Actor
from tandem.roles.parts import objective_of
from tandem.roles.reference import Reference
from tests.roles.batches import PROMPT, algorithm_config, moved, rollout_batch, step, tiny_actor, weights_of
from tests.roles.presets import full_batch, preset_actor
from tests.tiny import tiny_model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("models"), num_hidden_layers=1)


def actor(**algorithm):
    """Advantages need no engine."""
    return Actor(None, algorithm_config(**algorithm), ActorConfig(), reference=Reference(None), max_new_tokens=10)


def completions(batch, field):
    return [row[field][PROMPT:].tolist() for row in unpack(batch)]


def on_policy(folder, groups, **columns):
    batch = rollout_batch(groups, **columns)
    batch["rollout_logprobs"] = tiny_actor(folder).engine.forward(batch).logprobs
    return batch


def test_gae_adds_advantages_and_returns_from_values_and_the_reason_of_the_end():
    batch = rollout_batch([[(1.0, 2), (2.0, 1)]], stop_reason=[0, 1], bootstrap_value=[9.0, 3.0])
    batch["values"] = torch.full((9,), 0.5)
    found = actor(advantage=Component("gae", {"whitened": False})).compute_advantages(batch)
    assert completions(found, "advantages") == [[0.5, 0.5], [4.5]]
    assert completions(found, "returns") == [[1, 1], [5]]
    assert not found["advantages"][~found["loss_mask"]].any()


def test_gae_without_a_critic_names_the_stage():
    with pytest.raises(BatchError, match=r"no values, which algorithm.advantage=gae needs; call critic.compute_values"):
        actor(advantage="gae").compute_advantages(rollout_batch([[(1.0, 2)]]))


def test_remax_reads_the_greedy_sample_and_names_a_group_without_one():
    columns = {"in_loss": [True, False], "in_statistics": [True, False], "greedy": [False, True]}
    batch = rollout_batch([[(1.0, 2), (0.25, 3)]], **columns)
    assert completions(actor(advantage="remax").compute_advantages(batch), "advantages") == [[0.75] * 2, [0] * 3]
    with pytest.raises(BatchError, match=r"algorithm.advantage=remax: group 100 has no greedy sample"):
        actor(advantage="remax").compute_advantages(rollout_batch([[(1.0, 2)]]))


def test_gdpo_reads_the_named_rewards():
    batch = rollout_batch([[(0.0, 1), (0.0, 1)]], **{"rewards/a": [1.0, 0.0], "rewards/b": [0.0, 1.0]})
    weighted = actor(advantage=Component("gdpo", {"weights": "b=3"})).compute_advantages(batch)
    assert completions(weighted, "advantages")[0][0] == pytest.approx(-math.sqrt(0.5), rel=1e-4)
    equal = actor(advantage="gdpo").compute_advantages(batch)
    assert completions(equal, "advantages") == [[0], [0]]
    with pytest.raises(BatchError, match="gdpo needs named rewards"):
        actor(advantage="gdpo").compute_advantages(rollout_batch([[(1.0, 2)]]))


def test_luspo_counts_all_trajectories_of_a_sample(folder):
    """Ratio 1: the loss is −A·T/(N·T) a token, so each sample's loss is −A·T/N whatever its trajectories."""
    batch = on_policy(folder, [[(1.0, [2, 2]), (0.0, 4)]])
    both = step(preset_actor(folder, "luspo"), batch)
    other = on_policy(folder, [[(1.0, [2, 2]), (0.0, 2)]])
    uneven = step(preset_actor(folder, "luspo"), other)
    unit = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert both["loss"] == pytest.approx(0, abs=1e-5)
    assert uneven["loss"] == pytest.approx(-unit * (4 - 2) / 2, rel=1e-4)


@pytest.mark.parametrize("preset", ["m2po", "vespo", "dppo"])
def test_losses_that_look_at_the_sampler_feel_its_log_probabilities(folder, preset):
    batch, near = (full_batch(folder, drift=drift) for drift in (0.4, 0.0))
    close = ["algorithm.policy_loss.threshold=1e-5"] if preset == "dppo" else []  # probabilities are small here
    runs = [preset_actor(folder, preset, *close) for _ in range(2)]
    metrics = [step(one, b) for one, b in zip(runs, (batch, near), strict=True)]
    assert metrics[0]["grad_norm"] != pytest.approx(metrics[1]["grad_norm"], rel=1e-3)
    if preset != "vespo":
        assert metrics[0][f"dropped/{preset}"] > 0
        assert metrics[1][f"dropped/{preset}"] == 0


def test_what_is_prepared_leaves_out_expired_tokens_and_samples_outside_the_loss(folder):
    batch = full_batch(folder, drift=0.6)
    batch["expired"] = torch.zeros_like(batch["loss_mask"])
    one = preset_actor(folder, "m2po")
    whole = one.compute_advantages(one.compute_proximal(batch))
    taken = whole["prepared"] == 0
    assert bool(taken.any())
    assert not bool((taken & ~batch["loss_mask"]).any())
    batch["expired"] = taken
    assert not bool((one.compute_advantages(one.compute_proximal(batch))["prepared"][taken] == 0).any())


def test_the_token_filter_keeps_the_most_uncertain_fifth_and_counts_the_others(folder):
    batch = on_policy(folder, [[(1.0, 4), (0.0, 7)]])
    one = tiny_actor(folder, token_filter="top_entropy")
    ready = one.compute_advantages(one.compute_proximal(batch))
    kept = batch["loss_mask"] & ~ready["dropped"]
    assert int(kept.sum()) == 3  # a fifth of 11, rounded up
    assert ready["entropy"][kept].min() >= ready["entropy"][batch["loss_mask"] & ~kept].max()
    assert one.ppo_update(ready)["dropped/token_filter"] == pytest.approx(8 / 11)


def test_the_share_dropped_by_shaping_and_by_a_rejection_rule_is_reported(folder):
    batch = on_policy(folder, [[(1.0, 3), (0.0, 5)]], stop_reason=[0, 1])
    found = step(tiny_actor(folder, shaping=(Component("mask_truncated"),)), batch)
    assert found["dropped/shaping"] == pytest.approx(5 / 8)
    batch = on_policy(folder, [[(1.0, 3), (0.0, 5)]])
    batch["rollout_logprobs"][: PROMPT + 3] += 1.0  # the first sample's product is e^-3
    correction = CorrectionConfig("none", reject=Component("product", {"low": 0.2}))
    found = step(tiny_actor(folder, correction=correction), batch)
    assert found["dropped/product"] == found["correction/dropped"] == pytest.approx(3 / 8)


def test_effective_sample_size_mean_and_largest_weight_are_known(folder):
    """Weights 2, 1, 1, 1 (the cap) of ratios 4, 1, 1, 1: mean 5/4, ESS 25/28."""
    batch = on_policy(folder, [[(1.0, 2), (0.0, 2)]])
    batch["rollout_logprobs"][PROMPT] -= math.log(4)
    capped = step(tiny_actor(folder, correction=CorrectionConfig("truncate", high=2.0)), batch)
    assert capped["correction/mean"] == pytest.approx(5 / 4, rel=1e-4)
    assert capped["correction/max"] == pytest.approx(4, rel=1e-4)
    assert capped["correction/ess"] == pytest.approx(25 / 28, rel=1e-4)
    assert capped["kl/rollout_proximal"] == pytest.approx((4 - 1 - math.log(4)) / 4, rel=1e-3)
    none = step(tiny_actor(folder), batch)  # also said where nothing is corrected
    assert none["correction/mean"] == pytest.approx(7 / 4, rel=1e-4)
    assert none["correction/ess"] == pytest.approx(49 / (4 * 19), rel=1e-4)


def test_the_kl_coefficient_follows_the_kl_of_a_sample(folder):
    """d = 1/2 at 4 + 2 tokens of two samples: 1.5 nats each, half as much again as wished, so + 20 % · 2/10."""
    batch = on_policy(folder, [[(1.0, 4), (0.0, 2)]])
    batch["reference_logprobs"] = batch["rollout_logprobs"] - 0.5
    kl = KLConfig(0.1, target=1.0, horizon=10.0)
    one = tiny_actor(folder, kl=kl, actor={"reference": Reference(None)})
    assert one.needs_proximal
    metrics = step(one, batch)
    assert metrics["kl/sample"] == pytest.approx(1.5, rel=1e-4)
    assert metrics["kl/coefficient"] == 0.1
    assert one.kl_coefficient == pytest.approx(0.1 * (1 + 0.2 * 2 / 10))


def test_the_loss_uses_the_coefficient_that_has_become(folder):
    batch = on_policy(folder, [[(1.0, 4), (0.0, 2)]])
    batch["reference_logprobs"] = batch["rollout_logprobs"] - 0.5
    found = []
    for coefficient in (0.1, 0.2, 0.4):
        one = tiny_actor(folder, kl=KLConfig(0.1, target=1.0), actor={"reference": Reference(None)})
        one.kl_coefficient = coefficient
        found.append(step(one, batch)["loss"])
    k3 = math.exp(-0.5) - 0.5
    assert found[1] - found[0] == pytest.approx(0.1 * k3, rel=1e-3)
    assert found[2] - found[1] == pytest.approx(0.2 * k3, rel=1e-3)


@pytest.mark.parametrize(("importance", "expected"), [(True, 2 * 0.5), (False, 0.5)])
def test_the_importance_ratio_of_the_kl_is_that_to_the_sampler(importance, expected):
    """One token: the policy is twice as likely as the sampler, four times as likely as the proximal one."""
    view = pack(
        [
            {
                "input_ids": torch.tensor([5, 6]),
                "loss_mask": torch.tensor([False, True]),
                "rollout_logprobs": torch.tensor([0.0, -1.0 - math.log(2)]),
                "proximal_logprobs": torch.tensor([0.0, -1.0 - math.log(4)]),
                "reference_logprobs": torch.tensor([0.0, -1.5]),
                "advantages": torch.zeros(2),
                "dropped": torch.zeros(2, dtype=torch.bool),
            }
        ]
    )
    objective = objective_of(algorithm_config(kl=KLConfig(1.0, estimator="k1", importance=importance)))
    losses, _ = objective(Outputs(torch.tensor([0.0, -1.0]), entropy=torch.zeros(2)), view)
    assert losses.tolist() == pytest.approx([0.0, expected])


def test_kl_in_the_reward_uses_the_coefficient_that_has_become(folder):
    batch = on_policy(folder, [[(1.0, 4), (0.0, 2)]])
    batch["proximal_logprobs"] = batch["rollout_logprobs"]
    batch["reference_logprobs"] = batch["rollout_logprobs"] - 0.5
    one = actor(advantage="dr_grpo", kl=KLConfig(0.1, "reward", target=1.0))
    one.kl_coefficient = 0.2  # rewards 1 − .2·2 and 0 − .2·1
    assert completions(one.compute_advantages(batch), "advantages")[0][0] == pytest.approx(0.4)


def test_the_noise_of_a_choice_follows_from_ids_and_not_from_the_place(folder):
    """Which random tokens clip_cov takes."""
    batch = full_batch(folder)
    component = "algorithm.policy_loss={name: clip_cov, share: 0.2, low: -9, high: 9}"
    one = preset_actor(folder, "grpo", component)
    order = torch.arange(num_sequences(batch)).flip(0)
    ready, turned = (one.compute_advantages(one.compute_proximal(b)) for b in (batch, select(batch, order)))
    assert torch.equal(select(ready, order)["prepared"], turned["prepared"])
    later = preset_actor(folder, "grpo", component, version=1)
    assert not torch.equal(later.compute_advantages(later.compute_proximal(batch))["prepared"], ready["prepared"])


OWN = """
import torch
from tandem.algorithms.registry import prepared_by

def likely(proximal, mask, *, above=-4.0):
    return proximal > above

@prepared_by(likely)
def only_likely(policy, advantages, mask, prepared, *, strength=1.0):
    losses = -strength * advantages * policy * prepared
    return losses.masked_fill(~mask, 0.0), {"likely": prepared}

def needs_what_nobody_makes(policy, prepared): ...

def centred(rewards, group_id, in_statistics, lengths, *, per_token=0.1):
    return rewards - rewards.mean() - per_token * (lengths - lengths.float().mean())

def tokens_too(token_rewards, values, mask):
    return token_rewards - values, values + 1
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py"


def test_a_loss_of_ones_own_may_prepare_something_over_the_whole_batch(folder, own):
    batch = full_batch(folder)
    runs = [
        preset_actor(folder, "grpo", f"algorithm.policy_loss={own}:only_likely", *more)
        for more in ((), ("algorithm.policy_loss.above=-99", "algorithm.policy_loss.strength=2"))
    ]
    before = weights_of(runs[0])
    found = [step(one, batch) for one in runs]
    assert 0 < found[0]["likely"] < 1 == found[1]["likely"]
    assert moved(before, weights_of(runs[0])) > 0


def test_a_loss_that_asks_for_what_nobody_prepares_is_refused(own):
    refusal = "asks for `prepared`, and has no preparation; decorate the function with prepared_by"
    with pytest.raises(ConfigError, match=refusal):
        actor(policy_loss=f"{own}:needs_what_nobody_makes")


def test_an_advantage_of_ones_own_has_knobs_and_may_be_of_tokens(own):
    batch = rollout_batch([[(1.0, 1), (0.0, 3)]])
    found = actor(advantage=Component(f"{own}:centred", {"per_token": 0.25})).compute_advantages(batch)
    assert completions(found, "advantages") == [[0.75], [-0.75] * 3]
    batch["values"] = torch.full((10,), 0.25)
    found = actor(advantage=f"{own}:tokens_too").compute_advantages(batch)
    assert completions(found, "advantages") == [[0.75], [-0.25] * 3]
    assert completions(found, "returns") == [[1.25], [1.25] * 3]


def test_a_loss_of_ones_own_keeps_terms_without_an_advantage(folder, tmp_path):
    (tmp_path / "pull.py").write_text("def pull(policy, mask):\n    return -policy.masked_fill(~mask, 0.0), {}\n")
    one = tiny_actor(folder, policy_loss=f"{tmp_path}/pull.py:pull")
    before = weights_of(one)
    assert step(one, rollout_batch([[(1.0, 2), (1.0, 3)]]))["step_without_signal"] == 0
    assert moved(before, weights_of(one)) > 0


def test_a_users_loss_that_is_called_proportional_spares_a_step_without_advantages(folder, tmp_path):
    (tmp_path / "gain.py").write_text(
        "from tandem.algorithms.registry import POLICY_LOSSES\n\n\n"
        "@POLICY_LOSSES.describe(proportional=True)\n"
        "def gain(policy, advantages, mask):\n    return -advantages * policy.masked_fill(~mask, 0.0), {}\n"
    )
    one = tiny_actor(folder, policy_loss=f"{tmp_path}/gain.py:gain")
    before = weights_of(one)
    assert step(one, rollout_batch([[(1.0, 2), (1.0, 3)]]))["step_without_signal"] == 1
    assert moved(before, weights_of(one)) == 0


@pytest.mark.parametrize(
    "returned", ["policy", "(policy, policy)", "(policy, {}, {})", "(policy[1:], {})", "(policy, {'x': 1.0})"]
)
def test_a_loss_of_ones_own_must_return_losses_and_metrics(folder, tmp_path, returned):
    (tmp_path / "odd.py").write_text(f"def odd(policy, mask):\n    return {returned}\n")
    with pytest.raises(UserCodeFailed, match=r"must return \(losses, \{name: metric\}\), tensors of shape \[\d+\]"):
        step(tiny_actor(folder, policy_loss=f"{tmp_path}/odd.py:odd"), rollout_batch([[(1.0, 2), (0.0, 3)]]))
