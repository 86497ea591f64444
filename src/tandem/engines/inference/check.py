"""Refuses a model that no inference engine here can run, from the model's configuration, before anything is started."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import torch

from tandem.config.errors import ConfigError
from tandem.config.fleet import kinds_of, parse_backend
from tandem.config.rollout import RolloutConfig
from tandem.engines.inference.build import python_of, read_token
from tandem.engines.inference.decoder import gate
from tandem.engines.inference.fused_weights import compute_dtype
from tandem.engines.inference.kv_cache import make_cache
from tandem.engines.inference.remote.launch import OURS
from tandem.models.architecture import Architecture
from tandem.models.foreign import read_hf_config
from tandem.models.heads import refuse_classifier
from tandem.models.precision import resolve_dtype

MAKERS = {"vllm": "vLLM", "sglang": "SGLang"}
"""Kinds of server that are a library in an environment of its own → what people call it."""

LOOK_S = 60.0
"""Python starts and looks for one package."""


def check_inference_engine(rollout: RolloutConfig, folder: Path, device: str) -> None:
    """Passes if the engine or servers of ``rollout`` can generate with the model in ``folder``; its weights are not read.

    Raises:
        ConfigError: a reward model, an architecture or a size that is not there, a library or a token that is missing.
    """
    servers = parse_backend(rollout.backend)
    config = read_hf_config(folder)
    refuse_classifier(folder, config)
    architecture = Architecture.from_config(config)
    if kinds_of(rollout.backend, rollout.fleet) & {"embedded", "tandem"}:
        gate(architecture.activation)
        dtype = compute_dtype(resolve_dtype(rollout.dtype, device), torch.device(device))
        make_cache(architecture, rollout.engine, dtype, torch.device(device))
    for kind, _ in servers or ():
        if kind in MAKERS:
            _check_library(kind, python_of(rollout, kind), rollout.backend)
    for key in ("token_file", "admin_token_file"):
        read_token(getattr(rollout.fleet, key), key)


def _check_library(kind: str, python: str, backend: str) -> None:
    """Passes if an interpreter exists and finds the library of this kind of server."""
    key, maker = f"rollout.fleet.{kind}_python", MAKERS[kind]
    remedy = f"set {key} to the python of an environment that has {maker} (docs/servers.md)"
    if not Path(python).is_file():
        raise ConfigError(f"{key}={python} is not a file; {remedy}")
    if not _has(kind, python):
        raise ConfigError(f"rollout.backend={backend} starts {maker}, which {python} does not have; {remedy}")


def _has(package: str, python: str) -> bool:
    if python == sys.executable:
        return importlib.util.find_spec(package) is not None
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    environment = {name: value for name, value in os.environ.items() if name not in OURS}
    try:
        done = subprocess.run([python, "-c", code], env=environment, capture_output=True, timeout=LOOK_S, check=False)
    except OSError:  # a file that is no program
        return False
    except subprocess.TimeoutExpired:  # a busy disk: the start will tell
        return True
    return done.returncode == 0
