"""Sums of large tensors for training in bfloat16 on a CPU, in one pass over memory (`sums.cpp`).

torch's operators, which compute the same where there are no compiled kernels, make a copy of the tensor first.
"""

import ctypes
import functools
from pathlib import Path

import torch

from tandem.models.native import function, load


class _Sums:
    """Calls into the library."""

    def __init__(self, path: Path, dtype: torch.dtype):
        library = ctypes.CDLL(str(path))
        pointer, number, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self.add_to = function(library, "add_to", [pointer, pointer, number, threads])
        self.square_sum = function(library, "square_sum", [pointer, number, threads], ctypes.c_double)


@functools.cache
def _library() -> _Sums | None:
    return load(Path(__file__).with_name("sums.cpp"), torch.bfloat16, _Sums)


def _library_for(*tensors: tuple[torch.Tensor, torch.dtype]) -> _Sums | None:
    """The library, if these are plain tensors of a CPU that have these dtypes."""
    plain = all(x.device.type == "cpu" and x.dtype == dtype and x.is_contiguous() for x, dtype in tensors)
    return _library() if plain else None


def add_to(total: torch.Tensor, part: torch.Tensor) -> None:
    """``total += part``, both of the same shape; the same to the bit with and without kernels."""
    library = _library_for((total, torch.float32), (part, torch.bfloat16))
    if library is None:
        total.add_(part)
    else:
        library.add_to(total.data_ptr(), part.data_ptr(), total.numel(), torch.get_num_threads())


def square_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum of the squares of float32 numbers, ``[]`` float64; squares are float64 with kernels, else float32."""
    library = _library_for((x, torch.float32))
    if library is None:
        return x.pow(2).sum(dtype=torch.float64)
    return torch.tensor(library.square_sum(x.data_ptr(), x.numel(), torch.get_num_threads()), dtype=torch.float64)
