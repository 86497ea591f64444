"""Copies the state of a run, so that the copy can be written while training changes the original."""

import contextlib
import mmap
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tandem.api.failures import NotWritten
from tandem.api.shared_memory import SharedMemory, tensor_in
from tandem.api.state import Parted, State, TensorPart
from tandem.api.team import Team
from tandem.state.tree import joined, split

MARK_BYTES = 64
"""Number of random bytes at the beginning of each memory, which identify it: a process on another machine may have the same
process id."""

ALIGNMENT = 64


@dataclass(frozen=True)
class Offer:
    """A rank's description of its memory, with which another process can map it."""

    path: str
    mark: bytes
    num_bytes: int
    parts: Mapping[str, tuple[int, TensorPart]]
    """Name → offset in the memory, and the part, without its values (device ``meta``)."""

    def part(self, name: str, memory: mmap.mmap) -> TensorPart:
        """Returns a part with its values, which are in ``memory``."""
        offset, part = self.parts[name]
        return replace(part, values=tensor_in(memory, part.values.shape, part.values.dtype, offset))


class SharedParts:
    """Copies of the parts of a state, in memory that rank 0 can read. Call `copy` and then `share`, which is collective.
    Each copy reuses the memory of the previous one."""

    def __init__(self, team: Team) -> None:
        """``team``: the ranks that have parts; its first rank reads all of them."""
        self._team, self._file = team, SharedMemory("tandem-checkpoint")
        self._mark = secrets.token_bytes(MARK_BYTES)
        self._memory: mmap.mmap | None = None
        self._parts: dict[str, tuple[int, TensorPart]] = {}
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
        """Copies this rank's parts; call `share` before `parts`.

        Raises:
            OSError: the system reports too little memory. Linux may overcommit and then kill a process during a copy;
                `tandem plan` includes the memory of the copy.
        """
        if not self._file.is_anonymous:
            return  # a file on the disk is no place for a copy; `share` reports it
        self._parts, place = {}, MARK_BYTES
        for name, part in parts.items():
            if part.values.numel():
                self._parts[name] = place, replace(part, values=part.values.detach().to("meta"))
                place += -(-part.values.nbytes // ALIGNMENT) * ALIGNMENT
        memory, offer = self._room(place), self.offer()
        for name in self._parts:
            offer.part(name, memory).values.copy_(parts[name].values.detach())

    def _room(self, num_bytes: int) -> mmap.mmap:
        """Returns memory of this size; the present memory, if its size is right."""
        if self._memory is not None and len(self._memory) == num_bytes:
            return self._memory
        self._file.resize(num_bytes)
        self._memory = mmap.mmap(self._file.fd, num_bytes)
        self._memory[:MARK_BYTES] = self._mark
        return self._memory

    def offer(self) -> Offer:
        """Returns the description of this rank's memory, for rank 0."""
        return Offer(self._file.path if self._file.is_anonymous else "", self._mark, self.num_bytes, self._parts)

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
                where = "on another machine, or in another container"
                return f"rank 0 cannot read the memory of rank {rank}: is it {where}?"
            maps[key] = memory  # memory stays mapped for the next snapshot
        self._maps = maps
        return None

    def parts(self, name: str) -> list[TensorPart]:
        """Returns the ranks' parts of a tensor, on rank 0. It may be called in any thread; the parts are valid until the
        next `copy`."""
        maps = zip(self._offers, self._maps.values(), strict=True)
        return [offer.part(name, memory) for offer, memory in maps if name in offer.parts]


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
    (`SharedParts`), and rank 0 writes all parts.
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
                    self._shared.copy({name: tensor.parts()[0] for name, tensor in spread.items()})
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
        copies = self._buffers | {name: Parted(name, partial(self._shared.parts, name)) for name in spread}
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
