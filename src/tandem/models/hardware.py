"""The device of a run: which one it is, the dtype in which it should compute, and copies between host and device for which
the host does not wait."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from tandem.api.lazy_torch import TensorDict, torch
from tandem.config.errors import ConfigError
from tandem.config.train_engine import parse_layout

DTYPES = ("bfloat16", "float32")


def fast_bfloat16(device: str | torch.device) -> bool:
    """Tells whether the device multiplies bfloat16 in hardware; without it a CPU is several times slower in bfloat16."""
    if torch.device(device).type != "cpu":
        return True
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and torch.cpu._is_avx512_bf16_supported()


def resolve_dtype(name: str, device: str | torch.device) -> torch.dtype:
    """Returns the dtype called ``name``; ``auto`` is bfloat16 if the device is fast in it, else float32.

    Raises:
        ValueError: ``name`` is not ``auto``, ``bfloat16`` or ``float32``.
    """
    if name == "auto":
        return torch.bfloat16 if fast_bfloat16(device) else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype must be auto or one of {sorted(DTYPES)}, got {name!r}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def uses_gpu(device: str) -> bool:
    """Tells whether ``device`` (`auto`, `cpu` or `cuda`) means a GPU on this machine.

    Raises:
        ConfigError: ``device`` is `cuda`, and there is no GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch sees no GPU here; use device=cpu, or install a CUDA build of torch")
    return device != "cpu" and torch.cuda.is_available()


def choose_device(device: str, backend: str) -> str:
    """Returns `cpu`, or this rank's GPU as `cuda:<number>`. ``device``, ``backend``: the run's `device` and `actor.backend`.

    Raises:
        ConfigError: `device=cuda` without a GPU, or more ranks on this machine than it has GPUs.
    """
    if not uses_gpu(device):
        return "cpu"
    ranks, gpus = parse_layout(backend).ranks, torch.cuda.device_count()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if here > gpus:
        raise ConfigError(
            f"actor.backend={backend} has {here} ranks on this machine, each with a GPU of its own, and torch "
            f"sees {gpus}; use fewer ranks, or device=cpu"
        )
    return f"cuda:{int(os.environ.get('LOCAL_RANK', 0))}"


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The device of a run, which may be on another machine."""

    kind: Literal["cpu", "gpu"]
    memory_gib: float = 0.0
    """Memory of one GPU; for a CPU the memory that all processes share; 0 if it is not known."""

    fast_bfloat16: bool = True
    """True if the device is fast in bfloat16. If not, `auto` means float32, and the inference engine computes in float32
    with bfloat16 weights."""

    @property
    def cpu(self) -> bool:
        """True for a CPU."""
        return self.kind == "cpu"

    def dtype(self, name: str) -> Literal["float32", "bfloat16"]:
        """Returns the dtype that `auto`, `float32` or `bfloat16` means on this device, see `resolve_dtype`."""
        return "bfloat16" if name == "bfloat16" or (name == "auto" and self.fast_bfloat16) else "float32"

    def engine_dtype(self, name: str) -> Literal["float32", "bfloat16"]:
        """Returns the dtype in which the inference engine computes with weights of dtype ``name``."""
        return self.dtype(name) if self.fast_bfloat16 else "float32"


def hardware(device: str) -> Hardware:
    """Describes a device of this machine. ``device``: as `choose_device` returns it."""
    if device == "cpu":
        return Hardware(kind="cpu", fast_bfloat16=fast_bfloat16(device))
    return Hardware(kind="gpu", memory_gib=torch.cuda.get_device_properties(device).total_memory / 2**30)


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns the tensor on ``device``. The host does not wait for the GPU: a copy from pageable memory would wait, so the
    tensor is first copied to pinned memory."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Download:
    """An asynchronous copy of a tensor to the host. A tensor that is on the host is not copied."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor, self._event = tensor, None
        if tensor.is_cuda:
            place = torch.empty(tensor.shape, dtype=tensor.dtype).pin_memory()
            self._tensor, self._event = place.copy_(tensor, non_blocking=True), torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> torch.Tensor:
        """Returns the tensor on the host; waits for the copy and earlier work of the device, but not for later work."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor


def uploaded(batch: TensorDict, device: torch.device) -> TensorDict:
    """Returns a batch on ``device``; every field is copied by `upload`."""
    if device.type == "cpu":
        return batch
    return TensorDict({str(name): upload(x, device) for name, x in batch.to_dict().items()}, batch_size=[])
