"""Samples that fail are counted by reason, spend the budget of failures, and are said; a group that lost most is dropped."""

import asyncio
import logging
import time

import pytest

from tandem.api.failures import DataFailure, RewardFailure, ServerFailed
from tandem.api.workflow import Group, RolloutWorkflow
from tandem.config.rollout import RolloutConfig
from tandem.rollout.book import NoBatch
from tandem.rollout.episodes import Episode, finish_groups
from tandem.rollout.executor import Rollout
from tandem.rollout.gate import PromptId
from tandem.rollout.groups import WholeGroup, WithGreedyBaseline
from tandem.rollout.workflows import Repeated
from tests.rollout.clockwork import ClockworkEngine, OneAnswer, prompts, rows


class SomeFail(RolloutWorkflow):
    """The first ``broken`` samples of a row fail, the very first of them by another reason than the rest."""

    async def arun_episode(self, engine, data):
        sample = await OneAnswer().arun_episode(engine, data)
        if engine.noise_key.sample < data["broken"]:
            raise RewardFailure("reward_raised" if engine.noise_key.sample == 0 else "reward_timeout", "the judge hangs")
        return sample


def broken_rows(*broken):
    return [{**row, "broken": count} for row, count in zip(rows(len(broken)), broken, strict=True)]


def rollout_of(**config):
    return Rollout(ClockworkEngine(), RolloutConfig(**config))


def test_failed_samples_are_counted_by_reason_also_those_of_groups_that_are_dropped():
    with rollout_of(batch_size=3) as rollout:
        batch = rollout.rollout_batch(broken_rows(0, 2, 7), Repeated(SomeFail(), 8))
        assert batch["group_id"].tolist() == [0] * 8 + [1] * 6
        metrics = rollout.metrics()
        assert metrics["samples/failed/reward_raised"] == 2
        assert metrics["samples/failed/reward_timeout"] == 1 + 6
        assert metrics["episodes/dropped/reward_timeout"] == 1  # the commonest reason of the seven
        assert rollout.ledger.failed_samples == {"reward_raised": 2, "reward_timeout": 7}


@pytest.mark.parametrize(
    ("n", "broken", "survives"), [(8, 4, True), (8, 5, False), (5, 2, True), (5, 3, False), (1, 1, False)]
)
def test_a_group_needs_half_of_its_samples_unless_another_number_is_asked_for(n, broken, survives):
    with rollout_of(batch_size=2) as rollout:
        batch = rollout.rollout_batch(broken_rows(0, broken), Repeated(SomeFail(), n))
        assert sorted(set(prompts(batch))) == ([0, 1] if survives else [0])
    with rollout_of(batch_size=2) as rollout:
        batch = rollout.rollout_batch(broken_rows(0, n - 1), Repeated(SomeFail(), n, min_group_size=1))
        assert sorted(set(prompts(batch))) == [0, 1]


def test_the_drop_says_how_many_failed_what_the_rule_is_and_why_the_first_did():
    with rollout_of(batch_size=1) as rollout, pytest.raises(NoBatch) as caught:
        rollout.rollout_batch(broken_rows(7), Repeated(SomeFail(), 8))
    words = "reward_timeout: 7 of 8 samples failed, and a group needs 4 (rollout.min_group_size); the first of these"
    assert f"{words}: reward_timeout: the judge hangs" in str(caught.value)


def test_groups_that_lose_most_of_their_samples_end_the_run_although_trainable():
    endless = ({"tandem.epoch": 0, "tandem.index": i, "broken": 7} for i in range(10**6))
    with rollout_of(batch_size=2, max_data_failures=9) as rollout:
        workflow = Repeated(SomeFail(), 8, min_group_size=1)
        for _ in range(4):
            rollout.prepare_batch(endless, workflow)
            rollout.end_step()
        with pytest.raises(NoBatch, match=r"9 episodes in a row.*7 of 8 samples failed.*reward_timeout"):
            rollout.prepare_batch(endless, workflow)


def test_a_group_with_most_of_its_samples_begins_the_count_anew():
    some = [{**row, "broken": 3 if row["tandem.index"] % 3 == 2 else 7} for row in rows(60)]
    with rollout_of(batch_size=2, max_data_failures=3) as rollout:
        for _ in range(10):
            rollout.prepare_batch(iter(some), Repeated(SomeFail(), 8, min_group_size=1))
            rollout.end_step()
            some = some[2:]


