"""What all ranks must hear of: rank 0's result, and a failure of any rank, at once and not after the group's timeout.

Without ``torch.distributed``, with one rank, or in a thread that works `by_itself`, everything here is a plain call.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tandem.api.activity import OTHER_RANKS, waiting
from tandem.api.failures import RankFailed, TandemError
from tandem.api.portable import survives_pickling

T = TypeVar("T")
_THREAD = threading.local()


def is_main() -> bool:
    """Whether this is rank 0, which alone generates, logs and writes."""
    return not dist.is_initialized() or dist.get_rank() == 0


@contextlib.contextmanager
def by_itself() -> Iterator[None]:
    """A block in which this thread takes part in no collective call: what it does beside training is its rank's alone, and
    would meet the other ranks in the middle of theirs."""
    _THREAD.by_itself = True
    try:
        yield
    finally:
        _THREAD.by_itself = False


def from_main(make: Callable[[], T]) -> T:
    """What ``make`` returns on rank 0, on every rank; it is called there only, and its result must be picklable. Collective.

    Raises:
        Exception: what ``make`` raised, on rank 0; on the others the same where it is a `TandemError`, else `RankFailed`.
    """
    if _alone(None):
        return make()
    said: list[Any] = [None, None]
    if is_main():
        try:
            said[0] = make()
        except Exception as error:  # the worker boundary: the others would wait for a broadcast that never comes
            with waiting(OTHER_RANKS):
                dist.broadcast_object_list([None, _portable(error, 0)], src=0)
            raise
    with waiting(OTHER_RANKS):
        dist.broadcast_object_list(said, src=0)
    if said[1] is not None:
        raise said[1]
    result: T = said[0]
    return result


@contextlib.contextmanager
def together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """A block that every rank enters, and that fails on all of them if it fails on one. Collective at its end.

    A rank with nothing to do enters it all the same: ``with together(): …`` around what only rank 0 does. Collective
    calls inside are allowed as long as each rank makes all of them, also when it fails (see `whole`).

    Raises:
        Exception: of the first rank that failed: there the error itself, on the others as in `from_main`.
    """
    if _alone(group):
        yield
        return
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # the worker boundary: the others would wait for this rank in the next collective call
        error = caught
    rank = dist.get_rank(group)
    said: list[Exception | None] = [None] * dist.get_world_size(group)
    with waiting(OTHER_RANKS):
        dist.all_gather_object(said, None if error is None else _portable(error, rank), group=group)
    first = next((other for other, failure in enumerate(said) if failure is not None), None)
    if first == rank and error is not None:
        raise error
    if first is not None and said[first] is not None:
        raise said[first] from error  # type: ignore[misc]


@contextlib.contextmanager
def whole(stream: Iterable[T]) -> Iterator[Iterator[T]]:
    """A collective stream that is read to its end also when its reader fails, for the other ranks take part in it."""
    iterator = iter(stream)
    try:
        yield iterator
    except Exception:  # the worker boundary: the other ranks wait in the stream's collective calls
        if not _alone(None):
            for _ in iterator:
                pass
        raise


def spread(stream: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """A stream of named tensors that rank 0 has, on every rank; the others give anything, which is not read. Collective.

    Raises:
        Exception: what reading it raised on rank 0; on the others as in `from_main`.
    """
    if _alone(None):
        yield from stream
        return
    iterator = iter(stream)
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    while True:
        item: list[tuple[str, torch.Tensor]] = []

        def take(item: list[tuple[str, torch.Tensor]] = item) -> tuple[str, torch.Size, torch.dtype] | None:
            item.extend(itertools.islice(iterator, 1))
            return (item[0][0], item[0][1].shape, item[0][1].dtype) if item else None

        told = from_main(take)
        if told is None:
            return
        name, shape, dtype = told
        tensor = item[0][1].to(device).contiguous() if item else torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(tensor, src=0)
        yield name, tensor


def _alone(group: dist.ProcessGroup | None) -> bool:
    if getattr(_THREAD, "by_itself", False) or not dist.is_available() or not dist.is_initialized():
        return True
    return dist.get_world_size(group) == 1


def _portable(error: Exception, rank: int) -> Exception:
    """The error itself where it speaks to the user and can travel, else one that quotes it."""
    if isinstance(error, TandemError) and survives_pickling(error):
        return error
    return RankFailed(f"rank {rank} failed: {type(error).__name__}: {error}")
