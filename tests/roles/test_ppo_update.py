"""`ppo_update` on a tiny model: what a step is, and what leaves it alone."""

import copy
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.api.batch import per_token, select, sum_by_sequence, unpack
from tandem.api.failures import BatchError
from tandem.config.algorithm import Component, CorrectionConfig, KLConfig
from tandem.roles.actor import Actor
from tandem.roles.reference import Reference
from tests.roles.batches import PROMPT, moved, rollout_batch, step, tiny_actor, weights_of
from tests.tiny import tiny_model_folder

GROUPS = [[(1.0, 3), (0.0, 5), (1.0, 2)], [(0.0, 4), (0.0, 1)], [(0.5, [2, 3]), (0.0, 4)]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("models"))


def result(folder, batch, **settings):
    """Metrics, weights before and weights after one batch."""
    actor = tiny_actor(folder, **settings)
    before = weights_of(actor)
    return step(actor, batch), before, weights_of(actor)


def on_policy(folder, batch):
    """The batch with the model's own log-probabilities as those of the rollout."""
    batch = copy.copy(batch)
    batch["rollout_logprobs"] = tiny_actor(folder).engine.forward(batch).logprobs
    return batch


def test_a_grpo_step_equals_one_written_by_hand(folder):
    """Loss and gradient norm, from transformers alone: the gradient at ρ = 1 is that of −A·log p, weighted 1/(N·T_i)."""
    batch = rollout_batch(GROUPS)
    metrics, *_ = result(folder, batch)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    spread = torch.tensor([1.0, 0, 1]).std() + 1e-6
    advantages = [
        (1 / 3) / spread,
        (-2 / 3) / spread,
        (1 / 3) / spread,
        0,
        0,
        *[0.25 / (0.5**1.5 + 1e-6)] * 2,
        -0.25 / (0.5**1.5 + 1e-6),
    ]
    lengths = [3, 5, 2, 4, 1, 5, 5, 4]
    surrogate, value = 0.0, 0.0
    for row, advantage, length in zip(unpack(batch), advantages, lengths, strict=True):
        logprobs = model(row["input_ids"][None]).logits[0].log_softmax(-1)[:-1].gather(1, row["input_ids"][1:, None])[:, 0]
        surrogate = surrogate - advantage * logprobs[PROMPT - 1 :].sum() / (7 * length)
        value -= float(advantage) * (len(row["input_ids"]) - PROMPT) / (7 * length)
    surrogate.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    assert metrics["loss"] == pytest.approx(value, abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["groups/without_spread"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    "correction",
    [
        CorrectionConfig(),
        CorrectionConfig("truncate", high=1.05),
        CorrectionConfig("mask", "sequence", low=0.3, high=1.4),
        CorrectionConfig("none", reject=Component("product")),
        CorrectionConfig("mask", low=0.5, high=2.0, reject=Component("geometric")),
        CorrectionConfig("truncate", reject=Component("negative_drift")),
    ],
    ids=lambda c: f"{c.weight}-{c.level}-{c.reject.name}",
)
def test_skipping_the_proximal_pass_changes_nothing(folder, correction):
    batch = on_policy(folder, rollout_batch(GROUPS))
    noise = 0.4 * torch.randn(len(batch["input_ids"]), generator=torch.Generator().manual_seed(1)) * batch["loss_mask"]
    mean = sum_by_sequence(batch, noise) / sum_by_sequence(batch, batch["loss_mask"].float())
    # the first group has a mean of 0, so that no rule drops all of it; the last one drifts, so that each drops some
    drift = torch.where(torch.arange(len(mean)) < 3, -mean, 0.8)
    batch["rollout_logprobs"] = batch["rollout_logprobs"] + noise + per_token(batch, drift)
    skipped, computed = (tiny_actor(folder, max_tokens=20, correction=correction) for _ in range(2))
    before = weights_of(skipped)
    assert skipped.compute_proximal(batch) is batch
    outputs = computed.engine.forward(batch)
    with_proximal = copy.copy(batch)
    with_proximal["proximal_logprobs"] = outputs.logprobs
    mine, theirs = step(skipped, batch), step(computed, with_proximal)
    assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    assert moved(before, weights_of(skipped)) > 0
    assert moved(weights_of(skipped), weights_of(computed)) <= 1e-3 * moved(before, weights_of(skipped))


def test_several_optimizer_steps_compute_the_proximal_pass(folder):
    actor = tiny_actor(folder, mini_batches=2)
    found = actor.compute_proximal(rollout_batch(GROUPS))
    assert {"proximal_logprobs", "entropy"} <= set(found.keys())
    with pytest.raises(BatchError, match=r"no proximal_logprobs.*compute_proximal\(batch\)"):
        actor.ppo_update(actor.compute_advantages(rollout_batch(GROUPS)))


def test_a_step_does_not_depend_on_micro_batches(folder):
    batch = rollout_batch(GROUPS)
    settings = {"correction": CorrectionConfig("truncate", "sequence", high=1.5), "entropy_coefficient": 0.01}
    (whole, before, a), (split, _, b) = (result(folder, batch, max_tokens=m, **settings) for m in (1000, 9))
    assert split == pytest.approx(whole, rel=1e-4, abs=1e-6)
    assert moved(a, b) <= 1e-2 * moved(before, a)


def test_groups_without_spread_leave_the_weights_to_the_bit_and_say_so(folder, caplog):
    actor = tiny_actor(folder)
    step(actor, rollout_batch(GROUPS))  # the optimizer has momentum now
    before = weights_of(actor)
    flat = rollout_batch([[(1.0, 2), (1.0, 3)], [(0.0, 2), (0.0, 1)]], seed=5)
    flat["versions"][flat["versions"] == 0] = 1
    metrics = step(actor, flat)
    assert metrics["groups/without_spread"] == 1
    assert metrics["step_without_signal"] == 1
    assert metrics["grad_norm"] == 0
    assert "this step changes nothing" in caplog.text
    after = weights_of(actor)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_with_an_entropy_bonus_a_step_without_spread_is_taken(folder):
    metrics, before, after = result(folder, rollout_batch([[(1.0, 2), (1.0, 3)]]), entropy_coefficient=0.1)
    assert metrics["step_without_signal"] == 0
    assert moved(before, after) > 0
    assert metrics["loss"] == pytest.approx(-0.1 * metrics["entropy"], rel=0.2)


def test_an_entropy_bonus_raises_the_entropy(folder):
    actor, batch = tiny_actor(folder, entropy_coefficient=1.0), rollout_batch([[(1.0, 9), (1.0, 9)]])
    before = step(actor, batch)["entropy"]
    batch["versions"][batch["versions"] == 0] = 1
    assert step(actor, batch)["entropy"] > before


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum"])
def test_dropped_tokens_leave_the_denominators_of_the_others(folder, aggregation):
    batch = rollout_batch([[(1.0, 4), (0.0, 4)]])
    actor = tiny_actor(folder, aggregation=aggregation)
    whole = next(iter(actor.weighted(actor.compute_advantages(batch))))["loss_weights"]
    batch["expired"][PROMPT : PROMPT + 2] = True
    part = next(iter(actor.weighted(actor.compute_advantages(batch))))["loss_weights"]
    assert part[PROMPT : PROMPT + 2].tolist() == [0, 0]
    assert torch.equal(part[PROMPT + 2 :], whole[PROMPT + 2 :])


def test_a_sample_outside_the_loss_is_as_if_it_were_not_there(folder):
    groups = [[(1.0, 3), (0.0, 2), (7.0, 5)]]
    batch = rollout_batch(groups, in_loss=[True, True, False], in_statistics=[True, True, False])
    alone = select(batch, [0, 1])
    (metrics, before, a), (expected, _, b) = result(folder, batch), result(folder, alone)
    assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-7)
    assert moved(a, b) <= 1e-3 * moved(before, b)


