"""Batches from the executor: order, failures, deadlines, filters, expiry."""

import asyncio
import contextlib
import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.api.activity import ACTIVITY, within
from tandem.api.failures import DataFailure, EngineDied, InfrastructureFailure, WaitTimeout
from tandem.api.workflow import RolloutWorkflow
from tandem.config.errors import ConfigError
from tandem.config.rollout import RolloutConfig
from tandem.rewards.function import AsyncReward
from tandem.rollout.book import NoBatch
from tandem.rollout.executor import Rollout
from tandem.rollout.workflows import Repeated
from tests.rollout.clockwork import ClockworkEngine, OneAnswer, prompts, rows


def fail_with(error):
    def fail(attempt):
        raise error

    return fail


def train(engine, rollout):
    """What a trainer does to the executor's world."""
    engine.number += 1
    rollout.end_step()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 3), st.integers(1, 4), st.none() | st.integers(1, 6), st.integers(0, 10_000))
def test_nothing_is_lost_or_counted_twice_for_any_arrivals_failures_and_rejections(eta, batch_size, most, seed):
    draw = random.Random(seed)
    data = rows(60)
    for row in data:
        kind = draw.choice(["fine"] * 4 + ["data", "retry"])
        if kind == "data":
            row["fail"] = fail_with(DataFailure("bad_row"))
        elif kind == "retry":
            row["fail"] = lambda attempt: fail_with(InfrastructureFailure("hiccup"))(attempt) if attempt == 0 else None
        row["reward"] = draw.choice([0.0, 1.0, 1.0])
    delays = {i: draw.choice([0.0, 0.001, 0.004]) for i in range(60)}
    engine = ClockworkEngine(lambda request: delays[request.input_ids[1]])
    config = RolloutConfig(batch_size=batch_size, max_concurrent=most, max_head_offpolicyness=eta, wait_timeout_s=20)
    keep = lambda group: (group.samples[0].reward > 0, "wrong")  # noqa: E731
    consumed, source = [], iter(data)
    with Rollout(engine, config, group_filter=keep, max_draws=100) as rollout:
        while True:
            try:
                batch = rollout.prepare_batch(source, OneAnswer())
            except NoBatch:
                break
            gate = rollout.gate
            assert gate.running + gate.waiting + gate.taken <= (eta + 1) * batch_size
            assert rollout.metrics()["staleness/max"] <= eta
            consumed += prompts(batch)
            train(engine, rollout)
            if draw.random() < 0.3:
                rollout.begin_again()  # as when a reward has changed
        fine = [row["tandem.index"] for row in data if row["reward"] > 0 and not is_bad(row)]
        assert len(set(consumed)) == len(consumed)
        assert set(consumed) <= set(fine)
        assert len(fine) - len(consumed) == rollout.ledger.total("waiting") < batch_size
        bad = sum(is_bad(row) for row in data)
        assert rollout.ledger.dropped.get("bad_row", 0) == bad
        assert rollout.ledger.dropped.get("filter/wrong", 0) == 60 - bad - len(fine)
        if eta == 0:
            assert consumed == fine[: len(consumed)]  # the synchronous sequence, whatever the arrival order


def is_bad(row):
    try:
        row.get("fail", lambda attempt: None)(1)
    except DataFailure:
        return True
    return False


def test_batches_come_in_order_of_start_and_name_their_groups():
    engine = ClockworkEngine(lambda request: 0.02 * (3 - request.input_ids[1]))
    with Rollout(engine, RolloutConfig(batch_size=3), seed=5) as rollout:
        batch = rollout.rollout_batch(rows(3, source="a"), Repeated(OneAnswer(), 2))
        assert prompts(batch) == [0, 0, 1, 1, 2, 2]
        assert batch["group_id"].tolist() == [0, 0, 1, 1, 2, 2]
        assert batch["sample_id"].tolist() == [0, 1, 2, 3, 4, 5]
        keys = sorted(request.noise_key for request in engine.requests)
        assert [(key.seed, key.group, key.sample) for key in keys] == [(5, g, s) for g in range(3) for s in range(2)]
        metrics = rollout.metrics()
        assert metrics["groups/size"] == 2
        assert metrics["groups/without_spread"] == 1
        assert metrics["episodes/trained"] == 0
        rollout.end_step()
        assert rollout.metrics()["episodes/trained"] == 3


