"""Weights to an SGLang server by a gloo group of two, for a server that sees no folder of ours: this process is rank 0.

The server asks for the group under a name and makes its end with torch's own helper, which puts three prefixes before the
keys of the store; ours are the same ones.
"""

import itertools
import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

GROUP_TIMEOUT_S = 120.0
BUCKET_BYTES = 64 << 20
"""Tensors that are announced together; the server holds so much beside its weights."""

_names = itertools.count()


class UpdateGroup:
    """A group with one server. ``call``: makes a control call; ``host``: this machine, as the server reaches it."""

    def __init__(self, call: Callable[..., Any], host: str = "127.0.0.1"):
        self._call = call
        self._name = f"tandem-{next(_names)}"
        wait = timedelta(seconds=GROUP_TIMEOUT_S)
        listening = socket.create_server((host, 0))  # torch's own socket would listen at all addresses of this machine
        port = listening.getsockname()[1]
        body = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": 2}
        with ThreadPoolExecutor(1, "weight-group") as pool:
            joined = pool.submit(self._control, "/init_weights_update_group", body | {"backend": "gloo"})
            store: dist.Store = dist.TCPStore(host, port, 2, True, wait, master_listen_fd=listening.detach())
            for prefix in (self._name, f"{self._name}/", "cpu/"):
                store = dist.PrefixStore(prefix, store)
            gloo: Any = dist.ProcessGroupGloo  # torch's stub lacks its options and its collective calls
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=host)]
            options._timeout = wait
            self._group = gloo(store, 0, 2, options)
            joined.result()

    def send(self, named_tensors: Iterable[tuple[str, torch.Tensor]], label: str) -> None:
        """Streams all tensors; the server takes them as they come, and then flushes its cache and takes the label."""
        self._call("/begin_weight_update", {})
        with ThreadPoolExecutor(1, "weight-group") as pool:
            for bucket, last in _with_last(_buckets(named_tensors)):
                body = {
                    "names": [name for name, _ in bucket],
                    "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                    "shapes": [list(tensor.shape) for _, tensor in bucket],
                    "flush_cache": last,
                    "weight_version": label if last else None,
                }
                taken = pool.submit(self._control, "/update_weights_from_distributed", body)
                for _, tensor in bucket:
                    self._group.broadcast([tensor], dist.BroadcastOptions()).wait()
                taken.result()
        self._call("/end_weight_update", {})

    def close(self) -> None:
        """The server's end too."""
        self._control("/destroy_weights_update_group", {})

    def _control(self, path: str, body: dict[str, Any]) -> Any:
        return self._call(path, body | {"group_name": self._name}, timeout_s=GROUP_TIMEOUT_S)


def _buckets(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in named_tensors:
        bucket.append((name, tensor.detach().cpu().clone(memory_format=torch.contiguous_format)))
        size += tensor.nbytes
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _with_last(buckets: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Each with whether it is the last."""
    before = next(buckets, None)
    for bucket in buckets:
        yield before, False
        before = bucket
    if before is not None:
        yield before, True
