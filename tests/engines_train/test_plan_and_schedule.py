"""Micro-batches and learning rates."""

import time
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from tandem.config.train_engine import OptimizerConfig
from tandem.engines.train.micro_batches import PlannedSequence, has_weight, micro_batches, plan
from tandem.engines.train.optimizer import learning_rate


def computed(items, micro):
    """Tokens that a micro-batch computes: each prompt once."""
    prompts = {items[i].prompt: items[i].prompt_tokens for i in micro}
    return sum(prompts.values()) + sum(items[i].completion for i in micro)


@given(
    sizes=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 40), st.one_of(st.none(), st.integers(0, 6))), min_size=1, max_size=30
    ),
    max_tokens=st.integers(1, 100),
    ranks=st.integers(1, 4),
)
def test_every_sequence_is_in_one_micro_batch_with_its_unit_and_within_the_budget(sizes, max_tokens, ranks):
    items = [PlannedSequence(prompt, 5 * prompt, completion, unit) for prompt, completion, unit in sizes]
    planned = plan(items, max_tokens, ranks)
    everywhere = [micro for rank in planned for micro in rank]

    assert Counter(i for micro in everywhere for i in micro) == Counter(range(len(items)))
    assert len({len(rank) for rank in planned}) == 1
    for unit in {item.unit for item in items} - {None}:
        assert sum(any(items[i].unit == unit for i in micro) for micro in everywhere) == 1
    for micro in everywhere:
        whole = {i if items[i].unit is None else -1 - items[i].unit for i in micro}
        assert computed(items, micro) <= max_tokens or len(whole) == 1


def test_a_micro_batch_that_is_one_token_over_the_budget_is_split():
    planned = plan([PlannedSequence(0, 0, 4)] * 5, 11, 1)  # two micro-batches would have 12 and 8
    assert sorted(map(len, planned[0])) == [1, 2, 2]


def test_a_sequence_longer_than_the_budget_is_alone():
    planned = plan([PlannedSequence(0, 0, size) for size in (50, 3, 3)], 10, 1)
    assert sorted(map(sorted, planned[0])) == [[0], [1, 2]]


def test_samples_of_one_prompt_go_together_as_far_as_the_budget_allows():
    items = [PlannedSequence(prompt, 40, 5) for prompt in range(4) for _ in range(8)]
    planned = plan(items, 200, 1)[0]
    assert sum(computed(items, micro) for micro in planned) == 4 * (40 + 8 * 5)


def test_ranks_get_nearly_equal_work():
    lengths = [10 * (1 + i % 7) for i in range(64)]
    planned = plan([PlannedSequence(0, 0, length) for length in lengths], 200, 2)
    tokens = [[sum(lengths[i] for i in micro) for micro in rank] for rank in planned]
    assert all(abs(a - b) <= 30 for a, b in zip(*tokens, strict=True))


def test_no_rank_gets_the_larger_micro_batch_of_every_round():
    sizes = (80, 70, 60, 50)
    planned = plan([PlannedSequence(0, 0, size) for size in sizes], 80, 2)
    assert [sum(sizes[i] for micro in rank for i in micro) for rank in planned] == [130, 130]


def test_samples_of_one_prompt_are_divided_where_a_rank_would_have_nothing_to_do():
    planned = plan([PlannedSequence(0, 40, 5)] * 8, 200, 2)
    assert [sum(map(len, rank)) for rank in planned] == [4, 4]


@pytest.mark.parametrize("by", ["token", "sequence"])
def test_a_sequence_has_weight_if_one_of_its_unit_has_any_of_either_sign(by):
    weights = [0.0, -0.5, 0.0, 0.0, 2.0]
    given = weights if by == "sequence" else [x for weight in weights for x in (0.0, weight)]
    columns = {"input_ids": torch.zeros(10), "cu_seqlens": torch.arange(0, 11, 2), "loss_weights": torch.tensor(given)}
    batch = TensorDict(columns, batch_size=[])
    assert has_weight(batch).tolist() == [False, True, False, False, True]
    batch["unit_id"] = torch.tensor([7, 7, 7, 3, 3])
    assert has_weight(batch).tolist() == [True] * 5
    batch["unit_id"] = torch.tensor([1, 7, 7, 3, 4])
    assert has_weight(batch).tolist() == [False, True, True, False, True]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 0.775, 0.55, 0.325, 0.1, 0.1]),
        ("cosine", [0.5, 1, 0.868198, 0.55, 0.231802, 0.1, 0.1]),
    ],
)
def test_schedules_warm_up_and_fall_to_their_floor(schedule, expected):
    config = OptimizerConfig(lr=1.0, schedule=schedule, warmup_steps=2, min_lr_ratio=0.1)
    rates = [learning_rate(step, 6, config) for step in (0, 2, 3, 4, 5, 6, 8)]
    assert rates == pytest.approx(expected, rel=1e-5)


def test_a_run_that_is_all_warm_up_has_no_division_by_zero():
    config = OptimizerConfig(lr=1.0, schedule="cosine", warmup_steps=5)
    assert [learning_rate(step, 5, config) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_long_prompts_are_read_once_and_not_again_for_each_of_their_samples():
    """256 prompts of 2,048 tokens with 16 samples each; reading them for every sample takes about 2 s."""
    prompts = torch.randint(0, 50_000, (256, 2048), generator=torch.Generator().manual_seed(0))
    samples = torch.cat([prompts.repeat_interleave(16, 0), torch.zeros(4096, 64, dtype=torch.int64)], 1)
    batch = TensorDict(
        {
            "input_ids": samples.flatten(),
            "cu_seqlens": torch.arange(4097) * 2112,
            "loss_mask": (torch.arange(2112) >= 2048).repeat(4096),
        },
        batch_size=[],
    )

    began = time.process_time()
    planned = micro_batches(batch, 16_384, rank=0, ranks=1)
    spent = time.process_time() - began

    assert sorted(i for micro in planned for i in micro) == list(range(4096))
    assert all(len({i // 16 for i in micro}) * 2048 + len(micro) * 64 <= 16_384 for micro in planned)
    assert spent < 1.0
