"""Tensors of the host, brought to a device, and back."""

import torch
from tensordict import TensorDict


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on ``device``. The host does not wait for what a GPU still has to do: a copy from memory that may be paged
    out would, so a pinned copy is sent."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Download:
    """A tensor on its way to the host, which may do other things until it needs it. One that is there stays as it is."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor, self._event = tensor, None
        if tensor.is_cuda:
            place = torch.empty(tensor.shape, dtype=tensor.dtype).pin_memory()
            self._tensor, self._event = place.copy_(tensor, non_blocking=True), torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> torch.Tensor:
        """It; waits for what the device had to do up to the copy, and for nothing behind it."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor


def uploaded(batch: TensorDict, device: torch.device) -> TensorDict:
    """A batch on ``device``, in the same way."""
    if device.type == "cpu":
        return batch
    return TensorDict({str(name): upload(x, device) for name, x in batch.to_dict().items()}, batch_size=[])
