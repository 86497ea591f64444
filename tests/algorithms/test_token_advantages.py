"""Advantages of tokens: REINFORCE++ and generalised advantage estimation."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.algorithms.advantages import gae, reinforce, reinforce_pp

T, F = True, False


def given_by(rewards, values, mask=None, sequence=None, cut=(F,), bootstrap=(9.0,)):
    count = len(rewards)
    return {
        "token_rewards": torch.tensor(rewards),
        "values": torch.tensor(values),
        "bootstrap_value": torch.tensor(bootstrap),
        "cut": torch.tensor(cut),
        "mask": torch.ones(count, dtype=torch.bool) if mask is None else torch.tensor(mask),
        "sequence": torch.zeros(count, dtype=torch.int64) if sequence is None else torch.tensor(sequence),
        "sample": torch.zeros(count, dtype=torch.int64) if sequence is None else torch.tensor(sequence),
        "in_statistics": torch.ones(len(cut), dtype=torch.bool),
    }


def test_gae_by_hand():
    """γ = 1/2, λ = 1/2: δ = (0 + .5·2 − 1, 0 + .5·4 − 2, 3 − 4) = (0, 0, −1); A = (−1/16, −1/4, −1)."""
    advantages, returns = gae(**given_by([0.0, 0, 3], [1.0, 2, 4]), gamma=0.5, lam=0.5, whitened=False)
    assert advantages.tolist() == [-0.0625, -0.25, -1]
    assert returns.tolist() == [0.9375, 1.75, 3]


def test_gae_bootstraps_from_the_value_after_the_last_token_where_the_answer_was_cut():
    ended, _ = gae(**given_by([0.0, 1], [0.0, 0]), whitened=False)
    cut, _ = gae(**given_by([0.0, 1], [0.0, 0], cut=(T,)), gamma=0.5, whitened=False)
    assert ended.tolist() == [1, 1]
    assert cut.tolist() == [0.5 * 5.5, 5.5]  # 1 + .5·9


def test_gae_skips_foreign_tokens_and_credits_their_reward_to_the_trained_one_before():
    mask = [F, T, F, F, T, F]
    spaced = given_by([7.0, 0, 2, 0, 1, 3], [8.0, 1, 8, 8, 2, 8], mask)
    close = given_by([2.0, 4], [1.0, 2])
    settings = {"gamma": 0.9, "lam": 0.8, "whitened": False}
    for a, b in zip(gae(**spaced, **settings), gae(**close, **settings), strict=True):
        assert a[torch.tensor(mask)].tolist() == b.tolist()
        assert not a[~torch.tensor(mask)].any()


def test_gae_keeps_trajectories_apart():
    both = given_by([0.0, 1, 5, 5], [0.0, 0, 1, 1], sequence=[0, 0, 2, 2], cut=(F, T, T), bootstrap=(0.0, 4.0, 2.0))
    advantages, returns = gae(**both, whitened=False)
    assert advantages.tolist() == [1, 1, 11, 6]
    assert returns.tolist() == [1, 1, 12, 7]


def test_gae_takes_the_returns_before_it_whitens():
    given = given_by([0.0, 0, 3], [1.0, 2, 4])
    plain, before = gae(**given, whitened=False)
    white, after = gae(**given)
    assert after.tolist() == before.tolist()
    assert float(white.mean()) == pytest.approx(0, abs=1e-6)
    assert float(white.var()) == pytest.approx(1, rel=1e-5)
    assert white.tolist() == pytest.approx(((plain - plain.mean()) / plain.std()).tolist(), rel=1e-5)


def test_gae_of_nothing_trained_is_zero():
    advantages, returns = gae(**given_by([1.0, 1], [3.0, 3], [F, F]))
    assert advantages.tolist() == returns.tolist() == [0, 0]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(-2, 2, width=32), st.booleans(), st.booleans()), min_size=1, max_size=20))
def test_gae_at_lambda_and_gamma_one_without_values_is_the_return_to_go(rows):
    rewards = [r if m else 0.0 for r, m, _ in rows]
    starts = [0, *[int(new) for _, _, new in rows[1:]]]
    sequence = torch.tensor(starts).cumsum(0).tolist()
    count = sequence[-1] + 1
    mask = [m for _, m, _ in rows]
    given = given_by(rewards, [0.0] * len(rows), mask, sequence, (F,) * count, (0.0,) * count)
    advantages, returns = gae(**given, whitened=False)
    expected = reinforce(given["token_rewards"], given["sequence"]).masked_fill(~given["mask"], 0.0)
    assert advantages.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert returns.tolist() == advantages.tolist()


def test_reinforce_pp_whitens_the_return_to_go_over_the_trained_tokens():
    """Returns-to-go 1, 1 | 3 at trained tokens: μ = 5/3, variance 4/3."""
    found = reinforce_pp(
        torch.tensor([0.0, 0, 1, 3, 0]),
        torch.tensor([0, 0, 0, 1, 1]),
        torch.tensor([F, T, T, T, F]),
        torch.tensor([0, 0, 0, 1, 1]),
        torch.tensor([T, T]),
    )
    low, high = (1 - 5 / 3) / math.sqrt(4 / 3 + 1e-8), (3 - 5 / 3) / math.sqrt(4 / 3 + 1e-8)
    assert found.tolist() == pytest.approx([0, low, low, high, 0])


def test_reinforce_pp_of_equal_returns_is_exactly_zero():
    found = reinforce_pp(
        torch.full((7,), 0.7), torch.arange(7), torch.ones(7, dtype=torch.bool), torch.arange(7), torch.ones(7).bool()
    )
    assert found.tolist() == [0] * 7
