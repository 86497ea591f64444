"""Weights over a process group, streamed: the trainer broadcasts buckets, and each engine takes them as they come.

Nothing lies ready anywhere, so neither side holds more than a bucket beside its own tensors. A group lasts for one
update: one that broke leaves nothing to repair.
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
from tandem.api.weights import WeightSource
from tandem.weights.channel import Delivery, WeightChannel
from tandem.weights.pieces import digest_in, pieces

BUCKET_BYTES = 32 * 2**20
POLL_S = 0.0005
JOINED = "joined"
"""Key under which the store counts those who wish to receive."""


@dataclass(frozen=True)
class Announced:
    """One tensor of the stream."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class CollectiveSource(WeightSource):
    """The trainer's meeting place for receivers, and the tensors that it will broadcast. May be read once by each engine."""

    is_private: ClassVar[bool] = True

    host: str
    port: int
    backend: str
    receivers: int
    announced: tuple[Announced, ...]
    dtype: torch.dtype
    bucket_bytes: int
    timeout_s: float
    device: str = "cpu"
    """The receiving engine's."""

    version: str = ""
    """The trainer's version of NCCL, which the engine's must be; empty for gloo."""

    def received_on(self, device: torch.device) -> "CollectiveSource":
        """Sets the receiving device. Not the process's current device: the engine's may be another."""
        return replace(self, device=str(device)) if self.backend == "nccl" else self

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors. Raises `OSError` when the stream is over or breaks off."""
        try:
            yield from self._receive()
        except RuntimeError as error:  # what the process group and its store raise
            raise OSError(f"the stream of weights from {self.host}:{self.port} broke off: {error}") from error

    def _receive(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.version != (own := version_of(self.backend)):
            raise OSError(
                f"the trainer has NCCL {self.version}, and this engine has {own}: install the same version for both"
            )
        store = dist.TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=self.timeout_s))
        rank = store.add(JOINED, 1)
        if rank > self.receivers:
            raise OSError(f"the stream of weights is for {self.receivers} engines, and as many have joined it already")
        with DeliveryGroup(self.backend, store, rank, self.receivers + 1, self.timeout_s, self.host) as group:
            yield from self._take(group)

    def _take(self, group: "DeliveryGroup") -> Iterator[tuple[str, torch.Tensor]]:
        device = torch.device(self.device)
        left = sum(torch.Size(a.shape).numel() for a in self.announced) * self.dtype.itemsize
        bucket, place, filled = torch.empty(self.bucket_bytes, dtype=torch.uint8, device=device), 0, 0
        for announced in self.announced:
            tensor = torch.empty(announced.shape, dtype=self.dtype, device=device)
            data, done = tensor.reshape(-1).view(torch.uint8), 0
            while done < len(data):
                if place == filled:
                    filled, place = min(left, self.bucket_bytes), 0
                    left -= filled
                    group.broadcast(bucket[:filled])
                count = min(filled - place, len(data) - done)
                data[done : done + count] = bucket[place : place + count]
                place, done = place + count, done + count
            yield announced.name, tensor


class CollectiveChannel(WeightChannel):
    """To engines that can be reached over the network, by ``torch.distributed`` and without a disk.

    The stream is read twice: for the digests, which travel ahead of the tensors, and for the tensors.
    """

    streams = True
    for_adapters = False

    def __init__(
        self,
        receivers: int,
        *,
        backend: str = "gloo",
        host: str = "127.0.0.1",
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = 300.0,
    ):
        """``receivers``: engines that take each update. ``backend``: ``gloo``, or ``nccl`` where all have GPUs. ``host``:
        address of this machine that the engines reach. ``timeout_s``: of each wait for another process."""
        self._receivers, self._backend, self._host = receivers, backend, host
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s
        self._store: dist.TCPStore | None = None

    def put(self, named_tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Delivery:
        """Lays the tensors out. Holds a few MiB; the tensors themselves go out in `send`."""
        digests: dict[str, str] = {}
        announced = []
        for name, tensor in named_tensors:
            if name in digests:
                raise ValueError(f"tensor {name!r} came twice")
            digests[name] = digest_in(tensor, dtype, self.key)
            announced.append(Announced(name, tuple(tensor.shape)))
        wait = timedelta(seconds=self._timeout_s)
        with socket.create_server((self._host, 0)) as listening:  # torch's own would listen at all addresses
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
            self._bucket_bytes,
            self._timeout_s,
            version=version_of(self._backend),
        )
        num_bytes = sum(torch.Size(a.shape).numel() for a in announced) * dtype.itemsize
        return Delivery(source, digests, num_bytes, self.key)

    def send(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, given_up: Callable[[], bool]
    ) -> None:
        """Broadcasts the tensors. Raises `WeightUpdateFailed` when an engine does not come, leaves or falls silent."""
        assert self._store is not None, "put comes before send"
        try:
            self._await_receivers(given_up)
            with DeliveryGroup(self._backend, self._store, 0, self._receivers + 1, self._timeout_s, self._host) as group:
                for bucket in self._buckets(named_tensors, dtype):
                    group.broadcast(bucket, given_up)
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

    def _buckets(self, named_tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """The bytes of all tensors end to end, cut into buckets; each is valid until the next is asked for."""
        device = _device(self._backend)
        bucket, filled = torch.empty(self._bucket_bytes, dtype=torch.uint8, device=device), 0
        for _, tensor in named_tensors:
            for piece in pieces(tensor, dtype, device):
                while len(piece):
                    count = min(len(piece), self._bucket_bytes - filled)
                    bucket[filled : filled + count] = piece[:count]
                    piece, filled = piece[count:], filled + count
                    if filled == self._bucket_bytes:
                        yield bucket
                        filled = 0
        if filled:
            yield bucket[:filled]


class DeliveryGroup:
    """A process group beside the default one, which the trainer may have and an engine does not.

    Leaving the ``with`` block closes its connections, so that the others hear of it: nothing else may refer to the group,
    for it has no other way to be closed.
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
            group.abort()  # what an NCCL call has left on the GPU ends too

    def broadcast(self, bucket: torch.Tensor, given_up: Callable[[], bool] = lambda: False) -> None:
        """From rank 0 to all; returns when this process has sent or received it.

        Raises:
            RuntimeError: another process left, or the wait passed its deadline.
        """
        assert self._group is not None
        work = self._group.broadcast([bucket], dist.BroadcastOptions())
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
    """An NCCL group that is made in this block leaves the process alive when another rank dies; torch would end it."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before, os.environ[name] = os.environ.get(name), "0"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def version_of(backend: str) -> str:
    """The version of NCCL here, which must be the same on all sides; empty for gloo, which is torch's own."""
    return ".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else ""


def _device(backend: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
