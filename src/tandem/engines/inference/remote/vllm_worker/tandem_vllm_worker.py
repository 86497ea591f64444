"""What a vLLM server that Tandem starts can do besides: read an update from shared memory, so that no disk is needed.

It runs in vLLM's environment (``--worker-extension-cls``), where there is no Tandem: only torch and the standard library.
"""

import mmap
import os

import torch


class TandemWorker:
    """Joined to the server's worker class."""

    def tandem_load(self, place):
        """Takes the weights that lie at a `WeightSource.place`; the server is paused meanwhile."""
        self.reload_weights(weights_iterator=mapped(place["memory"], place["tensors"]))


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
