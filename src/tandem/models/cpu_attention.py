"""Attention of packed sequences on a CPU, forward and backward, by a compiled kernel (`cpu_attention.cpp`).

One call computes all sequences of a batch, and a shared prompt only once. Without a compiler or the needed CPU instructions
torch's kernel computes the same, sequence by sequence; it is the reference.
"""

import ctypes
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from tandem.models.native import function, load

STEP, LARGEST = 32, 512
"""The kernel supports head dimensions that are a multiple of `STEP` and at most `LARGEST`."""


class QueryRange(NamedTuple):
    """Consecutive query tokens, and the tokens to which they attend: all of ``prompt``, and causally ``keys``. The last
    query attends to all ``keys``, the query before it to all but the last, and so on."""

    queries: range
    keys: range
    prompt: range = range(0)


class QueryRanges(NamedTuple):
    """The work of one call, in segments and groups. Every query is in one segment, and every key in one group."""

    segments: torch.Tensor
    """``[segments, 6]`` int64: first and number of queries, of keys, of the prompt's keys."""

    groups: torch.Tensor
    """``[groups + 1]`` int64: first segment of each group. Segments that share keys are in one group."""

    @classmethod
    def of(cls, groups: Sequence[Sequence[QueryRange]]) -> "QueryRanges":
        """Makes the tensors from groups, which are lists of segments that share keys."""
        rows = [[number for part in segment for number in (part.start, len(part))] for group in groups for segment in group]
        bounds = itertools.accumulate(map(len, groups), initial=0)
        with torch.inference_mode(False):  # a backward pass may keep these tensors
            return cls(torch.tensor(rows, dtype=torch.int64).reshape(-1, 6), torch.tensor(list(bounds), dtype=torch.int64))


class _Call(ctypes.Structure):
    """The C struct ``Call`` of `cpu_attention.cpp`."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim", "groups", "query_tokens", "key_tokens", "window")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("group", "segment", "q", "k", "v")),
        *((f"{name}_{of}", ctypes.c_int64) for name in ("q", "k", "v") for of in ("token", "head")),
        *((name, ctypes.c_void_p) for name in ("out", "peak", "grad")),
        *((name, ctypes.c_int64) for name in ("grad_token", "grad_head")),
        *((name, ctypes.c_void_p) for name in ("q_grad", "k_grad", "v_grad", "sums")),
    ]


class _Kernel:
    def __init__(self, path: Path, dtype: torch.dtype):
        library = ctypes.CDLL(str(path))
        types = [ctypes.POINTER(_Call), ctypes.c_int]
        self.attend, self.backward = (function(library, name, types) for name in ("attend", "attend_backward"))


@functools.cache
def kernel(dtype: torch.dtype) -> _Kernel | None:
    """Returns the compiled kernel for tensors of this dtype; None if there is none, see `load`."""
    return load(Path(__file__).with_name("cpu_attention.cpp"), dtype, _Kernel)


def takes(query: torch.Tensor) -> bool:
    """Tells whether `attend` supports the device, dtype and head dimension of ``query [..., D]``."""
    return query.device.type == "cpu" and fits(query.shape[-1]) and kernel(query.dtype) is not None


def fits(head_dim: int) -> bool:
    """Tells whether the kernel supports this head dimension."""
    return head_dim % STEP == 0 and head_dim <= LARGEST


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: QueryRanges, scale: float, window: int | None
) -> torch.Tensor:
    """Computes causal attention ``[Q, heads, D]`` from ``q [Q, heads, D]`` and ``k``, ``v [K, kv_heads, D]``.

    ``window``: the most keys to which a query attends, including its own; None: no limit. The softmax is computed in
    float32; its weights and the gradients of scores are rounded to the tensors' dtype before they are multiplied, as in
    torch's kernel.

    Raises:
        ValueError: dtypes or shapes of the tensors do not fit together.
    """
    return _attention(q, k, v, *segments, scale, window or 0)[0]


def _call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: torch.Tensor, groups: torch.Tensor, **extra) -> _Call:
    """Fills a `_Call`. ``extra``: values of its further fields; a tensor is passed by its address."""
    call = _Call(
        heads=q.shape[1], kv_heads=k.shape[1], dim=q.shape[2], groups=len(groups) - 1,
        query_tokens=len(q), key_tokens=len(k), group=groups.data_ptr(), segment=segments.data_ptr(),
    )  # fmt: skip
    for name, tensor in {"q": q, "k": k, "v": v}.items():
        setattr(call, name, tensor.data_ptr())
        setattr(call, f"{name}_token", tensor.stride(0))
        setattr(call, f"{name}_head", tensor.stride(1))
    for name, value in extra.items():
        setattr(call, name, value.data_ptr() if isinstance(value, torch.Tensor) else value)
    return call


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, copied if the numbers of a head are not contiguous, or if a head begins at an odd offset, where
    the kernel's 2-number words would be misaligned."""
    return x if x.stride(2) == 1 and x.stride(0) % 2 == x.stride(1) % 2 == 0 else x.contiguous()


