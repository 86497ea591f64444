"""The critic: values before tokens, what follows a cut, and steps towards the returns."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.api.batch import pack, trained_tokens, with_fields
from tandem.api.failures import BatchError
from tandem.api.requests import StopReason
from tandem.config.algorithm import Component
from tandem.config.errors import ConfigError
from tandem.config.train_engine import ActorConfig, AdamWConfig, CriticConfig, OptimizerConfig, critic_engine
from tandem.engines.train.engine import SpreadEngine
from tandem.roles.actor import Actor
from tandem.roles.critic import Critic, SharedCritic
from tests.ranks import alone_and_on_two
from tests.roles.batches import algorithm_config, moved, rollout_batch, tiny_actor, weights_of
from tests.tiny import tiny_model_folder

GROUPS = [[(1.0, 3), (0.0, 5), (1.0, 2)], [(0.0, 4), (0.0, 1)], [(0.5, [2, 3]), (0.0, 4)]]
STOP, LENGTH = int(StopReason.STOP), int(StopReason.LENGTH)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("models"), "smollm")


def critic_on(folder, *, max_tokens=1000, mini_batches=1, ranks=1, lr=1e-2, learnt=2, updates_so_far=0, **config) -> Critic:
    """``learnt``: steps towards arbitrary returns that it begins with, so that its values are not 0."""
    actor = ActorConfig(
        path=str(folder),
        dtype="float32",
        backend=f"fsdp:d{ranks}",
        max_tokens_per_micro_batch=max_tokens,
        mini_batches=mini_batches,
    )
    own = CriticConfig(optimizer=AdamWConfig(lr=lr, max_grad_norm=None), **config)
    engine = SpreadEngine(critic_engine(own, actor), total_steps=100, head="scalar")
    critic = Critic(engine, own, actor, updates_so_far=updates_so_far)
    for seed in range(learnt):
        critic.engine.train_batch(batch_with_returns(seed=seed, loss_weights=True), critic.loss)
    return critic


def batch_with_returns(seed=0, loss_weights=False, **columns):
    """A batch with everything that `update` reads; values and returns at random."""
    batch = rollout_batch(GROUPS, seed=seed, **columns)
    mask = trained_tokens(batch)
    generator = torch.Generator().manual_seed(seed)
    fields = {
        "values": torch.randn(len(mask), generator=generator) * mask,
        "returns": 2 + torch.randn(len(mask), generator=generator) * mask,
        "dropped": torch.zeros_like(mask),
    }
    if loss_weights:
        fields["loss_weights"] = mask / mask.sum()
    return with_fields(batch, **fields)


def test_a_value_stands_before_its_token(folder):
    critic, batch = critic_on(folder), rollout_batch(GROUPS)
    found = critic.compute_values(batch)
    scores = critic.engine.forward(batch).scores
    bounds = batch["cu_seqlens"].tolist()
    for start, end in zip(bounds, bounds[1:], strict=False):
        assert found["values"][start] == 0
        assert torch.equal(found["values"][start + 1 : end], scores[start : end - 1])
    assert scores.std() > 0.01
    assert "values" not in batch.keys()


def test_what_follows_the_last_token_counts_where_the_stop_reason_says_the_cut(folder):
    critic = critic_on(folder)
    reasons = [STOP, LENGTH, STOP, LENGTH, int(StopReason.CANCELLED), STOP, LENGTH, STOP]
    batch = rollout_batch(GROUPS, stop_reason=reasons)
    found = critic.compute_values(batch)["bootstrap_value"]
    last = critic.engine.forward(batch).scores[batch["cu_seqlens"][1:] - 1]
    assert torch.equal(found, torch.where(torch.tensor(reasons) == LENGTH, last, 0.0))
    assert last.abs().min() > 0


@pytest.mark.parametrize(("reason", "end"), [(STOP, 0.0), (LENGTH, 0.8)])
def test_advantages_run_over_trained_tokens_and_skip_those_of_tools(folder, reason, end):
    """γ = 0.5, λ = 0.5; prompt of 3, then trained, tool, tool, trained, trained, tool: tools neither decay nor count."""
    batch = rollout_batch([[(1.3, 6)]], stop_reason=[reason])
    batch["loss_mask"] = torch.tensor([0, 0, 0, 1, 0, 0, 1, 1, 0]).bool()
    values = torch.tensor([9.0, 9, 9, 0.2, 9, 9, 0.4, 0.6, 9])  # 9 where nothing may be read
    rewards = torch.tensor([0.0, 0, 0, 0, 0, 0.3, 0, 0, 0])  # the tool's, credited to the trained token before it
    batch = with_fields(batch, values=values, bootstrap_value=torch.tensor([0.8]), token_rewards=rewards)
    settings = {"gamma": 0.5, "lam": 0.5, "whitened": False}
    found = tiny_actor(folder, advantage=Component("gae", settings)).compute_advantages(batch)

    third = 1.0 + 0.5 * end - 0.6
    second = 0.0 + 0.5 * 0.6 - 0.4 + 0.25 * third
    first = 0.3 + 0.5 * 0.4 - 0.2 + 0.25 * second
    expected = torch.tensor([0, 0, 0, first, 0, 0, second, third, 0])
    torch.testing.assert_close(found["advantages"], expected)
    torch.testing.assert_close(found["returns"], (expected + values) * batch["loss_mask"])


def test_advantages_without_values_name_the_stage_that_makes_them(folder):
    with pytest.raises(BatchError, match=r"call critic\.compute_values\(batch\) before"):
        tiny_actor(folder, advantage="gae").compute_advantages(rollout_batch(GROUPS))


@pytest.mark.parametrize("clip", [0.2, None])
def test_the_loss_is_the_larger_of_plain_and_clipped_over_trained_tokens(folder, clip):
    critic, batch = critic_on(folder, value_clip=clip), batch_with_returns()
    mask = trained_tokens(batch)
    now, before, returns = (x[mask] for x in (critic.compute_values(batch)["values"], batch["values"], batch["returns"]))
    plain = (now - returns).square()
    near = (before + (now - before).clamp(-0.2, 0.2) - returns).square()
    expected = plain if clip is None else torch.maximum(plain, near)

    metrics = critic.update(batch)
    assert metrics["value/loss"] == pytest.approx(float(expected.mean()) / 2, rel=1e-5)
    assert metrics["value/mean"] == pytest.approx(float(before.mean()), abs=1e-6)
    assert metrics["returns/mean"] == pytest.approx(float(returns.mean()), rel=1e-5)
    explained = 1 - float((returns - before).var(correction=0) / returns.var(correction=0))
    assert metrics["value/explained_variance"] == pytest.approx(explained, rel=1e-4)
    if clip is None:
        assert "value/clip_fraction" not in metrics
    else:
        assert metrics["value/clip_fraction"] == pytest.approx(float((near > plain).float().mean()))
        assert 0 < metrics["value/clip_fraction"] < 1


def test_values_that_say_the_returns_explain_all_of_their_variance(folder):
    batch = batch_with_returns()
    assert critic_on(folder).update(with_fields(batch, values=batch["returns"]))["value/explained_variance"] == 1
    flat = with_fields(batch, returns=torch.ones_like(batch["returns"]))
    assert "value/explained_variance" not in critic_on(folder).update(flat)


def test_tokens_that_were_dropped_and_samples_outside_the_loss_teach_nothing(folder):
    batch = batch_with_returns(in_loss=[True] * 7 + [False])
    batch["dropped"][: batch["cu_seqlens"][1]] = True
    after = []
    for poison in (0.0, 100.0):
        poisoned = batch["returns"].clone()
        poisoned[: batch["cu_seqlens"][1]] += poison
        poisoned[batch["cu_seqlens"][7] :] += poison
        critic = critic_on(folder)
        before = weights_of(critic)
        critic.update(with_fields(batch, returns=poisoned))
        after.append(weights_of(critic))
    assert moved(*after) == 0
    assert moved(before, after[0]) > 0


def test_an_update_does_not_depend_on_micro_batches(folder):
    found = []
    for max_tokens in (1000, 9):
        critic = critic_on(folder, learnt=1)
        critic.engine.config = critic_on(folder, max_tokens=max_tokens, learnt=0).engine.config
        before = weights_of(critic)
        found.append((critic.update(batch_with_returns()), weights_of(critic)))
    (whole, a), (split, b) = found
    assert split == pytest.approx(whole, rel=1e-4, abs=1e-6)
    assert moved(a, b) <= 1e-3 * moved(before, a)


def test_epochs_are_the_actors_unless_it_has_its_own_and_mini_batches_always(folder):
    actor = ActorConfig(path=str(folder), mini_batches=2, epochs_per_batch=3)
    engine = critic_on(folder).engine
    follows = Critic(engine, CriticConfig(), actor)
    own = Critic(engine, CriticConfig(epochs_per_batch=4), actor)
    assert (follows.mini_batches, follows.epochs_per_batch) == (2, 3)
    assert (own.mini_batches, own.epochs_per_batch) == (2, 4)


def test_a_critic_learns_returns_that_follow_from_the_text(folder):
    """Returns that are 1 after an even token and −1 after an odd one: on new text it explains most of their variance."""
    critic = critic_on(folder, learnt=0, lr=3e-3, epochs_per_batch=4, value_clip=None)
    for seed in range(30):
        batch = rollout_batch([[(0.0, 20)] * 4], seed=seed, vocab_size=20)
        before = batch["input_ids"].roll(1)
        fields = {"returns": 1.0 - 2.0 * (before % 2), "dropped": torch.zeros_like(batch["loss_mask"])}
        metrics = critic.update(with_fields(critic.compute_values(batch), **fields))
    assert metrics["value/explained_variance"] > 0.8


def test_the_warm_up_ends_after_its_updates(folder):
    critic = critic_on(folder, learnt=0, warmup_steps=2)
    states = []
    for _ in range(3):
        states.append(critic.warming_up)
        critic.update(batch_with_returns())
    assert states == [True, True, False]
    assert not critic_on(folder, learnt=0, warmup_steps=2, updates_so_far=2).warming_up


def both(folder, ranks):
    """Values, then an update of two mini-batches."""
    torch.set_num_threads(1)
    critic = critic_on(folder, ranks=ranks, max_tokens=15, mini_batches=2)
    values = critic.compute_values(rollout_batch(GROUPS, stop_reason=[LENGTH] * 8))
    metrics = critic.update(batch_with_returns())
    actor, shared = shared_actor(folder, ranks=ranks, max_tokens=15)
    for seed in range(2):
        batch = actor.compute_advantages(shared.compute_values(rollout_batch(GROUPS, seed=seed)))
        batch["versions"] += seed
        step = actor.ppo_update(batch)
    return {
        "shared": step,
        "shared_values": shared.compute_values(batch)["values"],
        "values": values["values"],
        "bootstrap_value": values["bootstrap_value"],
        "metrics": metrics,
        "weights": weights_of(critic),
    }


@pytest.mark.slow
@pytest.mark.invariant
def test_two_ranks_value_and_learn_as_one(folder, tmp_path):
    one, two = alone_and_on_two(both, folder, out=tmp_path)
    initial = weights_of(critic_on(folder, learnt=0))
    for found in two:
        torch.testing.assert_close(found["values"], one["values"], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found["bootstrap_value"], one["bootstrap_value"], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found["shared_values"], one["shared_values"], atol=1e-3, rtol=1e-3)
        assert found["shared"] == pytest.approx(one["shared"], rel=1e-3, abs=1e-6)
        assert found["metrics"] == pytest.approx(one["metrics"], rel=1e-3)
        assert moved(found["weights"], one["weights"]) <= 1e-2 * moved(initial, one["weights"])


def shared_actor(folder, *, max_tokens=1000, ranks=1, lr=1e-2, value_clip=0.2):
    """An actor whose model has the value head too, and that head's role."""
    config = ActorConfig(
        path=str(folder),
        dtype="float32",
        backend=f"fsdp:d{ranks}",
        optimizer=OptimizerConfig(lr=lr, max_grad_norm=None),
        max_tokens_per_micro_batch=max_tokens,
    )
    engine = SpreadEngine(config, total_steps=100, head="both")
    critic = SharedCritic(engine, CriticConfig(shared=True, loss_weight=0.5, value_clip=value_clip))
    algorithm = algorithm_config(advantage=Component("gae", {"whitened": False}), aggregation="token_mean")
    return Actor(engine, algorithm, config, shared_critic=critic), critic


