"""Noise that follows from what a token is, never from where it stands in a batch."""

from __future__ import annotations

from tandem.api.lazy_torch import torch

_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""Odd 64-bit constants of splitmix64, as signed integers."""


def splitmix64(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser on int64, whose products wrap."""
    for shift, factor in ((30, _ODD[1]), (27, _ODD[2])):
        x = (x ^ _right(x, shift)) * factor
    return x ^ _right(x, 31)


def _right(x: torch.Tensor, by: int) -> torch.Tensor:
    """Shift without the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def token_noise(
    seed: int, step: int, group_id: torch.Tensor, sample_id: torch.Tensor, input_ids: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """``[T]`` float64 in [0, 1), equal for equal ids, tokens and place within the trajectory.

    ``group_id``, ``sample_id``: ``[N]``, ``input_ids``: ``[T]``, ``cu_seqlens``: ``[N + 1]``. The trajectory's tokens stand
    in for its number within the sample.
    """
    sizes = cu_seqlens.diff()
    sequence = torch.repeat_interleave(sizes)
    place = torch.arange(len(input_ids), device=input_ids.device) - cu_seqlens[sequence]
    content = torch.zeros_like(group_id).index_add(0, sequence, splitmix64(input_ids * _ODD[0] + place * _ODD[1]))
    key = torch.zeros_like(group_id)
    for part in (torch.full_like(key, seed), torch.full_like(key, step), group_id, sample_id, content):
        key = splitmix64((key + part) * _ODD[0] + 1)
    bits = splitmix64(key[sequence] + (place + 1) * _ODD[0])
    return _right(bits, 11).double() / 2.0**53
