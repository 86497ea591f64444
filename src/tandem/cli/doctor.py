"""Show what this machine has: versions, processor, memory, disk, GPU, sandbox, optional packages. Meant for bug reports.

User and home folder are left out; environment variables show their value where it is a number, else only that they are set.
"""

import argparse
import getpass
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tandem.config import libraries
from tandem.config.cache import cache_folder
from tandem.config.errors import ConfigError
from tandem.models.precision import fast_bfloat16
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
    """True if the folder (or, where it does not exist, its nearest parent) can be written to, and the GiB free there."""
    while not folder.exists():
        folder = folder.parent
    return os.access(folder, os.W_OK), round(shutil.disk_usage(folder).free / GIB, 1)


def model_cache() -> dict[str, Any]:
    """The contents of the cache of built-in models."""
    folder = cache_folder()
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    models = sorted({path.parent.name for path in files if path.suffix == ".safetensors"})
    return {
        "models": models,
        "size_gib": round(sum(path.stat().st_size for path in files) / GIB, 2),
        "writable": writable(folder)[0],
    }


def sandbox() -> dict[str, str | None]:
    """The sandbox that works here, and what it cannot hold back."""
    try:
        back_end = choose_sandbox().name
    except ConfigError:
        back_end = None
    return {"back_end": back_end, "not_limited": NOT_COUNTED}


def environment() -> dict[str, str]:
    """Variables that change how things run: numbers as they are, of others only that they are set."""
    found = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return {name: value if value.replace(",", "").isdecimal() else "set" for name, value in found.items()}


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
    """Changes that would help, from most to least important."""
    here, said = report["machine"], []
    if not report["run_root"]["writable"]:
        said.append("runs cannot be written here: give another run.root")
    if report["run_root"]["free_gib"] < 2:
        said.append("less than 2 GiB of disk are free: a checkpoint of the built-in model takes 0.5 GiB")
    if here["memory_available_gib"] < 6:
        said.append(
            "less than 6 GiB of memory are free: lower rollout.engine.kv_cache_gib and actor.max_tokens_per_micro_batch"
        )
    if not report["torch"]["fast_bfloat16"]:
        said.append(
            "no fast bfloat16 here: dtype=auto computes in float32, which takes more time and memory than bfloat16 elsewhere"
        )
    if report["torch"]["imported_before_tandem"]:
        said.append(
            "torch was imported before tandem, so its threads spin for long while they wait, which other processes on these "
            f"cores pay for: import tandem before torch, or export {_exports(libraries.WAITING)}"
        )
    limit = report["environment"].get("OMP_NUM_THREADS")
    if limit is not None and limit != str(here["cores"]):
        said.append(
            f"OMP_NUM_THREADS={limit}, but {here['cores']} cores can be used: unset it, or set threads={here['cores']}"
        )
    return said


def _exports(settings: Mapping[str, libraries.Setting]) -> str:
    return " ".join(f"{name}={setting.value}" for name, setting in settings.items())


def redact(value: Any, secrets: dict[str, str]) -> Any:
    """Replaces every occurrence of a secret in any text."""
    if isinstance(value, dict):
        return {key: redact(item, secrets) for key, item in value.items()}
    if isinstance(value, list):
        return [redact(item, secrets) for item in value]
    if isinstance(value, str):
        for secret, shown in secrets.items():
            value = value.replace(secret, shown)
    return value


def private() -> dict[str, str]:
    """Words that must not be shown, each with its replacement: the home folder, and the user's name unless it is a common
    word."""
    found = {str(Path.home()): "~"} if str(Path.home()) != "/" else {}
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = ""
    return found | ({user: "<user>"} if len(user) > 3 and user != "root" else {})


def text(report: dict[str, Any]) -> str:
    lines = []
    for section, values in report.items():
        lines.append(section.replace("_", " "))
        if isinstance(values, list):
            lines += [f"  - {value}" for value in values] or ["  nothing to remark"]
            continue
        for name, value in values.items():
            shown = {None: "not installed" if section in ("versions", "optional") else "none", True: "yes", False: "no"}.get(
                value if value is None or isinstance(value, bool) else "", value
            )
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
