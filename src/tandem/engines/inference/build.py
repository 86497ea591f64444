"""Makes the inference engine that the configuration names: one engine, or a fleet of servers."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from tandem.api.engines import InferenceEngine
from tandem.api.weights import FolderSource, WeightUpdate, WeightVersion, tensor_digest, version_digest
from tandem.config.devices import DeviceMap, Seat, devices_of, share_of
from tandem.config.errors import ConfigError
from tandem.config.fleet import Servers, kinds_of, numbered, parse_address, parse_backend
from tandem.config.parts import Knob
from tandem.config.rollout import JOINING, EmbeddedEngineConfig, GenerationConfig, RolloutConfig, cache_gib, chunk_tokens
from tandem.engines.inference.check import engine_threads, python_of, read_token
from tandem.engines.inference.core import EngineCore
from tandem.engines.inference.embedded import CAPABILITIES, EmbeddedEngine, EmbeddedProcess
from tandem.engines.inference.fleet.addresses import DEFAULT_NAME, JOURNAL_NAME
from tandem.engines.inference.fleet.members import Rules, ServerOrigin
from tandem.engines.inference.fleet.pool import Fleet
from tandem.engines.inference.remote.foreign.protocol import group_backend
from tandem.engines.inference.remote.foreign.server import ForeignServer
from tandem.engines.inference.remote.foreign.sglang import SGLangServer
from tandem.engines.inference.remote.foreign.vllm import VllmServer
from tandem.engines.inference.remote.launch import Keeping, ServerPlace
from tandem.engines.inference.remote.tandem_server import TandemServer, start_tandem_server
from tandem.models.foreign import read_hf_config
from tandem.models.hardware import resolve_dtype
from tandem.models.load import refuse_classifier
from tandem.models.shape import Dtype, engine_bytes, read_shape

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
    """The functions for one kind of server; each is None if this kind cannot do it."""

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
