"""Noise of tokens against the same function on Python's integers: a run repeats on every machine, and with every release."""

import torch

from tandem.roles.parts import splitmix64, token_noise

GAMMA, WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1


def mixed(x):
    """The finaliser of splitmix64."""
    x = (x ^ (x & WORD) >> 30) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & WORD
    return x ^ x >> 31


def test_the_mixing_is_splitmix64():
    first = int(splitmix64(torch.tensor([GAMMA - (1 << 64)]))) & WORD
    assert first == mixed(GAMMA) == 0xE220A8397B1DCDAF  # the first number that splitmix64 draws from seed 0


def test_a_token_has_the_noise_of_its_ids_its_place_and_its_trajectory():
    seed, step, groups, samples = 7, 3, [100, 101], [9, 8]
    rows = [[5, 6, 5], [11, 12]]
    expected = []
    for group, sample, row in zip(groups, samples, rows, strict=True):
        content = sum(mixed(t * GAMMA + place * 0xBF58476D1CE4E5B9 & WORD) for place, t in enumerate(row))
        key = 0
        for part in (seed, step, group, sample, content):
            key = mixed((key + part) * GAMMA + 1 & WORD)
        expected += [(mixed(key + (place + 1) * GAMMA & WORD) >> 11) / 2**53 for place in range(len(row))]
    ids = torch.tensor([token for row in rows for token in row])
    found = token_noise(seed, step, torch.tensor(groups), torch.tensor(samples), ids, torch.tensor([0, 3, 5]))
    assert found.tolist() == expected
    assert len(set(expected)) == 5
