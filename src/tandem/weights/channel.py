"""Channels: where the tensors of an update lie until every engine has taken them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from tandem.api.weights import WeightSource, tensor_digest

DIGEST_THREADS = 2
"""Digests are computed beside the casting and copying."""


@dataclass(frozen=True)
class Delivery:
    """Tensors that lie ready, with the digest of each."""

    source: WeightSource
    digests: dict[str, str]
    """Hugging Face name → digest."""

    num_bytes: int
    key: int | None = None
    """The key of the digests; see `WeightUpdate.key`."""


class WeightChannel(ABC):
    """One way of handing tensors over. A delivery is valid until the next `put`."""

    for_adapters = True
    """True if an adapter may be delivered alone. False for servers of other makers, which need whole weights."""

    streams = False
    """True if nothing lies ready after `put`: the tensors go out in `send`, while the engines take them."""

    key: int | None = None
    """The key of the digests; see `WeightUpdate.key`. Whoever publishes may set it where `takes_key`."""

    takes_key = True
    """False if servers of other makers compare the digests too: then they are SHA-256."""

    @abstractmethod
    def put(self, named_tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Delivery:
        """Lays the tensors down in ``dtype``; they may come in another one, and each is valid until the next."""

    def send(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, given_up: Callable[[], bool]
    ) -> None:
        """Sends, if it `streams`, the same tensors again, to the engines that are preparing; ``given_up``: one of them
        failed.

        On a rank without engines it takes part in the stream.
        """
        for _ in named_tensors:
            pass

    def withdraw(self) -> None:
        """Called when the last delivery was given up: no engine has it, and all serve the one before."""
        return

    @abstractmethod
    def close(self) -> None:
        """Give all memory back; idempotent."""


@dataclass(frozen=True)
class LocalSource(WeightSource):
    """Tensors of this process, as they are."""

    named_tensors: tuple[tuple[str, torch.Tensor], ...]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.named_tensors


class LocalChannel(WeightChannel):
    """To an engine of this process. Copies only what has another dtype: the engine copies anyway."""

    def put(self, named_tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Delivery:
        """Puts tensors as they are. In its own dtype a tensor is not copied: do not train before the engine has taken it."""
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
    """The channel of a rank without an engine: it takes part in the collective stream and keeps nothing of it."""

    def __init__(self, *, digests: bool = False, key: int | None = None):
        """``digests``: this rank computes the digests, by ``key``, and shares the version with the other ranks."""
        self._digests, self.key = digests, key

    def put(self, named_tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Delivery:
        """Reads the stream to its end. It holds one tensor at a time, so a model that fits only in shards is never whole
        here."""
        digests, num_bytes = {}, 0
        for name, tensor in named_tensors:
            num_bytes += tensor.numel() * dtype.itemsize
            if self._digests:
                digests[name] = tensor_digest(tensor.detach().to(dtype), self.key)
        return Delivery(LocalSource(()), digests, num_bytes, self.key)

    def close(self) -> None:
        """Nothing is held."""


class Digests:
    """Computes digests in threads, while the next tensors are made: ``with Digests() as digests: digests.add(…)``."""

    def __init__(self, key: int | None = None) -> None:
        self._key = key
        self._pool = ThreadPoolExecutor(DIGEST_THREADS, "weight-digest")
        self._futures: dict[str, Future[str]] = {}

    def __enter__(self) -> "Digests":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """``tensor`` must stay as it is until the block ends."""
        if name in self._futures:
            raise ValueError(f"tensor {name!r} came twice")
        self._futures[name] = self._pool.submit(tensor_digest, tensor, self._key)

    def result(self) -> dict[str, str]:
        """Name → digest of all that were added."""
        return {name: future.result() for name, future in self._futures.items()}