def test_generation_goes_on_while_the_trainer_trains_and_the_oldest_go_first():
    engine = ClockworkEngine(lambda request: 0.005)
    config = RolloutConfig(batch_size=2, max_head_offpolicyness=1, wait_timeout_s=60)
    endless = ({"tandem.epoch": 0, "tandem.index": i} for i in itertools.count())
    with Rollout(engine, config) as rollout:
        assert prompts(rollout.prepare_batch(endless, OneAnswer())) == [0, 1]
        deadline = time.monotonic() + 60
        while rollout.gate.waiting < 2 and time.monotonic() < deadline:
            time.sleep(0.01)  # training
        assert rollout.gate.waiting == 2
        train(engine, rollout)
        assert prompts(rollout.prepare_batch(endless, OneAnswer())) == [2, 3]
        assert rollout.metrics()["staleness/max"] == 1


def test_forgetting_to_end_the_step_is_said():
    with Rollout(ClockworkEngine(), RolloutConfig(batch_size=2)) as rollout:
        rollout.rollout_batch(rows(2), OneAnswer())
        with pytest.raises(NoBatch, match="end_step"):
            rollout.rollout_batch([{"tandem.epoch": 1, "tandem.index": 0}], OneAnswer())


def test_infrastructure_failures_are_retried_with_new_noise_but_not_data_failures():
    attempts = []

    def once(attempt):
        attempts.append(attempt)
        if attempt == 0:
            raise InfrastructureFailure("server_gone")

    data = rows(2)
    data[0]["fail"] = once
    data[1]["fail"] = fail_with(DataFailure("bad_row"))
    engine = ClockworkEngine()
    with Rollout(engine, RolloutConfig(batch_size=2)) as rollout:
        assert prompts(rollout.rollout_batch(data, OneAnswer())) == [0]
        assert attempts == [0, 1]
        assert [request.noise_key.attempt for request in engine.requests] == [1]
        assert rollout.ledger.dropped == {"bad_row": 1}


def test_retries_are_bounded():
    data = rows(1, fail=fail_with(InfrastructureFailure("server_gone")))
    with (
        Rollout(ClockworkEngine(), RolloutConfig(batch_size=1, max_retries=1)) as rollout,
        pytest.raises(NoBatch, match="server_gone"),
    ):
        rollout.rollout_batch(data, OneAnswer())


def test_a_workflow_that_raises_is_dropped_with_its_cause():
    data = rows(2)
    data[0]["fail"] = fail_with(KeyError("answr"))
    with Rollout(ClockworkEngine(), RolloutConfig(batch_size=2)) as rollout:
        assert prompts(rollout.rollout_batch(data, OneAnswer())) == [1]
        assert rollout.metrics()["episodes/dropped/workflow_raised"] == 1


def test_too_many_failures_in_a_row_end_the_run_with_their_reasons():
    bad = (
        {"tandem.epoch": 0, "tandem.index": i, "fail": fail_with(DataFailure("bad_row", f"row {i}"))}
        for i in itertools.count()
    )
    config = RolloutConfig(batch_size=4, max_data_failures=20)
    with Rollout(ClockworkEngine(), config) as rollout, pytest.raises(NoBatch, match=r"20 episodes in a row.*bad_row: row"):
        rollout.prepare_batch(bad, OneAnswer())


def test_an_episode_ends_at_its_deadline_and_another_takes_its_place():
    engine = ClockworkEngine(lambda request: 60.0 if request.input_ids[1] == 0 else 0.0)
    config = RolloutConfig(batch_size=2, episode_timeout_s=0.1)
    with Rollout(engine, config) as rollout:
        assert prompts(rollout.prepare_batch(iter(rows(5)), OneAnswer())) == [1, 2]
        assert rollout.ledger.dropped == {"deadline": 1}


