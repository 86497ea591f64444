"""Finds the models of a run that are the same but for their heads and adapters: one copy of them is in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tandem.api.lazy_torch import torch
from tandem.models.adapter_beside import adapter_beside
from tandem.models.catalog import present
from tandem.models.precision import resolve_dtype
from tandem.models.stored import same_trunk, stored_tensors

if TYPE_CHECKING:
    from tandem.flow.plan import Resident


class Trunk(NamedTuple):
    """Frozen weights as they are in memory, without heads and adapters."""

    path: str
    folder: Path | None
    """The folder; None if it is not on this machine yet."""

    dtype: str
    """The dtype in the configuration: `auto`, `bfloat16` or `float32`."""

    adapter_dtype: torch.dtype | None
    """To which they are rounded beside an adapter; None: there is none."""

    rank: int
    """The rank in whose memory they are."""

    def same(self, other: Trunk, device: str) -> bool:
        """True if one memory can serve both, to the bit. ``device``: `auto`, `cpu` or `cuda`."""
        numbers = (self.dtype, self.adapter_dtype) == (other.dtype, other.adapter_dtype)
        if self.rank != other.rank or not (numbers or self.numbers(device) == other.numbers(device)):
            return False
        both_here = self.folder is not None and other.folder is not None
        return self.path == other.path or (both_here and same_trunk(self.folder, other.folder))  # type: ignore[arg-type]

    def numbers(self, device: str) -> tuple[torch.dtype, torch.dtype | None]:
        """The dtype in memory, and the one to which the weights are rounded first if that changes them."""
        gpu = device != "cpu" and torch.cuda.is_available()
        dtype, rounding = resolve_dtype(self.dtype, "cuda" if gpu else "cpu"), self.adapter_dtype
        unchanged = rounding == dtype or self.folder is None or not _rounds(self.folder, rounding)
        return dtype, None if unchanged else rounding


def with_adapter(resident: Resident) -> Resident:
    """A frozen model as its base and its adapter, if its folder has both and one rank holds it; else as it is."""
    engine = resident.engine
    assert engine is not None and not resident.changes, "a frozen model"
    folder = present(engine.path) if _is_alone(resident) else None
    adapter = None if folder is None else adapter_beside(folder)
    if adapter is None:
        return resident
    return replace(resident, engine=replace(engine, path=adapter.base, lora=adapter.lora), adapter=adapter)


def share_trunks(residents: Iterable[Resident], device: str) -> Iterator[Resident]:
    """The residents in order, each with the name of an earlier one whose trunk it shares, if there is one.

    Only what never changes is shared: frozen models, and those that adapters are trained beside. ``device``: `auto`, `cpu`
    or `cuda`.
    """
    lenders: list[tuple[str, Trunk]] = []
    for resident in residents:
        trunk = _trunk(resident)
        lender = None if trunk is None else next((name for name, other in lenders if trunk.same(other, device)), None)
        if trunk is not None and lender is None:
            lenders.append((resident.name, trunk))
        yield replace(resident, trunk_of=lender)


def _is_alone(resident: Resident) -> bool:
    """True if one process holds all of it: parts of models are not shared."""
    engine = resident.engine
    return engine is not None and not engine.offload and len(resident.ranks) == 1 and engine.backend.startswith("fsdp")


def _trunk(resident: Resident) -> Trunk | None:
    """Names what a resident could share; None if it is trained, has an engine of the user's or no memory of its own, lies on
    several ranks, writes (another kind of engine does that), or computes beside the others while episodes run."""
    engine = resident.engine
    trained = resident.changes and (engine is None or engine.lora.rank is None)
    own = engine is None or trained or resident.base_of is not None or resident.head == "text" or resident.in_episodes
    own = own or resident.own is not None
    if engine is None or own or not _is_alone(resident):
        return None
    folder = present(engine.path)
    rounding = None if resident.adapter is None else resident.adapter.dtype
    return Trunk(str(folder or engine.path), folder, engine.dtype, rounding, resident.ranks[0])


def _rounds(folder: Path, dtype: torch.dtype | None) -> bool:
    """True if the stored numbers have more digits than ``dtype``."""
    try:
        stored = stored_tensors(folder).values()
    except (OSError, ValueError):
        return True
    return dtype is not None and any(tensor.dtype.itemsize > dtype.itemsize for tensor in stored)
