"""What a vLLM server that Tandem starts can do besides: take an update from shared memory, and take all of it on a CPU.

It runs in vLLM's environment (``--worker-extension-cls``), where there is no Tandem: only torch and the standard library.
"""

import mmap
import os

import torch


class TandemWorker:
    """Joined to the server's worker class."""

    def tandem_load(self, place):
        """Takes the weights that lie at a `WeightSource.place`; the server is paused meanwhile."""
        if "memory" in place:
            self.reload_weights(weights_iterator=mapped(place["memory"], place["tensors"]))
        else:
            self.reload_weights(weights_path=place["folder"])
        pack_again(self.model_runner.get_model())


def mapped(path, entries):
    """Yields (name, tensor), each backed by the segment; nothing is copied here."""
    fd = os.open(path, os.O_RDWR)
    try:
        for name, shape, dtype_name, offset in entries:
            dtype = getattr(torch, dtype_name)
            count = torch.Size(shape).numel()
            memory = mmap.mmap(fd, max(1, count * dtype.itemsize), offset=offset)
            yield name, torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
    finally:
        os.close(fd)


@torch.no_grad()
def pack_again(model):
    """On a CPU each layer multiplies with a packed copy of its matrix, made when the layer is loaded.

    An output layer that shares the embedding's matrix is not loaded itself, so vLLM 0.32.0 leaves it the old copy. Here each
    layer that still has its matrix beside the copy makes the copy anew, and raises `RuntimeError` if they differ then.
    """
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if not hasattr(layer, "cpu_linear") or weight is None or weight.dim() != 2 or not weight.numel():
            continue
        layer.quant_method.process_weights_after_loading(layer)
        probe = torch.ones(1, weight.shape[1], dtype=weight.dtype)
        packed, plain = layer.cpu_linear(probe, weight, None).float(), torch.nn.functional.linear(probe, weight).float()
        if not torch.allclose(packed, plain, rtol=0.05, atol=0.05 * float(plain.abs().max())):
            raise RuntimeError(f"{type(layer).__name__} multiplies with another matrix than the one that was loaded")
