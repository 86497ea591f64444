"""All that runs on a CUDA device only: the lines of this check, and the list of those in the package.

`CUDA_LINES` is compared with the source by a test, so nobody adds such a line without naming it here.
"""

import os
from typing import Any

import torch

from tandem.config.devices import visible

CUDA_LINES = {
    "api/team.py": "tensors that ranks exchange lie on the GPU under nccl",
    "cli/doctor.py": "tells the CUDA version, and whether there is a GPU",
    "cli/sampling.py": "--device cuda, and auto, of all commands that load a model",
    "cli/verify_weights.py": "scores on a GPU where there is one",
    "engines/train/ranks.py": "one process that keeps its shards in host memory makes a group of its own, over nccl",
    "models/attention.py": "bfloat16 attention over packed sequences and shared prompts by a varlen kernel",
    "models/varlen.py": "the kernel is not taken by GPUs older than Ampere",
    "models/upload.py": "copies to the device from locked memory and back to it, which the host does not wait for",
    "state/machine.py": "names the GPUs in run.json",
    "state/snapshot.py": "the copy of a state goes into locked memory, and is waited for",
    "evaluation/run.py": "device=cuda, and auto",
    "planning/calibrate.py": "measures the GPU",
    "planning/fit.py": "a start asks how much memory the GPUs have",
    "engines/inference/child.py": "the engine's process compiles nothing on a GPU",
    "flow/process.py": "device=cuda, one GPU a rank, nccl; rollout.backend=auto looks for GPUs",
    "lifecycle/random_state.py": "the GPU's random generator is saved",
    "flow/episode_scores.py": "the thread that scores in the middle of an episode works on its rank's GPU",
    "flow/state_parts.py": "the memory of one GPU, by which a run counts the share of a server that sleeps",
    "flow/sharing.py": "says in which precision a model is stored on a GPU",
    "engines/inference/graphs.py": "records decode steps as CUDA graphs",
    "engines/inference/static_decode.py": "makes such recordings",
    "engines/inference/build.py": "GPUs of servers and of the engine's process, by their map",
    "flow/delivery.py": "the collective channel speaks nccl",
    "engines/inference/remote/foreign/in_server/tandem_vllm_worker.py": "a vLLM server joins the group over nccl, and opens "
    "the trainer's memory by handles",
    "engines/inference/remote/foreign/server.py": "a server that opens the trainer's memory must be on its GPU",
    "engines/inference/remote/foreign/weight_group.py": "the group of trainer and servers speaks nccl",
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


def default_device() -> str:
    """A GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize(device: str) -> None:
    """Waits for the device; on a CPU nothing is under way."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def peak_gib(device: str) -> float | None:
    """The most memory that tensors took since the last call; None on a CPU."""
    if not device.startswith("cuda"):
        return None
    found = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return found


def allocated(device: str) -> int | None:
    """The memory that tensors of this process have, in bytes; None on a CPU."""
    return torch.cuda.memory_allocated() if device.startswith("cuda") else None


def environment() -> dict[str, str]:
    """The environment of a process that sees the first GPU of this one alone, as a server on it does."""
    return os.environ | {"CUDA_VISIBLE_DEVICES": visible((0,), os.environ)}


def free(device: str) -> None:
    """Gives memory back that nothing uses."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def described(device: str) -> dict[str, Any]:
    """Name, memory and driver's CUDA version; empty on a CPU."""
    if not device.startswith("cuda"):
        return {}
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {"gpu": found.name, "gpu_memory_gib": round(found.total_memory / 2**30, 1), "cuda": torch.version.cuda}
