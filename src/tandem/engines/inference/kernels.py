"""Compiled kernels for CPUs (`kernels.cpp`): everything of a step but the products.

`models/native.py` builds them. Without them the engine computes the same with torch's operators, which stay the reference.
"""

import ctypes
import functools
from pathlib import Path

import torch

from tandem.models.native import function, load

HEAD_DIMS = (32, 64, 96, 128, 256)
"""Those that attention is compiled for."""


class AttentionPlan(ctypes.Structure):
    """``AttentionPlan`` of `kernels.cpp`: which tokens attend to which rows."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim", "tokens", "tiles")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("token", "own_slab", "own_row", "own_length")),
        *((name, ctypes.c_void_p) for name in ("prompt_slab", "prompt_row", "prompt_length", "tile", "capacity")),
    ]


class Layer(ctypes.Structure):
    """``Layer`` of `kernels.cpp`: the tensors of one layer."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("qkv", "out", "keys", "values", "position")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "query_norm", "key_norm")),
        ("eps", ctypes.c_float),
        ("window", ctypes.c_int64),
    ]


class Kernels:
    """Calls into the library. Tensors are contiguous, on the CPU and of ``dtype`` unless said otherwise."""

    def __init__(self, path: Path, dtype: torch.dtype):
        self.dtype = dtype
        library = ctypes.CDLL(str(path))
        pointer, number, real, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
        self._norm = function(library, "rms_norm", [pointer, pointer, pointer, number, number, real, threads])
        self._gate = function(library, "silu_gate", [pointer, pointer, number, number, threads])
        self._draw = function(library, "draw", [pointer] * 8 + [number, number, threads])
        plans = [ctypes.POINTER(AttentionPlan), ctypes.POINTER(Layer), threads]
        self._attend = function(library, "attend", plans, ctypes.c_int)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """``[T, size]``, each row over its root mean square, times ``weight [size]``."""
        out = torch.empty_like(x)
        self._norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), len(x), x.shape[1], eps, torch.get_num_threads())
        return out

    def silu_gate(self, both: torch.Tensor) -> torch.Tensor:
        """``[T, 2 · I]`` (gate, up) → silu(gate) · up, ``[T, I]``."""
        rows, size = len(both), both.shape[1] // 2
        out = both.new_empty(rows, size)
        self._gate(both.data_ptr(), out.data_ptr(), rows, size, torch.get_num_threads())
        return out

    def draw(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor,
        uniforms: torch.Tensor,
        greedy: torch.Tensor | None,
        forbidden: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens ``[B]`` drawn from softmax(logits ``[B, V]`` / temperature) by ``uniforms`` (float64), or the most probable
        where ``greedy`` (bool), and their log-probabilities (float32).

        ``forbidden``: rows ``[F]`` in ascending order, and a token of each that it may not draw."""
        rows, size = logits.shape
        tokens, logprobs = torch.empty(rows, dtype=torch.long), torch.empty(rows)
        given = [logits.data_ptr(), temperatures.data_ptr(), uniforms.data_ptr(), None, None, None]
        if greedy is not None:
            given[3] = greedy.data_ptr()
        if forbidden is not None:
            bans = torch.searchsorted(forbidden[0], torch.arange(rows + 1))
            given[4:] = forbidden[1].data_ptr(), bans.data_ptr()
        self._draw(*given, tokens.data_ptr(), logprobs.data_ptr(), rows, size, torch.get_num_threads())
        return tokens, logprobs

    def attend(self, plan: AttentionPlan, layer: Layer) -> None:
        """Rotates queries and keys, writes keys and values to the cache, and attends; ``layer.out`` is filled."""
        if self._attend(plan, layer, torch.get_num_threads()):
            raise ValueError(f"attention is compiled for head dimensions {HEAD_DIMS}, got {plan.dim}")


@functools.cache
def kernels(dtype: torch.dtype, build_timeout_s: float = 120) -> Kernels | None:
    """The kernels for numbers of ``dtype``; None where they cannot be built, see `load`."""
    return load(Path(__file__).with_name("kernels.cpp"), dtype, Kernels, build_timeout_s)
