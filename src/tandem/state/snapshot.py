"""A copy of a state, so that it can be written while what it was taken from goes on."""

import contextlib
import mmap
import os
import secrets
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from tandem.api.failures import NotWritten
from tandem.api.state import Parted, State, TensorPart, part_of
from tandem.api.team import Team

MARK_BYTES = 64
"""At the beginning of each memory, some random bytes: a process of that number on another machine has others."""

ALIGNMENT = 64


class Block(NamedTuple):
    """The place of a copied part."""

    offset: int
    size: tuple[int, ...]
    dtype: torch.dtype
    start: tuple[int, ...]
    shape: tuple[int, ...]
    flat: bool

    def tensor(self, memory: mmap.mmap) -> torch.Tensor:
        count = torch.Size(self.size).numel()
        return torch.frombuffer(memory, dtype=self.dtype, count=count, offset=self.offset).view(self.size)


@dataclass(frozen=True)
class Offer:
    """A rank's description of its memory."""

    path: str
    mark: bytes
    num_bytes: int
    blocks: Mapping[str, Block]


class SharedParts:
    """Copies of one state's parts. `copy` and then `share`, which is collective; each takes the memory of those before."""

    def __init__(self, team: Team) -> None:
        """``team``: the ranks that have parts; its first one reads them all."""
        self._team = team
        self._fd: int | None = None
        self._mark = secrets.token_bytes(MARK_BYTES)
        self._memory: mmap.mmap | None = None
        self._blocks: dict[str, Block] = {}
        self._offers: list[Offer] = []
        self._maps: dict[tuple[str, bytes, int], mmap.mmap] = {}

    @property
    def num_bytes(self) -> int:
        return 0 if self._memory is None else len(self._memory)

    def reachable(self) -> str | None:
        """Tried before anything is copied. Collective."""
        with contextlib.suppress(OSError):  # a system that forbids such memory: `share` says that nobody can read it
            self.copy({})
        return self.share()

    def copy(self, parts: Mapping[str, TensorPart]) -> None:
        """Copies this rank's parts; `whole` gives nothing before `share`.

        Raises:
            OSError: the system says that there is not so much memory. One that promises more than it has, as Linux may, ends
                a process in the middle of a copy; `tandem plan` counts the copy.
        """
        if not hasattr(os, "memfd_create"):
            return  # `share` says so
        self._blocks, place = {}, MARK_BYTES
        for name, part in parts.items():
            if part.values.numel():
                size, dtype = tuple(part.values.shape), part.values.dtype
                self._blocks[name] = Block(place, size, dtype, part.start, part.shape, part.flat)
                place += -(-part.values.nbytes // ALIGNMENT) * ALIGNMENT
        memory = self._room(place)
        for name, block in self._blocks.items():
            block.tensor(memory).copy_(parts[name].values.detach())

    def _room(self, num_bytes: int) -> mmap.mmap:
        """Memory of that size; the one that there is, if it has it."""
        if self._memory is not None and len(self._memory) == num_bytes:
            return self._memory
        if self._fd is None:
            self._fd = os.memfd_create("tandem-checkpoint")
            weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, num_bytes)
        os.posix_fallocate(self._fd, 0, num_bytes)  # where it is known that there is not so much, here and not in the copy
        self._memory = mmap.mmap(self._fd, num_bytes)
        self._memory[:MARK_BYTES] = self._mark
        return self._memory

    def offer(self) -> Offer:
        """The memory of this rank, for rank 0 to read; without a path if there is none."""
        path = f"/proc/{os.getpid()}/fd/{self._fd}" if self._fd is not None else ""
        return Offer(path, self._mark, self.num_bytes, self._blocks)

    def share(self) -> str | None:
        """Lets rank 0 read what every rank has copied; None, or why it cannot. Collective."""
        offers = self._team.gather(self.offer())
        self._offers = offers if self._team.main else []
        return self._team.share(self._map)

    def _map(self) -> str | None:
        """On rank 0."""
        maps = {}
        for rank, offer in enumerate(self._offers):
            key = (offer.path, offer.mark, offer.num_bytes)
            memory = self._memory if offer.mark == self._mark else self._maps.get(key) or mapped(offer)
            if memory is None:
                where = "on another machine, in another container, or not on Linux"
                return f"rank 0 cannot read the memory of rank {rank}: is it {where}?"
            maps[key] = memory  # the same memory stays mapped from one snapshot to the next
        self._maps = maps
        return None

    def whole(self, name: str) -> torch.Tensor:
        """A tensor put together, on rank 0; valid until the next `copy`, from any thread."""
        parts = [
            (offer.blocks[name], memory)
            for offer, memory in zip(self._offers, self._maps.values(), strict=True)
            if name in offer.blocks
        ]
        first = parts[0][0]
        whole = torch.empty(first.shape, dtype=first.dtype)
        missing = whole.numel()
        for block, memory in parts:
            part = block.tensor(memory)
            place = tuple(slice(at, at + size) for at, size in zip(block.start, block.size, strict=True))
            (whole.view(-1) if block.flat else whole)[place] = part
            missing -= part.numel()
        if missing:
            raise RuntimeError(f"the parts of {name} are {missing} entries short of the whole, {list(first.shape)}")
        return whole


