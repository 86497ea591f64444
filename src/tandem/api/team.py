"""A team: ranks that work together. They share one rank's result, and all hear at once if one of them fails.

Who is on which team is decided in `tandem.flow`; everybody else is given a team and calls its methods. In a team of one
rank, and without ``torch.distributed``, they are plain calls.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from tensordict import TensorDict

from tandem.api.activity import OTHER_RANKS, waiting
from tandem.api.failures import RankFailed, TandemError
from tandem.api.portable import survives_pickling
from tandem.config.errors import kind_and_text

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
        """``group``: the ranks; None stands for all that there are when a method is called."""
        self.group = group
        self.parts: dict[tuple[int, ...], Team] = {}
        """Teams of some of its ranks, by these: their groups are made once."""

        self._single = False

    @classmethod
    def alone(cls) -> Self:
        """This rank by itself: for a thread beside training, whose collective calls would meet those of training."""
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
        """Place of this rank in the team; -1 if it is not on it."""
        if self._single or not dist.is_available() or not dist.is_initialized():
            return 0
        return dist.get_rank(self.group)

    @property
    def member(self) -> bool:
        """True if this rank is on the team."""
        return self.rank >= 0

    @property
    def main(self) -> bool:
        """True on the team's first rank. Of all ranks it is the one that logs and writes."""
        return self.rank == 0

    def share(self, make: Callable[[], T], source: int = 0) -> T:
        """Gives every rank the result of ``make``, which only one rank calls: the first, or that of place ``source``.

        The result must be picklable. A batch is sent column by column, and then lies on the CPU.

        Raises:
            Exception: on the rank that calls it, the error of ``make``; on the others the same if it is a `TandemError`,
                otherwise `RankFailed`.
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
        """Gives every rank a list of what each brings, in their order; it must be picklable."""
        if self._is_one():
            return [own]
        everybody: list[Any] = [None] * self.size
        dist.all_gather_object(everybody, own, group=self.group)
        return everybody

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A block that every rank enters, and that fails on all of them if it fails on one. Collective at its end.

        A rank with nothing to do enters it all the same: ``with team.together(): …`` around what only the first rank does.
        Collective calls inside are allowed as long as each rank makes all of them, also when it fails (see `whole`).

        Raises:
            Exception: of the first rank that failed: there the error itself, on the others as in `share`.
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
            raise failures[first] from error  # type: ignore[misc]  # it is none that is None

    @contextlib.contextmanager
    def whole(self, stream: Iterable[T]) -> Iterator[Iterator[T]]:
        """A collective stream that is read to its end also when its reader fails, for the other ranks take part in it."""
        iterator = iter(stream)
        try:
            yield iterator
        except Exception:  # the worker boundary: the other ranks wait in the stream's collective calls
            if not self._is_one():
                for _ in iterator:
                    pass
            raise

    def spread(self, stream: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Gives every rank the named tensors that the first one has; what the others bring is not read.

        Raises:
            Exception: on the first rank, the error of reading the stream; on the others as in `share`.
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
        """The error itself if it speaks to the user and can travel to another rank, otherwise one that quotes it."""
        if isinstance(error, TandemError) and survives_pickling(error):
            return error
        return RankFailed(f"rank {Team().rank} failed: {kind_and_text(error)}")

    def _send(self, make: Callable[[], T], place: int = 0) -> T:
        """One rank's object on all ranks; see `share`."""
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
        """One rank's tensor on all ranks, on this device (None: the CPU); None on the others."""
        tensor = torch.empty(shape, dtype=dtype, device=device) if tensor is None else tensor.contiguous()
        dist.broadcast(tensor, src=self._global_rank(place), group=self.group)
        return tensor

    def _global_rank(self, place: int) -> int:
        """The rank in the run of a place in the team."""
        return place if self.group is None else dist.get_global_rank(self.group, place)

    def _is_one(self) -> bool:
        if not self.member:
            raise RuntimeError(f"rank {dist.get_rank()} is not on this team; only its members may call this method")
        return self.size == 1
