"""What is done with the samples of a prompt together, on the executor."""

import asyncio
from dataclasses import replace

import pytest

from tandem.api.failures import DataFailure, EngineDied
from tandem.api.requests import LLMRequest, LLMResponse, StopReason
from tandem.api.workflow import RolloutWorkflow, Sample, Vote
from tandem.config.errors import ConfigError
from tandem.config.rollout import GenerationConfig, RolloutConfig
from tandem.rollout.executor import Rollout
from tandem.rollout.groups import GREEDY_SAMPLE, FirstSamples, MajorityLabels, WithGreedyBaseline
from tandem.rollout.workflows import Repeated, Tokens
from tests.rollout.clockwork import ClockworkEngine, rows


class Ask(RolloutWorkflow):
    """One request; the reward is the sample's number. ``fails``: numbers of samples that fail."""

    def __init__(self, fails=(), gconfig=None, seen=None):
        self.fails, self.gconfig, self.seen = fails, gconfig or GenerationConfig(), seen if seen is not None else []

    async def arun_episode(self, engine, data):
        number = engine.noise_key.sample
        self.seen.append(dict(data))
        tokens = Tokens([1, 5])
        tokens.add_response(await engine.agenerate(LLMRequest(tuple(tokens.ids), self.gconfig)))
        if number in self.fails:
            raise self.fails[number]
        return Sample((tokens.trajectory(),), reward=float(number % 100), completion_text=str(number))


class ByText:
    """A vote over texts; no mathematics."""

    def answer_of(self, sample):
        return sample.completion_text or None

    async def __call__(self, answers, expected=None):
        known = [answer for answer in answers if answer]
        if not known:
            return None
        winner = max(known, key=known.count)
        right = None if expected is None else tuple(a == expected for a in answers)
        return Vote(tuple(a == winner for a in answers), known.count(winner) / len(answers), right)


class Say(RolloutWorkflow):
    """Samples with given answers and a reward that must not count."""

    def __init__(self, answers, seen=None):
        self.answers, self.seen = answers, seen if seen is not None else []

    async def arun_episode(self, engine, data):
        self.seen.append(dict(data))
        return replace(
            await Ask().arun_episode(engine, data),
            reward=9.0,
            accuracy=1.0,
            completion_text=self.answers[engine.noise_key.sample],
        )


def group_of(workflow, row=None, engine=None):
    """The group that one row gives, the batch, and the metrics."""
    data = [{"messages": [], **(row or {}), **rows(1)[0]}]
    with Rollout(engine or ClockworkEngine(), RolloutConfig(batch_size=1, max_retries=1)) as rollout:
        batch = rollout.rollout_batch(data, workflow)
        return rollout.last_groups[0], batch, rollout.metrics()


def dropped(workflow):
    with Rollout(ClockworkEngine(), RolloutConfig(batch_size=1, max_retries=0)) as rollout:
        with pytest.raises(Exception, match="of 1 groups"):
            rollout.rollout_batch([{"messages": [], **rows(1)[0]}], workflow)
        return rollout.metrics()


def test_the_first_samples_are_trained_on_and_enter_statistics():
    group, batch, metrics = group_of(Repeated(FirstSamples(Ask(), 2), 5))
    assert [sample.in_loss for sample in group.samples] == [True, True, False, False, False]
    assert [sample.in_statistics for sample in group.samples] == [True, True, False, False, False]
    assert batch["in_loss"].tolist() == batch["in_statistics"].tolist() == [True, True, False, False, False]
    assert metrics["reward/mean"] == 0.5  # of samples 0 and 1
    assert "greedy" not in batch.keys()


def test_where_samples_failed_the_first_of_those_that_are_there_count():
    group, _, _ = group_of(Repeated(FirstSamples(Ask({0: DataFailure("bad")}), 2), 4))
    assert [(sample.reward, sample.in_loss) for sample in group.samples] == [(1, True), (2, True), (3, False)]
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        FirstSamples(Ask(), 0)


def test_a_greedy_answer_stands_beside_the_samples_outside_loss_and_statistics():
    engine, greedy = ClockworkEngine(), GenerationConfig(greedy=True)
    _, batch, metrics = group_of(WithGreedyBaseline(Repeated(Ask(), 3), Ask(gconfig=greedy)), engine=engine)
    assert batch["greedy"].tolist() == [False, False, False, True]
    assert batch["in_loss"].tolist() == batch["in_statistics"].tolist() == [True, True, True, False]
    assert [request.gconfig.greedy for request in engine.requests].count(True) == 1
    assert {request.noise_key.sample for request in engine.requests} == {0, 1, 2, GREEDY_SAMPLE}
    assert metrics["reward/mean"] == 1.0  # of the three
    assert metrics["groups/size"] == 4


