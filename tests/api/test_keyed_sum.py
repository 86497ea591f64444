"""A keyed sum tells tensors apart that differ anywhere, and is the same however the tensor lies."""

import pytest
import torch

from tandem.api.weights import ROWS, WORDS, KeyedSum, keyed_sum, tensor_digest
from tests.pretended_gpu import GPU, pretended_gpu

KEY = 12345
LARGE = torch.randn(2 * WORDS + 77)  # more words than there are keys, and half of one at the end


def changed(tensor, change):
    other = tensor.clone()
    change(other)
    return other


def swapped(first, second):
    def swap(tensor):
        tensor[[*first, *second]] = tensor[[*second, *first]]

    return swap


CHANGES = {
    "one bit": lambda x: x[3:4].view(torch.int32).bitwise_xor_(1),
    "two signs": lambda x: x[5:4001:3995].neg_(),
    "all signs": lambda x: x.neg_(),
    "the signs of two words": lambda x: x[8:12].neg_(),
    "neighbours": swapped([10], [11]),
    "the same word of other chunks": swapped([6, 7], [6 + 2 * WORDS, 7 + 2 * WORDS]),
    "the last one": lambda x: x[-1:].add_(1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_is_seen(change):
    assert keyed_sum(changed(LARGE, change), KEY) != keyed_sum(LARGE, KEY)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("factor", [-1, 2, -2])
def test_numbers_that_all_change_alike_are_others(dtype, factor):
    numbers = (20 * LARGE[:4096]).to(dtype)
    assert keyed_sum(numbers * factor, KEY) != keyed_sum(numbers, KEY)


@pytest.mark.parametrize("bits", [0, -1, 0x5555555555555555], ids=["zeros", "ones", "every second"])
def test_every_bit_of_a_word_counts_whatever_the_others_are(bits):
    word = torch.full((1,), bits, dtype=torch.int64)
    flipped = [word ^ (-(2**63) if place == 63 else 2**place) for place in range(64)]
    sums = {keyed_sum(one, KEY) for one in (word, *flipped)}
    assert len(sums) == 65


def test_a_change_that_is_folded_into_the_first_bit_is_seen_in_every_word():
    words = torch.arange(64)
    harm = -(2**63) + 2**32 + 2  # the sum changes by the key times 2^63: by nothing if the key is even
    changes = [changed(words, lambda x, at=at: x[at : at + 1].bitwise_xor_(harm)) for at in range(64)]
    assert keyed_sum(words, KEY) not in {keyed_sum(one, KEY) for one in changes}


def test_the_sum_depends_on_key_and_bytes_and_on_nothing_else():
    assert keyed_sum(LARGE, KEY) == keyed_sum(LARGE.clone(), KEY) != keyed_sum(LARGE, KEY + 1)
    inside = torch.cat([torch.zeros(1), LARGE])[1:]  # where no word of 64 bits begins
    assert keyed_sum(inside, KEY) == keyed_sum(LARGE, KEY)
    assert keyed_sum(LARGE[1:], KEY) == keyed_sum(LARGE[1:].clone(), KEY)  # there too, with whole words
    pieces = KeyedSum(KEY)
    for piece in LARGE.split(2 * WORDS):
        pieces.add(piece)
    assert pieces.value == keyed_sum(LARGE, KEY)
    flat = LARGE[:700].view(7, -1).t()
    assert tensor_digest(flat, KEY) == tensor_digest(flat.contiguous(), KEY)
    odd = torch.arange(5, dtype=torch.int8).to(torch.bfloat16)
    assert len(tensor_digest(odd, KEY)) == 16 and tensor_digest(odd, KEY) != tensor_digest(odd.flip(0), KEY)


@pytest.mark.parametrize("count", [1, WORDS, 2 * WORDS + 77, 2 * ROWS * WORDS + 2 * WORDS + 1])
def test_a_device_that_sums_many_rows_at_once_finds_the_same(count):
    numbers = torch.randn(count)
    with pretended_gpu():
        assert keyed_sum(numbers.to(GPU), KEY) == keyed_sum(numbers, KEY)
