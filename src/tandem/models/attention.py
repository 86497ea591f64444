"""Attention over packed sequences, registered with transformers as ``tandem_packed``.

Each token sees its own sequence only, causally. On a CPU each sequence is one call of the fused kernel, neighbours of
equal length go together; on a GPU one variable-length kernel takes all of them. The sequences arrive as the keyword
argument ``packing``, which transformers hands down to every layer.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "tandem_packed"


class Run(NamedTuple):
    """Neighbouring sequences of equal length."""

    count: int
    length: int


@dataclass(frozen=True)
class Packing:
    """Where the sequences of a packed batch lie.

    Example: lengths 3, 3, 5 → ``cu_seqlens [0, 3, 6, 11]``, runs (2 of 3), (1 of 5)
    """

    cu_seqlens: torch.Tensor
    """``[N + 1]`` int32 on the device of the model."""

    runs: tuple[Run, ...]
    longest: int

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: torch.Tensor) -> "Packing":
        """``cu_seqlens [N + 1]``; empty sequences are fine."""
        lengths = [length for length in cu_seqlens.diff().tolist() if length > 0]
        runs = tuple(Run(len(list(same)), length) for length, same in groupby(lengths))
        return cls(cu_seqlens.to(torch.int32), runs, max(lengths, default=0))

    def positions(self) -> torch.Tensor:
        """Position of each token in its sequence, ``[T]`` int64."""
        starts, lengths = self.cu_seqlens[:-1].long(), self.cu_seqlens.diff().long()
        total = sum(run.count * run.length for run in self.runs)
        return torch.arange(total, device=starts.device) - torch.repeat_interleave(starts, lengths, output_size=total)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer.

    ``query [1, heads, T, D]``, ``key`` and ``value [1, kv_heads, T, D]``; returns ``([1, T, heads, D], None)``, as
    transformers expects. ``sliding_window``: token i sees i - window + 1 … i. ``softcap``: ``cap * tanh(logits / cap)``.
    ``dropout`` is 0: `load_causal_lm` turns it off, because log-probabilities of a policy must not be random.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = sliding_window if sliding_window is not None and sliding_window < packing.longest else None
    if query.is_cuda and softcap is None and query.dtype in (torch.bfloat16, torch.float16) and _varlen_attn is not None:
        return _varlen(query, key, value, packing, scale, window), None

    sizes = [run.count * run.length for run in packing.runs]
    # `split` and `cat` have each other as gradients; slices would each make a gradient of the size of the whole
    tensors = [tensor[0].transpose(0, 1).split(sizes) for tensor in (query, key, value)]
    outputs = []
    for run, *parts in zip(packing.runs, *tensors, strict=True):
        q, k, v = (part.unflatten(0, (run.count, run.length)).transpose(1, 2) for part in parts)  # [B, heads, S, D]
        outputs.append(_causal(q, k, v, scale, window, softcap).transpose(1, 2).flatten(0, 1))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0), None


def _causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None, softcap: float | None
) -> torch.Tensor:
    """``[B, heads, S, D]`` each (fewer heads in ``k`` and ``v``) → ``[B, heads, S, D]``."""
    length = q.shape[2]
    grouped = q.shape[1] != k.shape[1]
    if softcap is not None:
        return _capped(q, k, v, scale, window, softcap)
    if window is None or window >= length:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    mask = _visible(length, window, q.device)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _visible(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Which key (column) each query (row) sees, ``[S, S]`` bool."""
    visible = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return visible if window is None else visible.triu(1 - window)


def _capped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None, softcap: float
) -> torch.Tensor:
    """The long way, because no fused kernel on the CPU knows soft-caps; softmax in float32 as transformers has it."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    logits = torch.tanh(q @ k.transpose(2, 3) * (scale / softcap)) * softcap
    logits = logits.masked_fill(~_visible(q.shape[2], window, q.device), float("-inf"))
    return logits.softmax(-1, dtype=torch.float32).to(v.dtype) @ v


def _find_varlen_attn() -> Any:
    """torch's variable-length attention where it exists with windows and grouped queries, else None."""
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - younger than the oldest torch that works
    except ImportError:
        return None
    return varlen_attn if {"window_size", "enable_gqa", "scale"} <= set(inspect.signature(varlen_attn).parameters) else None


_varlen_attn = _find_varlen_attn()


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing, scale: float, window: int | None
) -> torch.Tensor:
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))  # [T, heads, D]
    cu, longest = packing.cu_seqlens, packing.longest
    left = -1 if window is None else window - 1
    grouped = q.shape[1] != k.shape[1]
    return _varlen_attn(q, k, v, cu, cu, longest, longest, scale=scale, window_size=(left, 0), enable_gqa=grouped).unsqueeze(
        0
    )


def _no_mask(*_: Any, **__: Any) -> None:
    """The sequences travel as ``packing``; a dense mask is never made."""
    return None


def register() -> None:
    """Makes ``attn_implementation="tandem_packed"`` known to transformers; needs both of its registries."""
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def check_lengths(cu_seqlens: torch.Tensor, total: int) -> Sequence[int]:
    """The bounds as a list, if they cover ``total`` tokens.

    Raises:
        ValueError: they do not start at 0, fall, or end elsewhere.
    """
    bounds = cu_seqlens.tolist()
    if not bounds or bounds[0] != 0 or bounds[-1] != total or any(a > b for a, b in zip(bounds, bounds[1:], strict=False)):
        raise ValueError(f"cu_seqlens must rise from 0 to {total} (the number of tokens), got {bounds[:8]}")
    return bounds


register()
