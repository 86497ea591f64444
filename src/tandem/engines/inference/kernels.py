"""Compiled kernels for CPUs (`kernels.cpp`): all of a step except matrix products.

`models/native.py` builds them. Without them the engine computes the same with torch's operators, which are the reference.

One call of the attention kernel computes all tokens of a layer: decode and prefill, with shared prompts and windows. A plan
states, once for all layers, which token reads which rows. Tokens that share a prompt read it together, in tiles that fit in
the kernel's own memory.
"""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from tandem.engines.inference.attention import Kernel, PrefillSpan
from tandem.engines.inference.kv_cache import Row, numbered
from tandem.models.native import function, load

HEAD_DIMS = (32, 64, 96, 128, 256)
"""Head dimensions that attention is compiled for."""


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
    """Functions of the compiled library. Tensors are contiguous, on the CPU and of ``dtype`` unless stated otherwise."""

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
        """Returns ``x [T, size]``, each row divided by its root mean square and multiplied by ``weight [size]``."""
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
        """Draws tokens ``[B]`` from softmax(logits ``[B, V]`` / temperature) by ``uniforms`` (float64), or takes the most
        probable one where ``greedy`` (bool) is set. Returns the tokens and their log-probabilities (float32).

        ``forbidden``: rows ``[F]`` in ascending order, and for each entry a token that the row may not draw."""
        rows, size = logits.shape
        tokens, logprobs = torch.empty(rows, dtype=torch.long), torch.empty(rows)
        inputs = [logits.data_ptr(), temperatures.data_ptr(), uniforms.data_ptr(), None, None, None]
        if greedy is not None:
            inputs[3] = greedy.data_ptr()
        if forbidden is not None:
            bans = torch.searchsorted(forbidden[0], torch.arange(rows + 1))
            inputs[4:] = forbidden[1].data_ptr(), bans.data_ptr()
        self._draw(*inputs, tokens.data_ptr(), logprobs.data_ptr(), rows, size, torch.get_num_threads())
        return tokens, logprobs

    def attend(self, plan: AttentionPlan, layer: Layer) -> None:
        """Rotates queries and keys, writes keys and values to the cache, and attends. The result is in ``layer.out``."""
        if self._attend(plan, layer, torch.get_num_threads()):
            raise ValueError(f"attention is compiled for head dimensions {HEAD_DIMS}, got {plan.dim}")


@functools.cache
def kernels(dtype: torch.dtype, build_timeout_s: float = 120) -> Kernels | None:
    """Returns the kernels for tensors of ``dtype``; None if they cannot be built, see `load`."""
    return load(Path(__file__).with_name("kernels.cpp"), dtype, Kernels, build_timeout_s)


_TILE_QUERIES = 48
"""``kQueries`` of `kernels.cpp`: most queries in a tile, which has ``group`` queries per token."""


def attends(kernel: Kernel) -> bool:
    """True if the compiled kernels, once built, compute this model's attention."""
    supported = kernel.head_dim in HEAD_DIMS and kernel.group <= _TILE_QUERIES
    return supported and kernel.softcap is None and kernel.device.type == "cpu"


class RowAttention:
    """Attention of ``T`` tokens to their own rows and to the prompts before them.

    Args:
        rows: the own row of each token; the tokens of one piece of a prompt are adjacent.
        own: number of tokens in the row of each token, up to and including this token.
        prompts: the row of each token's shared prompt, or None.
        starts: number of tokens of each token's shared prompt, 0 without one.
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
        # Tokens of one prompt (without a prompt: of one row) come together; otherwise the order stays.
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
        """Plans attention for pieces of prompts packed end to end."""
        tokens = [(piece, piece.start + i + 1) for piece in pieces for i in range(piece.count)]
        rows, lengths = [piece.row for piece, _ in tokens], [length for _, length in tokens]
        prompts = [piece.prompt if piece.prompt_length else None for piece, _ in tokens]
        return cls(kernels, kernel, rows, lengths, prompts, [piece.prompt_length for piece, _ in tokens])

    def advance(self) -> None:
        """Moves the plan on by one token per sequence."""
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
        """Computes attention of one layer: rotates queries and keys, stores keys and values, and attends.

        Args:
            index: number of the layer.
            window: number of tokens that a token sees, itself included; None: all.
            qkv: ``[T, (heads + 2 · kv_heads) · D]``; overwritten.
            positions: ``[T]`` int64, absolute.
            table: cosine and sine of every position, or None for a layer without positions.
            norms: weights of the norms of queries and keys and their epsilon, or None.

        Returns:
            ``[T, heads · D]``.
        """
        # Looked up in each call, because a slab that has grown since the plan was made has other tensors.
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