def test_a_second_head_leaves_the_policy_as_it_is_and_reads_the_states_of_a_critic(folder):
    actor, critic = shared_actor(folder)
    batch = rollout_batch(GROUPS)
    assert not critic.compute_values(batch)["values"].any()
    outputs = actor.engine.forward(batch, entropy=True)
    alone = tiny_actor(folder).engine.forward(batch, entropy=True)
    assert torch.equal(outputs.logprobs, alone.logprobs)
    assert torch.equal(outputs.entropy, alone.entropy)
    assert set(weights_of(actor)) == set(weights_of(tiny_actor(folder)))  # what inference engines are given

    own = critic_on(folder, learnt=0)
    torch.nn.init.ones_(actor.engine.model.value.weight)
    torch.nn.init.ones_(own.engine.model.model.score.weight)
    torch.testing.assert_close(critic.compute_values(batch)["values"], own.compute_values(batch)["values"])


def test_one_step_trains_both_heads_on_the_sum_of_their_losses(folder, tmp_path):
    actor, critic = shared_actor(folder)
    batch = actor.compute_advantages(critic.compute_values(rollout_batch(GROUPS)))
    before = weights_of(actor)
    metrics = actor.ppo_update(batch) | critic.update(batch)
    mask = trained_tokens(batch)
    value_loss = float(batch["returns"][mask].square().mean()) / 2
    policy_loss = -float(batch["advantages"][mask].mean())  # at a ratio of 1
    assert metrics["value/loss"] == pytest.approx(value_loss, rel=1e-5)
    assert metrics["loss"] == pytest.approx(policy_loss + 0.5 * value_loss, rel=1e-5)
    assert metrics["value/explained_variance"] == 0
    assert moved(before, weights_of(actor)) > 0
    values = critic.compute_values(batch)["values"]
    assert values.any()

    actor.engine.save(tmp_path / "saved")
    AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    fresh, again = shared_actor(tmp_path / "saved")
    assert not again.compute_values(batch)["values"].any()  # a language model: the head begins anew
    fresh.engine.load(tmp_path / "saved")
    assert torch.equal(again.compute_values(batch)["values"], values)
    with pytest.raises(ConfigError, match=r"has no value_head\.safetensors"):
        fresh.engine.load(folder)


