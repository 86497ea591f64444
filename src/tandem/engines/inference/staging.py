"""Taking a weight update in: every tensor is checked against its digest while the core copies it."""

import contextlib
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from tandem.api.failures import WeightUpdateFailed
from tandem.api.weights import Adapter, WeightUpdate, tensor_digest, version_digest
from tandem.engines.inference.folder import read_tensors
from tandem.models.lora import A, B, merged

if TYPE_CHECKING:
    from tandem.engines.inference.core import EngineCore, StagedWeights

HASH_THREADS = 2
"""Digests are computed beside the copying; one update keeps two cores busy with them at most."""


def stage_update(core: "EngineCore", update: WeightUpdate) -> "StagedWeights":
    """Lays the update beside the weights that the core serves; it goes on generating meanwhile.

    Raises:
        WeightUpdateFailed: a tensor is missing, unknown, has the wrong shape or not the bytes that were sent; names it.
    """
    if version_digest(update.digests) != update.version.digest:
        raise WeightUpdateFailed(
            f"version {update.version.number}: the digests of its tensors do not give the version's digest "
            f"{update.version.digest[:12]}…; the update was mixed up on its way"
        )
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
    for name, tensor in read_tensors(core.folder):
        weight, module = tensor.to(core.device, adapter.dtype), name.removesuffix(".weight")
        a, b = (given.pop(f"{module}.{which}.weight", None) for which in (A, B))
        yield name, weight if a is None or b is None else merged(weight, a, b, adapter.scaling)
    if given:
        raise WeightUpdateFailed(f"adapter: {min(given)!r} belongs to no matrix of {core.folder}")


def verified(update: WeightUpdate, pool: ThreadPoolExecutor) -> Generator[tuple[str, torch.Tensor]]:
    """Yields the tensors of an update; the digest of each is computed while the consumer copies it.

    A tensor is only valid until the next is asked for, so its digest is awaited before that.
    """
    missing = set(update.digests)
    for name, tensor in update.source.tensors():
        if name not in missing:
            raise WeightUpdateFailed(f"version {update.version.number}: tensor {name!r} came twice or was not announced")
        missing.remove(name)
        digest: Future[str] = pool.submit(tensor_digest, tensor)
        yield name, tensor
        if digest.result() != update.digests[name]:
            raise WeightUpdateFailed(
                f"version {update.version.number}: tensor {name!r} arrived with digest {digest.result()[:12]}…, "
                f"sent was {update.digests[name][:12]}…; the bytes changed on their way"
            )
    if missing:
        raise WeightUpdateFailed(
            f"version {update.version.number}: {len(missing)} tensors did not arrive, first {min(missing)!r}"
        )