def mapped(offer: Offer) -> mmap.mmap | None:
    """Another rank's memory; None where that cannot be opened, or is another process's."""
    try:
        descriptor = os.open(offer.path, os.O_RDWR)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_size != offer.num_bytes:
            return None
        memory = mmap.mmap(descriptor, offer.num_bytes)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    return memory if memory[:MARK_BYTES] == offer.mark else None


class Snapshots:
    """Copies of one run's state, one at a time: each takes the memory of the one before.

    The tensors' copies are in host memory, as large as the tensors, and are kept for the next one: a copy into memory that
    is there already takes a fraction of the time. What comes from a GPU is copied into locked memory. Of tensors that are
    spread over ranks each copies what it has (`SharedParts`), and rank 0 puts them together when they are written.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._buffers: dict[str, torch.Tensor] = {}
        self._shared = SharedParts(team)

    def why_not(self, tree: Mapping[str, Any]) -> str | None:
        """Why a copy of this state cannot be taken; None where it can. Collective; rank 0's word counts."""
        spread = dict(_spread(tree))
        reason = self._shared.reachable() if spread and not self._shared.num_bytes else None
        odd = next((name for name, leaf in spread.items() if isinstance(leaf, Parted) and leaf.part is None), None)
        return reason or (None if odd is None else f"of {odd} no rank has a part that could be copied")

    def take(self, tree: Mapping[str, Any]) -> State:
        """The tree as it is now, sharing nothing with it that could change. Valid until the next call. Collective where
        tensors are spread over ranks; rank 0's copy is whole, and the others' is nothing.

        Raises:
            NotWritten: a rank has too little memory for its copy; on every rank.
            TypeError: a tensor's parts are no blocks: see `why_not`.
            RuntimeError: rank 0 cannot read what another rank has copied.
        """
        used: dict[str, torch.Tensor] = {}
        with self._team.together():  # before the next collective call: there may be too little memory on one rank
            spread = dict(_spread(tree))
            if spread:
                try:
                    self._shared.copy({name: _own(name, leaf) for name, leaf in spread.items()})
                except OSError as error:
                    raise NotWritten(f"there is too little memory for a copy of the state: {error}") from error
            copy = {key: self._copied(value, key, used) for key, value in tree.items()} if self._team.main else {}
            self._buffers = used  # what is no part of the state any more is let go of
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        reason = self._shared.share() if spread else None
        if reason is not None:
            raise RuntimeError(reason)
        return copy

    @property
    def num_bytes(self) -> int:
        """Host memory that this rank's copies take."""
        return sum(buffer.nbytes for buffer in self._buffers.values()) + self._shared.num_bytes

    def _copied(self, value: Any, name: str, used: dict[str, torch.Tensor]) -> Any:
        if isinstance(value, Mapping):
            return {key: self._copied(item, f"{name}/{key}", used) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._copied(item, f"{name}/{i}", used) for i, item in enumerate(value)]
        if isinstance(value, (Parted, DTensor)):
            return Parted(partial(self._shared.whole, name))
        if not isinstance(value, torch.Tensor):
            return value
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        used[name] = buffer.copy_(value.detach(), non_blocking=True)
        return buffer


def _spread(value: Any, name: str = "") -> Iterator[tuple[str, Parted | DTensor]]:
    """The tensors of which each rank has a part, by their path."""
    if isinstance(value, (Parted, DTensor)):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _spread(item, f"{name}/{key}" if name else key)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _spread(item, f"{name}/{i}")


def _own(name: str, leaf: Parted | DTensor) -> TensorPart:
    if isinstance(leaf, DTensor):
        return part_of(leaf)
    if leaf.part is None:
        raise TypeError(f"the tensor at {name} is spread over ranks; a copy of it would have to be gathered first")
    return leaf.part()