def test_a_step_of_both_heads_does_not_depend_on_micro_batches(folder):
    """Each step begins with the same weights: what rounding leaves of one, the next one's ratios make larger."""
    (whole, critic), (split, _) = (shared_actor(folder, max_tokens=max_tokens) for max_tokens in (1000, 9))
    for seed in range(2):
        batch = whole.compute_advantages(critic.compute_values(rollout_batch(GROUPS, seed=seed)))
        batch["versions"] += seed
        metrics, of_parts = whole.ppo_update(batch), split.ppo_update(batch)
        assert of_parts == pytest.approx(metrics, rel=1e-3, abs=1e-6)
        assert moved(weights_of(whole), weights_of(split)) <= 1e-4
        heads = [actor.engine.model.value.weight.detach() for actor in (whole, split)]
        torch.testing.assert_close(*heads, atol=1e-4, rtol=0)
        split.engine.load_state_dict(copy.deepcopy(whole.engine.state_dict()))


def test_the_order_of_mini_batches_over_several_epochs_follows_from_the_seed(folder):
    batch, after = batch_with_returns(), []
    for seed in (0, 0, 3):
        one = critic_on(folder, learnt=1, mini_batches=3, epochs_per_batch=2)
        critic = Critic(one.engine, one.config, ActorConfig(path=str(folder), mini_batches=3), seed=seed, updates_so_far=7)
        critic.update(batch)
        assert critic.state_dict()["updates"] == 8
        after.append(weights_of(critic))
    assert moved(after[0], after[1]) == 0
    assert moved(after[0], after[2]) > 0


def test_the_value_before_a_sequence_of_one_token_is_0(folder):
    rows = [{"input_ids": torch.arange(3, 3 + n), "loss_mask": torch.arange(n) > 0, "temperature": 1.0} for n in (3, 1)]
    critic, batch = critic_on(folder), pack([row | {"stop_reason": STOP} for row in rows])
    found = critic.compute_values(batch)["values"]
    assert found[0] == found[3] == 0
    assert found[1:3].abs().min() > 0
