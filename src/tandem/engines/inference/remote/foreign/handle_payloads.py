"""Handles of a GPU's memory in the form that SGLang's `/update_weights_from_tensor` takes: a pickle of named tensors.

Tandem writes these and reads none. SGLang reads them with a list of what they may call, on which torch's own
`rebuild_cuda_tensor` stands.
"""

import base64
import io
import itertools
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor


class _OnTheGpu:
    """Pickled as what makes the tensor where it is read."""

    def __init__(self, handle: Sequence[Any], shape: Sequence[int], dtype: torch.dtype, offset: int):
        """``handle``: of its bucket, in JSON's words. ``offset``: bytes."""
        _, *others = (base64.b64decode(part) if isinstance(part, str) else part for part in handle)
        memory, num_bytes, start, counter, count, event, wait = others
        stride = tuple(torch.empty(tuple(shape), device="meta").stride())
        own = (torch.Tensor, torch.Size(shape), stride, offset // dtype.itemsize, torch.storage.TypedStorage, dtype)
        # 0: the only GPU that the server sees
        self._terms = (*own, 0, memory, num_bytes, start, False, counter, count, event, wait)

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_cuda_tensor, self._terms


def handle_payloads(handles: Sequence[Sequence[Any]], tensors: Iterable[Sequence[Any]]) -> list[str]:
    """One payload a bucket; see `WeightSource.place` for the arguments."""
    payloads = []
    for bucket, entries in itertools.groupby(tensors, key=lambda entry: entry[3]):
        named = [
            (name, _OnTheGpu(handles[bucket], shape, getattr(torch, dtype), offset))
            for name, shape, dtype, _, offset in entries
        ]
        written = io.BytesIO()
        pickle.dump(named, written)
        payloads.append(base64.b64encode(written.getvalue()).decode())
    return payloads
