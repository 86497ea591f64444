"""`compute_advantages`: from rewards of samples to advantages of tokens."""

import pytest
import torch

from tandem.api.batch import unpack
from tandem.api.failures import BatchError, UserCodeFailed
from tandem.config.algorithm import Component, KLConfig
from tandem.config.errors import ConfigError
from tandem.config.train_engine import ActorConfig
from tandem.roles.actor import Actor
from tandem.roles.reference import Reference
from tests.roles.batches import PROMPT, algorithm_config, rollout_batch


def actor(**algorithm):
    """Advantages need no engine."""
    return Actor(None, algorithm_config(**algorithm), ActorConfig(), reference=Reference(None), max_new_tokens=10)


def completions(batch, field):
    """The field at the trained tokens, one list a trajectory."""
    return [row[field][PROMPT:].tolist() for row in unpack(batch)]


def test_the_advantage_of_a_sample_goes_to_trained_tokens_of_all_its_trajectories():
    batch = rollout_batch([[(1.0, [2, 1]), (0.0, 3)]])
    found = actor(advantage="dr_grpo").compute_advantages(batch)
    assert completions(found, "advantages") == [[0.5, 0.5], [0.5], [-0.5] * 3]
    assert not found["advantages"][~found["loss_mask"]].any()


def test_a_sample_of_two_trajectories_counts_once_in_the_statistics():
    found = actor(advantage="rloo").compute_advantages(rollout_batch([[(1.0, [2, 2]), (0.0, 1), (0.0, 1)]]))
    assert completions(found, "advantages") == [[1, 1], [1, 1], [-0.5], [-0.5]]


def test_the_batch_is_not_changed():
    batch = rollout_batch([[(1.0, 2), (0.0, 1)]])
    before = {name: value.clone() for name, value in batch.items()}
    actor(shaping=(Component("scale", {"factor": 3.0}),)).compute_advantages(batch)
    assert set(batch.keys()) == set(before)
    assert all(torch.equal(batch[name], before[name]) for name in before)


def test_what_tokens_earn_is_part_of_the_reward_and_the_last_token_has_the_rest():
    batch = rollout_batch([[(1.0, 3), (2.0, 1)]])
    batch["token_rewards"] = torch.tensor([0, 0, 0, 0, 0.25, 0, 0, 0, 0, 0])
    found = actor(advantage="reinforce").compute_advantages(batch)
    assert completions(found, "advantages") == [[1, 1, 0.75], [2]]


def test_each_trajectory_of_a_sample_is_told_all_that_is_earned_from_there_on():
    batch = rollout_batch([[(1.0, [2, 2]), (0.5, 1)]])
    earned = torch.zeros(len(batch["input_ids"]))
    trained = batch["loss_mask"].nonzero().flatten()
    earned[trained[[0, 1, 2]]] = torch.tensor([0.25, 0.125, 0.5])
    found = actor(advantage="reinforce").compute_advantages(batch.set("token_rewards", earned))
    assert completions(found, "advantages") == [[1, 0.75], [0.625, 0.125], [0.5]]


def test_whole_samples_are_judged_by_all_that_they_earn_whenever_that_was():
    batch = rollout_batch([[(1.0, 1), (0.0, 1)]])
    plain = actor().compute_advantages(batch)["advantages"]
    batch["token_rewards"] = torch.ones(len(batch["input_ids"]))
    assert torch.equal(actor().compute_advantages(batch)["advantages"], plain)


def test_shaping_is_applied_in_order_and_once_for_a_sample():
    batch = rollout_batch([[(1.0, [2, 7]), (0.0, 8)]])
    shaping = (Component("bias", {"offset": 1.0}), Component("scale", {"factor": 10.0}), Component("overlong"))
    found = actor(shaping=shaping).compute_advantages(batch)  # 10 tokens, buffer 2: nine trained tokens cost a half
    assert found["shaped_reward"].tolist() == [19.5, 19.5, 10]


def test_truncated_samples_are_told_by_the_stop_reason_of_their_last_trajectory():
    batch = rollout_batch([[(1.0, [1, 1]), (0.0, [1, 1]), (0.0, 1)]], stop_reason=[1, 0, 0, 1, 0])
    found = actor(shaping=(Component("mask_truncated"),)).compute_advantages(batch)
    assert completions(found, "dropped") == [[False], [False], [True], [True], [False]]
    assert found["shaped_reward"].tolist() == [1, 1, 0, 0, 0]
    penalised = actor(shaping=(Component("penalize_truncated", {"penalty": 2.0}),)).compute_advantages(batch)
    assert penalised["shaped_reward"].tolist() == [1, 1, -2, -2, 0]


def test_a_sample_that_one_shaping_masks_stays_masked(tmp_path):
    (tmp_path / "mine.py").write_text("def keeps(rewards, truncated):\n    return rewards, truncated | True\n")
    batch = rollout_batch([[(1.0, 1), (0.0, 1)]], stop_reason=[1, 0])
    for shaping in (["mask_truncated", f"{tmp_path}/mine.py:keeps"], [f"{tmp_path}/mine.py:keeps", "mask_truncated"]):
        found = actor(shaping=tuple(map(Component, shaping))).compute_advantages(batch)
        assert completions(found, "dropped") == [[True], [False]]


def test_expired_tokens_are_dropped_and_keep_their_advantage():
    batch = rollout_batch([[(1.0, 2), (0.0, 2)]])
    batch["expired"][PROMPT] = True
    found = actor(advantage="dr_grpo").compute_advantages(batch)
    assert completions(found, "dropped") == [[True, False], [False, False]]
    assert completions(found, "advantages")[0] == [0.5, 0.5]


