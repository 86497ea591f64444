"""Makes the inference engine that the configuration names: one engine, or a fleet of servers.

A model that no inference engine here can run is refused by its configuration, before anything is started.
"""

import importlib.util
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from tandem.api.engines import InferenceEngine
from tandem.api.weights import FolderSource, WeightUpdate, WeightVersion, is_complete, tensor_digest, version_digest
from tandem.config.devices import DeviceMap, Seat, devices_of, share_of
from tandem.config.errors import ConfigError, nearest_names
from tandem.config.fleet import Servers, kinds_of, numbered, parse_address, parse_backend
from tandem.config.parts import Knob
from tandem.config.rollout import JOINING, EmbeddedEngineConfig, GenerationConfig, RolloutConfig, cache_gib, chunk_tokens
from tandem.engines.inference.core import EngineCore
from tandem.engines.inference.decoder import check_stored, compute_dtype, gate
from tandem.engines.inference.embedded import CAPABILITIES, EmbeddedEngine, EmbeddedProcess
from tandem.engines.inference.fleet.addresses import DEFAULT_NAME, JOURNAL_NAME
from tandem.engines.inference.fleet.members import Rules, ServerOrigin
from tandem.engines.inference.fleet.pool import Fleet
from tandem.engines.inference.kv_cache import make_cache
from tandem.engines.inference.remote.foreign.protocol import group_backend
from tandem.engines.inference.remote.foreign.server import ForeignServer
from tandem.engines.inference.remote.foreign.sglang import SGLangServer
from tandem.engines.inference.remote.foreign.vllm import VllmServer
from tandem.engines.inference.remote.launch import Keeping, ServerPlace
from tandem.engines.inference.remote.tandem_server import TandemServer, start_tandem_server
from tandem.engines.inference.tower import Tower
from tandem.models.architecture import Architecture
from tandem.models.foreign import read_hf_config
from tandem.models.hardware import resolve_dtype
from tandem.models.load import refuse_classifier
from tandem.models.media.families import family_of
from tandem.models.shape import Dtype, engine_bytes, read_shape
from tandem.workers.process import inherited

logger = logging.getLogger("tandem.fleet")

_GIB = 2**30


@dataclass(frozen=True)
class ServerTerms:
    """Settings with which all servers of a run are started or attached."""

    rollout: RolloutConfig
    engine: EmbeddedEngineConfig
    """Settings of one server, with `threads` decided."""

    folder: Path
    dtype: torch.dtype
    device: str
    deterministic: bool
    version: WeightVersion
    """Initial weights of a server that the run starts. ``version.run`` names the run that takes the servers; if it is empty,
    attached servers only answer requests and keep their owners."""

    run_folder: Path | None = None
    weights_folder: Path | None = None
    """Folder below which servers read weights from disk."""

    gconfig: GenerationConfig | None = None
    """Sampling settings of the run; a server that does not support them is refused."""

    keeping: Keeping | None = None
    """If set, the servers that the run starts outlive the run's process; None: they end with it."""

    devices: DeviceMap | None = None
    """The GPUs of each server that the run starts; None on a CPU."""

    sleeps: bool = False
    """True if vLLM and SGLang servers must free their memory while training uses the GPUs; one that cannot is refused."""

    def seat(self, name: str) -> Seat | None:
        return None if self.devices is None else self.devices.server(name)

    def place(self, name: str) -> ServerPlace | None:
        return None if self.keeping is None else self.keeping.place(name)


class Kind(NamedTuple):
    """Functions that start and attach a server of one kind; None if that is not possible."""

    start: Callable[[ServerTerms, str], InferenceEngine] | None
    """Starts a server under a name that is unique in the run."""

    attach: Callable[[ServerTerms, str], InferenceEngine] | None
    """Connects to the server at a URL."""


def _embedded(terms: ServerTerms, name: str) -> InferenceEngine:
    seat = terms.seat(name)
    return EmbeddedProcess.start(
        terms.folder,
        terms.engine,
        terms.dtype,
        terms.device if seat is None else f"cuda:{seat.devices[0]}",
        version=terms.version,
        threads=terms.engine.threads or 1,
        deterministic=terms.deterministic,
        timeout_s=terms.rollout.fleet.startup_timeout_s,
    )