def test_each_reason_is_said_once_with_its_cause(caplog):
    with caplog.at_level(logging.INFO, "tandem.rollout"), rollout_of(batch_size=4) as rollout:
        rollout.rollout_batch(broken_rows(2, 2, 3, 1), Repeated(SomeFail(), 8))
    said = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.getMessage() for record in said] == [
        "a sample failed and is missing in its group (reward_raised: the judge hangs); samples/failed/reward_raised counts "
        "the others",
        "a sample failed and is missing in its group (reward_timeout: the judge hangs); samples/failed/reward_timeout "
        "counts the others",
    ]
    assert not any(record.exc_info for record in said)  # the trace is for log.txt, which has INFO too
    assert [str(record.exc_info[1]) for record in caplog.records if record.levelno == logging.INFO] == [
        "reward_raised: the judge hangs",
        "reward_timeout: the judge hangs",
    ]


ENDLESS = [{"epoch": 0, "index": i, "broken": 8} for i in range(99)]


def taken_from(broken, eta=0, workflow=SomeFail, batches=1, **config):
    """Number of rows that were drawn until the batches stood, or the error."""
    data = iter([{**row, "broken": n} for row, n in zip(ENDLESS, [*broken, *[8] * 90], strict=False)])
    with rollout_of(batch_size=1, max_head_offpolicyness=eta, **config) as rollout:
        try:
            for _ in range(batches):
                rollout.prepare_batch(data, Repeated(workflow(), 8))
                rollout.end_step()
        except NoBatch as error:
            return rollout.ledger.total("dropped"), str(error)
    return rollout.ledger.total("dropped"), None


@pytest.mark.parametrize("eta", [0, 2])
def test_three_groups_that_fail_by_the_users_code_before_any_other_end_the_run(eta):
    dropped, said = taken_from([], eta)
    assert said.startswith("the first 3 groups all failed, so the next would too: reward_timeout: the judge hangs. Mend it")
    assert dropped >= 3 if eta else dropped == 3
    assert taken_from([], eta, max_data_failures=2)[1].startswith("2 episodes in a row")


class Refuses(SomeFail):
    """Fails by a word of its own; a choice, and no mistake."""

    async def arun_episode(self, engine, data):
        try:
            return await super().arun_episode(engine, data)
        except RewardFailure as failure:
            raise RewardFailure("unreadable", "the completion is empty") from failure


class ServerAway(SomeFail):
    async def arun_episode(self, engine, data):
        if data["broken"]:
            raise ServerFailed("it is away", url="http://judge")
        return await OneAnswer().arun_episode(engine, data)


class Unfit(SomeFail):
    """The rows that are broken have no answer, which the start has told of."""

    async def arun_episode(self, engine, data):
        if data["broken"]:
            raise RewardFailure("row_unfit", "there is no answer")
        return await OneAnswer().arun_episode(engine, data)


def test_what_fails_by_choice_by_a_server_or_by_its_row_does_not_end_early():
    assert taken_from([8] * 4 + [0], workflow=Unfit) == (4, None)
    assert taken_from([8, 8, 0, 8, 8, 8, 0], batches=2) == (5, None)
    assert taken_from([8, 8, 7, 8, 8, 8, 0]) == (6, None)  # one sample of the third group came through
    assert taken_from([8] * 9 + [0], workflow=Refuses) == (9, None)
    assert taken_from([8] * 9 + [0], workflow=ServerAway, max_retries=0) == (9, None)


class ComparesBadly(OneAnswer):
    async def finish_group(self, samples, data):
        raise RewardFailure("reward_raised", "my.py:Judge: ZeroDivisionError: division by zero (my.py:9 in compare: 1 / 0)")


class Bug(OneAnswer):
    async def arun_episode(self, engine, data):
        return [].pop()


@pytest.mark.parametrize(("workflow", "words"), [(ComparesBadly, "(my.py:9 in compare"), (Bug, "return [].pop()")])
def test_so_does_what_compares_a_group_and_a_workflow(workflow, words):
    dropped, said = taken_from([], workflow=workflow)
    assert dropped == 3 and said.startswith("the first 3 groups all failed") and words in said


