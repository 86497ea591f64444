"""Keys and values: one row per sequence (or shared prompt), in slabs of rows of equal capacity.

A slab's tensors are dense, so attention over its rows is a view and never a gather. Capacities come in steps, so a short
sequence neither reserves nor reads the memory that a long one needs. `admission.Growth` decides how large a row is at
admission, and what happens when it is full.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from tandem.config.errors import ConfigError
from tandem.config.rollout import EmbeddedEngineConfig, cache_gib
from tandem.models.architecture import Architecture

_FIRST_ROWS = 8

Pool = Literal["whole", "prompt", "suffix"]
"""The contents of a row: a whole sequence, a prompt that samples share, or the own tokens of one of those samples."""


@dataclass(eq=False)
class Row:
    """A place for the keys and values of up to ``slab.capacity`` tokens; ``index`` changes when the slab is compacted."""

    slab: "Slab"
    index: int


class Slab:
    """Rows of one capacity: per layer keys and values ``[rows, kv_heads, capacity, head_dim]``."""

    def __init__(self, cache: "KVCache", pool: Pool, capacity: int):
        self.pool, self.capacity = pool, capacity
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.rows: list[Row] = []
        self.size = 0
        self._cache = cache

    def resize(self, size: int) -> None:
        """Makes room for ``size`` rows, keeping the first ones; layer by layer, so that at most one layer exists twice."""
        cache, used = self._cache, min(len(self.rows), size)
        shape = (size, cache.kv_heads, self.capacity, cache.head_dim)
        for tensors in (self.keys, self.values):
            for layer in range(cache.layers):
                # Zeros and not garbage: a masked position is multiplied by 0, and 0 · NaN is NaN.
                new = torch.zeros(shape, dtype=cache.dtype, device=cache.device)
                if used:
                    new[:used] = tensors[layer][:used]
                if layer < len(tensors):
                    tensors[layer] = new
                else:
                    tensors.append(new)
        self.size = size

    def release(self, row: Row) -> None:
        """Frees a row, and moves the last row into its place."""
        # Rows in use stay a prefix of the slab, so attention reads one contiguous slice and needs no gather.
        last = self.rows.pop()
        if last is not row:
            for tensor in (*self.keys, *self.values):
                tensor[row.index] = tensor[last.index]
            last.index = row.index
            self.rows[last.index] = last


def numbered(rows: Sequence[Row | None]) -> tuple[list[Slab], list[tuple[int, int]]]:
    """Returns the slabs of these rows, and for each row (number of its slab, index in that slab); (0, 0) for None."""
    slabs = {id(row.slab): row.slab for row in rows if row is not None}
    number = {key: i for i, key in enumerate(slabs)}
    return list(slabs.values()), [(number[id(row.slab)], row.index) if row is not None else (0, 0) for row in rows]


class KVCache:
    """All slabs, within a budget of tokens."""

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, budget_gib: float
    ):
        self.layers, self.kv_heads, self.head_dim = layers, kv_heads, head_dim
        self.dtype, self.device = dtype, device
        self.bytes_per_token = 2 * layers * kv_heads * head_dim * dtype.itemsize
        self.budget_tokens = int(budget_gib * 2**30) // self.bytes_per_token
        self.reserved_tokens = 0
        self.slabs: dict[tuple[Pool, int], Slab] = {}

    def capacity_for(self, tokens: int) -> int:
        """Returns the capacity of a row for this many tokens: a multiple of 32 up to 128, then steps of about a quarter."""
        step = 32
        # Few distinct capacities keep slabs few; above 128 tokens at most about a quarter of a row is waste.
        while tokens > 4 * step:
            step *= 2
        return min(-(-tokens // step) * step, max(self.budget_tokens, tokens))

    def fits(self, capacities: Iterable[int]) -> bool:
        """True if rows of these capacities can be allocated now."""
        return self.reserved_tokens + sum(capacities) <= self.budget_tokens

    def reserve(self, pool: Pool, capacity: int, count: int) -> Slab:
        """Returns the slab of this pool and capacity, grown once for ``count`` further rows."""
        slab = self.slabs.setdefault((pool, capacity), Slab(self, pool, capacity))
        if len(slab.rows) + count > slab.size:
            # Room for more rows than ``count``, because growing copies the slab.
            new_size = max(len(slab.rows) + count, min(2 * slab.size, slab.size + 32), _FIRST_ROWS)
            # `fits` counts rows in use. Slabs also hold unused rows: if these take the room, they are freed here, and this
            # slab grows by ``count`` rows only.
            spare = self.budget_tokens - sum(s.size * s.capacity for s in self.slabs.values() if s is not slab)
            if spare < new_size * capacity:
                self._trim(slab)
                new_size = len(slab.rows) + count
            slab.resize(new_size)
        return slab

    def allocate(self, pool: Pool, capacity: int) -> Row:
        """Returns a new row. The caller has checked `fits` before."""
        slab = self.reserve(pool, capacity, 1)
        row = Row(slab, len(slab.rows))
        slab.rows.append(row)
        self.reserved_tokens += capacity
        return row

    def free(self, row: Row) -> None:
        """Frees a row; another row of the slab may move."""
        row.slab.release(row)
        self.reserved_tokens -= row.slab.capacity

    def move(self, row: Row, capacity: int) -> None:
        """Moves a row to the slab of a larger capacity. The caller has checked `fits` before."""
        # A substitute holds the old place while ``row`` moves: allocating may resize the slab and move other rows.
        old = Row(row.slab, row.index)
        old.slab.rows[old.index] = old
        new = self.allocate(row.slab.pool, capacity)
        for target, source in ((new.slab.keys, old.slab.keys), (new.slab.values, old.slab.values)):
            for layer, tensor in enumerate(target):
                tensor[new.index, :, : old.slab.capacity] = source[layer][old.index]
        row.slab, row.index = new.slab, new.index
        new.slab.rows[new.index] = row
        self.free(old)

    def clear(self) -> None:
        """Frees all memory. Raises `RuntimeError` while a row is in use."""
        if self.reserved_tokens:
            raise RuntimeError(f"the KV cache holds {self.reserved_tokens} tokens; it can only be cleared when nothing runs")
        self.slabs.clear()

    def held_bytes(self) -> int:
        return sum(slab.size * slab.capacity for slab in self.slabs.values()) * self.bytes_per_token

    def _trim(self, spared: Slab) -> None:
        """Shrinks all slabs except ``spared`` to the rows in use."""
        for key, slab in list(self.slabs.items()):
            if slab is spared:
                continue
            if not slab.rows:
                del self.slabs[key]
            elif len(slab.rows) < slab.size:
                slab.resize(len(slab.rows))


def make_cache(a: Architecture, config: EmbeddedEngineConfig, dtype: torch.dtype, device: torch.device) -> KVCache:
    """Returns the empty cache of an embedded engine that computes in ``dtype``.

    Raises:
        ConfigError: `max_model_len` is longer than the model's context, or the cache cannot hold the smallest row.
    """
    longest = a.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(
            f"rollout.engine.max_model_len must be at most this model's context ({longest} tokens), "
            f"got {config.max_model_len}; leave it out to use all of it"
        )
    gib = cache_gib(config, device.type)
    cache = KVCache(a.num_layers, a.num_kv_heads, a.head_dim, dtype, device, gib)
    # 32 is the smallest row
    if cache.budget_tokens < 32:
        raise ConfigError(
            f"rollout.engine.kv_cache_gib={gib} holds {cache.budget_tokens} tokens of this model, "
            f"at {cache.bytes_per_token} bytes each; make it larger"
        )
    return cache
