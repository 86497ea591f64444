"""Facts about this machine and this installation, for `run.json` and `tandem doctor`. Names nobody and imports no torch."""

import contextlib
import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from tandem.config.cores import usable_cores

GIB = 2**30
PACKAGES = ("tandem-rl", "torch", "transformers", "tensordict", "safetensors", "numpy")
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "bf16")


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str | None]:
    """Installed versions by distribution name, and Python's; None where a package is not installed."""
    installed: dict[str, str | None] = {"python": platform.python_version()}
    for name in packages:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = None
    return installed


def _cpuinfo() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def cpu_features() -> list[str]:
    """Those of `CPU_FEATURES` that the processor has; they decide how fast bfloat16 is."""
    info = _cpuinfo()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    return [name for name in CPU_FEATURES if name in flags]


def gpus() -> list[dict[str, Any]]:
    """Name and memory of each GPU. Asks torch only where it is loaded already, because loading it takes seconds."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [{"name": gpu.name, "memory_gib": round(gpu.total_memory / GIB, 1)} for gpu in properties]


def memory_available_gib(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Memory that this process can still have: what the machine has free, or what is left of the container's limit."""
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # no container, or no limit: the file says `max`
        limit, held = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
        facts = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        free = min(free, limit - held + int(facts.get("inactive_file", 0)))  # files that were read give way
    return max(0, free) / GIB


def machine() -> dict[str, Any]:
    """Processor, cores, memory and GPUs."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpuinfo().get("model name") or platform.processor() or "unknown",
        "cpu_features": cpu_features(),
        "cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "gpus": gpus(),
    }


def git_commit(folder: Path | None = None) -> dict[str, Any] | None:
    """Commit of the folder and whether files differ from it; None outside a repository or without git."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None