def test_a_batch_wholly_outside_the_loss_changes_nothing(folder):
    batch = rollout_batch([[(1.0, 3), (0.0, 2)]], in_loss=[False, False])
    metrics, before, after = result(folder, batch)
    assert metrics["step_without_signal"] == 1
    assert moved(before, after) == 0


def test_each_mini_batch_is_a_step_with_denominators_of_its_own(folder):
    batch = rollout_batch(GROUPS)
    actor = tiny_actor(folder, mini_batches=3, epochs=2)
    parts = list(actor.weighted(actor.compute_advantages(batch)))
    assert [float(part["loss_weights"].sum()) for part in parts] == pytest.approx([1] * 6)
    metrics = step(actor, batch)
    assert metrics["clip_fraction"] > 0  # the later steps have moved away
    assert metrics["ratio"] != 1


def test_a_sample_in_two_trajectories_has_the_weight_of_one(folder):
    batch = rollout_batch([[(1.0, [2, 2]), (0.0, 4)]])
    actor = tiny_actor(folder)
    weights = next(iter(actor.weighted(actor.compute_advantages(batch))))["loss_weights"]
    assert weights[weights > 0].tolist() == [0.125] * 8


def test_truncated_correction_scales_the_loss(folder):
    batch = on_policy(folder, rollout_batch([[(1.0, 2), (0.0, 2)]]))
    batch["rollout_logprobs"] = batch["rollout_logprobs"] - math.log(1.5)  # every weight is 1.5
    plain, *_ = result(folder, batch)
    weighted, *_ = result(folder, batch, correction=CorrectionConfig("truncate", high=2.0))
    capped, *_ = result(folder, batch, correction=CorrectionConfig("truncate", high=1.2))
    dropped, before, after = result(folder, batch, correction=CorrectionConfig("mask", low=0.0, high=1.2))
    assert weighted["grad_norm"] == pytest.approx(1.5 * plain["grad_norm"], rel=1e-4)
    assert capped["grad_norm"] == pytest.approx(1.2 * plain["grad_norm"], rel=1e-4)
    assert moved(before, after) == 0
    assert dropped["correction/dropped"] == 1
    assert capped["correction/mean"] == pytest.approx(1.2, rel=1e-5)
    assert capped["correction/max"] == pytest.approx(1.5, rel=1e-4)
    assert capped["correction/ess"] == pytest.approx(1, rel=1e-4)
    assert plain["kl/rollout_proximal"] == pytest.approx(1.5 - 1 - math.log(1.5), rel=1e-3)


