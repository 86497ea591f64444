"""Copies the state of a run, so that the copy can be written while training changes the original."""

import contextlib
import mmap
import os
import secrets
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from tandem.api.failures import NotWritten
from tandem.api.state import Parted, State, TensorPart, part_of
from tandem.api.team import Team
from tandem.state.tree import joined, split

MARK_BYTES = 64
"""Number of random bytes at the beginning of each memory, which identify it: a process on another machine may have the same
process id."""

ALIGNMENT = 64


class Block(NamedTuple):
    """The place of a copied part in the memory, and its place in the whole tensor."""

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
    """A rank's description of its memory, with which another process can map it."""

    path: str
    mark: bytes
    num_bytes: int
    blocks: Mapping[str, Block]


class SharedParts:
    """Copies of the parts of a state, in memory that rank 0 can read. Call `copy` and then `share`, which is collective.
    Each copy reuses the memory of the previous one."""

    def __init__(self, team: Team) -> None:
        """``team``: the ranks that have parts; its first rank reads all of them."""
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
        """Tests with empty memory whether rank 0 can read all ranks; returns None, or the reason why not. Collective."""
        with contextlib.suppress(OSError):  # if the system forbids such memory, `share` reports it
            self.copy({})
        return self.share()

    def copy(self, parts: Mapping[str, TensorPart]) -> None:
        """Copies this rank's parts; call `share` before `whole`.

        Raises:
            OSError: the system reports too little memory. Linux may overcommit and then kill a process during a copy;
                `tandem plan` includes the memory of the copy.
        """
        if not hasattr(os, "memfd_create"):
            return  # `share` reports it
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
        """Returns memory of this size; the present memory, if its size is right."""
        if self._memory is not None and len(self._memory) == num_bytes:
            return self._memory
        if self._fd is None:
            self._fd = os.memfd_create("tandem-checkpoint")
            weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, num_bytes)
        os.posix_fallocate(self._fd, 0, num_bytes)  # too little memory is reported here and not during the copy
        self._memory = mmap.mmap(self._fd, num_bytes)
        self._memory[:MARK_BYTES] = self._mark
        return self._memory

    def offer(self) -> Offer:
        """Returns the description of this rank's memory, for rank 0; with an empty path if there is none."""
        path = f"/proc/{os.getpid()}/fd/{self._fd}" if self._fd is not None else ""
        return Offer(path, self._mark, self.num_bytes, self._blocks)

    def share(self) -> str | None:
        """Lets rank 0 map the memory of every rank; returns None, or the reason why it cannot. Collective."""
        offers = self._team.gather(self.offer())
        self._offers = offers if self._team.main else []
        return self._team.share(self._map)

    def _map(self) -> str | None:
        """Maps the memory of every rank, on rank 0; returns None, or the reason why this failed."""
        maps = {}
        for rank, offer in enumerate(self._offers):
            key = (offer.path, offer.mark, offer.num_bytes)
            memory = self._memory if offer.mark == self._mark else self._maps.get(key) or mapped(offer)
            if memory is None:
                where = "on another machine, in another container, or not on Linux"
                return f"rank 0 cannot read the memory of rank {rank}: is it {where}?"
            maps[key] = memory  # memory stays mapped for the next snapshot
        self._maps = maps
        return None

    def whole(self, name: str) -> torch.Tensor:
        """Returns a whole tensor, put together from the ranks' parts, on rank 0. It may be called in any thread until the
        next `copy`."""
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
    """Maps another rank's memory; returns None if it cannot be opened, or belongs to another process."""
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
    """Copies of one run's state, one at a time; each reuses the memory of the previous one.

    Copies of tensors are in host memory, which is kept for the next copy: copying into existing memory takes a fraction of
    the time. Tensors of a GPU are copied into pinned memory. If a tensor is spread over ranks, each rank copies its part
    (`SharedParts`), and rank 0 puts the parts together when it writes the tensor.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._buffers: dict[str, torch.Tensor] = {}
        self._shared = SharedParts(team)

    def why_not(self, tree: Mapping[str, Any]) -> str | None:
        """Returns the reason why this state cannot be copied; None if it can. Collective; rank 0's result is decisive.

        Raises:
            TypeError: see `take`.
        """
        if self._shared.num_bytes:
            return None  # an earlier copy was read
        with self._team.together():
            spread = any(isinstance(tensor, Parted) for tensor in split(tree)[1].values())
        return self._shared.reachable() if spread else None

    def take(self, tree: Mapping[str, Any]) -> State:
        """Returns a copy of the tree, valid until the next call. Collective if tensors are spread over ranks; rank 0 gets
        the whole copy, and other ranks get {}.

        Raises:
            NotWritten: a rank has too little memory for its copy; raised on every rank.
            TypeError: a value in the tree is neither plain data nor a tensor; names its path.
            RuntimeError: rank 0 cannot read the memory of another rank.
        """
        with self._team.together():  # before the next collective call: there may be too little memory on one rank
            plain, tensors = split(tree)
            spread = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Parted)}
            if spread:
                try:
                    self._shared.copy({name: tensor.part() for name, tensor in spread.items()})
                except OSError as error:
                    raise NotWritten(f"there is too little memory for a copy of the state: {error}") from error
            whole = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, Parted)}
            if self._team.main:
                self._buffers = {name: self._copied(name, tensor) for name, tensor in whole.items()}  # frees other buffers
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        reason = self._shared.share() if spread else None
        if reason is not None:
            raise RuntimeError(reason)
        copies = self._buffers | {name: self._spread(name) for name in spread}
        return joined(plain, copies.__getitem__) if self._team.main else {}

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that this rank's copies take."""
        return sum(buffer.nbytes for buffer in self._buffers.values()) + self._shared.num_bytes

    def _copied(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return buffer.copy_(tensor, non_blocking=True)

    def _spread(self, name: str) -> Parted:
        """Returns the copy of a tensor that is spread over ranks; rank 0 has all of it."""
        whole = partial(self._shared.whole, name)
        return Parted(whole, lambda: part_of(whole()))
