"""Weights to a server by a process group that stays up between updates; this process is rank 0 of it.

gloo on CPUs; NCCL by its name on GPUs, which has never been run. A group serves one server, so that one that dies breaks no
other. What goes wrong aborts the group, which also ends what an NCCL call has left on the GPU, and the next update makes
another.
"""

import itertools
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tandem.engines.inference.remote.foreign.in_server.tandem_vllm_worker import (
    compare_versions,
    joined,
    key_of,
)

TIMEOUT_S = 300.0
POLL_S = 0.0005

_numbers = itertools.count()


class Way(NamedTuple):
    """The way to a server."""

    host: str
    """This machine's address, as the server sees it."""

    backend: str = "gloo"
    device: str = "cpu"
    """From which this process sends: a GPU where the backend is NCCL."""


class WeightGroup:
    """The trainer's end. ``size``: all ranks, this one too."""

    def __init__(
        self,
        way: "Way",
        size: int,
        join: Callable[[str, int, str], Any],
        *,
        prefixes: bool = False,
        timeout_s: float = TIMEOUT_S,
    ):
        """``join(host, port, name)`` asks the server to join, which it answers once it has. ``prefixes``: it makes its end
        with torch's own helper, which puts three words before the keys of the store."""
        host, backend, self.device = way
        self.timeout_s = timeout_s
        self.name = f"tandem-{next(_numbers)}"
        listening = socket.create_server((host, 0))  # torch's own socket would listen at all addresses of this machine
        port, wait = listening.getsockname()[1], timedelta(seconds=timeout_s)
        with ThreadPoolExecutor(1, "weight-group") as pool:
            joining = pool.submit(join, host, port, self.name)
            store: dist.Store = dist.TCPStore(
                host, port, size, True, wait, wait_for_workers=False, master_listen_fd=listening.detach()
            )
            kind = "cuda" if backend == "nccl" else "cpu"
            for prefix in (self.name, f"{self.name}/", f"{kind}/") if prefixes else ():
                store = dist.PrefixStore(prefix, store)
            if not prefixes:
                keys = [key_of(rank) for rank in range(1, size)]
                while not (store.check(keys) or joining.done()):  # done: it has died or refused
                    time.sleep(POLL_S)
                if not store.check(keys):
                    joining.result()
                compare_versions(store, 0, range(1, size), backend)
            self.group = joined(store, 0, size, backend, host, timeout_s)
            joining.result()

    def broadcast(self, tensor: torch.Tensor, taken: "Future[Any]") -> None:
        """Sends to all ranks of the server. ``taken``: the call by which they take it; if it fails nobody waits for them."""
        deadline = time.monotonic() + self.timeout_s
        work = self.group.broadcast([tensor.to(self.device)], dist.BroadcastOptions())
        try:
            while not work.is_completed():
                if taken.done():
                    taken.result()
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no progress for {self.timeout_s:g} s")
                time.sleep(POLL_S)
            work.wait()
        except BaseException:
            self.close()  # before anybody waits for a server that waits for this group
            raise
        finally:
            del work  # it holds the connections, and an exception holds this frame

    def close(self) -> None:
        """Closes this end of the group, and aborts what is under way; idempotent."""
        group, self.group = self.group, None
        if group is not None:
            group.abort()


def group_backend(device: str, trainer: Sequence[int], server: Sequence[int]) -> str:
    """The backend that can join the trainer's first rank and a server, which have these GPUs; NCCL takes no two on one."""
    return "nccl" if device != "cpu" and trainer and server and not set(trainer) & set(server) else "gloo"


class GroupDelivery:
    """The group that a protocol keeps: made at the start, and made anew after a failure."""

    def __init__(self, way: Way):
        self.way = way
        self.group: WeightGroup | None = None

    def send(self, make: Callable[[], WeightGroup], send: Callable[[WeightGroup], None] = lambda group: None) -> None:
        """Makes the group where there is none, and sends. Raises what either raises; this end is closed then."""
        try:
            self.group = self.group or make()
            send(self.group)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes this end of the group; idempotent."""
        if self.group is not None:
            self.group.close()
            self.group = None
