"""Show what this machine has: versions, processor, memory, disk, GPU, sandbox, optional packages. Meant for bug reports.

User and home folder are left out. An environment variable is shown with its value if that is a number, otherwise as `set`.
"""

import argparse
import getpass
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from tandem.config import libraries
from tandem.config.errors import ConfigError
from tandem.config.libraries import cache_folder
from tandem.models.hardware import fast_bfloat16
from tandem.sandbox.choose import NOT_COUNTED, choose_sandbox
from tandem.state.machine import GIB, PACKAGES, machine, memory_available_gib, versions

OPTIONAL = (
    "datasets",
    "reasoning-gym",
    "math-verify",
    "gguf",
    "tensorboard",
    "wandb",
    "trackio",
    "flash-attn",
    "vllm",
    "sglang",
)
VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_AFFINITY", "OMP_WAIT_POLICY", *libraries.SETTINGS, "LD_PRELOAD",
    "CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE", "TANDEM_CACHE", "TANDEM_KERNELS", "WANDB_MODE",
    "WORLD_SIZE", "RANK",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", default="runs", metavar="FOLDER", help="where runs are to be written (default: runs)")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def writable(folder: Path) -> tuple[bool, float]:
    """Returns whether the folder can be written to, and its free space in GiB. If the folder does not exist, the nearest
    existing parent counts."""
    while not folder.exists():
        folder = folder.parent
    return os.access(folder, os.W_OK), round(shutil.disk_usage(folder).free / GIB, 1)


def model_cache() -> dict[str, Any]:
    """Describes the cache of built-in models: names, size in GiB, and whether it is writable."""
    folder = cache_folder()
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    models = sorted({path.parent.name for path in files if path.suffix == ".safetensors"})
    return {
        "models": models,
        "size_gib": round(sum(path.stat().st_size for path in files) / GIB, 2),
        "writable": writable(folder)[0],
    }


def sandbox() -> dict[str, str | None]:
    """Names the sandbox that works here (`None`: none does), and the resources that it does not limit."""
    try:
        back_end = choose_sandbox().name
    except ConfigError:
        back_end = None
    return {"back_end": back_end, "not_limited": NOT_COUNTED}


def environment() -> dict[str, str]:
    """Returns the variables that influence a run. A number is shown as it is; any other value only as ``set``."""
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return {name: value if value.replace(",", "").isdecimal() else "set" for name, value in variables.items()}


def examine(root: Path) -> dict[str, Any]:
    can_write, free = writable(root.expanduser().absolute())
    optional = versions(OPTIONAL)
    optional.pop("python")
    report = {
        "versions": versions(PACKAGES),
        "optional": optional,
        "machine": machine() | {"memory_available_gib": round(memory_available_gib(), 1)},
        "torch": {
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "imported_before_tandem": libraries.torch_came_first,
            "fast_bfloat16": fast_bfloat16("cuda" if torch.cuda.is_available() else "cpu"),
            "cuda": torch.version.cuda,
            "cuda_available": torch.cuda.is_available(),
        },
        "model_cache": model_cache(),
        "sandbox": sandbox(),
        "run_root": {"writable": can_write, "free_gib": free},
        "environment": environment(),
    }
    return report | {"advice": advice(report)}


def advice(report: dict[str, Any]) -> list[str]:
    """Lists changes that would help, the most important first."""
    hardware, lines = report["machine"], []
    if not report["run_root"]["writable"]:
        lines.append("runs cannot be written here: give another run.root")
    if report["run_root"]["free_gib"] < 2:
        lines.append("less than 2 GiB of disk are free: a checkpoint of the built-in model takes 0.5 GiB")
    if hardware["memory_available_gib"] < 6:
        lines.append(
            "less than 6 GiB of memory are free: lower rollout.engine.kv_cache_gib and actor.max_tokens_per_micro_batch"
        )
    if not report["torch"]["fast_bfloat16"]:
        lines.append(
            "no fast bfloat16 here: dtype=auto computes in float32, which takes more time and memory than bfloat16 elsewhere"
        )
    if report["torch"]["imported_before_tandem"]:
        exports = " ".join(f"{name}={setting.value}" for name, setting in libraries.WAITING.items())
        lines.append(
            "torch was imported before tandem, so its threads spin for long while they wait, which slows other processes on "
            f"these cores: import tandem before torch, or export {exports}"
        )
    limit = report["environment"].get("OMP_NUM_THREADS")
    if limit is not None and limit != str(hardware["cores"]):
        lines.append(
            f"OMP_NUM_THREADS={limit}, but {hardware['cores']} cores can be used: unset it, or set "
            f"threads={hardware['cores']}"
        )
    return lines


def redact(value: Any, secrets: dict[str, str]) -> Any:
    """Replaces every occurrence of a secret in all texts of a nested value. ``secrets``: secret → replacement."""
    if isinstance(value, dict):
        return {key: redact(item, secrets) for key, item in value.items()}
    if isinstance(value, list):
        return [redact(item, secrets) for item in value]
    if isinstance(value, str):
        for secret, shown in secrets.items():
            value = value.replace(secret, shown)
    return value


def private() -> dict[str, str]:
    """Returns texts that must not be shown, each with its replacement: the home folder, and the user's name if it has more
    than 3 letters and is not `root`."""
    replacements = {str(Path.home()): "~"} if str(Path.home()) != "/" else {}
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = ""
    return replacements | ({user: "<user>"} if len(user) > 3 and user != "root" else {})


def text(report: dict[str, Any]) -> str:
    lines = []
    for section, values in report.items():
        lines.append(section.replace("_", " "))
        if isinstance(values, list):
            lines += [f"  - {value}" for value in values] or ["  nothing to remark"]
            continue
        for name, value in values.items():
            words = {None: "not installed" if section in ("versions", "optional") else "none", True: "yes", False: "no"}
            shown = words[value] if value is None or isinstance(value, bool) else value
            if isinstance(shown, list):
                shown = ", ".join(
                    f"{item['name']} ({item['memory_gib']} GiB)" if isinstance(item, dict) else str(item) for item in shown
                )
            lines.append(f"  {name:<32} {shown if shown != '' else 'none'}")
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> int:
    report = redact(examine(Path(arguments.root)), private())
    print(json.dumps(report, ensure_ascii=False) if arguments.json else text(report))
    return 0