def test_a_sample_outside_the_statistics_is_left_out_of_them():
    batch = rollout_batch([[(1.0, 1), (0.0, 1), (5.0, 1)]], in_statistics=[True, True, False])
    assert completions(actor(advantage="dr_grpo").compute_advantages(batch), "advantages") == [[0.5], [-0.5], [4.5]]


def with_distance(batch, distance):
    """Adds proximal and reference log-probabilities that far apart at every token, also the prompt's."""
    batch["proximal_logprobs"] = torch.full((len(batch["input_ids"]),), -1.0)
    batch["reference_logprobs"] = batch["proximal_logprobs"] - distance
    return batch


def test_kl_in_the_reward_is_taken_from_the_sample_before_the_comparison():
    batch = with_distance(rollout_batch([[(1.0, [1, 1]), (0.0, 1)]]), 0.5)
    kl = KLConfig(coefficient=0.1, where="reward", estimator="k1")
    found = actor(advantage="rloo", kl=kl).compute_advantages(batch)  # 1 − .1·.5·2 against 0 − .1·.5·1
    assert [x for row in completions(found, "advantages") for x in row] == pytest.approx([0.95, 0.95, -0.95])


def test_kl_in_the_reward_counts_from_its_token_on_for_reinforce():
    batch = with_distance(rollout_batch([[(1.0, 3)]]), 1.0)
    kl = KLConfig(coefficient=0.1, where="reward", estimator="k1")
    found = actor(advantage="reinforce", kl=kl).compute_advantages(batch)
    assert completions(found, "advantages")[0] == pytest.approx([0.7, 0.8, 0.9])


def test_kl_in_the_reward_names_the_stage_that_was_left_out():
    kl = KLConfig(coefficient=0.1, where="reward", estimator="k1")
    with pytest.raises(BatchError, match=r"no proximal_logprobs.*call compute_proximal\(batch\) before"):
        actor(kl=kl).compute_advantages(rollout_batch([[(1.0, 1)]]))


def test_a_missing_field_is_named_with_the_stage():
    batch = rollout_batch([[(1.0, 1)]])
    del batch["group_id"]
    with pytest.raises(BatchError, match=r"compute_advantages needs the fields \['group_id'\]"):
        actor().compute_advantages(batch)


def test_kl_without_a_reference_is_refused_at_once():
    with pytest.raises(ConfigError, match=r"algorithm.kl.coefficient=0.1 measures.*set algorithm.kl.coefficient=0"):
        Actor(None, algorithm_config(kl=KLConfig(0.1)), ActorConfig())


def test_an_advantage_of_ones_own_must_have_the_right_length(tmp_path):
    (tmp_path / "own.py").write_text("def short(rewards):\n    return rewards[:1]\n")
    with pytest.raises(UserCodeFailed, match=r"own.py:short must return a tensor of shape \[2\]; it returned .* \[1\]"):
        actor(advantage=f"{tmp_path}/own.py:short").compute_advantages(rollout_batch([[(1.0, 1), (0.0, 1)]]))


def test_whitening_within_the_group_counts_each_trained_token_of_the_group_once():
    """Returns 1 at one token and 0 at three: mean 1/4, variance (9/16 + 3/16)/3 = 1/4. The second group is all equal, the
    third has its own scale."""
    groups = [[(1.0, 1), (0.0, [1, 2])], [(2.0, 2), (2.0, 3)], [(40.0, 1), (0.0, 1)]]
    found = actor(advantage="reinforce", whitening="group").compute_advantages(rollout_batch(groups))
    half = 0.5**0.5
    expected = [[1.5], [-0.5], [-0.5] * 2, [0.0] * 2, [0.0] * 3, [half], [-half]]
    assert [pytest.approx(row, rel=1e-6) for row in expected] == completions(found, "advantages")
    assert not found["advantages"][~found["loss_mask"]].any()


def test_whitening_over_the_batch_is_of_all_its_trained_tokens():
    """Returns 1, 0 · 3, 4 · 2: mean 3/2, variance (1/4 + 27/4 + 50/4)/5 = 3.9."""
    batch = rollout_batch([[(1.0, 1), (0.0, 3)], [(4.0, 2)]])
    found = actor(advantage="reinforce", whitening="batch").compute_advantages(batch)
    expected = [[(x - 1.5) / 3.9**0.5] * n for x, n in ((1, 1), (0, 3), (4, 2))]
    assert [pytest.approx(row, rel=1e-6) for row in expected] == completions(found, "advantages")


def test_samples_outside_the_statistics_are_whitened_with_those_of_the_others():
    batch = rollout_batch([[(1.0, 1), (0.0, 1), (7.0, 1)]], in_statistics=[True, True, False])
    found = actor(advantage="reinforce", whitening="group").compute_advantages(batch)
    assert completions(found, "advantages") == [[pytest.approx(x * 2**0.5)] for x in (0.5, -0.5, 6.5)]


def test_whitening_within_the_group_replaces_that_over_the_batch_and_leaves_returns():
    batch = rollout_batch([[(1.0, 2), (0.0, 3)], [(9.0, 1), (2.0, 2)]], bootstrap_value=[0.0] * 4)
    batch["values"] = torch.linspace(-1, 1, len(batch["input_ids"]))
    found = actor(advantage="gae", whitening="group").compute_advantages(batch)
    plain = actor(advantage=Component("gae", {"whitened": False})).compute_advantages(batch)
    assert torch.equal(found["returns"], plain["returns"])
    for group in (slice(0, 2), slice(2, 4)):
        own, bare = (
            torch.tensor([x for row in completions(one, "advantages")[group] for x in row]) for one in (found, plain)
        )
        assert torch.allclose(own, (bare - bare.mean()) / bare.std(), atol=1e-5)
