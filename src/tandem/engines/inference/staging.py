"""Taking a weight update in: each tensor is copied, and the copy proven by its digest while the core lays it out."""

import contextlib
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from tandem.api.failures import WeightUpdateFailed
from tandem.api.weights import Adapter, FolderSource, WeightUpdate, tensor_digest, version_digest
from tandem.models.lora import A, B, merged

if TYPE_CHECKING:
    from tandem.engines.inference.core import EngineCore
    from tandem.engines.inference.fused_weights import NewWeights

HASH_THREADS = 2
"""Digests are computed beside the copying; one update keeps two cores busy with them at most."""


def stage_update(core: "EngineCore", update: WeightUpdate) -> "NewWeights":
    """Lays the update beside the weights that the core serves; it goes on generating meanwhile.

    Raises:
        WeightUpdateFailed: a tensor is missing, unknown, has the wrong shape or not the bytes that were sent; names it.
    """
    if version_digest(update.digests) != update.version.digest:
        raise WeightUpdateFailed(
            f"version {update.version.number}: the digests of its tensors do not give the version's digest "
            f"{update.version.digest[:12]}…; the update was mixed up on its way"
        )
    update = replace(update, source=update.source.received_on(core.device))
    try:
        with (
            ThreadPoolExecutor(HASH_THREADS, "weight-digest") as pool,
            contextlib.closing(verified(update, pool)) as tensors,  # a stream that is not read to its end is left at once
        ):
            if update.adapter is not None:
                return core.stage(with_adapter(core, tensors, update.adapter))
            return core.stage(tensors)
    except (ValueError, KeyError, RuntimeError, OSError, MemoryError, SafetensorError) as error:
        if isinstance(error, WeightUpdateFailed):
            raise
        raise WeightUpdateFailed(f"version {update.version.number} cannot be taken: {error}") from error


def with_adapter(
    core: "EngineCore", tensors: Iterable[tuple[str, torch.Tensor]], adapter: Adapter
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of the folder that the core was made with, the adapter merged into them: to the bit what the trainer's
    merged weights would be. They are read again each time, mapped into memory, so that no copy of them need be kept.

    Raises:
        WeightUpdateFailed: a tensor of the adapter belongs to no matrix of the model; names it.
    """
    given = {name: tensor.to(core.device, copy=True) for name, tensor in tensors}
    for name, tensor in FolderSource(core.folder).tensors():
        weight, module = tensor.to(core.device, adapter.dtype), core.own_name(name).removesuffix(".weight")
        a, b = (given.pop(f"{module}.{which}.weight", None) for which in (A, B))
        yield name, weight if a is None or b is None else merged(weight, a, b, adapter.scaling)
    if given:
        raise WeightUpdateFailed(f"adapter: {min(given)!r} belongs to no matrix of {core.folder}")


def verified(update: WeightUpdate, pool: ThreadPoolExecutor) -> Generator[tuple[str, torch.Tensor]]:
    """Yields a private copy of each tensor; its digest is computed while the consumer reads it.

    The sender's memory is read once, so a change of it shows in the digest or does not reach the consumer. A tensor is only
    valid until the next is asked for, so its digest is awaited before that.
    """
    missing = set(update.digests)
    copies = _Copies()
    for name, tensor in update.source.tensors():
        if name not in missing:
            raise WeightUpdateFailed(f"version {update.version.number}: tensor {name!r} came twice or was not announced")
        missing.remove(name)
        own = tensor if update.source.is_private else copies.of(tensor)
        digest: Future[str] = pool.submit(tensor_digest, own, update.key)
        yield name, own
        # The consumer may have laid out wrong bytes by now; they are never served, because the whole update fails here.
        if digest.result() != update.digests[name]:
            raise WeightUpdateFailed(
                f"version {update.version.number}: tensor {name!r} arrived with digest {digest.result()[:12]}…, "
                f"sent was {update.digests[name][:12]}…; the bytes changed on their way"
            )
    if missing:
        raise WeightUpdateFailed(
            f"version {update.version.number}: {len(missing)} tensors did not arrive, first {min(missing)!r}"
        )


class _Copies:
    """One copy at a time, always in the same memory, so that nothing but the largest tensor comes on top of the weights."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy on the same device; valid until the next is made."""
        if self._memory.numel() < tensor.nbytes or self._memory.device != tensor.device:
            self._memory = torch.empty(0, dtype=torch.uint8)  # the smaller one goes before the larger one is made
            self._memory = torch.empty(tensor.nbytes, dtype=torch.uint8, device=tensor.device)
        return self._memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
