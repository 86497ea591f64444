"""All that runs on a CUDA device only: the lines of this check, and the list of those in the package.

`CUDA_LINES` is compared with the source by a test, so nobody adds such a line without naming it here.
"""

import os

import torch

from tandem.config.devices import visible

CUDA_LINES = {
    "api/activity.py": "`tandem profile` records kernels, and waits for those under way",
    "tracking/profile.py": "kernels and copies belong to the stage that launched them; the peak of the GPU's memory",
    "api/team.py": "tensors that ranks exchange lie on the GPU under nccl",
    "cli/doctor.py": "tells the CUDA version, and whether there is a GPU",
    "cli/arguments.py": "--device cuda, and auto, of all commands that load a model",
    "cli/verifying.py": "scores on a GPU where there is one",
    "models/attention.py": "bfloat16 attention over packed sequences by a varlen kernel, from Ampere on",
    "models/hardware.py": "the memory of the GPUs, for plans and starts; copies to the device from locked "
    "memory and back to it, which the host does not wait for",
    "models/allocator.py": "freed memory is given back to the device",
    "models/packed.py": "layers are compiled by default",
    "engines/train/holders.py": "the norm of gradients is taken by few kernels; one process that keeps its shards in host "
    "memory makes a group of its own, over nccl",
    "engines/inference/engine_calls.py": "a thread takes its engine's GPU",
    "engines/inference/remote/foreign/in_server/tandem_sglang.py": "the share of memory is computed from what is free",
    "state/machine.py": "names the GPUs in run.json",
    "state/snapshot.py": "the copy of a state goes into locked memory, and is waited for",
    "evaluation/run.py": "device=cuda, and auto",
    "planning/machine.py": "`tandem plan` asks how much memory the GPUs have",
    "flow/process.py": "device=cuda, one GPU a rank, nccl; rollout.backend=auto looks for GPUs",
    "state/tree.py": "the GPU's random generator is saved",
    "flow/sleep_plan.py": "the memory of one GPU, by which a run counts the share of a server that sleeps",
    "flow/planned_models.py": "says in which precision a model is stored on a GPU",
    "engines/inference/attention.py": "prefill by variable-length calls",
    "engines/inference/paged_kernel.py": "the kernel of decode steps",
    "engines/inference/passes.py": "decode steps read the cache where it is",
    "engines/inference/build.py": "GPUs of servers and of the engine's process, by their map",
    "flow/residents.py": "the collective channel speaks nccl",
    "engines/inference/remote/foreign/in_server/tandem_vllm_worker.py": "a vLLM server joins the group over nccl, and opens "
    "the trainer's memory by handles",
    "engines/inference/remote/foreign/server.py": "a server that opens the trainer's memory must be on its GPU",
    "engines/inference/remote/foreign/protocol.py": "the group of trainer and servers speaks nccl",
    "weights/collective.py": "the same, on the sending and the receiving side",
    "weights/cuda_ipc.py": "a version lies in the GPU's memory, and its handles are made there",
}
"""File below src/tandem → what only a GPU makes it do. `config/` only has the names of devices."""


NCCL = "nccl"
"""The group of ranks with a GPU each."""


def uuids(device: str) -> list[str]:
    """The driver's names of the GPUs here; empty on a CPU."""
    count = torch.cuda.device_count() if device.startswith("cuda") else 0
    return [str(torch.cuda.get_device_properties(one).uuid) for one in range(count)]


def take(number: int) -> str:
    """Makes a GPU this process's own, and returns its name."""
    torch.cuda.set_device(number)
    return f"cuda:{number}"


def synchronize(device: str) -> None:
    """Waits for the device; on a CPU nothing is under way."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def peak(device: str) -> str:
    """The most memory that tensors had and that torch held since the last call, in words; empty on a CPU."""
    if not device.startswith("cuda"):
        return ""
    most = torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return f"; {most[0]:.1f} GiB of tensors at most, {most[1]:.1f} GiB reserved"


def allocated(device: str) -> int | None:
    """The memory that tensors of this process have, in bytes; None on a CPU."""
    return torch.cuda.memory_allocated() if device.startswith("cuda") else None


def reserved(device: str) -> tuple[int, int]:
    """Bytes that torch holds here, and that the device has; of a CPU some small number."""
    return (torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[1]) if device.startswith("cuda") else (0, 1 << 33)


def activities(device: str) -> list[torch.profiler.ProfilerActivity]:
    """The kinds of events in a profile."""
    kinds = torch.profiler.ProfilerActivity
    return [kinds.CPU, kinds.CUDA] if device.startswith("cuda") else [kinds.CPU]


def kernel_times(device: str, profile: torch.profiler.profile) -> dict[str, tuple[float, int]]:
    """Name → microseconds and calls: of kernels, or of a CPU's operators."""
    gpu = device.startswith("cuda")
    kind = torch.autograd.DeviceType.CUDA if gpu else torch.autograd.DeviceType.CPU
    rows = [
        row for row in profile.key_averages() if row.device_type == kind and not getattr(row, "is_user_annotation", False)
    ]
    return {row.key: (row.self_device_time_total if gpu else row.self_cpu_time_total, row.count) for row in rows}


def fewer_heads(device: str) -> str:
    """Does torch's kernel take two heads of keys for four of queries as they are? Tensors say no more than a call does."""
    if not device.startswith("cuda"):
        return "asked on a GPU only"
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - younger than the oldest torch that works

    query, key = (torch.randn(32, heads, 64, device=device, dtype=torch.bfloat16) for heads in (4, 2))
    bounds = torch.tensor([0, 32], device=device, dtype=torch.int32)
    try:
        found = varlen_attn(query, key, key, bounds, bounds, 32, 32)
    except (RuntimeError, TypeError, ValueError) as error:
        return f"no: {error}".splitlines()[0][:200]
    twice = key.repeat_interleave(2, 1)
    apart = (found - varlen_attn(query, twice, twice, bounds, bounds, 32, 32)).abs().max()
    return f"yes, {apart:.1e} from repeated ones"


def environment() -> dict[str, str]:
    """The environment of a process that sees the first GPU of this one alone, as a server on it does."""
    return os.environ | {"CUDA_VISIBLE_DEVICES": visible((0,), os.environ)}


def share_blocks(device: str) -> None:
    """Before the first tensor: blocks that grow have no handles, as runs with channel=ipc know too."""
    if device.startswith("cuda"):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def free(device: str) -> None:
    """Gives memory back that nothing uses."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def described(device: str) -> dict[str, str]:
    """The GPU and its libraries; empty on a CPU."""
    if not device.startswith("cuda"):
        return {}
    found, (free, total) = torch.cuda.get_device_properties(0), torch.cuda.mem_get_info()
    return {
        "gpu": f"{found.name}, capability {found.major}.{found.minor}, {torch.cuda.device_count()} of them",
        "memory": f"{free / 2**30:.1f} GiB free of {total / 2**30:.1f}",
        "CUDA and NCCL": f"{torch.version.cuda}, {'.'.join(map(str, torch.cuda.nccl.version()))}",
    }
