"""Facts about this machine and installation, for `run.json` and `tandem doctor`. Records no user names, imports no torch."""

import contextlib
import importlib.metadata
import platform
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from tandem.config.devices import usable_cores

GIB = 2**30
PACKAGES = ("tandem-rl", "torch", "transformers", "tensordict", "safetensors", "numpy")
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "bf16")


@cache
def _version(package: str) -> str | None:
    """Returns the installed version, or None; the answer, for which folders are searched, is kept for this process."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def now() -> str:
    """Returns the local time to the second with its UTC offset, such as 2030-05-01T09:30:00+0000."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime())


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str | None]:
    """Returns the installed versions by package name, and Python's; None for a package that is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def _cpuinfo() -> dict[str, str]:
    """Returns the first processor's entries of /proc/cpuinfo; {} if there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def cpu_features() -> list[str]:
    """Returns the entries of `CPU_FEATURES` that the processor has; they decide how fast bfloat16 is."""
    info = _cpuinfo()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    return [name for name in CPU_FEATURES if name in flags]


def gpus() -> list[dict[str, Any]]:
    """Returns name and memory of each GPU; [] if torch is not imported yet, because importing it takes seconds."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [{"name": gpu.name, "memory_gib": round(gpu.total_memory / GIB, 1)} for gpu in properties]


def memory_available_gib(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Returns the memory that this process can still get, in GiB: the machine's free memory, or less by a container's
    limit."""
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # no container, or no limit: the file contains `max`
        limit, held = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
        facts = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        free = min(free, limit - held + int(facts.get("inactive_file", 0)))  # the page cache can be reclaimed
    return max(0, free) / GIB


def machine() -> dict[str, Any]:
    """Returns system, processor, cores, memory and GPUs of this machine."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpuinfo().get("model name") or platform.processor() or "unknown",
        "cpu_features": cpu_features(),
        "cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "gpus": gpus(),
    }


def git_commit(folder: Path | None = None) -> dict[str, Any] | None:
    """Returns the git commit of a folder, and whether tracked files differ from it; None without a repository or git."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None
