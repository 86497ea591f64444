"""Attention over the KV cache on a GPU: decode by a kernel that reads rows where they are, prefill by variable-length calls.

What depends on lengths alone is planned once a step and used by all layers.
"""

import itertools
from collections.abc import Iterable, Sequence

import torch

from tandem.engines.inference import paged_kernel
from tandem.engines.inference.attention import Kernel, PrefillSpan
from tandem.engines.inference.kv_cache import Row, Slab, numbered
from tandem.models import varlen
from tandem.models.upload import upload


class PagedDecode:
    """Attention of one new token of each sequence; planned when the set of sequences changes, advanced at each step.

    Args:
        rows: each sequence's own row.
        prompts: the shared prompt's row of each sequence, or None.
        own: tokens in each own row with the new one.
        starts: tokens of each shared prompt, 0 without.
    """

    def __init__(
        self,
        kernel: Kernel,
        rows: Sequence[Row],
        prompts: Sequence[Row | None],
        own: Sequence[int],
        starts: Sequence[int],
    ):
        self._kernel = kernel
        self._slabs, places = numbered([*prompts, *rows])
        numbers, indices = torch.tensor(places).T
        capacities = torch.tensor([slab.capacity for slab in self._slabs])[numbers]
        lines = torch.stack((numbers, indices * kernel.kv_heads * capacities, capacities, torch.tensor([*starts, *own])))
        self._table = upload(lines.unflatten(1, (2, -1)).transpose(0, 1).flatten(0, 1), kernel.device)  # [8, B]
        self._longest = max(map(sum, zip(own, starts, strict=True)))
        self._find()

    def advance(self) -> None:
        """Every sequence has one token more."""
        self._table[7] += 1
        self._longest += 1
        self._find()

    def _find(self) -> None:
        """Looks the addresses up again, because a slab that has grown has other tensors."""
        both = [[[one.data_ptr() for one in tensors] for tensors in (s.keys, s.values)] for s in self._slabs]
        self._addresses = upload(torch.tensor(both).permute(2, 1, 0).contiguous(), self._kernel.device)  # [layers, 2, slabs]

    def __call__(
        self, layer: int, window: int | None, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Writes keys and values ``[B, kv_heads, D]`` and attends with ``[B, heads, D]``; returns ``[B, heads · D]``."""
        kernel, tensors = self._kernel, (queries, keys, values, self._table, self._addresses[layer])
        return paged_kernel.attend(*tensors, self._longest, window, kernel.scale, kernel.softcap).flatten(1)


_Places = list[tuple[Slab, torch.Tensor, torch.Tensor]]
"""Tokens of slabs: ``[n · kv_heads]`` in the slab seen as ``[rows · kv_heads · capacity, D]``, and ``[n]``, the same tokens
among those that are packed end to end."""


class PackedPrefill:
    """Attention of several pieces packed end to end, by one variable-length call a layer."""

    def __init__(self, kernel: Kernel, pieces: Sequence[PrefillSpan]):
        self._kernel = kernel
        queries = [piece.count for piece in pieces]
        keys = [piece.prompt_length + piece.start + piece.count for piece in pieces]
        ends = (torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32) for lengths in (queries, keys))
        self._queries, self._keys = (upload(end, kernel.device) for end in ends)
        self._longest = max(queries), max(keys)
        rows = [[(piece.row, 0, piece.start), (piece.row, piece.start, piece.count)] for piece in pieces]
        self._writes = self._by_slab([own for _, own in rows])
        self._total, self._reads = sum(keys), _Places()
        if self._total > sum(queries):  # not only to what is computed now
            prompts = [(piece.prompt or piece.row, 0, piece.prompt_length) for piece in pieces]
            self._reads = self._by_slab(part for prompt, own in zip(prompts, rows, strict=True) for part in (prompt, *own))

    @staticmethod
    def takes(kernel: Kernel) -> bool:
        """True if a variable-length kernel computes this model's attention on this device."""
        known = kernel.device.type == "cuda" and kernel.dtype != torch.float32 and kernel.softcap is None
        return known and varlen.takes_kernel(kernel.device)

    def _by_slab(self, parts: Iterable[tuple[Row, int, int]]) -> _Places:
        """``parts``: tokens of rows, as (row, first, count), in the order in which they are packed."""
        found: dict[Slab, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        heads, done = torch.arange(self._kernel.kv_heads), 0
        for row, first, count in parts:
            lines = (row.index * len(heads) + heads) * row.slab.capacity
            cached = (torch.arange(first, first + count)[:, None] + lines).flatten()
            found.setdefault(row.slab, []).append((cached, torch.arange(done, done := done + count)))
        there = self._kernel.device
        return [(slab, *(upload(torch.cat(one), there) for one in zip(*some, strict=True))) for slab, some in found.items()]  # type: ignore[misc]

    def __call__(
        self, layer: int, window: int | None, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Writes keys and values ``[T, kv_heads, D]`` and attends with ``[T, heads, D]``; returns ``[T, heads · D]``."""
        given = []
        for which, new in (("keys", keys), ("values", values)):
            whole = new.new_empty(self._total, *new.shape[1:]) if self._reads else new.contiguous()
            for slab, cached, packed in self._writes:
                flat = getattr(slab, which)[layer].view(-1, self._kernel.head_dim)
                flat.index_copy_(0, cached, new[packed].view(-1, self._kernel.head_dim))
            for slab, cached, packed in self._reads:
                flat = getattr(slab, which)[layer].view(-1, self._kernel.head_dim)
                whole.index_copy_(0, packed, flat[cached].view(-1, *new.shape[1:]))
            given.append(whole)
        tensors = queries.contiguous(), given[0], given[1], self._queries, self._keys
        left = -1 if window is None else window - 1
        return varlen.KERNEL(*tensors, *self._longest, scale=self._kernel.scale, left=left).flatten(1)