def output(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segments: torch.Tensor,
    groups: torch.Tensor,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output of `attend`, and ``[heads, Q]`` float32: log2 of the sum of 2^score, for the backward pass."""
    library = kernel(q.dtype)
    assert library is not None, "callers check `takes` first"
    if not (
        q.dtype == k.dtype == v.dtype and q.shape[2] == k.shape[2] and k.shape == v.shape and q.shape[1] % k.shape[1] == 0
    ):
        raise ValueError(
            f"queries {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)} must have one dtype and one head "
            f"dimension, and each key head as many query heads; dtypes: {q.dtype}, {k.dtype}, {v.dtype}"
        )
    q, k, v = map(_dense, (q, k, v))
    out, peak = q.new_empty(q.shape), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    call = _call(q, k, v, segments, groups, scale=scale, window=window, out=out, peak=peak)
    library.attend(ctypes.byref(call), torch.get_num_threads())
    return out, peak


def gradients(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segments: torch.Tensor,
    groups: torch.Tensor,
    scale: float,
    window: int,
    out: torch.Tensor,
    peak: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of ``q``, ``k`` and ``v`` from the gradient of the output and the results of `output`; and the
    memory in which it summed them, ``[2, heads, K, D]`` float32, so that `tandem.planning.planned_model` sees it."""
    library = kernel(q.dtype)
    assert library is not None, "the forward pass had it"
    grad, q, k, v = map(_dense, (grad, q, k, v))
    grads = [x.new_empty(x.shape) for x in (q, k, v)]
    sums = q.new_empty(2, q.shape[1], len(k), q.shape[2], dtype=torch.float32)
    call = _call(
        q, k, v, segments, groups, scale=scale, window=window, out=out, peak=peak, sums=sums,
        grad=grad, grad_token=grad.stride(0), grad_head=grad.stride(1),
        q_grad=grads[0], k_grad=grads[1], v_grad=grads[2],
    )  # fmt: skip
    library.backward(ctypes.byref(call), torch.get_num_threads())
    return grads[0], grads[1], grads[2], sums


# Custom operators, so that selective checkpointing can recognise and keep their results.
_attention = torch.library.custom_op("tandem::packed_attention", output, mutates_args=())
_gradients = torch.library.custom_op("tandem::packed_attention_backward", gradients, mutates_args=())


@_attention.register_fake
def _(q, k, v, segments, groups, scale, window):
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@_gradients.register_fake
def _(grad, q, k, v, segments, groups, scale, window, out, peak):
    sums = q.new_empty(2, q.shape[1], k.shape[0], q.shape[2], dtype=torch.float32)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), sums


def _keep(ctx, inputs, output) -> None:
    *tensors, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad: torch.Tensor, _: torch.Tensor):
    q, k, v, segments, groups, out, peak = ctx.saved_tensors
    *found, _ = _gradients(grad, q, k, v, segments, groups, ctx.scale, ctx.window, out, peak)
    return *found, None, None, None, None


_attention.register_autograd(_backward, setup_context=_keep)