def test_a_wait_has_a_deadline_and_says_what_it_waited_for():
    with (
        Rollout(ClockworkEngine(lambda request: 60.0), RolloutConfig(batch_size=2, wait_timeout_s=0.1)) as rollout,
        pytest.raises(WaitTimeout, match=r"2 groups; running 2, the oldest for \d+\.\d s, waiting 0"),
    ):
        rollout.rollout_batch(rows(2), OneAnswer())


def test_the_death_of_the_engine_ends_the_wait_at_once_and_loses_no_prompt():
    engine = ClockworkEngine(lambda request: 60.0)
    with Rollout(engine, RolloutConfig(batch_size=2)) as rollout:
        rollout.submit(rows(1)[0], OneAnswer())
        time.sleep(0.05)
        engine.dead = True
        began = time.monotonic()
        with pytest.raises(EngineDied):
            rollout.wait(1)
        assert time.monotonic() - began < 30
        assert rollout.ledger.total("pending") == 1


def test_a_filter_keeps_drawing_until_the_batch_is_full():
    data = rows(10)
    for row in data:
        row["reward"] = float(row["tandem.index"] % 2)
    keep = lambda group: (group.samples[0].reward > 0, "none_correct")  # noqa: E731
    with Rollout(ClockworkEngine(), RolloutConfig(batch_size=3), group_filter=keep) as rollout:
        assert prompts(rollout.prepare_batch(iter(data), OneAnswer())) == [1, 3, 5]
        assert rollout.metrics()["episodes/dropped/filter/none_correct"] >= 3


def test_a_filter_that_keeps_nothing_ends_the_run_with_its_name():
    endless = ({"tandem.epoch": 0, "tandem.index": i} for i in itertools.count())
    rollout = Rollout(
        ClockworkEngine(), RolloutConfig(batch_size=2), group_filter=lambda g: (False, "all_correct"), max_draws=4
    )
    with rollout, pytest.raises(NoBatch, match=r"kept 0 of 8 groups.*'all_correct': 8"):
        rollout.prepare_batch(endless, OneAnswer())


@pytest.mark.parametrize(("wanted", "delay_s", "ends"), [(1, 0.0, False), (2, 0.2, True)])
def test_a_filter_ends_no_run_whose_batch_is_full_already(wanted, delay_s, ends):
    """Of two groups the first is kept and the second is the last that may be drawn, before anyone takes the batch."""
    keep = lambda group: (group.group_id == 0, "wrong")  # noqa: E731
    config = RolloutConfig(batch_size=1, max_head_offpolicyness=1)
    with Rollout(
        ClockworkEngine(lambda request: delay_s * (1 + request.input_ids[1])), config, group_filter=keep, max_draws=2
    ) as rollout:
        for row in rows(2):
            rollout.submit(row, OneAnswer())
        while not ends and not rollout.ledger.dropped:
            time.sleep(0.01)
        with pytest.raises(NoBatch, match="kept 1 of 2 groups, and 2 are needed") if ends else contextlib.nullcontext():
            assert prompts(rollout.wait(wanted)) == [0]
        assert rollout.ledger.dropped == {"filter/wrong": 1}


def test_a_filter_that_raises_reaches_the_caller():
    def broken(group):
        raise ZeroDivisionError("in the filter")

    rollout = Rollout(ClockworkEngine(), RolloutConfig(batch_size=1), group_filter=broken)
    with rollout, pytest.raises(ZeroDivisionError):
        rollout.rollout_batch(rows(1), OneAnswer())


def test_oversampling_takes_the_first_to_finish_and_counts_the_aborted():
    engine = ClockworkEngine(lambda request: 30.0 if request.input_ids[1] in (0, 2) else 0.01)
    with Rollout(engine, RolloutConfig(batch_size=4, oversample=1.5)) as rollout:
        assert prompts(rollout.prepare_batch(iter(rows(6)), OneAnswer())) == [1, 3, 4, 5]
        assert rollout.ledger.dropped == {"oversampled": 2}
        rollout.end_step()
        assert rollout.gate.capacity() == 6