def test_metrics_count_only_tokens_that_carry_weight(folder):
    batch = on_policy(folder, rollout_batch([[(1.0, 4), (0.0, 4)]]))
    batch["rollout_logprobs"][PROMPT] -= 3.0
    expired = copy.copy(batch)
    expired["expired"] = batch["expired"].clone()
    expired["expired"][PROMPT] = True
    counted, *_ = result(folder, batch)
    left_out, *_ = result(folder, expired)
    assert counted["gap/mean"] == pytest.approx(3 / 8, rel=1e-3)
    assert counted["gap/max"] == pytest.approx(3, rel=1e-3)
    assert left_out["gap/max"] < 1e-4
    assert left_out["kl/rollout_proximal"] < 1e-6


def test_the_gap_is_measured_on_tokens_of_the_current_version(folder):
    batch = on_policy(folder, rollout_batch([[(1.0, 2), (0.0, 2)]]))
    batch["versions"][PROMPT : PROMPT + 2] = 1
    batch["rollout_logprobs"][PROMPT + 2 :] -= 1.0  # stale, so not part of the gap
    actor = tiny_actor(folder, actor={"version": 1, "max_head_offpolicyness": 1})
    assert step(actor, batch)["gap/max"] < 1e-4


def test_a_token_beyond_the_staleness_bound_is_refused_unless_it_is_marked(folder):
    actor = tiny_actor(folder, actor={"version": 3, "max_head_offpolicyness": 2})
    batch = rollout_batch([[(1.0, 2), (0.0, 2)]])
    before = weights_of(actor)
    with pytest.raises(BatchError, match="3 versions old, and max_head_offpolicyness is 2"):
        step(actor, batch)
    assert moved(before, weights_of(actor)) == 0
    batch["expired"] = batch["loss_mask"].clone()
    assert step(actor, batch)["step_without_signal"] == 1


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_plus"])
def test_kl_in_the_loss_pulls_towards_the_reference(folder, tmp_path, estimator):
    other = tiny_actor(tiny_model_folder(tmp_path, seed=1)).engine
    reference = Reference(other)
    actor = tiny_actor(folder, kl=KLConfig(0.1, "loss", estimator), actor={"reference": reference}, lr=3e-3)
    batch = reference.compute_logprobs(rollout_batch([[(0.0, 9), (0.0, 9)]]))
    before = step(actor, batch)
    batch["versions"][batch["versions"] == 0] = 1
    after = step(actor, batch)
    assert before["kl/reference"] > 0.01
    assert after["loss"] < before["loss"]
    assert before["step_without_signal"] == 0


