"""Checks that the engine or the servers of a configuration can run its model, before anything is started.

No server is contacted here, so that `tandem plan` imports no HTTP client.
"""

import importlib.util
import logging
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch

from tandem.api.weights import is_complete
from tandem.config.errors import ConfigError, nearest_names
from tandem.config.fleet import kinds_of, parse_backend
from tandem.config.parts import Knob
from tandem.config.rollout import EmbeddedEngineConfig, RolloutConfig
from tandem.engines.inference.decoder import check_stored, compute_dtype, gate
from tandem.engines.inference.kv_cache import make_cache
from tandem.engines.inference.tower import Tower
from tandem.models.architecture import Architecture
from tandem.models.foreign import read_hf_config
from tandem.models.hardware import resolve_dtype
from tandem.models.load import refuse_classifier
from tandem.models.media.families import family_of
from tandem.workers.process import inherited

log = logging.getLogger(__name__)

MAKERS = {"vllm": "vLLM", "sglang": "SGLang"}
"""Kind of server → name of its library, for servers that need an environment of their own."""

HELP = {
    "tandem": ("tandem", "serve", "--help"),
    "vllm": ("vllm.entrypoints.openai.api_server", "--help=all"),
    "sglang": ("sglang.launch_server", "--help"),
}
"""Kind of server → arguments of ``python -m`` that list the options of its command."""

HELP_S = 300.0
"""Maximum seconds until a server lists its options, for which it imports all of its library; it gets two attempts."""

LOOK_S = 60.0
"""Maximum seconds for a Python interpreter to start and look for one package."""


def check_inference_engine(rollout: RolloutConfig, folder: Path, device: str) -> None:
    """Passes if the engine or servers of ``rollout`` can generate with the model in ``folder``. Of weight files, if there
    are any, only the headers are read.

    Raises:
        ConfigError: the model is a reward model, its architecture or a size is not supported, or a library or a token is
            missing.
    """
    servers = parse_backend(rollout.backend)
    if rollout.weights.terms.on_gpu and device == "cpu":
        raise ConfigError(
            f"rollout.weights.channel={rollout.weights.channel} hands over GPU memory, and this run has no GPU; "
            "leave it out, so that weights go through folders"
        )
    config = read_hf_config(folder)
    refuse_classifier(folder, config)
    architecture, family = Architecture.from_config(config), family_of(folder, config)
    kinds = kinds_of(rollout.backend, rollout.fleet)
    if family is not None and "vllm" in kinds and rollout.engine.keep_kv_on_update:
        raise ConfigError(
            f"rollout.engine.keep_kv_on_update=true with vLLM and a media model ({config.model_type}): an update "
            "drops the encoded images and sounds of running prompts, and vLLM exits; leave it out"
        )
    if kinds & {"embedded", "tandem"}:
        gate(architecture.activation)
        dtype = compute_dtype(resolve_dtype(rollout.dtype, device), torch.device(device))
        make_cache(architecture, rollout.engine, dtype, torch.device(device))
        if is_complete(folder) or any(folder.glob("pytorch_model*.bin")):
            check_stored(folder, architecture, None if family is None else Tower(family, config, dtype, torch.device("cpu")))
    for group in servers or ():
        check_tensor_parallel(group.tensor, architecture.num_heads, architecture.num_kv_heads, rollout.backend)
    for kind in dict.fromkeys(group.kind for group in servers or ()):
        if kind in MAKERS:
            _check_library(kind, python_of(rollout, kind), rollout.backend)
        if kind != "embedded":
            check_options(kind, python_of(rollout, kind), rollout.fleet.options)
    for key in ("token_file", "admin_token_file"):
        read_token(getattr(rollout.fleet, key), key)


def context_of(engine: EmbeddedEngineConfig, folder: Path) -> int:
    """Returns the context length: the most tokens of a prompt and its answer together."""
    return engine.max_model_len or Architecture.from_config(read_hf_config(folder)).max_position_embeddings


def warn_of_cut(max_new_tokens: int, room: int, prompt: int = 1) -> None:
    """Warns if a prompt of ``prompt`` tokens in a context of ``room`` tokens leaves less than ``max_new_tokens``."""
    if prompt + max_new_tokens > room:
        text = "gconfig.max_new_tokens=%d, but the context of %d tokens leaves at most %d for an answer, which is cut there"
        log.warning(text, max_new_tokens, room, room - prompt)


def check_tensor_parallel(devices: int, heads: int, kv_heads: int, backend: str) -> None:
    """Passes if a model's attention heads can be divided among ``devices`` devices. vLLM and SGLang can repeat a key-value
    head on several devices, but do not split one.

    Raises:
        ConfigError: the heads cannot be divided; the message lists the possible numbers of devices.
    """
    if heads % devices or (kv_heads % devices and devices % kv_heads):
        sizes = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        raise ConfigError(
            f"rollout.backend={backend} spreads each server over {devices} devices, and this model's {heads} heads and "
            f"{kv_heads} key-value heads cannot be divided among them; possible: t{', t'.join(map(str, sizes))}"
        )


