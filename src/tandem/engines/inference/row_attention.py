"""Attention of all tokens of a layer in one call of the compiled kernel: decode and prefill, shared prompts and windows.

The plan says once for all layers which token reads which rows. Tokens that share a prompt read it together, in tiles of as
many as the kernel keeps in its own memory.
"""

import ctypes
from collections.abc import Sequence

import torch

from tandem.engines.inference.attention import Kernel, PrefillSpan
from tandem.engines.inference.kernels import HEAD_DIMS, AttentionPlan, Kernels, Layer
from tandem.engines.inference.kv_cache import Row, numbered

_TILE_QUERIES = 48
"""``kQueries`` of `kernels.cpp`: most queries of a tile, which has ``group`` of each token."""


def attends(kernel: Kernel) -> bool:
    """True if compiled kernels, where there are any, compute this model's attention."""
    known = kernel.head_dim in HEAD_DIMS and kernel.group <= _TILE_QUERIES
    return known and kernel.softcap is None and kernel.device.type == "cpu"


class RowAttention:
    """Attention of ``T`` tokens to their own rows and to the prompts before them.

    Args:
        rows: the own row of each token; the tokens of one piece of a prompt stand together.
        own: tokens in that row, up to and with this one.
        prompts: the shared prompt's row of each token, or None.
        starts: tokens of each shared prompt, 0 without.
    """

    def __init__(
        self,
        kernels: Kernels,
        kernel: Kernel,
        rows: Sequence[Row],
        own: Sequence[int],
        prompts: Sequence[Row | None],
        starts: Sequence[int],
    ):
        self._kernels, self._kernel = kernels, kernel
        self._slabs, places = numbered([*rows, *prompts])
        place, before = places[: len(rows)], places[len(rows) :]
        # Of each prompt (or row, without one) together, otherwise in the order given.
        key = [
            (start > 0, *(prompt if start else own_row))
            for start, prompt, own_row in zip(starts, before, place, strict=True)
        ]
        order = sorted(range(len(rows)), key=key.__getitem__)
        tiles, most = [0], _TILE_QUERIES // kernel.group
        for i in range(1, len(order)):
            if i - tiles[-1] >= most or key[order[i]] != key[order[i - 1]]:
                tiles.append(i)
        table = [[i, *place[i], own[i], *before[i], starts[i]] for i in order]
        self._table = torch.tensor(table, dtype=torch.int32).T.contiguous()  # [7, T]
        self._tiles = torch.tensor([*tiles, len(order)], dtype=torch.int32)
        self._capacities = torch.tensor([slab.capacity for slab in self._slabs])
        self._addresses = ctypes.c_int64 * len(self._slabs)
        columns = [line.data_ptr() for line in self._table]
        sizes = kernel.heads, kernel.kv_heads, kernel.head_dim, len(order), len(tiles), kernel.scale
        self._plan = AttentionPlan(*sizes, *columns, self._tiles.data_ptr(), self._capacities.data_ptr())

    @classmethod
    def of_pieces(cls, kernels: Kernels, kernel: Kernel, pieces: Sequence[PrefillSpan]) -> "RowAttention":
        """For pieces of prompts packed end to end."""
        tokens = [(piece, piece.start + i + 1) for piece in pieces for i in range(piece.count)]
        rows, own = [piece.row for piece, _ in tokens], [length for _, length in tokens]
        prompts = [piece.prompt if piece.prompt_length else None for piece, _ in tokens]
        return cls(kernels, kernel, rows, own, prompts, [piece.prompt_length for piece, _ in tokens])

    def advance(self) -> None:
        """Every sequence has one token more."""
        self._table[3] += 1

    def __call__(
        self,
        index: int,
        window: int | None,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        table: tuple[torch.Tensor, torch.Tensor] | None,
        norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    ) -> torch.Tensor:
        """Layer ``index``: rotates and stores what ``qkv [T, (heads + 2 · kv_heads) · D]`` holds, and attends.

        Args:
            index: the layer.
            window: how many tokens a token sees, itself included; None: all.
            qkv: overwritten.
            positions: ``[T]`` int64, absolute.
            table: cosine and sine of every position, or None for a layer without positions.
            norms: weights of the norms of queries and keys and their epsilon, or None.

        Returns:
            ``[T, heads · D]``.
        """
        # Asked anew: a slab that grew since the plan was made has other tensors.
        keys = self._addresses(*(slab.keys[index].data_ptr() for slab in self._slabs))
        values = self._addresses(*(slab.values[index].data_ptr() for slab in self._slabs))
        out = qkv.new_empty(len(qkv), self._kernel.heads * self._kernel.head_dim)
        bases = ctypes.addressof(keys), ctypes.addressof(values)
        cos, sin = (None, None) if table is None else (table[0].data_ptr(), table[1].data_ptr())
        weights = (None, None) if norms is None else (norms[0].data_ptr(), norms[1].data_ptr())
        eps = 0.0 if norms is None else norms[2]
        tensors = qkv.data_ptr(), out.data_ptr(), *bases, positions.data_ptr(), cos, sin, *weights
        self._kernels.attend(self._plan, Layer(*tensors, eps, window or 0))
        return out
