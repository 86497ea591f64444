"""The variable-length attention kernel of this environment, under one signature.

torch has `varlen_attn` since 2.10. Release 2.10 knows neither windows nor a scale and is not used; 2.11 wants keys and
values with as many heads as the queries, so they are repeated; 2.12 and later take fewer by ``enable_gqa``. Where torch's
does not do, flash-attn's `flash_attn_varlen_func` is taken if it is installed. All align causality at the last token.
"""

import functools
import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Protocol

import torch


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


def by_torch(varlen_attn: Callable[..., torch.Tensor]) -> Varlen | None:
    """torch's kernel, or None if this release of it lacks windows or a scale."""
    known = set(inspect.signature(varlen_attn).parameters)
    if not {"window_size", "scale"} <= known:
        return None

    def attend(query: Any, key: Any, value: Any, *bounds: Any, scale: float, left: int) -> torch.Tensor:
        groups = query.shape[1] // key.shape[1]
        settings: dict[str, Any] = {"scale": scale, "window_size": (left, 0)}
        if groups > 1 and "enable_gqa" in known:
            settings["enable_gqa"] = True
        elif groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return varlen_attn(query, key, value, *bounds, **settings)

    return attend


def by_flash_attn(flash_attn_varlen_func: Callable[..., torch.Tensor]) -> Varlen:
    """flash-attn's kernel, which takes fewer heads of keys and values as they are."""

    def attend(query: Any, key: Any, value: Any, *bounds: Any, scale: float, left: int) -> torch.Tensor:
        window = (left, -1 if left < 0 else 0)
        return flash_attn_varlen_func(query, key, value, *bounds, softmax_scale=scale, causal=True, window_size=window)

    return attend


def _find_kernel() -> Varlen | None:
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - younger than the oldest torch that works
    except ImportError:
        kernel = None
    else:
        kernel = by_torch(varlen_attn)
    if kernel is not None:
        return kernel
    try:
        from flash_attn import flash_attn_varlen_func  # noqa: PLC0415 - optional
    except ImportError:
        return None
    return by_flash_attn(flash_attn_varlen_func)


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


KERNEL = _find_kernel()
"""The kernel; None: attention on a GPU goes prompt by prompt."""
