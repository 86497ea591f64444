"""The same work on one process and on several, for tests that compare them."""

import contextlib
import io
import multiprocessing
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ["tests.warm"]
"""What nearly all ranks import, which takes seconds: one process does, and each rank is forked from it."""


def start(work: Callable[..., None], arguments: tuple, ranks: int) -> mp.ProcessContext:
    """Starts ``work(rank, *arguments)`` in a process for each rank, as `torch.multiprocessing.spawn` does, but sooner."""
    multiprocessing.set_forkserver_preload(LIBRARIES)
    with contextlib.chdir(ROOT):  # where it finds them; ranks get the folder of this process
        forkserver.ensure_running()
    return mp.start_processes(work, arguments, nprocs=ranks, join=False, start_method="forkserver")


def finish(context: mp.ProcessContext) -> None:
    """Waits for all ranks; what one raised is raised here."""
    while not context.join():
        pass


def _child(rank: int, ranks: int, work: Callable[..., Any], arguments: tuple, out: Path) -> None:
    torch.set_num_threads(1)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        try:
            dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=ranks)
            torch.save(work(*arguments, ranks=ranks), out / f"rank-{rank}.pt")
            dist.destroy_process_group()
        except Exception:
            raise
        except BaseException as error:  # `mp.ProcessContext` would tell the exit code alone
            raise RuntimeError(f"rank {rank} ended with {error!r}; it printed: {printed.getvalue()}") from error


def alone_and_on(ranks: int, work: Callable[..., Any], *arguments: Any, out: Path) -> tuple[Any, list[Any]]:
    """What ``work(*arguments, ranks=1)`` gives here, and what it gives on each of ``ranks`` ranks.

    ``work`` is a function of a module; ``arguments`` and results are what pickle and `torch.load` take.
    """
    context = start(_child, (ranks, work, arguments, out), ranks)
    alone = work(*arguments, ranks=1)
    finish(context)
    return alone, _found(out, ranks)


def alone_and_on_two(work: Callable[..., Any], *arguments: Any, out: Path) -> tuple[Any, list[Any]]:
    """`alone_and_on` two."""
    return alone_and_on(2, work, *arguments, out=out)


def on(ranks: int, work: Callable[..., Any], *arguments: Any, out: Path) -> list[Any]:
    """The second half of `alone_and_on`."""
    finish(start(_child, (ranks, work, arguments, out), ranks))
    return _found(out, ranks)


def on_two(work: Callable[..., Any], *arguments: Any, out: Path) -> list[Any]:
    """The second half of `alone_and_on_two`."""
    return on(2, work, *arguments, out=out)


def _found(out: Path, ranks: int) -> list[Any]:
    return [torch.load(out / f"rank-{rank}.pt", weights_only=True) for rank in range(ranks)]