def _start_arguments(terms: ServerTerms, name: str) -> dict[str, Any]:
    """Returns the arguments for starting a server of any kind."""
    fleet = terms.rollout.fleet
    return {
        "log_file": (terms.run_folder or Path.cwd()) / "servers-logs" / f"{name}.log",
        "seat": terms.seat(name),
        "options": option_words(fleet.options),
        "startup_timeout_s": fleet.startup_timeout_s,
        "request_timeout_s": terms.rollout.episode_timeout_s,
        "progress": partial(logger.info, "%s"),
    }


def _attach_arguments(terms: ServerTerms) -> dict[str, Any]:
    """Returns the arguments for attaching to a server of any kind."""
    fleet = terms.rollout.fleet
    tokens = {key: read_token(getattr(fleet, f"{key}_file"), f"{key}_file") for key in ("token", "admin_token")}
    return {"dtype": terms.dtype, "request_timeout_s": terms.rollout.episode_timeout_s, **tokens}


def _start_tandem(terms: ServerTerms, name: str) -> InferenceEngine:
    if terms.weights_folder is not None:
        terms.weights_folder.mkdir(parents=True, exist_ok=True)
    return start_tandem_server(
        terms.folder,
        terms.engine,
        terms.dtype,
        terms.device,
        run=terms.version.run,
        weights_roots=() if terms.weights_folder is None else (terms.weights_folder,),
        **_start_arguments(terms, name),
        place=terms.place(name),
    )


def _attach_tandem(terms: ServerTerms, url: str) -> InferenceEngine:
    return TandemServer.attach(url, run=terms.version.run, **_attach_arguments(terms))


def _start_foreign(server: type[ForeignServer], kind: str, terms: ServerTerms, name: str) -> InferenceEngine:
    engine = server.start(
        terms.folder,
        python=python_of(terms.rollout, kind),
        dtype=terms.dtype,
        version=terms.version,
        device=terms.device,
        settings=terms.engine,
        **_start_arguments(terms, name),
        place=None if terms.sleeps else terms.place(name),  # a kept server could not say which of its parts sleep
        sleeps=terms.sleeps,
    )
    return _checked(engine, terms, terms.seat(name))


def _attach_foreign(server: type[ForeignServer], terms: ServerTerms, url: str) -> InferenceEngine:
    take, arguments = bool(terms.version.run), _attach_arguments(terms)
    return _checked(server.attach(url, folder=terms.folder, version=terms.version, take=take, **arguments), terms)


def _checked(engine: ForeignServer, terms: ServerTerms, seat: Seat | None = None) -> ForeignServer:
    """Returns the server if it supports the run's sampling, its weight channel and, if needed, sleep. Otherwise closes the
    server and raises `ConfigError`."""
    try:
        ranks = () if terms.devices is None else terms.devices.ranks
        trainer = ranks[0].devices if ranks else ()
        needs = terms.rollout.weights.terms
        if needs.by_group and terms.version.run:
            backend = group_backend(terms.device, trainer, () if seat is None else seat.devices)
            engine.take_by_group(backend, f"cuda:{trainer[0]}" if backend == "nccl" else "cpu")
        if needs.on_gpu and terms.version.run:
            engine.take_by_handles(f"cuda:{trainer[0]}" if trainer else terms.device)
        if terms.rollout.engine.keep_kv_on_update:
            engine.keep_kv()
        if terms.sleeps:
            engine.check_sleep()
        if terms.gconfig is not None and terms.version.run:
            engine.check_generation(terms.gconfig)
    except ConfigError:
        engine.close()
        raise
    return engine


KINDS: dict[str, Kind] = {
    "embedded": Kind(_embedded, None),
    "tandem": Kind(_start_tandem, _attach_tandem),
    "vllm": Kind(partial(_start_foreign, VllmServer, "vllm"), partial(_attach_foreign, VllmServer)),
    "sglang": Kind(partial(_start_foreign, SGLangServer, "sglang"), partial(_attach_foreign, SGLangServer)),
}


def started(terms: ServerTerms, kind: str, name: str) -> ServerOrigin:
    """Describes a server that the run will start. Raises `ConfigError` if a run cannot start this kind."""
    start = KINDS[kind].start if kind in KINDS else None
    if start is None:
        raise ConfigError(f"rollout.backend={terms.rollout.backend}: a run cannot start servers of kind {kind}")
    return ServerOrigin(name, lambda: start(terms, name), owned=True, holds=terms.version.number)