def straggle(on_expiry, eta=1):
    """Prompt 0 is overtaken for several steps; returns the batches' prompts, the worst ages, and the rollout's ledger."""
    hold = lambda request, number: on_expiry != "wait" and request.input_ids[1] == 0 and number < 4  # noqa: E731
    engine = ClockworkEngine(lambda request: 0.15 if request.input_ids[1] == 0 else 0.002, hold)
    config = RolloutConfig(batch_size=2, max_head_offpolicyness=eta, on_expiry=on_expiry, wait_timeout_s=60)
    endless = ({"tandem.epoch": 0, "tandem.index": i} for i in itertools.count())
    batches, worst = [], []
    with Rollout(engine, config) as rollout:
        for _ in range(12):
            batch = rollout.prepare_batch(endless, OneAnswer())
            trained = batch["loss_mask"] & ~batch["expired"]
            worst.append((int((engine.number - batch["versions"][trained]).max()), int(batch["expired"].sum())))
            batches.append(prompts(batch))
            time.sleep(0.03)
            train(engine, rollout)
        return batches, worst, rollout


def test_expiry_mask_takes_old_tokens_out_of_the_loss():
    batches, worst, rollout = straggle("mask")
    assert max(age for age, _ in worst) <= 1
    assert sum(count for _, count in worst) == 1  # its first token; the last was made by current weights
    assert [0 in batch for batch in batches].index(True) >= 4
    assert not rollout.ledger.dropped


def test_expiry_drop_replaces_the_group():
    batches, worst, rollout = straggle("drop")
    assert all(0 not in batch and len(batch) == 2 for batch in batches)
    assert all(count == 0 for _, count in worst)
    assert rollout.ledger.dropped == {"expired": 1}


def test_expiry_wait_lets_nothing_expire_and_loses_nothing():
    batches, worst, rollout = straggle("wait")
    assert 0 in batches[1]  # the last batch that it may enter waits for it
    assert all(count == 0 and age <= 1 for age, count in worst)
    assert not rollout.ledger.dropped


class Spoils(RolloutWorkflow):
    async def arun_episode(self, engine, data):
        assert data["messages"] == ["hello"]
        data["messages"].append("spoiled")
        return await OneAnswer().arun_episode(engine, data)


def test_a_workflow_may_change_its_data_without_anyone_seeing():
    data = rows(2, messages=["hello"])
    with Rollout(ClockworkEngine(), RolloutConfig(batch_size=2)) as rollout:
        assert len(prompts(rollout.rollout_batch(data, Repeated(Spoils(), 3)))) == 6
        assert data[0]["messages"] == ["hello"]


class SomeFail(RolloutWorkflow):
    async def arun_episode(self, engine, data):
        if engine.noise_key.sample < data["broken"]:
            raise DataFailure("reward_timeout")
        return await OneAnswer().arun_episode(engine, data)


def test_failed_samples_leave_a_ragged_group_down_to_the_smallest_allowed():
    data = rows(3)
    for row, broken in zip(data, [0, 1, 3], strict=True):
        row["broken"] = broken
    with Rollout(ClockworkEngine(), RolloutConfig(batch_size=3)) as rollout:
        batch = rollout.rollout_batch(data, Repeated(SomeFail(), 4, min_group_size=2))
        assert batch["group_id"].tolist() == [0] * 4 + [1] * 3
        assert rollout.last_groups[1].failures == ("reward_timeout",)
        assert rollout.ledger.dropped == {"reward_timeout": 1}


@pytest.mark.parametrize(("n", "smallest"), [(0, 0), (0, 1), (2, 0), (2, 3)])
def test_the_smallest_group_lies_between_one_and_all_of_its_samples(n, smallest):
    with pytest.raises(ConfigError, match=f"got {smallest} and n={n}"):
        Repeated(OneAnswer(), n, min_group_size=smallest)


def test_an_episode_that_ends_without_the_engine_is_progress_of_who_waits_for_it():
    with Rollout(ClockworkEngine(), RolloutConfig(batch_size=1)) as rollout, within("generate"):
        before = ACTIVITY.count
        rollout.submit(rows(1, fail=fail_with(DataFailure("bad_row")))[0], OneAnswer())
        deadline = time.monotonic() + 30
        while not rollout.ledger.dropped and time.monotonic() < deadline:
            time.sleep(0.01)
        assert ACTIVITY.count == before + 1


class Nothing(RolloutWorkflow):
    async def arun_episode(self, engine, data):
        return None if data["tandem.index"] else await OneAnswer().arun_episode(engine, data)


