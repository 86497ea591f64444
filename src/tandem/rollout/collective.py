"""One rank collects, every rank receives the batch."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from tensordict import TensorDict

from tandem.api.collective import from_main, is_main

is_collector = is_main
"""Whether this rank is the one that has loader, executor, gate and ledger."""


def share(make: Callable[[], TensorDict]) -> TensorDict:
    """What ``make`` returns on rank 0, on every rank. Collective; without ``torch.distributed`` simply ``make()``.

    Raises:
        Exception: on all ranks, what ``make`` raised on rank 0.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    batch: TensorDict | None = None

    def header() -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        nonlocal batch
        batch = make()
        return [(str(name), column.dtype, tuple(column.shape)) for name, column in sorted(batch.items())]

    described, device = from_main(header), _device()
    columns = {}
    for name, dtype, shape in described:
        tensor = batch[name].to(device) if batch is not None else torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(tensor, src=0)
        columns[name] = tensor.cpu()
    return TensorDict(columns, batch_size=[])


def _device() -> torch.device:
    """Where the default process group broadcasts."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