def test_a_failed_greedy_answer_drops_the_prompt_with_its_reason():
    metrics = dropped(WithGreedyBaseline(Repeated(Ask(), 3), Ask({GREEDY_SAMPLE: DataFailure("reward_raised", "no")})))
    assert metrics["episodes/dropped/greedy_sample_failed"] == 1
    metrics = dropped(WithGreedyBaseline(Repeated(Ask(dict.fromkeys(range(3), DataFailure("bad"))), 3), Ask()))
    assert metrics["episodes/dropped/bad"] == 1


def test_an_engine_that_dies_under_the_greedy_answer_ends_the_run():
    workflow = WithGreedyBaseline(Repeated(Ask(), 3), Ask({GREEDY_SAMPLE: EngineDied("gone")}))
    row = [{"messages": [], **rows(1)[0]}]
    with Rollout(ClockworkEngine(), RolloutConfig(batch_size=1)) as rollout, pytest.raises(EngineDied):
        rollout.rollout_batch(row, workflow)


def test_the_deterministic_wave_waits_for_the_greedy_answer_too():
    engine = ClockworkEngine()
    with Rollout(engine, RolloutConfig(batch_size=2), deterministic=True) as rollout:
        workflow = WithGreedyBaseline(Repeated(Ask(), 2), Ask(gconfig=GenerationConfig(greedy=True)))
        batch = rollout.prepare_batch(iter(rows(4)), workflow)
    assert batch["greedy"].tolist() == [False, False, True] * 2
    assert len(engine.requests) == 6


def test_the_majority_is_the_label_and_the_rewards_of_the_workflow_are_gone():
    group, batch, metrics = group_of(Repeated(MajorityLabels(Say(["7", "8", "7", "", "7"]), ByText()), 5), {"answer": "8"})
    assert batch["reward"].tolist() == [1, 0, 1, 0, 1]
    assert all(sample.accuracy is None and not sample.rewards for sample in group.samples)
    expected = {
        "ttrl/majority_ratio": 0.6,
        "ttrl/label_accuracy": 0.0,
        "ttrl/reward_accuracy": 0.2,  # sample 3 alone: no vote, and not right
        "ttrl/pass@5": 1.0,
        "ttrl/undecided": 0.0,
        "accuracy": 0.2,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_without_an_expected_answer_only_the_vote_is_reported():
    _, batch, metrics = group_of(Repeated(FirstSamples(MajorityLabels(Say(["7", "8", "8"]), ByText()), 1), 3))
    assert batch["reward"].tolist() == [0, 1, 1]  # all three voted
    assert batch["in_loss"].tolist() == [True, False, False]
    assert metrics["ttrl/majority_ratio"] == pytest.approx(2 / 3)
    assert not {"ttrl/label_accuracy", "ttrl/pass@3", "accuracy"} & set(metrics)


def test_the_workflow_sees_the_question_alone():
    seen = []
    group_of(
        Repeated(MajorityLabels(Say(["7", "7"], seen), ByText()), 2),
        {"answer": "7", "solution": "it is 7", "tandem.source": "s"},
    )
    assert {name for row in seen for name in row} == {"messages", "tandem.source", "tandem.epoch", "tandem.index"}


def test_a_prompt_without_any_answer_is_skipped_with_its_reason():
    assert dropped(Repeated(MajorityLabels(Say(["", ""]), ByText()), 2))["episodes/dropped/no_answer_parsed"] == 1


def test_a_single_sample_is_its_own_majority_and_teaches_nothing():
    _, batch, metrics = group_of(Repeated(MajorityLabels(Say(["7"]), ByText()), 1))
    assert batch["reward"].tolist() == [1]
    assert metrics["groups/without_spread"] == 1


def test_tokens_drawn_at_another_temperature_are_masked_in_the_trajectory():
    tokens = Tokens([1, 2])
    tokens.add_response(LLMResponse((1, 2), (7, 8, 9), (-1.0, -2.0, -3.0), (0, 0, 0), StopReason.STOP, untrained_tokens=1))
    one = tokens.trajectory()
    assert one.loss_mask.tolist() == [False, False, False, True, True]
    assert one.rollout_logprobs.tolist() == [0, 0, -1, -2, -3]  # kept, for those who read them


def test_wrappers_pass_a_workflows_own_finish_on():
    class Doubles(Ask):
        async def finish_group(self, samples, data):
            return tuple(replace(sample, reward=2 * sample.reward) for sample in samples)

    samples = tuple(Sample((), reward=float(i)) for i in range(3))
    finished = asyncio.run(FirstSamples(Doubles(), 1).finish_group(samples, {}))
    assert [sample.reward for sample in finished] == [0, 2, 4]