def test_kl_in_the_loss_names_the_stage_that_was_left_out(folder):
    actor = tiny_actor(folder)
    with_kl = Actor(
        actor.engine,
        tiny_actor(folder, kl=KLConfig(0.1), actor={"reference": Reference(None)}).algorithm,
        actor.config,
        reference=Reference(None),
    )
    with pytest.raises(BatchError, match=r"no reference_logprobs.*reference\.compute_logprobs\(batch\)"):
        step(with_kl, rollout_batch(GROUPS))


def test_the_loss_that_the_docs_show_can_be_used(folder, tmp_path):
    text = (Path(__file__).parents[2] / "docs/algorithms.md").read_text()
    (tmp_path / "capped.py").write_text(text.split("```python\n")[1].split("```")[0])
    own = Component(f"{tmp_path}/capped.py:capped", {"most": 3})
    metrics, before, after = result(folder, rollout_batch(GROUPS), policy_loss=own)
    expected, *_ = result(folder, rollout_batch(GROUPS))
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert moved(before, after) > 0


def test_it_learns_what_is_rewarded(folder):
    """Twenty steps on one group: the rewarded answer becomes likely, the other one does not."""
    actor = tiny_actor(folder, lr=1e-3, policy_loss=Component("ppo_clip", {"clip_high": 0.28}), mini_batches=1, epochs=2)
    batch = rollout_batch([[(1.0, 4), (0.0, 4)]])
    before = actor.engine.forward(batch).logprobs
    for version in range(20):
        batch["versions"] = torch.where(batch["loss_mask"], version, -1)
        step(actor, batch)
    gain = (actor.engine.forward(batch).logprobs - before)[batch["loss_mask"]]
    assert float(gain[:4].sum()) > 1 > float(gain[4:].sum())


def test_a_resting_actor_counts_a_version_and_leaves_its_weights(folder):
    rests = iter([True, False])
    actor = tiny_actor(folder, actor={"resting": lambda: next(rests), "max_head_offpolicyness": 1})
    batch = rollout_batch([[(1.0, 2), (0.0, 3)], [(1.0, 1), (1.0, 1)]])
    before, ready = weights_of(actor), actor.compute_advantages(batch)
    assert actor.ppo_update(ready) == {"groups/without_spread": 0.5, "actor/rests": 1.0}
    assert actor.version == 1 and moved(before, weights_of(actor)) == 0
    assert actor.ppo_update(ready)["actor/rests"] == 0.0 and moved(before, weights_of(actor)) > 0
