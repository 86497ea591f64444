"""One rank collects, every rank receives the batch."""

import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from tandem.api.failures import TandemError


def is_collector() -> bool:
    """Whether this rank is the one that has loader, executor, gate and ledger."""
    return not dist.is_initialized() or dist.get_rank() == 0


def share(make: Callable[[], TensorDict]) -> TensorDict:
    """What ``make`` returns on rank 0, on every rank. Collective; without ``torch.distributed`` simply ``make()``.

    Raises:
        Exception: on all ranks, what ``make`` raised on rank 0.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    batch: TensorDict | None = None
    header: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            batch = make()
            header = [[(str(k), v.dtype, tuple(v.shape)) for k, v in sorted(batch.items())]]
        except Exception as error:  # the worker boundary: others would wait for a broadcast that never comes
            header = [_portable(error)]
            dist.broadcast_object_list(header, src=0)
            raise
    dist.broadcast_object_list(header, src=0)
    if isinstance(header[0], Exception):
        raise header[0]
    device = _device()
    columns = {}
    for name, dtype, shape in header[0]:
        tensor = batch[name].to(device) if batch is not None else torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(tensor, src=0)
        columns[name] = tensor.cpu()
    return TensorDict(columns, batch_size=[])


def _portable(error: Exception) -> Exception:
    """The error itself if it can travel, else one that quotes it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever pickling raises: what matters is that the others hear of the error
        return TandemError(f"rank 0: {type(error).__name__}: {error}")
    return error


def _device() -> torch.device:
    """Where the default process group broadcasts."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
