"""Extension of a vLLM server that Tandem starts. It loads updates from shared memory, from a GPU's memory or through a
process group, loads them completely on a CPU too, and returns the log-probabilities that training needs if top-p, top-k or a
minimum number of tokens restricts the draw.

It runs in vLLM's environment (``--worker-extension-cls``), where Tandem is not installed, and uses only torch and the
standard library.
"""

import base64
import contextlib
import mmap
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class TandemWorker:
    """Mixed into the server's worker class, which has the first four attributes."""

    reload_weights: Callable[..., None]
    model_runner: Any
    rank: int
    device: torch.device
    tandem_group: Any = None

    def tandem_join(self, host: str, port: int, size: int, backend: str, timeout_s: float) -> None:
        """Joins a process group whose rank 0 is the trainer at this address. Leaves an earlier group."""
        self.tandem_leave()
        store = dist.TCPStore(host, port, size, False, timedelta(seconds=timeout_s))
        compare_versions(store, 1 + self.rank, (0,), backend)
        self.tandem_group = joined(store, 1 + self.rank, size, backend, own_address(host), timeout_s)
        self._tandem_device = self.device if backend == "nccl" else torch.device("cpu")

    def tandem_receive(self, plan: list[list[Any]]) -> None:
        """Loads the tensors that the trainer broadcasts, while paused. ``plan``: ``[name, shape, dtype]`` of each."""
        self.reload_weights(weights_iterator=received(self.tandem_group, plan, self._tandem_device))
        pack_again(self.model_runner.get_model())

    def tandem_leave(self) -> None:
        """Closes this end of the group and aborts its transfers. Does nothing without a group."""
        group, self.tandem_group = self.tandem_group, None
        if group is not None:
            group.abort()

    def tandem_load(self, place: dict[str, Any]) -> None:
        """Loads the weights at a `WeightSource.place`. The server is paused."""
        if "handles" in place:
            self.reload_weights(weights_iterator=opened(place["handles"], place["tensors"], self.device))
            if self.device.type == "cuda":  # the trainer may overwrite its memory after the answer
                torch.cuda.synchronize(self.device)
        elif "memory" in place:
            self.reload_weights(weights_iterator=mapped(place["memory"], place["tensors"]))
        else:
            self.reload_weights(weights_path=place["folder"])
        pack_again(self.model_runner.get_model())

    def tandem_gpu(self) -> str:
        """Returns the GPU's unique identifier; ``cpu`` without a GPU."""
        return "cpu" if self.device.type == "cpu" else str(torch.cuda.get_device_properties(self.device).uuid)

    def tandem_whole_logprobs(self) -> None:
        """Makes all later log-probabilities those of softmax(logits / temperature), before the draw is restricted.

        Further calls have no effect. An unknown kind of sampler is left unchanged; the client finds that out by requesting a
        token.
        """
        sampler: Any = getattr(self.model_runner, "sampler", None)
        if hasattr(sampler, "tandem_whole"):
            return
        if hasattr(sampler, "topk_topp_sampler"):  # the sampler of vLLM's first model runner
            sampler.forward, sampler.tandem_whole = whole_logprobs(sampler.forward), True
        elif hasattr(sampler, "needs_logits_processing"):  # that of the second
            sampler.sample, sampler.tandem_whole = whole_logits(sampler, sampler.sample), True


