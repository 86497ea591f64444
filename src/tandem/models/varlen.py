"""The variable-length attention kernel of torch, under one signature.

torch 2.11 wants keys and values with as many heads as the queries, so they are repeated; 2.12 and later take fewer by
``enable_gqa``. Causality is aligned at the last token.
"""

import functools
import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch.nn.attention.varlen import varlen_attn


class Varlen(Protocol):
    """Causal attention of sequences of several lengths. The queries of a sequence are the last of its keys."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_queries: torch.Tensor,
        cu_keys: torch.Tensor,
        longest_query: int,
        longest_key: int,
        *,
        scale: float,
        left: int,
    ) -> torch.Tensor:
        """``query [Tq, heads, D]``, ``key`` and ``value [Tk, kv_heads, D]`` → ``[Tq, heads, D]``. ``left``: a token sees
        that many before itself, or all of them if it is -1."""


def by_torch(varlen_attn: Callable[..., torch.Tensor]) -> Varlen:
    """torch's kernel, of whichever release."""
    repeats = "enable_gqa" not in inspect.signature(varlen_attn).parameters

    def attend(query: Any, key: Any, value: Any, *bounds: Any, scale: float, left: int) -> torch.Tensor:
        groups = query.shape[1] // key.shape[1]
        settings: dict[str, Any] = {"scale": scale, "window_size": (left, 0)}
        if not repeats:
            settings["enable_gqa"] = groups > 1
        elif groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return varlen_attn(query, key, value, *bounds, **settings)

    return attend


@functools.cache
def takes_kernel(device: torch.device) -> bool:
    """True if a GPU is of a generation that these kernels are made for (Ampere or younger). On Hopper torch's calls
    FlashAttention 3 from here on, where that is installed."""
    generation = torch.cuda.get_device_capability(device)
    exact = torch.are_deterministic_algorithms_enabled()
    if generation[0] == 9 and not exact and find_spec("flash_attn_interface") is not None:
        activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
        if activate is not None and "FA3" in torch.nn.attention.list_flash_attention_impls():
            activate("FA3")
    return generation >= (8, 0)


KERNEL = by_torch(varlen_attn)
