"""A team: ranks that work together. It shares one rank's result with all, and an error on one rank is raised on all.

`tandem.flow` decides which ranks form a team; all other code is passed a `Team` and calls its methods. In a team of one
rank, and without ``torch.distributed``, the methods communicate with nobody.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from tandem.api.activity import OTHER_RANKS, waiting
from tandem.api.failures import RankFailed, survives_pickling
from tandem.api.lazy_torch import TensorDict
from tandem.config.errors import TandemError, kind_and_text

T = TypeVar("T")


@dataclass(frozen=True)
class _Columns:
    """The header of a batch: name, dtype and shape of each column."""

    columns: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]


class Team:
    """All ranks of the run, or some of them.

    `share`, `gather`, `together` and `spread` are collective: every rank of the team calls them, in the same order; `whole`
    is for streams that are collective. A rank that is not on the team (`member`) must not call them.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        """``group``: the ranks; None: all ranks of the run at the time a method is called."""
        self.group = group
        self.parts: dict[tuple[int, ...], Team] = {}
        """Ranks → the team of these ranks, a part of this team; cached, because a process group must be made only once."""

        self._single = False

    @classmethod
    def alone(cls) -> Self:
        """Returns a team of only this rank, for a thread that runs beside training: the thread's collective calls would
        otherwise be mixed up with those of training."""
        team = cls()
        team._single = True
        return team

    @property
    def size(self) -> int:
        """Number of its ranks."""
        if self._single or not dist.is_available() or not dist.is_initialized():
            return 1
        return len(dist.get_process_group_ranks(self.group)) if self.member else 0

    @property
    def rank(self) -> int:
        """Index of this rank in the team; -1 if it is not a member."""
        if self._single or not dist.is_available() or not dist.is_initialized():
            return 0
        return dist.get_rank(self.group)

    @property
    def member(self) -> bool:
        """True if this rank is on the team."""
        return self.rank >= 0

    @property
    def main(self) -> bool:
        """True on the team's first rank. In the team of all ranks, this one logs and writes files."""
        return self.rank == 0

    def share(self, make: Callable[[], T], source: int = 0) -> T:
        """Returns the result of ``make`` on every rank. Only the rank with index ``source`` calls ``make``.

        The result must be picklable. A batch is sent column by column, and arrives on the CPU.

        Raises:
            Exception: if ``make`` raises: its error on the rank that called it; on the others the same error if it is a
                `TandemError`, otherwise `RankFailed`.
        """
        if self._is_one():
            return make()
        batch: TensorDict | None = None

        def describe() -> T | _Columns:
            nonlocal batch
            result = make()
            if not isinstance(result, TensorDict):
                return result
            batch = result
            items = sorted((str(name), column) for name, column in result.items())
            return _Columns(tuple((name, column.dtype, tuple(column.shape)) for name, column in items))

        result = self._send(describe, source)
        if not isinstance(result, _Columns):
            return result
        columns = {}
        for name, dtype, shape in result.columns:
            columns[name] = self._broadcast(None if batch is None else batch[name].cpu(), shape, dtype, source)
        return TensorDict(columns, batch_size=[])

    def gather(self, own: T) -> list[T]:
        """Returns on every rank the list of all ranks' ``own``, in order of ranks; ``own`` must be picklable."""
        if self._is_one():
            return [own]
        objects: list[Any] = [None] * self.size
        dist.all_gather_object(objects, own, group=self.group)
        return objects

    def send_to_main(self, tensor: torch.Tensor, source: int) -> None:
        """Sends a CPU tensor from the rank with index ``source`` to the first rank, which passes a tensor of this size to
        receive it. The calls of all other ranks do nothing."""
        with waiting(OTHER_RANKS):
            if source and self.main:
                dist.recv(tensor, self._global_rank(source), group=self.group)
            elif source and self.rank == source:
                dist.send(tensor, self._global_rank(0), group=self.group)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A block that every rank enters, and that fails on all of them if it fails on one. Collective at its end.

        Ranks with nothing to do must enter it too, as in ``with team.together(): …`` around work of only the first rank.
        Collective calls inside are allowed if each rank makes all of them even when it fails (see `whole`).

        Raises:
            Exception: the error of the first rank that failed; on other ranks converted as in `share`.
        """
        if self._is_one():
            yield
            return
        error: Exception | None = None
        try:
            yield
        except Exception as caught:  # the worker boundary: the others would wait for this rank in the next collective call
            error = caught
        with waiting(OTHER_RANKS):
            failures = self.gather(None if error is None else self.portable(error))
        first = next((rank for rank, failure in enumerate(failures) if failure is not None), None)
        if first == self.rank and error is not None:
            raise error
        if first is not None:
            raise failures[first] from error  # type: ignore[misc]  # failures[first] is not None

    @contextlib.contextmanager
    def whole(self, stream: Iterable[T]) -> Iterator[Iterator[T]]:
        """A block that reads a collective stream. If the block fails, the stream is still read to its end, because the other
        ranks wait in its collective calls."""
        iterator = iter(stream)
        try:
            yield iterator
        except Exception:  # the worker boundary: the other ranks wait in the stream's collective calls
            if not self._is_one():
                for _ in iterator:
                    pass
            raise

    def spread(self, stream: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields on every rank the (name, tensor) pairs of the first rank's stream; the streams of other ranks are not read.

        Raises:
            Exception: if the stream raises: its error on the first rank; on the others converted as in `share`.
        """
        if self._is_one():
            yield from stream
            return
        iterator = iter(stream)
        while True:
            item: list[tuple[str, torch.Tensor]] = []

            def take(item: list[tuple[str, torch.Tensor]] = item) -> tuple[str, torch.Size, torch.dtype] | None:
                item.extend(itertools.islice(iterator, 1))
                return (item[0][0], item[0][1].shape, item[0][1].dtype) if item else None

            header = self._send(take)
            if header is None:
                return
            name, shape, dtype = header
            gpu = "nccl" in dist.get_backend(self.group)
            device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
            yield name, self._broadcast(item[0][1].to(device) if item else None, tuple(shape), dtype, device=device)

    def portable(self, error: Exception) -> Exception:
        """Returns the error if it is a `TandemError` that can be pickled, otherwise a `RankFailed` that quotes it."""
        if isinstance(error, TandemError) and survives_pickling(error):
            return error
        return RankFailed(f"rank {Team().rank} failed: {kind_and_text(error)}")

    def _send(self, make: Callable[[], T], place: int = 0) -> T:
        """Calls ``make`` on the rank with index ``place``, and returns the result on all ranks; see `share`."""
        source = self._global_rank(place)
        message: list[Any] = [None, None]
        if self.rank == place:
            try:
                message[0] = make()
            except Exception as error:  # the worker boundary: the others would wait for a broadcast that never comes
                with waiting(OTHER_RANKS):
                    dist.broadcast_object_list([None, self.portable(error)], src=source, group=self.group)
                raise
        with waiting(OTHER_RANKS):
            dist.broadcast_object_list(message, src=source, group=self.group)
        if message[1] is not None:
            raise message[1]
        result: T = message[0]
        return result

    def _broadcast(
        self,
        tensor: torch.Tensor | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        place: int = 0,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        """Returns one rank's ``tensor`` on all ranks. The others pass None, and receive it on ``device`` (None: CPU)."""
        tensor = torch.empty(shape, dtype=dtype, device=device) if tensor is None else tensor.contiguous()
        dist.broadcast(tensor, src=self._global_rank(place), group=self.group)
        return tensor

    def _global_rank(self, place: int) -> int:
        """Returns the rank in the run of the team's rank ``place``."""
        return place if self.group is None else dist.get_global_rank(self.group, place)

    def _is_one(self) -> bool:
        if not self.member:
            raise RuntimeError(f"rank {dist.get_rank()} is not on this team; only its members may call this method")
        return self.size == 1
