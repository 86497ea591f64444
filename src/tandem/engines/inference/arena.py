"""Keys and values in one block of memory a layer, where a row is a range of tokens: a recorded step finds it by a number
that it reads, and not by an address that it was recorded with.

The block grows by doubling, within the budget, so that a recording is seldom lost. A range goes into the first gap that
holds it; if free memory lies scattered, ranges move together.
"""

import torch

from tandem.engines.inference.kv_cache import KVCache, Pool, Row, Slab
from tandem.models.footprint import arena_tokens

SCRATCH = 32
"""Tokens at the beginning that belong to no row: padding writes there, and reads there."""


class Region(Slab):
    """One row: a slab of its own, whose tensors ``[1, kv_heads, capacity, head_dim]`` are views of the block."""

    offset = 0
    """Its first token."""


class Arena(KVCache):
    """All rows of a layer in ``keys[layer]`` and ``values[layer]``, each ``[kv_heads, size, head_dim]``."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    size = 0
    """Tokens that there is memory for, `SCRATCH` included."""

    memory = 0
    """Counts how often the tensors were replaced by others."""

    layout = 0
    """Counts how often rows in use got other places."""

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, budget_gib: float
    ):
        super().__init__(layers, kv_heads, head_dim, dtype, device, budget_gib)
        self.keys, self.values = [], []
        self._regions: list[Region] = []  # in order of their places

    def reserve(self, pool: Pool, capacity: int, count: int) -> None:
        """Grows once for ``count`` further rows."""
        tokens = self.reserved_tokens + capacity * count
        if SCRATCH + tokens > self.size:
            self._grow(SCRATCH + arena_tokens(tokens, self.budget_tokens))

    def allocate(self, pool: Pool, capacity: int) -> Row:
        """A row; the caller has asked `fits` before."""
        return Row(self._region(pool, capacity), 0)

    def free(self, row: Row) -> None:
        """Gives a row back; no other row moves."""
        assert isinstance(row.slab, Region)
        self._regions.remove(row.slab)
        self.reserved_tokens -= row.slab.capacity

    def move(self, row: Row, capacity: int) -> None:
        """Moves a row to a longer range; the caller has asked `fits` for that before."""
        old, new = row.slab, self._region(row.slab.pool, capacity)
        for mine, theirs in ((new.keys, old.keys), (new.values, old.values)):
            for layer, tensor in enumerate(mine):
                tensor[:, :, : old.capacity] = theirs[layer]
        self.free(row)
        row.slab = new

    def clear(self) -> None:
        """Gives all memory back; only while no row is in use."""
        super().clear()
        self.keys, self.values, self.size = [], [], 0
        self.memory += 1

    def held_bytes(self) -> int:
        return self.size * self.bytes_per_token

    def _region(self, pool: Pool, capacity: int) -> Region:
        self.reserve(pool, capacity, 1)
        place = self._gap(capacity)
        if place is None:
            self._gather()
            place = self._gap(capacity)
        assert place is not None
        index, offset = place
        region = Region(self, pool, capacity)
        self._regions.insert(index, region)
        self._put(region, offset)
        self.reserved_tokens += capacity
        return region

    def _gap(self, capacity: int) -> tuple[int, int] | None:
        """Number and first token of a new range in the first gap that holds it."""
        end = SCRATCH
        for index, region in enumerate(self._regions):
            if region.offset - end >= capacity:
                return index, end
            end = region.offset + region.capacity
        return (len(self._regions), end) if self.size - end >= capacity else None

    def _put(self, region: Region, offset: int) -> None:
        region.offset = offset
        part = slice(offset, offset + region.capacity)
        region.keys, region.values = ([one[None, :, part] for one in tensors] for tensors in (self.keys, self.values))

    def _gather(self) -> None:
        """Moves all ranges to the front."""
        end = SCRATCH
        for region in self._regions:
            if region.offset != end:
                for tensor in (*self.keys, *self.values):
                    tensor[:, end : end + region.capacity] = tensor[
                        :, region.offset : region.offset + region.capacity
                    ].clone()
                self._put(region, end)
            end += region.capacity
        self.layout += 1

    def _grow(self, size: int) -> None:
        """Layer by layer, so that at most one layer exists twice."""
        for tensors in (self.keys, self.values):
            for layer in range(self.layers):
                # Zeros and not garbage: a masked position is multiplied by 0, and 0 · NaN is NaN.
                new = torch.zeros((self.kv_heads, size, self.head_dim), dtype=self.dtype, device=self.device)
                if layer < len(tensors):
                    new[:, : self.size] = tensors[layer]
                    tensors[layer] = new
                else:
                    tensors.append(new)
        self.size = size
        self.memory += 1
        for region in self._regions:
            self._put(region, region.offset)
