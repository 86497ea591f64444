"""Weights streamed through a process group: the trainer broadcasts one tensor after another to all engines.

Neither side holds more than one tensor beside its own weights. A group lasts for one update, so a broken group needs no
repair.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from tandem.api.failures import WeightUpdateFailed
from tandem.api.weights import WeightSource, tensor_digest
from tandem.weights.channel import Delivery, WeightChannel

POLL_S = 0.0005
JOINED = "joined"
"""Key under which the store counts the receivers that have joined."""


@dataclass(frozen=True)
class CollectiveSource(WeightSource):
    """Address at which receivers join the trainer's group, and the announced tensors. Each engine reads them once."""

    is_private: ClassVar[bool] = True

    host: str
    port: int
    backend: str
    receivers: int
    announced: tuple[tuple[str, tuple[int, ...]], ...]
    """Name and shape of each tensor, in the order of the stream."""

    dtype: torch.dtype
    timeout_s: float
    device: str = "cpu"
    """The receiving engine's device."""

    version: str = ""
    """The trainer's version of NCCL, which the engine must have too; empty for gloo."""

    def received_on(self, device: torch.device) -> "CollectiveSource":
        """Returns a copy with the engine's device, which may differ from the process's current device."""
        return replace(self, device=str(device)) if self.backend == "nccl" else self

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields all tensors. Raises `OSError` if the stream is over or breaks off."""
        try:
            yield from self._receive()
        except RuntimeError as error:  # what the process group and its store raise
            raise OSError(f"the stream of weights from {self.host}:{self.port} broke off: {error}") from error

    def _receive(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.version != (version := version_of(self.backend)):
            raise OSError(
                f"the trainer has NCCL {self.version}, and this engine has {version}: install the same version for both"
            )
        store = dist.TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=self.timeout_s))
        rank = store.add(JOINED, 1)
        if rank > self.receivers:
            raise OSError(f"the stream of weights is for {self.receivers} engines, which have all joined already")
        with DeliveryGroup(self.backend, store, rank, self.receivers + 1, self.timeout_s, self.host) as group:
            for name, shape in self.announced:
                tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
                group.broadcast(tensor)
                yield name, tensor


class CollectiveChannel(WeightChannel):
    """Delivers over the network, by ``torch.distributed`` and without a disk.

    The stream of weights is read twice: for the digests, which are sent before the tensors, and for the tensors.
    """

    streams = True
    for_adapters = False

    def __init__(
        self,
        receivers: int,
        *,
        backend: str = "gloo",
        host: str = "127.0.0.1",
        timeout_s: float = 300.0,
    ):
        """``receivers``: number of engines that receive each update. ``backend``: ``gloo``, or ``nccl`` if all have GPUs.
        ``host``: address of this machine that the engines reach. ``timeout_s``: seconds of each wait for another process."""
        self._receivers, self._backend, self._host = receivers, backend, host
        self._timeout_s = timeout_s
        self._store: dist.TCPStore | None = None

    def put(self, named_tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Delivery:
        """Computes the digests and announces the tensors, which `send` will send."""
        digests: dict[str, str] = {}
        announced = []
        for name, tensor in named_tensors:
            if name in digests:
                raise ValueError(f"tensor {name!r} came twice")
            digests[name] = tensor_digest(tensor.detach().to(dtype), self.key)
            announced.append((name, tuple(tensor.shape)))
        wait = timedelta(seconds=self._timeout_s)
        with socket.create_server((self._host, 0)) as listening:  # torch's own socket would listen at all addresses
            self._store = dist.TCPStore(
                self._host,
                listening.getsockname()[1],
                is_master=True,
                timeout=wait,
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
        source = CollectiveSource(
            self._host,
            self._store.port,
            self._backend,
            self._receivers,
            tuple(announced),
            dtype,
            self._timeout_s,
            version=version_of(self._backend),
        )
        num_bytes = sum(torch.Size(shape).numel() for _, shape in announced) * dtype.itemsize
        return Delivery(source, digests, num_bytes, self.key)

    def send(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, given_up: Callable[[], bool]
    ) -> None:
        """Broadcasts the tensors. Raises `WeightUpdateFailed` if an engine does not join, leaves, or makes no progress."""
        assert self._store is not None, "put comes before send"
        try:
            self._await_receivers(given_up)
            with DeliveryGroup(self._backend, self._store, 0, self._receivers + 1, self._timeout_s, self._host) as group:
                device = torch.device("cuda", torch.cuda.current_device()) if self._backend == "nccl" else "cpu"
                for _, tensor in named_tensors:
                    group.broadcast(tensor.detach().to(device, dtype).contiguous(), given_up)
        except RuntimeError as error:
            if isinstance(error, WeightUpdateFailed):
                raise
            raise WeightUpdateFailed(f"the stream of weights broke off: {error}") from error

    def withdraw(self) -> None:
        self._store = None

    def close(self) -> None:
        """Frees the port; idempotent."""
        self._store = None

    def _await_receivers(self, given_up: Callable[[], bool]) -> None:
        assert self._store is not None
        deadline = time.monotonic() + self._timeout_s
        while (joined := self._store.add(JOINED, 0)) < self._receivers:
            if given_up():
                raise WeightUpdateFailed(f"{joined} of {self._receivers} engines joined the stream of weights, one gave up")
            if time.monotonic() > deadline:
                raise WeightUpdateFailed(
                    f"waited {self._timeout_s:g} s for {self._receivers} engines to join the stream of weights, only "
                    f"{joined} came"
                )
            time.sleep(0.01)


class DeliveryGroup:
    """A process group that is independent of torch's default group, because engines have no default group.

    Leaving the ``with`` block closes its connections, which the other ranks notice. Nothing else may refer to the group,
    because it is closed only by being deleted.
    """

    def __init__(self, backend: str, store: dist.Store, rank: int, size: int, timeout_s: float, host: str):
        wait, self._timeout_s = timedelta(seconds=timeout_s), timeout_s
        self._group: Any  # torch's stubs of both kinds lack their collective calls
        if backend == "gloo":
            gloo: Any = dist.ProcessGroupGloo  # and the options of this one
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=host)]
            options._timeout = wait
            self._group = gloo(store, rank, size, options)
        else:
            nccl: Any = dist.ProcessGroupNCCL.Options()
            nccl._timeout = wait
            with outliving():
                self._group = dist.ProcessGroupNCCL(store, rank, size, nccl)

    def __enter__(self) -> "DeliveryGroup":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        group, self._group = self._group, None
        if kind is not None:
            group.abort()  # also ends what an NCCL call has left on the GPU

    def broadcast(self, tensor: torch.Tensor, given_up: Callable[[], bool] = lambda: False) -> None:
        """Sends a tensor from rank 0 to all; returns when this process has sent or received it. Empty tensors are not sent.

        Raises:
            RuntimeError: another process left, or there was no progress within the timeout.
        """
        assert self._group is not None
        if not tensor.numel():
            return
        data = tensor.reshape(-1).view(torch.uint8)  # bytes: every backend takes them, whatever the dtype
        work = self._group.broadcast([data], dist.BroadcastOptions())
        deadline = time.monotonic() + self._timeout_s
        try:
            while not work.is_completed():
                if given_up():
                    raise WeightUpdateFailed("an engine gave the stream of weights up")
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no progress for {self._timeout_s:g} s")
                time.sleep(POLL_S)
            work.wait()
        finally:
            del work  # it holds the connections, and an exception holds this frame


@contextlib.contextmanager
def outliving() -> Iterator[None]:
    """Within this block, a new NCCL group does not end the process when another rank dies, as torch's default would."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before, os.environ[name] = os.environ.get(name), "0"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def version_of(backend: str) -> str:
    """Returns this process's version of NCCL, which must be the same on all ranks; empty for gloo, a part of torch."""
    return ".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else ""