def installed_servers(rollout: RolloutConfig) -> tuple[str, ...]:
    """Returns the kinds of server that are installed: first those for which `rollout.fleet` names an interpreter, without a
    check of that interpreter, then those whose library this process's interpreter has."""
    named = [kind for kind in MAKERS if python_of(rollout, kind) != sys.executable]
    return (*named, *(kind for kind in MAKERS if kind not in named and _has(kind, sys.executable)))


def _check_library(kind: str, python: str, backend: str) -> None:
    """Passes if the interpreter exists and has the library of this kind of server."""
    key, maker = f"rollout.fleet.{kind}_python", MAKERS[kind]
    remedy = f"set {key} to the python of an environment that has {maker} (docs/servers.md)"
    if not Path(python).is_file():
        raise ConfigError(f"{key}={python} is not a file; {remedy}")
    if not _has(kind, python):
        raise ConfigError(f"rollout.backend={backend} starts {maker}, which {python} does not have; {remedy}")


OURS_ALONE = {
    "tandem": "port run token-file admin-token-file address-file dtype device threads max-running kv-cache-gib "
    "max-model-len prefill-chunk-tokens weights-root keep-kv-on-update cuda-graphs no-cuda-graphs",
    "vllm": "model served-model-name host port dtype max-num-seqs enable-scale-out logprobs-mode max-model-len "
    "worker-extension-cls middleware seed tensor-parallel-size gpu-memory-utilization api-key",
    "sglang": "model-path dtype host port device skip-server-warmup enable-metrics max-running-requests random-seed "
    "context-length tp-size mem-fraction-static api-key",
}
"""Kind of server → options that the run sets itself, so that users may not."""


def check_options(kind: str, python: str, options: Mapping[str, Knob]) -> None:
    """Passes if this kind of server accepts `rollout.fleet.options`, according to its command's ``--help``. If the command
    fails or does not answer in time, only a warning is logged.

    Raises:
        ConfigError: the command does not know an option, or the run sets it itself; the message names the option.
    """
    for name in options:
        if name in OURS_ALONE[kind].split():
            raise ConfigError(f"rollout.fleet.options.{name} is given to {kind} servers by the run itself: leave it out")
    if not options:
        return
    for _ in range(2):
        try:
            done = subprocess.run(
                [python, "-m", *HELP[kind]],
                env=_environment(python),
                capture_output=True,
                text=True,
                timeout=HELP_S,
                check=True,
            )
            break
        except subprocess.SubprocessError as error:
            problem = f"{error} {getattr(error, 'stderr', None) or ''}".strip()[-300:]
    else:
        log.warning("rollout.fleet.options could not be checked (%s); the server itself rejects wrong ones", problem)
        return
    known = set(re.findall(r"--([a-z][\w-]*)", done.stdout))
    for name in options:
        if known and name not in known:
            raise ConfigError(f"rollout.fleet.options.{name} is no option of {kind} servers; {nearest_names(name, known)}")


def _environment(python: str) -> dict[str, str] | None:
    """Returns the environment in which to start the interpreter ``python``. None, the environment of this process, if this
    process runs the same interpreter; otherwise an environment without the variables that only concern this process."""
    return None if python == sys.executable else inherited()


def _has(package: str, python: str) -> bool:
    """True if the interpreter finds the package, or does not answer in time."""
    if python == sys.executable:
        return importlib.util.find_spec(package) is not None
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        done = subprocess.run(
            [python, "-c", code], env=_environment(python), capture_output=True, timeout=LOOK_S, check=False
        )
    except OSError:  # the file cannot be executed
        return False
    except subprocess.TimeoutExpired:  # a busy disk; without the package, the server will fail at its start
        return True
    return done.returncode == 0


def python_of(rollout: RolloutConfig, kind: str) -> str:
    """Returns the configured Python interpreter for this kind of server; this process's own if none is configured."""
    fleet = rollout.fleet
    return {"vllm": fleet.vllm_python, "sglang": fleet.sglang_python}.get(kind) or sys.executable


def read_token(file: str | None, key: str) -> str | None:
    """Returns the token in a file, without surrounding white space; None without a file.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    if file is None:
        return None
    try:
        token = Path(file).expanduser().read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"rollout.fleet.{key}={file} cannot be read: {error.strerror or error}") from error
    if not token:
        raise ConfigError(f"rollout.fleet.{key}={file} is empty; it must hold the token")
    return token


def engine_threads(rollout: RolloutConfig, *, placement: Literal["colocate", "decoupled"], threads: int) -> int:
    """Returns the number of CPU threads of one engine: the configured number, or else an equal share of all threads
    (colocated with training) or of half the threads (decoupled)."""
    together = threads if placement == "colocate" else threads // 2
    return rollout.engine.threads or max(1, together // servers_here(rollout))


def servers_here(rollout: RolloutConfig) -> int:
    """Returns the number of engines that compute on this machine: those that the run starts, at least 1."""
    return max(1, sum(group.count for group in parse_backend(rollout.backend) or ()))
