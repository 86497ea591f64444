"""A keyed sum of bytes, 64 bits wide: proof that numbers are the same, computed where they lie and faster than SHA-256.

The word at each place has a key of its own, so words that changed places are seen as well as words that changed. It is no
defence against somebody who knows the keys.
"""

from __future__ import annotations

import functools
import secrets

from tandem.api.lazy_torch import torch

WORDS = 1 << 16
"""64-bit words that have keys of their own; after so many the sum so far is multiplied and the keys begin anew."""

ROWS = 64
"""Rows of so many words that are summed at a time on a device other than the CPU."""

_OF_THIS_PROCESS = secrets.randbits(63)
_STEP = 0x9E3779B97F4A7C15


class KeyedSum:
    """A sum of bytes that come in pieces, each but the last one a whole number of `WORDS` words."""

    def __init__(self, key: int = _OF_THIS_PROCESS) -> None:
        """``key``: of this process unless it is given, so that no file can be made to have a certain sum."""
        self.value, self._key = 0, key
        # one place for all pieces: where models sleep, each new one is mapped
        self._folded = torch.empty(0, dtype=torch.int64)

    def add(self, piece: torch.Tensor) -> None:
        """``piece``: any contiguous tensor, on any device."""
        data = piece.view(-1).view(torch.uint8)
        if data.storage_offset() % 8:
            data = data.clone()
        if data.numel() % 8:
            data = torch.nn.functional.pad(data, (0, -data.numel() % 8))
        words = data.view(torch.int64)
        for some in torch.split(words, WORDS if words.device.type == "cpu" else ROWS * WORDS):
            for total in self._sums(some):
                self.value = (self.value * _STEP + total) % 2**64

    def _sums(self, words: torch.Tensor) -> list[int]:
        # the upper bits are folded into the lower ones: a flipped sign bit times an odd key is the same for all keys; by 31
        # and not by 32, where the two signs of a negated pair of float32 would cancel
        if self._folded.shape != words.shape or self._folded.device != words.device:
            self._folded = torch.empty_like(words)
        folded = torch.bitwise_right_shift(words, 31, out=self._folded).bitwise_and_(0x1FFFFFFFF).bitwise_xor_(words)
        keys = _keys(self._key, words.device)
        if words.device.type == "cpu":
            return [int(torch.dot(folded, keys[: len(folded)]))]
        whole = len(folded) // WORDS * WORDS  # devices have no integer product of vectors
        rows = [(folded[:whole].view(-1, WORDS) * keys).sum(1)]
        if whole < len(folded):
            rows.append((folded[whole:] * keys[: len(folded) - whole]).sum().view(1))
        return [int(total) for total in torch.cat(rows).tolist()]


def keyed_sum(tensor: torch.Tensor, key: int = _OF_THIS_PROCESS) -> int:
    """The sum of all bytes of a contiguous tensor."""
    total = KeyedSum(key)
    for piece in torch.split(tensor.view(-1).view(torch.uint8), 8 * ROWS * WORDS):
        total.add(piece)
    return total.value


@functools.lru_cache(maxsize=8)
def _keys(key: int, device: torch.device) -> torch.Tensor:
    numbers = torch.randint(-(2**63), 2**63 - 1, (WORDS,), generator=torch.Generator().manual_seed(key))
    return (numbers | 1).to(device)
