"""What a workflow may return in a sample."""

import asyncio
import math
from dataclasses import replace

import pytest
import torch

from tandem.api.failures import DataFailure, WrongWorkflow
from tandem.api.workflow import RolloutWorkflow, Sample, Trajectory
from tandem.rollout.sample_checks import check_sample
from tandem.rollout.workflows import Repeated

NAN, INF = math.nan, math.inf


def trajectory(**changes):
    made = Trajectory(
        input_ids=torch.arange(4),
        loss_mask=torch.tensor([False, False, True, True]),
        rollout_logprobs=torch.tensor([NAN, INF, -1.0, -2.0]),  # where nothing is trained they mean nothing
        versions=torch.zeros(4, dtype=torch.int64),
    )
    return replace(made, **changes)


GOOD = Sample((trajectory(token_rewards=torch.zeros(4)),), 1.0, rewards={"form": 0.5}, accuracy=1.0, metrics={"turns": 2})


def with_trajectory(**changes):
    return replace(GOOD, trajectories=(trajectory(**changes),))


def test_what_can_be_trained_on_passes():
    check_sample(GOOD)
    check_sample(replace(GOOD, reward=True, metrics={"ratio": torch.tensor(0.5)}))


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        (replace(GOOD, trajectories=()), "empty_group"),
        (replace(GOOD, reward=NAN), "reward_not_finite"),
        (replace(GOOD, rewards={"form": INF}), "reward_not_finite"),
        (replace(GOOD, accuracy=NAN), "reward_not_finite"),
        (replace(GOOD, metrics={"turns": NAN}), "metric_not_finite"),
        (with_trajectory(token_rewards=torch.tensor([0, 0, NAN, 0])), "reward_not_finite"),
        (with_trajectory(rollout_logprobs=torch.tensor([0, 0, -INF, 0])), "logprob_not_finite"),
    ],
)
def test_a_number_that_is_not_finite_fails_the_row_with_its_reason(sample, reason):
    with pytest.raises(DataFailure) as error:
        check_sample(sample)
    assert error.value.reason == reason


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ("text", "returned a str"),
        (replace(GOOD, reward="1.0"), r"Sample\.reward must be a number; the workflow gave '1\.0' \(str\)"),
        (replace(GOOD, reward=None), r"Sample\.reward must be a number"),
        (replace(GOOD, metrics={"language": "en"}), r"Sample\.metrics\['language'\] must be a number"),
        (replace(GOOD, metrics=[1.0]), r"Sample\.metrics must map names to numbers"),
        (replace(GOOD, rewards={"form": torch.zeros(2)}), r"Sample\.rewards\['form'\] must be a number"),
        (with_trajectory(token_rewards=torch.zeros(3)), r"one a token \(\[4\]\); the workflow gave torch\.float32 \[3\]"),
        (with_trajectory(token_rewards=[0.0] * 4), r"gave a list"),
        (with_trajectory(loss_mask=torch.ones(4)), r"loss_mask must be bool"),
        (with_trajectory(media=torch.ones(4)), r"Trajectory\.media must be media numbers, int64, .*gave torch\.float32"),
        (with_trajectory(media=-torch.ones(4, dtype=torch.int64)), r"a medium at a token that is trained"),
    ],
)
def test_a_value_of_another_type_or_shape_is_the_workflow_s_mistake(sample, words):
    with pytest.raises(WrongWorkflow, match=words):
        check_sample(sample)


def test_a_sample_with_such_a_number_leaves_a_ragged_group():
    class Sometimes(RolloutWorkflow):
        made = 0

        async def arun_episode(self, engine, data):
            self.made += 1
            return replace(GOOD, reward=NAN if self.made == 1 else 1.0)

    group = asyncio.run(Repeated(Sometimes(), 3).arun_episode(None, {}))
    assert len(group.samples) == 2 and group.failures == ("reward_not_finite",)