def attached(terms: ServerTerms, kind: str, url: str) -> ServerOrigin:
    """Describes a running server to attach to. Raises `ConfigError` if a run cannot attach to this kind."""
    attach = KINDS[kind].attach if kind in KINDS else None
    if attach is None:
        raise ConfigError(f"{kind}={url}: a run cannot attach to servers of kind {kind}")
    needs, remedy = terms.rollout.weights.terms, f"leave rollout.weights.channel={terms.rollout.weights.channel} out"
    if needs.by_group and kind not in JOINING:
        raise ConfigError(f"{kind}={url} cannot join a process group; {remedy}")
    if needs.on_gpu:
        raise ConfigError(f"{kind}={url} was not started by this run; {remedy}")
    return ServerOrigin(f"{kind}={url}", lambda: attach(terms, url), owned=False)


def option_words(options: Mapping[str, Knob]) -> list[str]:
    """Converts `rollout.fleet.options` into command-line arguments: a switch for ``true``, nothing for ``false``."""
    words: list[str] = []
    for name, value in options.items():
        words += [f"--{name}"] if value is True else [] if value is False else [f"--{name}", str(value)]
    return words


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


def python_of(rollout: RolloutConfig, kind: str) -> str:
    """Returns the configured Python interpreter for this kind of server; this process's own if none is configured."""
    fleet = rollout.fleet
    return {"vllm": fleet.vllm_python, "sglang": fleet.sglang_python}.get(kind) or sys.executable


def build_inference_engine(
    rollout: RolloutConfig,
    *,
    folder: Path,
    placement: Literal["colocate", "decoupled"],
    threads: int,
    device: str,
    deterministic: bool,
    ranks: int = 0,
    run_folder: Path | None = None,
    run: str = "",
    weights_folder: Path | None = None,
    gconfig: GenerationConfig | None = None,
    keeping: Keeping | None = None,
    memory_limit_gib: float | None = None,
    sleeps: bool = False,
) -> InferenceEngine:
    """Builds the engine, with its model loaded from ``folder``. ``threads`` is the run's number of threads (see
    `engine_threads`), ``ranks`` its number of ranks on this machine.

    A fleet writes its fault table and its servers' logs into ``run_folder`` and watches the file of addresses there. Its
    servers belong to ``run``, may read weights below ``weights_folder``, and are refused if they do not support ``gconfig``.
    ``keeping``: keeps the servers alive when this process ends, and finds those that a former process kept.
    ``memory_limit_gib``: the run's memory limit. With a limit, or with ``sleeps``, servers must be able to free memory.

    Raises:
        ConfigError: `rollout.backend` is unknown, or the folder holds a reward model.
    """
    servers = parse_backend(rollout.backend)
    refuse_classifier(folder, read_hf_config(folder))
    count = engine_threads(rollout, placement=placement, threads=threads)
    dtype, version = resolve_dtype(rollout.dtype, device), WeightVersion(0)
    devices = device_map(rollout, placement, device, ranks)
    config = replace(engine_settings(rollout, folder, device, devices, memory_limit_gib), threads=count)
    sleeps = sleeps or memory_limit_gib is not None
    if servers is not None:
        owned = replace(version, run=run or "tandem")
        options = (run_folder, weights_folder, gconfig, keeping, devices, sleeps)
        terms = ServerTerms(rollout, config, folder, dtype, device, deterministic, owned, *options)
        return build_fleet(terms, servers)
    if placement == "decoupled":
        device = device if devices is None else f"cuda:{devices.server('embedded-0').devices[0]}"
        return EmbeddedProcess.start(
            folder, config, dtype, device, version=version, threads=count, deterministic=deterministic
        )
    core = EngineCore(folder, config, dtype, device, version, deterministic)
    return EmbeddedEngine(
        core, version=version, threads=count, deterministic=deterministic, keep_kv=config.keep_kv_on_update
    )