class Together(RolloutWorkflow):
    """A workflow that makes its group itself, and says what failed in it."""

    makes_group = True

    async def arun_episode(self, engine, data):
        samples = [await OneAnswer().arun_episode(engine, data) for _ in range(data["fine"])]
        return Group(tuple(samples), failures=("lost",) * data["broken"])


def test_a_workflow_that_makes_its_group_is_held_to_half_of_what_it_says():
    data = [{**row, "fine": fine, "broken": broken} for row, fine, broken in zip(rows(2), (2, 2), (2, 3), strict=True)]
    with rollout_of(batch_size=2) as rollout:
        assert prompts(rollout.rollout_batch(data, WholeGroup(Together()))) == [0, 0]
        assert rollout.ledger.dropped == {"group_too_small": 1}
        assert rollout.ledger.failed_samples == {"lost": 5}


def test_equal_failures_are_said_once():
    with rollout_of(batch_size=2, max_data_failures=3) as rollout, pytest.raises(NoBatch) as caught:
        rollout.prepare_batch(iter(rows(9)), Repeated(Fails(), 1))
    assert str(caught.value).count("1 of 1 samples failed") == 1 and "(and 2 more prompts with the same failure)" in str(
        caught.value
    )


def test_a_group_of_nothing_is_too_small():
    data = [{**row, "fine": fine, "broken": 0} for row, fine in zip(rows(2), (2, 0), strict=True)]
    with rollout_of(batch_size=2) as rollout:
        assert prompts(rollout.rollout_batch(data, WholeGroup(Together()))) == [0, 0]
        assert rollout.ledger.dropped == {"group_too_small": 1}


class FinishFails(SomeFail):
    async def finish_group(self, samples, data):
        raise DataFailure("no_answer_parsed")


class Fails(RolloutWorkflow):
    async def arun_episode(self, engine, data):
        raise DataFailure("too_long")


def test_what_failed_before_the_group_itself_failed_is_counted_too():
    for workflow, reason, more in (
        (Repeated(FinishFails(), 4), "no_answer_parsed", {}),
        (WithGreedyBaseline(Repeated(SomeFail(), 4), Fails()), "greedy_sample_failed", {"too_long": 1}),
    ):
        with rollout_of(batch_size=1) as rollout:
            with pytest.raises(NoBatch):
                rollout.rollout_batch(broken_rows(1), workflow)
            assert rollout.ledger.dropped == {reason: 1}
            assert rollout.ledger.failed_samples == {"reward_raised": 1, **more}


class CancelsOneSample(RolloutWorkflow):
    async def arun_episode(self, engine, data):
        if engine.noise_key.sample == 2:
            raise asyncio.CancelledError
        return await OneAnswer().arun_episode(engine, data)


def test_a_sample_that_cancels_itself_fails_alone():
    with rollout_of(batch_size=1) as rollout:
        assert len(prompts(rollout.rollout_batch(rows(1), Repeated(CancelsOneSample(), 4)))) == 3
        [said] = rollout.last_groups[0].failure_words
    assert said == "workflow_raised: CancelledError"


class FinishEnds(SomeFail):
    reads_scores = True

    def __init__(self, error):
        self.error = error

    async def finish_group(self, samples, data):
        raise self.error


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError()], ids=repr)
def test_a_group_whose_end_calls_for_the_end_of_the_process_is_dropped(error):
    episode = Episode(0, PromptId(0, 0), {}, FinishEnds(error), 0)
    [outcome] = asyncio.run(finish_groups([(episode, Group((), 0))], 5.0))
    assert isinstance(outcome, DataFailure) and type(error).__name__ in str(outcome)


def test_the_counts_go_on_after_a_resume_and_count_no_group_twice():
    endless = ({"tandem.epoch": 0, "tandem.index": i, "broken": 2} for i in range(10**6))
    with rollout_of(batch_size=2, max_head_offpolicyness=2) as rollout:
        rollout.prepare_batch(endless, Repeated(SomeFail(), 8))
        rollout.end_step()
        while rollout.gate.running:  # four more finish, and will be made again
            time.sleep(0.01)
        with rollout.standing_still():
            state = rollout.state_dict()
        assert rollout.gate.waiting > 0
    resumed = rollout_of(batch_size=2, max_head_offpolicyness=2)
    with resumed:
        resumed.load_state_dict(state)
        assert resumed.metrics()["samples/failed/reward_timeout"] == 2
