"""Recordings of a step on a GPU (CUDA graphs): the device runs all its kernels again, and the host starts one thing."""

from collections.abc import Callable
from typing import Any

import torch

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
"""Records what a function does on the device, without running it, and returns what runs the recording."""


class CudaCapture:
    """Records on one GPU. All recordings share one pool of memory for what a step needs in between, since they run one after
    another."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pool: Any = None  # torch has no public name for the type
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, step: Callable[[], None]) -> Replay:
        """Raises what the recording raises; the current stream is then what it was."""
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            self._stream = self._stream or torch.cuda.Stream()
            graph = torch.cuda.CUDAGraph()
            try:
                # Other threads lay out new weights meanwhile, and may allocate.
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    step()
            finally:
                torch.cuda.set_stream(current)  # torch leaves its own stream in place where the end of a recording fails
        return graph.replay

    def reset(self) -> None:
        """All recordings are gone: the next ones begin with a new pool, so that the old one's memory is free."""
        self._pool = None