def engine_settings(
    rollout: RolloutConfig, folder: Path, device: str, devices: DeviceMap | None, memory_limit_gib: float | None = None
) -> EmbeddedEngineConfig:
    """Returns `rollout.engine` with sizes of the cache and the prefill chunk chosen for the device where they are unset."""
    memory_gib, share, weights_gib = None, 0.0, 0.0
    ours = kinds_of(rollout.backend, rollout.fleet) & {"embedded", "tandem"}
    if devices is not None and ours and rollout.engine.kv_cache_gib is None:
        memory_gib = memory_limit_gib or torch.cuda.get_device_properties(0).total_memory / _GIB
        share = share_of(devices, devices.servers[0].name if devices.servers else None)
        dtype: Dtype = "float32" if resolve_dtype(rollout.dtype, device) == torch.float32 else "bfloat16"
        weights_gib = engine_bytes(read_shape(str(folder)), dtype, cpu=False) / _GIB
    cache = cache_gib(rollout.engine, device, memory_gib=memory_gib, share=share, weights_gib=weights_gib)
    return replace(rollout.engine, kv_cache_gib=cache, prefill_chunk_tokens=chunk_tokens(rollout.engine, device))


def device_map(
    rollout: RolloutConfig, placement: Literal["colocate", "decoupled"], device: str, ranks: int
) -> DeviceMap | None:
    """Assigns this machine's GPUs to training and servers; None on a CPU. Raises `ConfigError`, see `devices_of`."""
    if device == "cpu":
        return None
    return devices_of(rollout, placement, ranks=ranks, devices=torch.cuda.device_count())


def rules_of(rollout: RolloutConfig) -> Rules:
    """Returns the limits by which a run's fleet judges servers. A request may take as long as its episode, and the run waits
    for a healthy server as long as one may take to start."""
    fleet = rollout.fleet
    return Rules(
        stall_timeout_s=fleet.stall_timeout_s,
        request_timeout_s=rollout.episode_timeout_s,
        empty_timeout_s=fleet.startup_timeout_s,
    )


def build_fleet(terms: ServerTerms, servers: tuple[Servers, ...], rules: Rules | None = None) -> Fleet:
    """Builds the fleet: starts the run's own servers, and begins to attach to the configured ones. ``rules``: the limits by
    which servers are judged; None: `rules_of` the run.

    Raises:
        ConfigError: this kind of server cannot be started, or cannot be attached.
        EngineDied, WaitTimeout: one of the run's own servers could not be started.
    """
    config = terms.rollout.fleet
    members = [started(terms, group.kind, name) for name, group in numbered(servers)]
    members += [attached(terms, *parse_address(text)) for text in config.servers]
    watched = Path(config.watch).expanduser() if config.watch else None
    if watched is None and terms.run_folder is not None:
        watched = terms.run_folder / DEFAULT_NAME
    return Fleet.start(
        members,
        config,
        rules=rules or rules_of(terms.rollout),
        capabilities=fleet_capabilities(terms.rollout, sleeps=terms.sleeps),
        version=terms.version,
        journal=terms.run_folder / JOURNAL_NAME if terms.run_folder is not None else None,
        watched=watched,
        attach=lambda kind, url: attached(terms, kind, url),
        first=lambda: folder_update(terms.folder, terms.version),
    )


def fleet_capabilities(rollout: RolloutConfig, *, sleeps: bool = False) -> frozenset[str]:
    """Returns the capabilities that all servers of a fleet have. ``sleeps``: the run refuses servers that cannot sleep.
    Weights go through shared memory if all servers are embedded and no other servers may join."""
    kinds = {group.kind for group in parse_backend(rollout.backend) or ()}
    if kinds == {"embedded"} and not rollout.fleet.servers and rollout.fleet.watch is None:
        return CAPABILITIES | {"shared_memory"}
    return frozenset({rollout.weights.terms.reads, *(("sleep_weights", "sleep_kv_cache") if sleeps else ())})


def folder_update(folder: Path, version: WeightVersion) -> WeightUpdate:
    """Returns the weights of a model folder as an update, for servers whose present weights are unknown."""
    source = FolderSource(folder)
    digests = {name: tensor_digest(tensor) for name, tensor in source.tensors()}
    return WeightUpdate(replace(version, digest=version_digest(digests)), source, digests)


def engine_threads(rollout: RolloutConfig, *, placement: Literal["colocate", "decoupled"], threads: int) -> int:
    """Returns the number of CPU threads of one engine: the configured number, or else an equal share of all threads
    (colocated with training) or of half the threads (decoupled)."""
    together = threads if placement == "colocate" else threads // 2
    return rollout.engine.threads or max(1, together // servers_here(rollout))


def servers_here(rollout: RolloutConfig) -> int:
    """Returns the number of engines that compute on this machine: those that the run starts, at least 1."""
    return max(1, sum(group.count for group in parse_backend(rollout.backend) or ()))


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
