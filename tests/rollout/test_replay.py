"""Replay: earlier groups join later batches, no older and no oftener than allowed, and the ledger counts them once."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.api.workflow import Group, Sample, Trajectory
from tandem.config.rollout import ReplayConfig, RolloutConfig
from tandem.rollout.executor import Rollout, collate
from tandem.rollout.replay import Replay, group_of, plain_group
from tests.rollout.clockwork import ClockworkEngine, OneAnswer, prompts, rows


def group(number, *versions, in_loss=True, trained=True):
    trajectory = Trajectory(
        torch.arange(1 + len(versions)),
        torch.tensor([False, *[trained] * len(versions)]),
        torch.zeros(1 + len(versions)),
        torch.tensor([-1, *versions]),
    )
    return Group((Sample((trajectory,), 1.0, in_loss=in_loss),), group_id=number)


def numbers(groups):
    return [one.group_id for one in groups]


def test_what_was_trained_on_comes_back_until_it_is_too_old_or_used_up():
    replay = Replay(ReplayConfig(groups=2, max_age=2, max_uses=2))
    assert replay.draw(0) == ()
    replay.add([group(0, 0, 0), group(1, 0)])
    assert numbers(replay.draw(1)) == [0, 1]
    replay.add([group(2, 1)])
    assert len(replay.draw(2)) == 2
    assert replay.metrics(2) == {
        "replay/groups": 2,
        "replay/reused": 4,
        "replay/age_max": replay.metrics(2)["replay/age_max"],
        "replay/kept": 3,
    }
    assert numbers(replay.draw(3)) == [2]  # the others are 3 versions old
    assert replay.reused == 5
    assert replay.draw(9) == ()
    assert len(replay) == 0
    assert replay.metrics(9) == {"replay/groups": 0, "replay/reused": 5, "replay/age_max": 0, "replay/kept": 0}


def test_the_oldest_trained_token_decides_and_untrained_groups_are_not_kept():
    replay = Replay(ReplayConfig(groups=9, max_age=2, max_uses=9))
    replay.add([group(0, 1, 4), group(1, 3, 4), group(2, 4, in_loss=False), group(3, 4, trained=False)])
    assert numbers(replay.draw(5)) == [1]
    assert replay.metrics(5)["replay/age_max"] == 2


@given(
    groups=st.integers(1, 4),
    max_age=st.integers(1, 4),
    max_uses=st.integers(1, 3),
    batch=st.integers(1, 4),
    seed=st.integers(0, 3),
)
def test_no_group_is_replayed_too_late_too_often_or_twice_in_a_batch(groups, max_age, max_uses, batch, seed):
    config, uses, born = ReplayConfig(groups, max_age, max_uses), {}, {}
    one, two = Replay(config, seed=seed), Replay(config, seed=seed)
    ids = itertools.count()
    for version in range(12):
        drawn = numbers(one.draw(version))
        assert drawn == sorted(set(drawn)) == numbers(two.draw(version))
        assert len(drawn) <= groups
        for number in drawn:
            uses[number] = uses.get(number, 0) + 1
            assert uses[number] <= max_uses
            assert 0 < version - born[number] <= max_age
        eligible = sum(uses.get(n, 0) - (n in drawn) < max_uses and version - v <= max_age for n, v in born.items())
        assert len(drawn) == min(groups, eligible)
        fresh = [group(next(ids), version) for _ in range(batch)]
        born |= {g.group_id: version for g in fresh}
        one.add(fresh)
        if version == 5:  # resumed on the way
            state, two = one.state_dict(), Replay(config, seed=seed)
            two.load_state_dict(state)
        else:
            two.add(fresh)
    assert one.reused == two.reused == sum(uses.values())


def test_a_batch_holds_new_groups_before_replayed_ones_and_first_use_is_counted():
    engine = ClockworkEngine()
    config = RolloutConfig(batch_size=2, replay=ReplayConfig(groups=1, max_age=2, max_uses=1))
    source, seen, sizes = iter(rows(20)), [], []
    with Rollout(engine, config) as rollout:
        for step in range(5):
            batch = rollout.prepare_batch(source, OneAnswer())
            sizes.append(len(batch["cu_seqlens"]) - 1)
            found = prompts(batch)
            assert found[:2] == [2 * step, 2 * step + 1]
            seen += found
            assert not batch["expired"].any()
            assert batch["sample_id"].tolist() == list(range(sizes[-1]))
            assert len(set(batch["group_id"].tolist())) == sizes[-1]
            metrics = rollout.metrics()
            assert metrics["replay/age_max"] <= 2
            assert metrics["staleness/max"] == 0  # of the new ones
            engine.number += 1
            rollout.end_step()
        metrics = rollout.metrics()
    assert sizes == [2, 3, 3, 3, 3]
    assert metrics["replay/reused"] == 4
    assert metrics["episodes/trained"] == 10  # replays are no first use
    assert max(seen.count(prompt) for prompt in seen) == 2
    assert sorted(set(seen)) == list(range(10))


def test_without_replay_nothing_is_kept_and_no_metric_speaks_of_it():
    engine = ClockworkEngine()
    with Rollout(engine, RolloutConfig(batch_size=2)) as rollout:
        rollout.prepare_batch(iter(rows(4)), OneAnswer())
        assert len(rollout.replay) == 0
        assert not any(name.startswith("replay/") for name in rollout.metrics())


def test_tokens_of_a_replayed_group_that_are_older_than_allowed_are_marked():
    batch = collate([group(0, 9)], version=9, max_head_offpolicyness=0, replayed=[group(1, 7, 8)], max_age=1)
    assert batch["expired"].tolist() == [False, False, False, True, False]


@pytest.mark.parametrize("uses", [1, 3])
def test_state_is_kept(uses):
    replay = Replay(ReplayConfig(groups=1, max_age=9, max_uses=uses))
    replay.add([group(0, 0)])
    replay.draw(1)
    other = Replay(replay.config)
    other.load_state_dict(replay.state_dict())
    assert numbers(other.draw(2)) == numbers(replay.draw(2)) == ([] if uses == 1 else [0])


def test_a_group_comes_back_from_a_checkpoint_with_epoch_and_index_of_its_row():
    one = group(4, 2, 3)
    one = replace(one, data={"tandem.epoch": 1, "tandem.index": 7, "answer": "12"}, source="a", failures=("deadline",))
    again = group_of(plain_group(one))
    assert again.data == {"tandem.epoch": 1, "tandem.index": 7}
    assert (again.group_id, again.source, again.failures) == (4, "a", ("deadline",))
    (mine,), (theirs,) = one.samples[0].trajectories, again.samples[0].trajectories
    for name in ("input_ids", "loss_mask", "rollout_logprobs", "versions"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name))
        assert getattr(mine, name) is not getattr(theirs, name)
    assert (mine.stop_reason, mine.temperature) == (theirs.stop_reason, theirs.temperature)


def test_a_resumed_rollout_replays_what_the_other_one_would_and_goes_on_counting():
    config = RolloutConfig(batch_size=2, replay=ReplayConfig(groups=1, max_age=4, max_uses=2))
    engine, state, found = ClockworkEngine(), None, []
    with Rollout(engine, config) as rollout:
        rollout.prepare_batch(iter(rows(2)), OneAnswer())
        engine.number += 1
        rollout.end_step()
        state, ended = rollout.state_dict(), rollout.ledger.take_ended()
        rollout.prepare_batch(iter(rows(4)[2:]), OneAnswer())
        found.append((prompts_of(rollout), rollout.metrics()["replay/reused"], len(rollout.replay)))
    with Rollout(engine, config) as rollout:
        rollout.ledger.load_records(ended, {})
        rollout.load_state_dict(state)
        rollout.prepare_batch(iter(rows(4)[2:]), OneAnswer())
        found.append((prompts_of(rollout), rollout.metrics()["replay/reused"], len(rollout.replay)))
    assert found[0] == found[1] == ([2, 3], 1.0, 4)


def prompts_of(rollout):
    return [one.group_id for one in rollout.last_groups]
