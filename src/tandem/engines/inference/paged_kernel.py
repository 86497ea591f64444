"""Attention of one new token per row to keys and values in the cache, read in place: two GPU kernels in Triton.

The first cuts the keys of each row into splits of `SPLIT` and runs one program per (row, key head, split), which reads each
key once for all query heads of its key head. Scores, softmax and sums are float32. The second joins the splits of a row by
their log-sum-exps. Splits have the same length in every batch, so a row's result does not depend on the other rows.

triton is imported at the first call; it comes with torch where there is a GPU. With ``TRITON_INTERPRET=1`` it runs on a CPU.
"""

from __future__ import annotations  # the kernels name types of triton, which may not be installed

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._triton import has_triton

from tandem.models.packed import has_compiler

if TYPE_CHECKING:
    import triton.language as tl

SPLIT = 256
"""Number of keys per split."""

_TILE_BYTES = 16384
"""Bytes of keys, or of values, that a program loads at a time."""

_NO_WINDOW = 1 << 30


def takes(dim: int) -> bool:
    """True if the kernels can be compiled here, for heads of dimension ``dim``."""
    return 16 <= dim <= 256 and has_triton() and has_compiler()


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    addresses: torch.Tensor,
    longest: int,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Writes the new tokens' keys and values into the cache and attends.

    Args:
        queries: ``[B, heads, D]``, contiguous within a token.
        keys: ``[B, kv_heads, D]`` of the new tokens, in the cache's dtype.
        values: ``[B, kv_heads, D]``, likewise.
        table: ``[8, B]`` int64: four lines for the shared prompt, then four for the row's own tokens. Slab number; index of
            the first head's first token in the slab; tokens from one head to the next; number of tokens (0 without a
            prompt; own tokens include the new one).
        addresses: ``[2, slabs]`` int64, addresses of the keys and of the values of each slab in this layer.
        longest: number of tokens in the longest row.
        window: number of tokens that a token sees, itself included; None: all.
        scale: factor of the scores.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None: they stay as they are.

    Returns:
        ``[B, heads, D]``.
    """
    launch_splits, launch_join = kernels()
    (rows, heads, dim), kv_heads = queries.shape, keys.shape[1]
    splits = max(1, -(-(min(longest, window or longest) - 1) // SPLIT))
    parts = torch.empty((rows, heads, splits, dim), dtype=torch.float32, device=queries.device)
    sums = torch.empty((rows, heads, splits), dtype=torch.float32, device=queries.device)
    out = torch.empty((rows, heads, dim), dtype=queries.dtype, device=queries.device)
    seen = _NO_WINDOW if window is None else window
    precision = "ieee" if keys.dtype == torch.float32 else "tf32"  # tf32 holds bfloat16 and float16 exactly
    shape, tile = sizes(heads, kv_heads, dim, keys.itemsize)
    strides = queries.stride(0), keys.stride(0), values.stride(0)
    with torch.cuda.device_of(queries):
        launch_splits[rows, kv_heads, splits](
            queries, keys, values, table, addresses, parts, sums, *strides, rows, addresses.shape[1], splits, seen, scale,
            softcap or 1.0, CAPPED=softcap is not None, PRECISION=precision, **shape, **tile,
        )  # fmt: skip
        launch_join[rows, heads](table, parts, sums, out, rows, splits, seen, **shape)
    return out


def sizes(heads: int, kv_heads: int, dim: int, itemsize: int) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the compile-time constants that both kernels have, and those that only the first kernel has."""
    dims, group = 1 << (dim - 1).bit_length(), heads // kv_heads
    tile = {"GROUP": group, "QUERIES": max(16, 1 << (group - 1).bit_length()), "KEYS": _TILE_BYTES // (dims * itemsize)}
    return {"HEADS": heads, "DIM": dim, "DIMS": dims, "SPLIT": SPLIT}, tile


@functools.cache
def kernels() -> tuple[Any, Any]:
    """Returns both kernels. They are compiled at their first call for each dtype and head size."""
    import triton  # noqa: PLC0415 — only where there is a GPU
    import triton.language as tl  # noqa: PLC0415

    globals()["tl"] = tl  # the name by which the functions below know it
    changing = {"do_not_specialize": ["rows", "slabs", "splits", "window"]}  # else triton recompiles for some values
    return triton.jit(_splits, **changing), triton.jit(_join, **changing)


# fmt: off
def _splits(
    queries, new_keys, new_values, table, addresses, parts, sums,
    query_stride, key_stride, value_stride, rows, slabs, splits, window, scale, softcap,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    DIMS: tl.constexpr, SPLIT: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):
    # fmt: on
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    prompt, own = tl.load(table + 3 * rows + row), tl.load(table + 7 * rows + row)
    last = prompt + own - 1  # the new token
    begin = tl.maximum(last + 1 - window, 0) + split * SPLIT
    end = tl.minimum(begin + SPLIT, last)
    if (split > 0) & (begin >= end):
        return
    group, dims = tl.arange(0, QUERIES), tl.arange(0, DIMS)
    whole = dims < DIM
    query_mask = (group[:, None] < GROUP) & whole[None, :]
    places = (head * GROUP + group[:, None]) * DIM + dims[None, :]
    query = tl.load(queries + row * query_stride + places, mask=query_mask, other=0.0).to(tl.float32)  # [QUERIES, DIMS]
    most = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    out = tl.zeros([QUERIES, DIMS], tl.float32)
    for part in tl.static_range(3):  # the new token, which the first split takes; the shared prompt; the own tokens
        keys = new_keys + row * key_stride + head * DIM
        values = new_values + row * value_stride + head * DIM
        low, high = 0, tl.where(split == 0, 1, 0)
        if part > 0:
            lines = table + 4 * (part - 1) * rows + row
            slab, place, step = tl.load(lines), tl.load(lines + rows), tl.load(lines + 2 * rows)
            pointer = tl.pointer_type(new_keys.dtype.element_ty)
            offset = (place + head * step) * DIM
            keys = tl.multiple_of(tl.load(addresses + slab).to(pointer), 16) + offset
            values = tl.multiple_of(tl.load(addresses + slabs + slab).to(pointer), 16) + offset
            low, high = begin, tl.minimum(end, prompt)
        if part == 2:
            low, high = tl.maximum(begin - prompt, 0), end - prompt
            # No program reads this place: the new token is in no split.
            source, place, new = head * DIM + dims, (own - 1) * DIM + dims, whole & (split == 0)
            tl.store(keys + place, tl.load(new_keys + row * key_stride + source, mask=new), mask=new)
            tl.store(values + place, tl.load(new_values + row * value_stride + source, mask=new), mask=new)
        for start in range(low, high, KEYS):
            tokens = start + tl.arange(0, KEYS)
            valid = tokens < high
            at, mask = tokens[:, None] * DIM + dims[None, :], valid[:, None] & whole[None, :]
            block = tl.load(keys + at, mask=mask, other=0.0).to(tl.float32)  # [KEYS, DIMS]
            scores = tl.dot(query, tl.trans(block), input_precision=PRECISION) * scale
            if CAPPED:
                scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))  # tanh
            scores = tl.where(valid[None, :], scores, float("-inf"))
            higher = tl.maximum(most, tl.max(scores, 1))
            weights, shrunk = tl.exp(scores - higher[:, None]), tl.exp(most - higher)
            block = tl.load(values + at, mask=mask, other=0.0).to(tl.float32)
            out = out * shrunk[:, None] + tl.dot(weights, block, input_precision=PRECISION)
            total = total * shrunk + tl.sum(weights, 1)
            most = higher

    line = row * HEADS + head * GROUP + group
    tl.store(sums + line * splits + split, most + tl.log(total), mask=group < GROUP)
    tl.store(parts + (line[:, None] * splits + split) * DIM + dims[None, :], out / total[:, None], mask=query_mask)


def _join(
    table,
    parts,
    sums,
    out,
    rows,
    splits,
    window,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIMS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = tl.load(table + 3 * rows + row) + tl.load(table + 7 * rows + row)
    count = tl.maximum(tl.cdiv(tl.minimum(tokens, window) - 1, SPLIT), 1)
    dims, line = tl.arange(0, DIMS), row * HEADS + head
    whole = dims < DIM
    most = tl.load(sums + line * splits)
    joined = tl.load(parts + line * splits * DIM + dims, mask=whole, other=0.0)
    total = 1.0
    for split in range(1, count):
        lse = tl.load(sums + line * splits + split)
        higher = tl.maximum(most, lse)
        old, new = tl.exp(most - higher), tl.exp(lse - higher)
        part = tl.load(parts + (line * splits + split) * DIM + dims, mask=whole, other=0.0)
        joined, total, most = joined * old + part * new, total * old + new, higher
    tl.store(out + line * DIM + dims, joined / total, mask=whole)
