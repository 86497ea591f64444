"""Counter-based sampling noise: a pure function of the noise key and the absolute position, nothing else.

The generator is SplitMix64 (Steele, Lea, Flood 2014) used as a hash: the key's fields are folded into one 64-bit stream,
and the position picks a number in it. So a draw does not depend on batching, on arrival, or on what others drew.
"""

import torch

from tandem.api.requests import NoiseKey

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLY_1 = 0xBF58476D1CE4E5B9
_MULTIPLY_2 = 0x94D049BB133111EB


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MULTIPLY_1) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLY_2) & _MASK
    return value ^ (value >> 31)


def stream_of(key: NoiseKey) -> int:
    """The 64-bit stream of a noise key, as a signed int64."""
    state = 0
    for field in key:
        state = _mix((state + _GOLDEN + (field & _MASK)) & _MASK)
    return _signed(state)


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def uniform(streams: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Draws ``[B]`` float64 in (0, 1) from streams ``[B]`` at absolute positions ``[B]`` (both int64)."""
    # int64 arithmetic wraps around as SplitMix64's uint64 does; only shifts and the last step see the sign
    values = streams + (positions + 1) * _signed(_GOLDEN)
    values = (values ^ _shifted(values, 30)) * _signed(_MULTIPLY_1)
    values = (values ^ _shifted(values, 27)) * _signed(_MULTIPLY_2)
    values = values ^ _shifted(values, 31)
    # the upper 53 bits, all that float64 holds; half a step keeps both 0 and 1 out, whose logarithms are infinite
    return (_shifted(values, 11).double() + 0.5) * 2.0**-53
