"""The precision that a machine should compute in."""

from __future__ import annotations

from tandem.api.lazy_torch import torch

DTYPES = ("bfloat16", "float32")


def fast_bfloat16(device: str | torch.device) -> bool:
    """True if the device multiplies bfloat16 in hardware; a CPU without such instructions is several times slower in it."""
    if torch.device(device).type != "cpu":
        return True
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and torch.cpu._is_avx512_bf16_supported()


def resolve_dtype(name: str, device: str | torch.device) -> torch.dtype:
    """The dtype that ``name`` stands for; ``auto`` is bfloat16 where the device is fast in it, else float32.

    Raises:
        ValueError: another name.
    """
    if name == "auto":
        return torch.bfloat16 if fast_bfloat16(device) else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype must be auto or one of {sorted(DTYPES)}, got {name!r}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype
