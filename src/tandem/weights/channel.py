"""Channels: they hold or send the tensors of an update until every engine has received them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from tandem.api.weights import WeightSource, tensor_digest

DIGEST_THREADS = 2
"""Number of threads that compute digests while tensors are cast and copied."""


@dataclass(frozen=True)
class Delivery:
    """The tensors of an update, ready for the engines, with the digest of each."""

    source: WeightSource
    digests: dict[str, str]
    """Hugging Face name → digest."""

    num_bytes: int
    key: int | None = None
    """The key of the digests; see `WeightUpdate.key`."""


class WeightChannel(ABC):
    """One way to transfer tensors to engines. A delivery is valid until the next `put`."""

    for_adapters = True
    """True if an adapter may be delivered alone. False for servers of other makers, which need whole weights."""

    streams = False
    """True if `put` stores no tensors: they are sent by `send`, while the engines receive them."""

    key: int | None = None
    """The key of the digests; see `WeightUpdate.key`. The publisher sets it if `takes_key`."""

    takes_key = True
    """True if digests may be keyed. False if they must be SHA-256, because servers of other makers compare them too."""

    @abstractmethod
    def put(self, named_tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Delivery:
        """Stores the tensors in ``dtype``. They may come in another dtype; each is valid only until the next one comes."""

    def send(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, given_up: Callable[[], bool]
    ) -> None:
        """Sends the tensors to the engines that are preparing, if the channel `streams`. ``named_tensors``: the same tensors
        as for `put`. ``given_up``: returns True once an engine has failed.

        All other channels only read ``named_tensors`` to the end, because the ranks produce these tensors together.
        """
        for _ in named_tensors:
            pass

    def withdraw(self) -> None:
        """Takes back the last delivery, which has failed: no engine has it, and all engines serve the version before."""
        return

    @abstractmethod
    def close(self) -> None:
        """Frees all memory; idempotent."""


@dataclass(frozen=True)
class LocalSource(WeightSource):
    """Tensors of this process, not copied."""

    named_tensors: tuple[tuple[str, torch.Tensor], ...]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.named_tensors


class LocalChannel(WeightChannel):
    """Delivers to an engine of this process. Copies only tensors of another dtype, because the engine copies anyway."""

    def put(self, named_tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Delivery:
        """Stores tensors, without copies if they have ``dtype`` already: do not train before the engine has copied them."""
        tensors: list[tuple[str, torch.Tensor]] = []
        with Digests(self.key) as digests:
            for name, tensor in named_tensors:
                tensor = tensor.detach().to(dtype)
                tensors.append((name, tensor))
                digests.add(name, tensor)
        return Delivery(LocalSource(tuple(tensors)), digests.result(), sum(tensor.nbytes for _, tensor in tensors), self.key)

    def close(self) -> None:
        """Does nothing: the channel holds no memory."""


class NoChannel(WeightChannel):
    """The channel of a rank without an engine: it takes part in the collective stream and keeps no tensors."""

    def __init__(self, *, digests: bool = False, key: int | None = None):
        """``digests``: True on the rank that computes the digests for all ranks. ``key``: the key of the digests."""
        self._digests, self.key = digests, key

    def put(self, named_tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Delivery:
        """Reads the stream to its end, one tensor at a time, so that the whole model is never in memory."""
        digests, num_bytes = {}, 0
        for name, tensor in named_tensors:
            num_bytes += tensor.numel() * dtype.itemsize
            if self._digests:
                digests[name] = tensor_digest(tensor.detach().to(dtype), self.key)
        return Delivery(LocalSource(()), digests, num_bytes, self.key)

    def close(self) -> None:
        """Does nothing: the channel holds no memory."""


class Digests:
    """Computes digests in threads while the next tensors are produced: ``with Digests() as digests: digests.add(…)``."""

    def __init__(self, key: int | None = None) -> None:
        self._key = key
        self._pool = ThreadPoolExecutor(DIGEST_THREADS, "weight-digest")
        self._futures: dict[str, Future[str]] = {}

    def __enter__(self) -> "Digests":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Adds a tensor, which must not change until the ``with`` block ends."""
        if name in self._futures:
            raise ValueError(f"tensor {name!r} came twice")
        self._futures[name] = self._pool.submit(tensor_digest, tensor, self._key)

    def result(self) -> dict[str, str]:
        """Returns name → digest of all added tensors."""
        return {name: future.result() for name, future in self._futures.items()}
