"""Operations on packed batches, over batches that hypothesis makes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.api import batch as ops
from tandem.api.failures import BatchError


def trajectory(size, seed):
    noise = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(0, 100, (size,), generator=noise),
        "media": -torch.randint(0, 3, (size,), generator=noise),
        "loss_mask": torch.rand(size, generator=noise) < 0.5,
        "rollout_logprobs": torch.randn(size, generator=noise),
        "reward": float(seed),
        "rewards/format": 0.5,
        "temperature": 0.7,
        "sample_id": seed,
    }


@st.composite
def trajectories(draw, least=1):
    sizes = draw(st.lists(st.integers(1, 6), min_size=least, max_size=6))
    return [trajectory(size, i) for i, size in enumerate(sizes)]


def same(a, b):
    assert set(a.keys()) == set(b.keys())
    for name in a.keys():
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=0)


@settings(deadline=None, max_examples=40)
@given(trajectories())
def test_unpack_is_the_inverse_of_pack(rows):
    batch = ops.pack(rows)
    back = ops.unpack(batch)
    for row, found in zip(rows, back, strict=True):
        assert set(row) == set(found)
        for name, value in row.items():
            torch.testing.assert_close(found[name], torch.as_tensor(value, dtype=found[name].dtype), rtol=0, atol=0)
    same(ops.pack(back), batch)


@settings(deadline=None, max_examples=40)
@given(trajectories(), st.data())
def test_select_is_the_same_as_choosing_before_packing(rows, data):
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=8))
    same(ops.select(ops.pack(rows), index), ops.pack([rows[i] for i in index]))


@settings(deadline=None, max_examples=40)
@given(trajectories(), st.data())
def test_a_boolean_selects_like_its_indices(rows, data):
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))))
    batch = ops.pack(rows)
    same(ops.select(batch, mask), ops.select(batch, mask.nonzero().flatten()))


@settings(deadline=None, max_examples=40)
@given(trajectories(), st.data())
def test_concatenate_is_the_inverse_of_split(rows, data):
    batch, sizes, left = ops.pack(rows), [], len(rows)
    while left:
        sizes.append(data.draw(st.integers(0, left)))
        left -= sizes[-1]
        if not sizes[-1]:
            sizes[-1], left = left, 0
    parts = ops.split(batch, sizes)
    assert [ops.num_sequences(part) for part in parts] == sizes
    same(ops.concatenate(parts), batch)


@settings(deadline=None, max_examples=40)
@given(trajectories(), st.integers(0, 9))
def test_padding_adds_one_sequence_that_is_never_trained(rows, extra):
    batch = ops.pack(rows)
    total = len(batch["input_ids"])
    padded = ops.check(ops.pad(batch, total + extra))
    assert len(padded["input_ids"]) == total + extra
    assert ops.num_sequences(padded) == len(rows) + (extra > 0)
    assert not padded["loss_mask"][total:].any()
    same(ops.select(padded, range(len(rows))), batch)


@settings(deadline=None, max_examples=40)
@given(trajectories())
def test_sums_and_spreads_agree_with_a_loop(rows):
    batch = ops.pack(rows)
    sums = ops.sum_by_sequence(batch, batch["rollout_logprobs"])
    torch.testing.assert_close(sums, torch.stack([row["rollout_logprobs"].sum() for row in rows]))
    spread = ops.per_token(batch, batch["reward"])
    assert spread.tolist() == [row["reward"] for row in rows for _ in row["input_ids"]]


@settings(deadline=None, max_examples=40)
@given(trajectories(least=2))
def test_no_operation_changes_its_argument(rows):
    batch = ops.pack(rows)
    before = batch.clone()
    ops.select(batch, [0]), ops.split(batch, [1, len(rows) - 1]), ops.pad(batch, 99)
    ops.concatenate([batch, batch])
    same(batch, before)


def test_loss_weights_are_told_by_their_length():
    for size in (5, 2):
        batch = ops.pack([trajectory(2, 0), trajectory(3, 1)])
        batch["loss_weights"] = torch.arange(float(size))
        chosen = ops.select(ops.check(batch), [1])
        assert chosen["loss_weights"].tolist() == ([2.0, 3.0, 4.0] if size == 5 else [1.0])


def test_errors_name_the_field_the_length_and_the_rule():
    a, b = trajectory(2, 0), trajectory(3, 1)
    batch = ops.pack([a, b])
    cases = [
        (lambda: ops.pack([]), "nothing to pack"),
        (lambda: ops.pack([a, {"input_ids": [1]}]), "sequence 1 has other fields than sequence 0"),
        (lambda: ops.pack([a | {"loss_mask": [True]}]), "sequence 0: loss_mask has 1 entries, input_ids has 2"),
        (lambda: ops.pack([a | {"old_logprobs": [1.0, 2.0]}]), "no field is called 'old_logprobs'"),
        (lambda: ops.select(batch, [2]), "must lie in 0…1"),
        (lambda: ops.split(batch, [1]), "add up to 1, the batch has 2"),
        (lambda: ops.concatenate([]), "nothing to concatenate"),
        (lambda: ops.concatenate([batch, batch.exclude("reward")]), "different fields.*reward"),
        (lambda: ops.pad(batch, 4), "has 5 tokens, more than 4"),
        (lambda: ops.check(batch.clone().set("reward", torch.zeros(3))), "'reward' must have length 2, got 3"),
        (lambda: ops.declare("reward", ops.Field("token")), "declared already"),
    ]
    for act, words in cases:
        with pytest.raises(BatchError, match=words):
            act()


def test_a_field_of_one_s_own_can_be_declared_twice_alike():
    field = ops.Field("sequence", "float32", 0, "for this test")
    ops.declare("test_only_score", field)
    ops.declare("test_only_score", field)
    batch = ops.pack([{"input_ids": [1], "test_only_score": 2.0}])
    assert batch["test_only_score"].tolist() == [2.0]