def test_none_drops_the_prompt():
    with Rollout(ClockworkEngine(), RolloutConfig(batch_size=2)) as rollout:
        assert prompts(rollout.rollout_batch(rows(2), Nothing())) == [0]
        assert rollout.ledger.dropped == {"workflow_returned_none": 1}


class CancelsItself(RolloutWorkflow):
    async def arun_episode(self, engine, data):
        raise data["error"]


@pytest.mark.parametrize("error", [asyncio.CancelledError(), GeneratorExit()], ids=repr)
def test_a_workflow_that_cancels_itself_does_not_hang_the_run(error):
    data, config = [row | {"error": error} for row in rows(1)], RolloutConfig(batch_size=1, wait_timeout_s=5.0)
    with Rollout(ClockworkEngine(), config) as rollout, pytest.raises(NoBatch, match="cancelled"):
        rollout.rollout_batch(data, CancelsItself())


class Ends(RolloutWorkflow):
    """Ends with the row's ``error``: itself, in a reward, or in a task that it made; other rows are answered."""

    def __init__(self, where):
        self.where = where

    async def end(self, error):
        raise error

    async def arun_episode(self, engine, data):
        sample, error = await OneAnswer().arun_episode(engine, data), data.get("error")
        if self.where == "in a reward":
            given = {"prompt": "", "completion": "", "prompt_ids": (), "completion_ids": (), "row": data}
            await AsyncReward(_judge, "mine", timeout_s=5.0)(**given)
        elif error and self.where == "in a task":
            await asyncio.ensure_future(self.end(error))
        elif error:
            await self.end(error)
        return sample


async def _judge(row):
    if "error" in row:
        raise row["error"]
    return 1.0


class Ended(BaseException):
    """Such as `pytest.fail` raises."""


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), Ended()], ids=repr)
@pytest.mark.parametrize("where", ["itself", "in a reward", "in a task"])
def test_code_of_a_user_that_calls_for_the_end_of_the_process_fails_its_sample(where, error):
    data = [row | {"error": error} if row["tandem.index"] < 2 else row for row in rows(3)]
    config = RolloutConfig(batch_size=1, wait_timeout_s=5.0)
    for workflow in (Ends(where), Repeated(Ends(where), 2)):
        with Rollout(ClockworkEngine(), config) as rollout:
            assert set(prompts(rollout.prepare_batch(iter(data), workflow))) == {2}
            reason = "reward_raised" if where == "in a reward" else "workflow_raised"
            assert rollout.ledger.dropped == {reason: 2}


def test_deterministic_waves_reach_the_engine_together():
    seen = []

    class Watching(ClockworkEngine):
        def resume(self):
            super().resume()
            seen.append(len(self.requests))

    engine = Watching(lambda request: 0.001)
    config = RolloutConfig(batch_size=4, max_concurrent=2)
    with Rollout(engine, config, deterministic=True) as rollout:
        assert prompts(rollout.prepare_batch(iter(rows(6)), Repeated(OneAnswer(), 3))) == [
            i for i in range(4) for _ in range(3)
        ]
        assert seen == [6, 12]


def test_deterministic_and_asynchronous_contradict_each_other():
    with pytest.raises(ConfigError, match="deterministic=true is for synchronous training"):
        Rollout(ClockworkEngine(), RolloutConfig(max_head_offpolicyness=2), deterministic=True)


def test_the_same_prompt_twice_in_an_epoch_is_refused():
    with Rollout(ClockworkEngine(), RolloutConfig(batch_size=1)) as rollout:
        rollout.rollout_batch(rows(1), OneAnswer())
        rollout.end_step()
        with pytest.raises(RuntimeError, match="trained once"):
            rollout.rollout_batch(rows(1), OneAnswer())


def test_closing_makes_what_was_under_way_pending_again():
    rollout = Rollout(ClockworkEngine(lambda request: 60.0), RolloutConfig(batch_size=2))
    for row in rows(2):
        rollout.submit(row, OneAnswer())
    rollout.close()
    rollout.close()
    assert rollout.ledger.total("pending") == 2
    assert rollout.gate.running == 0
