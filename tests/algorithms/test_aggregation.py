"""Aggregation: the weight of each token in the batch of an optimizer step."""

import pytest
import torch

from tandem.algorithms.losses import constant, sequence_mean, sequence_sum, token_mean

# sample 0 has two trajectories (3 trained tokens in all), sample 1 one (1), sample 2 none
SAMPLE = torch.tensor([0, 0, 0, 1, 1, 0, 0, 2])
MASK = torch.tensor([False, True, True, False, True, False, True, False])


def test_token_mean_counts_every_token_the_same():
    assert token_mean(MASK).tolist() == pytest.approx([0, 1 / 4, 1 / 4, 0, 1 / 4, 0, 1 / 4, 0])


def test_sequence_mean_counts_a_sample_of_two_trajectories_once():
    third = 1 / 2 / 3
    assert sequence_mean(MASK, SAMPLE).tolist() == pytest.approx([0, third, third, 0, 1 / 2, 0, third, 0])
    assert float(sequence_mean(MASK, SAMPLE).sum()) == pytest.approx(1)


def test_sequence_sum_and_constant_divide_by_the_number_of_samples_with_tokens():
    assert sequence_sum(MASK, SAMPLE).tolist() == pytest.approx([0, 0.5, 0.5, 0, 0.5, 0, 0.5, 0])
    assert constant(MASK, SAMPLE, max_tokens=10).tolist() == pytest.approx([0, 0.05, 0.05, 0, 0.05, 0, 0.05, 0])


@pytest.mark.parametrize(
    "weights",
    [
        token_mean,
        lambda m: sequence_mean(m, SAMPLE),
        lambda m: sequence_sum(m, SAMPLE),
        lambda m: constant(m, SAMPLE, max_tokens=4),
    ],
)
def test_without_tokens_all_weights_are_zero(weights):
    assert weights(torch.zeros_like(MASK)).tolist() == [0] * 8
