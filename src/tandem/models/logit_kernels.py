"""Compiled kernels for the head of a language model in training (`logit_kernels.cpp`), in bfloat16.

`models/native.py` builds them. Without them `models/logprobs.py` computes the same with torch's operators, which stay the
reference.
"""

import ctypes
import functools
from pathlib import Path

import torch

from tandem.models.native import function, load

FACTS = 4
"""Numbers that describe the softmax of a row: the highest scaled logit, the logarithm of the sum of exponentials below it,
the log-probability of the target, and the entropy."""


class LogitKernels:
    """Calls into the library. Logits ``[C, V]`` are contiguous bfloat16 on the CPU, what describes their rows float32;
    ``targets [C]`` are tokens of the vocabulary, ``temperature [C]`` is None where all are 1."""

    def __init__(self, path: Path, dtype: torch.dtype):
        library = ctypes.CDLL(str(path))
        pointer, number, real, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
        behind = [number, number, threads]
        self._read = function(library, "read_logits", [pointer] * 3 + [real, threads, pointer, *behind])
        self._differentiate = function(library, "differentiate_logits", [pointer] * 3 + [real] + [pointer] * 3 + behind)

    def read(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperature: torch.Tensor | None,
        softcap: float | None,
        entropy: bool,
        facts: torch.Tensor,
    ) -> None:
        """Fills ``facts [C, FACTS]``; the entropy is 0 where it is not asked for."""
        given = logits.data_ptr(), targets.data_ptr(), _pointer(temperature), softcap or 0.0, int(entropy)
        self._read(*given, facts.data_ptr(), *logits.shape, torch.get_num_threads())

    def differentiate(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperature: torch.Tensor | None,
        softcap: float | None,
        facts: torch.Tensor,
        grad_logprobs: torch.Tensor,
        grad_entropy: torch.Tensor | None,
    ) -> None:
        """Writes the gradient of ``logits`` over them, from that of the log-probabilities ``[C]`` and entropies ``[C]``."""
        given = logits.data_ptr(), targets.data_ptr(), _pointer(temperature), softcap or 0.0
        pulls = grad_logprobs.data_ptr(), _pointer(grad_entropy)
        self._differentiate(*given, facts.data_ptr(), *pulls, *logits.shape, torch.get_num_threads())


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@functools.cache
def _kernels() -> LogitKernels | None:
    return load(Path(__file__).with_name("logit_kernels.cpp"), torch.bfloat16, LogitKernels)


def logit_kernels(hidden: torch.Tensor, weight: torch.Tensor) -> LogitKernels | None:
    """The kernels for the head of ``hidden`` and ``weight``; None where they are not for it, or cannot be built, see
    `load`."""
    here = all(x.device.type == "cpu" and x.dtype == torch.bfloat16 for x in (hidden, weight))
    return _kernels() if here else None
