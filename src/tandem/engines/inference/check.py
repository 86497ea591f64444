"""Refuses a model that no inference engine here can run, from the model's configuration, before anything is started."""

import importlib.util
import logging
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from tandem.api.weight_files import is_complete
from tandem.config.errors import ConfigError, nearest_names
from tandem.config.fleet import kinds_of, parse_backend
from tandem.config.parts import Knob
from tandem.config.rollout import EmbeddedEngineConfig, RolloutConfig
from tandem.engines.inference.build import python_of, read_token
from tandem.engines.inference.decoder import gate
from tandem.engines.inference.fused_weights import check_stored, compute_dtype
from tandem.engines.inference.kv_cache import make_cache
from tandem.engines.inference.remote.launch import inherited
from tandem.engines.inference.tower import Tower
from tandem.models.architecture import Architecture
from tandem.models.foreign import read_hf_config
from tandem.models.heads import refuse_classifier
from tandem.models.media.families import family_of
from tandem.models.precision import resolve_dtype

log = logging.getLogger(__name__)

MAKERS = {"vllm": "vLLM", "sglang": "SGLang"}
"""Kinds of server that are a library in an environment of its own → what people call it."""

HELP = {
    "tandem": ("tandem", "serve", "--help"),
    "vllm": ("vllm.entrypoints.openai.api_server", "--help=all"),
    "sglang": ("sglang.launch_server", "--help"),
}
"""The words behind ``python -m`` that list the options of a server's command."""

HELP_S = 300.0
"""A server imports all of its library before it lists its options; it may have this time twice."""

LOOK_S = 60.0
"""Python starts and looks for one package."""


def check_inference_engine(rollout: RolloutConfig, folder: Path, device: str) -> None:
    """Passes if the engine or servers of ``rollout`` can generate with the model in ``folder``; of its weights only
    the headers are read, where they are there.

    Raises:
        ConfigError: a reward model, an architecture or a size that is not there, a library or a token that is missing.
    """
    servers = parse_backend(rollout.backend)
    if rollout.weights.terms.on_gpu and device == "cpu":
        raise ConfigError(
            f"rollout.weights.channel={rollout.weights.channel} hands over memory of a GPU, and this run has none; "
            "leave it out: by folders"
        )
    config = read_hf_config(folder)
    refuse_classifier(folder, config)
    architecture, family = Architecture.from_config(config), family_of(folder, config)
    kinds = kinds_of(rollout.backend, rollout.fleet)
    if family is not None and "vllm" in kinds and rollout.engine.keep_kv_on_update:
        raise ConfigError(
            f"rollout.engine.keep_kv_on_update=true with vLLM and a media model ({config.model_type}): an update "
            "drops what a running prompt has seen, and vLLM ends; leave it out"
        )
    if kinds & {"embedded", "tandem"}:
        gate(architecture.activation)
        dtype = compute_dtype(resolve_dtype(rollout.dtype, device), torch.device(device))
        make_cache(architecture, rollout.engine, dtype, torch.device(device))
        if is_complete(folder) or any(folder.glob("pytorch_model*.bin")):
            check_stored(folder, architecture, None if family is None else Tower(family, config, dtype, torch.device("cpu")))
    for one in servers or ():
        check_tensor_parallel(one.tensor, architecture.num_heads, architecture.num_kv_heads, rollout.backend)
    for kind in dict.fromkeys(one.kind for one in servers or ()):
        if kind in MAKERS:
            _check_library(kind, python_of(rollout, kind), rollout.backend)
        if kind != "embedded":
            check_options(kind, python_of(rollout, kind), rollout.fleet.options)
    for key in ("token_file", "admin_token_file"):
        read_token(getattr(rollout.fleet, key), key)


def context_of(engine: EmbeddedEngineConfig, folder: Path) -> int:
    """Most tokens of a prompt and its answer."""
    return engine.max_model_len or Architecture.from_config(read_hf_config(folder)).max_position_embeddings


def warn_of_cut(max_new_tokens: int, room: int, prompt: int = 1) -> None:
    """Warns if answers may be longer than what a prompt of so many tokens leaves of a context of ``room`` tokens."""
    if prompt + max_new_tokens > room:
        told = "gconfig.max_new_tokens=%d, but the context of %d tokens leaves at most %d for an answer, which is cut there"
        log.warning(told, max_new_tokens, room, room - prompt)


def check_tensor_parallel(devices: int, heads: int, kv_heads: int, backend: str) -> None:
    """Passes if the heads of a model can be dealt to so many devices; vLLM and SGLang repeat a head of keys and values, but
    cut none.

    Raises:
        ConfigError: they cannot; says which numbers of devices are possible.
    """
    if heads % devices or (kv_heads % devices and devices % kv_heads):
        sizes = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        raise ConfigError(
            f"rollout.backend={backend} spreads each server over {devices} devices, and this model's {heads} heads with "
            f"{kv_heads} of keys and values cannot be dealt to them; possible: t{', t'.join(map(str, sizes))}"
        )


def installed_servers(rollout: RolloutConfig) -> tuple[str, ...]:
    """Kinds of server whose library is there: first those whose interpreter `rollout.fleet` names, whatever it has."""
    named = [kind for kind in MAKERS if python_of(rollout, kind) != sys.executable]
    return (*named, *(kind for kind in MAKERS if kind not in named and _has(kind, sys.executable)))


def _check_library(kind: str, python: str, backend: str) -> None:
    """Passes if an interpreter exists and finds the library of this kind of server."""
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
"""Options that a run gives its servers itself."""


def check_options(kind: str, python: str, options: Mapping[str, Knob]) -> None:
    """Passes if the command of this kind of server takes `rollout.fleet.options`. The command itself is asked (``--help``).

    Raises:
        ConfigError: an option that the command does not know, or that the run gives already; says which. A command that
            fails or gives no answer, as on a busy machine, is only warned of.
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
            why = f"{error} {getattr(error, 'stderr', None) or ''}".strip()[-300:]
    else:
        log.warning("rollout.fleet.options are not checked, for %s; the server itself will say what is wrong", why)
        return
    known = set(re.findall(r"--([a-z][\w-]*)", done.stdout))
    for name in options:
        if known and name not in known:
            raise ConfigError(f"rollout.fleet.options.{name} is no option of {kind} servers; {nearest_names(name, known)}")


def _environment(python: str) -> dict[str, str] | None:
    """This one for our own interpreter, and without what is about it for another."""
    return None if python == sys.executable else inherited()


def _has(package: str, python: str) -> bool:
    if python == sys.executable:
        return importlib.util.find_spec(package) is not None
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        done = subprocess.run(
            [python, "-c", code], env=_environment(python), capture_output=True, timeout=LOOK_S, check=False
        )
    except OSError:  # a file that is no program
        return False
    except subprocess.TimeoutExpired:  # a busy disk: the start will tell
        return True
    return done.returncode == 0
