"""The bytes of a tensor a few MiB at a time, so that neither casting nor copying holds a second whole tensor."""

import hashlib
from collections.abc import Iterable, Iterator

import torch

from tandem.api.weights import tensor_digest

PIECE_BYTES = 4 * 2**20
"""Most bytes of one piece, unless a single row is larger."""


def pieces(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device | str = "cpu") -> Iterator[torch.Tensor]:
    """The tensor in ``dtype``, row by row, as flat uint8 tensors on ``device``; each is valid until the next is asked for.

    A piece is the tensor's own memory where nothing has to be cast or moved.
    """
    rows = tensor.detach()
    rows = rows.reshape(1) if rows.dim() == 0 else rows
    if rows.numel() == 0:
        return
    row_bytes = rows[0].numel() * dtype.itemsize
    step = max(1, PIECE_BYTES // row_bytes)
    for start in range(0, len(rows), step):
        part = rows[start : start + step].to(device, dtype).contiguous()
        yield part.reshape(-1).view(torch.uint8)


def digest_in(tensor: torch.Tensor, dtype: torch.dtype, key: int | None) -> str:
    """The `tensor_digest` that the tensor has in ``dtype``."""
    return digest_of(pieces(tensor, dtype)) if key is None else tensor_digest(tensor.detach().to(dtype), key)


def digest_of(parts: Iterable[torch.Tensor]) -> str:
    """The `tensor_digest` of the tensor that these pieces are of."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part.numpy().data)
    return found.hexdigest()