def whole_logits(sampler: Any, inner: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a sampler's ``sample``, to return logits divided by the temperature, of which vLLM makes log-probabilities."""

    def sample(
        logits: torch.Tensor, expanded_idx_mapping: Any, idx_mapping: Any, idx_mapping_np: Any, *args: Any, **kwargs: Any
    ) -> Any:
        tokens, processed = inner(logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, *args, **kwargs)
        if not sampler.needs_logits_processing[idx_mapping_np].any():
            return tokens, processed  # the logits as they came
        whole = logits.to(torch.float32, copy=True)
        sampler.sampling_states.apply_temperature(whole, expanded_idx_mapping, idx_mapping_np)
        return tokens, whole

    return sample


def whole_logprobs(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a sampler's ``forward``: log-probabilities are computed before ``logits [B, V]`` are restricted."""

    def sample(logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        if sampling_metadata.max_num_logprobs is None or not narrows(sampling_metadata):
            return forward(logits, sampling_metadata, *args, **kwargs)
        temperature, whole = sampling_metadata.temperature, logits.float()
        if temperature is not None:  # 0: greedy, whose log-probabilities are at temperature 1
            whole = whole / torch.where(temperature < 1e-5, 1.0, temperature)[:, None]
        whole = whole.log_softmax(dim=-1)  # a copy, for the logits are overwritten
        output = forward(logits, sampling_metadata, *args, **kwargs)
        tensors = output.logprobs_tensors
        output.logprobs_tensors = tensors._replace(logprobs=whole.gather(-1, tensors.logprob_token_ids.long()))
        return output

    return sample


def narrows(sampling_metadata: Any) -> bool:
    """True if some row of a step draws from a restricted set of tokens."""
    if sampling_metadata.top_p is not None or sampling_metadata.top_k is not None:
        return True
    return any(getattr(processor, "min_toks", None) for processor in sampling_metadata.logitsprocs.non_argmax_invariant)


def version_of(backend: str) -> str:
    """Returns the version of NCCL, which must be the same on all ranks; ``any`` for gloo, a part of torch."""
    return ".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else "any"


def key_of(rank: int) -> str:
    """Returns the store's key under which a rank publishes its version when it joins."""
    return f"version of {rank}"


def compare_versions(store: Any, rank: int, others: Iterable[int], backend: str) -> None:
    """Publishes this rank's version of the library, waits for those of ``others``, and compares them.

    Raises:
        RuntimeError: the versions differ.
    """
    version = version_of(backend)
    store.set(key_of(rank), version)
    for other in others:
        other_version = store.get(key_of(other)).decode()
        if other_version != version:
            raise RuntimeError(
                f"rank {rank} of the weight group has {backend.upper()} {version}, and rank {other} has {other_version}: "
                "install the same version (nvidia-nccl) in both environments, or leave rollout.weights.channel out"
            )


@contextlib.contextmanager
def outliving() -> Iterator[None]:
    """Within this block, a new NCCL group does not end the process when another rank dies, as torch's default would."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before, os.environ[name] = os.environ.get(name), "0"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def joined(store: Any, rank: int, size: int, backend: str, host: str, timeout_s: float) -> Any:
    """Returns a new process group, apart from all others. ``host``: an address of this machine that other ranks reach."""
    wait = timedelta(seconds=timeout_s)
    if backend == "nccl":
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = wait
        with outliving():
            return dist.ProcessGroupNCCL(store, rank, size, options)
    gloo: Any = dist.ProcessGroupGloo  # torch's stub lacks its options and its collective calls
    options = gloo._Options()
    options._devices, options._timeout = [gloo.create_device(hostname=host)], wait
    return gloo(store, rank, size, options)


def own_address(host: str) -> str:
    """Returns the address of this machine from which ``host`` is reached. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as toward:
        toward.connect((host, 9))
        return str(toward.getsockname()[0])


def num_bytes_of(shape: Iterable[int], dtype: str) -> int:
    """Returns the number of bytes of a tensor; ``dtype`` is torch's name without ``torch.``."""
    return int(torch.Size(shape).numel() * getattr(torch, dtype).itemsize)


def received(group: Any, plan: Iterable[list[Any]], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) as the tensors arrive. Each has memory of its own, so a loader may keep it for a while."""
    for name, shape, dtype in plan:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        if tensor.numel():  # as bytes: every backend takes them, whatever the dtype
            group.broadcast([tensor.reshape(-1).view(torch.uint8)], dist.BroadcastOptions()).wait()
        yield name, tensor


def mapped(path: str, entries: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor), each backed by the shared memory at ``path``, without a copy."""
    fd = os.open(path, os.O_RDWR)
    try:
        for name, shape, dtype_name, offset in entries:
            dtype = getattr(torch, dtype_name)
            count = torch.Size(shape).numel()
            memory = mmap.mmap(fd, max(1, count * dtype.itemsize), offset=offset)
            yield name, torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
    finally:
        os.close(fd)


def opened(handles: Iterable[list[Any]], entries: Iterable[Any], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) in the trainer's own memory on ``device``, opened by its handles, without a copy."""
    buckets = [opened_storage(handle, device) for handle in handles]
    for name, shape, dtype, bucket, offset in entries:
        flat = torch.empty(0, dtype=torch.uint8, device=device).set_(buckets[bucket])
        yield name, flat[offset : offset + num_bytes_of(shape, dtype)].view(getattr(torch, dtype)).view(shape)


def opened_storage(handle: Iterable[Any], device: torch.device) -> Any:
    """Opens the memory behind a handle, whose first part is the GPU's number in the trainer; the number here may differ."""
    parts = [base64.b64decode(part) if isinstance(part, str) else part for part in handle]
    if device.type == "cpu":
        return torch.UntypedStorage._new_shared_filename_cpu(*parts)
    return torch.UntypedStorage._new_shared_cuda(device.index or 0, *parts[1:])


@torch.no_grad()
def pack_again(model: torch.nn.Module) -> None:
    """Renews the packed copies of weight matrices with which vLLM's layers multiply on a CPU.

    vLLM 0.32.0 packs a layer's matrix when the layer is loaded. An output layer that shares the embedding's matrix is not
    loaded itself, so its packed copy becomes stale. Every layer that still has its matrix beside the copy is packed again.
    Raises `RuntimeError` if the products with copy and matrix differ afterwards.
    """
    layer: Any
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if not hasattr(layer, "cpu_linear") or weight is None or weight.dim() != 2 or not weight.numel():
            continue
        layer.quant_method.process_weights_after_loading(layer)
        probe = torch.ones(1, weight.shape[1], dtype=weight.dtype)
        packed, plain = layer.cpu_linear(probe, weight, None).float(), torch.nn.functional.linear(probe, weight).float()
        if not torch.allclose(packed, plain, rtol=0.05, atol=0.05 * float(plain.abs().max())):
            raise RuntimeError(f"{type(layer).__name__} multiplies with another matrix than the one that was loaded")
