"""Tensors of the host, brought to a device."""

import torch
from tensordict import TensorDict


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on ``device``. The host does not wait for what a GPU still has to do: a copy from memory that may be paged
    out would, so a pinned copy is sent."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def uploaded(batch: TensorDict, device: torch.device) -> TensorDict:
    """A batch on ``device``, in the same way."""
    if device.type == "cpu":
        return batch
    return TensorDict({str(name): upload(x, device) for name, x in batch.to_dict().items()}, batch_size=[])
