"""Makes the inference engine that the configuration names: one engine, or a fleet of servers."""

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from tandem.api.engines import InferenceEngine
from tandem.api.weights import FolderSource, WeightUpdate, WeightVersion, tensor_digest, version_digest
from tandem.config.delivery import JOINING
from tandem.config.devices import DeviceMap, Seat, devices_of, share_of
from tandem.config.engine_memory import cache_gib, chunk_tokens
from tandem.config.errors import ConfigError
from tandem.config.fleet import Servers, kinds_of, numbered, parse_address, parse_backend
from tandem.config.generation import GenerationConfig
from tandem.config.parts import Knob
from tandem.config.rollout import EmbeddedEngineConfig, RolloutConfig
from tandem.engines.inference.core import EngineCore
from tandem.engines.inference.embedded import CAPABILITIES, EmbeddedEngine, EmbeddedProcess
from tandem.engines.inference.fleet.addresses import DEFAULT_NAME, JOURNAL_NAME
from tandem.engines.inference.fleet.members import ServerOrigin
from tandem.engines.inference.fleet.pool import Fleet
from tandem.engines.inference.remote.foreign.server import ForeignServer
from tandem.engines.inference.remote.foreign.sglang import SGLangServer
from tandem.engines.inference.remote.foreign.vllm import VllmServer
from tandem.engines.inference.remote.foreign.weight_group import group_backend
from tandem.engines.inference.remote.keeping import Keeping, ServerPlace
from tandem.engines.inference.remote.tandem_server import TandemServer, start_tandem_server
from tandem.models.footprint import engine_bytes
from tandem.models.foreign import read_hf_config
from tandem.models.heads import refuse_classifier
from tandem.models.precision import resolve_dtype
from tandem.models.shape import Dtype, read_shape

logger = logging.getLogger("tandem.fleet")

_GIB = 2**30


@dataclass(frozen=True)
class ServerTerms:
    """The terms on which the servers of a run are made."""

    rollout: RolloutConfig
    engine: EmbeddedEngineConfig
    """Settings of one server, its threads settled."""

    folder: Path
    dtype: torch.dtype
    device: str
    deterministic: bool
    version: WeightVersion
    """The version that a server holds at first which the run starts; names the run that it belongs to. Without a run,
    servers are only asked, and stay their owners'."""

    run_folder: Path | None = None
    weights_folder: Path | None = None
    """Below it lie the weights that servers read from a disk."""

    gconfig: GenerationConfig | None = None
    """The sampling of the run: a server that cannot do it is refused."""

    keeping: Keeping | None = None
    """The place where servers that the run starts outlive its process; None: they end with it."""

    devices: DeviceMap | None = None
    """The GPUs of each server that the run starts; None on a CPU."""

    sleeps: bool = False
    """vLLM and SGLang must give their memory back while others use their devices; one that cannot is refused."""

    def seat(self, name: str) -> Seat | None:
        return None if self.devices is None else self.devices.server(name)

    def place(self, name: str) -> ServerPlace | None:
        return None if self.keeping is None else self.keeping.place(name)


class Kind(NamedTuple):
    """The ways to a server of a kind; None for a way that does not exist."""

    start: Callable[[ServerTerms, str], InferenceEngine] | None
    """Starts one; the name is unique in the run."""

    attach: Callable[[ServerTerms, str], InferenceEngine] | None
    """Connects to the one at a URL."""


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


def _started_by(terms: ServerTerms, name: str) -> dict[str, Any]:
    """The arguments that a server of every kind is started with."""
    fleet = terms.rollout.fleet
    return {
        "log_file": (terms.run_folder or Path.cwd()) / "servers-logs" / f"{name}.log",
        "seat": terms.seat(name),
        "options": option_words(fleet.options),
        "startup_timeout_s": fleet.startup_timeout_s,
        "request_timeout_s": fleet.request_timeout_s,
        "progress": partial(logger.info, "%s"),
    }


def _attached_by(terms: ServerTerms) -> dict[str, Any]:
    """The arguments that a server of every kind is attached with."""
    fleet = terms.rollout.fleet
    tokens = {key: read_token(getattr(fleet, f"{key}_file"), f"{key}_file") for key in ("token", "admin_token")}
    return {"dtype": terms.dtype, "request_timeout_s": fleet.request_timeout_s, **tokens}


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
        **_started_by(terms, name),
        place=terms.place(name),
    )


def _attach_tandem(terms: ServerTerms, url: str) -> InferenceEngine:
    return TandemServer.attach(url, run=terms.version.run, **_attached_by(terms))


def _start_foreign(server: type[ForeignServer], kind: str, terms: ServerTerms, name: str) -> InferenceEngine:
    engine = server.start(
        terms.folder,
        python=python_of(terms.rollout, kind),
        dtype=terms.dtype,
        version=terms.version,
        device=terms.device,
        settings=terms.engine,
        **_started_by(terms, name),
        place=None if terms.sleeps else terms.place(name),  # nobody could tell what of a server that is left sleeps
        sleeps=terms.sleeps,
    )
    return _able(engine, terms, terms.seat(name))


def _attach_foreign(server: type[ForeignServer], terms: ServerTerms, url: str) -> InferenceEngine:
    take, more = bool(terms.version.run), _attached_by(terms)
    return _able(server.attach(url, folder=terms.folder, version=terms.version, take=take, **more), terms)


def _able(engine: ForeignServer, terms: ServerTerms, seat: Seat | None = None) -> ForeignServer:
    """The server, if it can sample what the run trains on, and sleep where it must; else it is closed. Raises
    `ConfigError`."""
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
    """A server that the run starts. Raises `ConfigError` where a run cannot start that kind."""
    start = KINDS[kind].start if kind in KINDS else None
    if start is None:
        raise ConfigError(f"rollout.backend={terms.rollout.backend}: a run cannot start servers of kind {kind}")
    return ServerOrigin(name, lambda: start(terms, name), owned=True, holds=terms.version.number)


def attached(terms: ServerTerms, kind: str, url: str) -> ServerOrigin:
    """A server that somebody else started. Raises `ConfigError` where a run cannot attach to that kind."""
    attach = KINDS[kind].attach if kind in KINDS else None
    if attach is None:
        raise ConfigError(f"{kind}={url}: a run cannot attach to servers of kind {kind}")
    needs, remedy = terms.rollout.weights.terms, f"leave rollout.weights.channel={terms.rollout.weights.channel} out"
    if needs.by_group and kind not in JOINING:
        raise ConfigError(f"{kind}={url} joins no process group; {remedy}")
    if needs.on_gpu:
        raise ConfigError(f"{kind}={url} was not started by this run; {remedy}")
    return ServerOrigin(f"{kind}={url}", lambda: attach(terms, url), owned=False)


def option_words(options: Mapping[str, Knob]) -> list[str]:
    """`rollout.fleet.options` as words of a command: a switch for ``true``, nothing for ``false``."""
    words: list[str] = []
    for name, value in options.items():
        words += [f"--{name}"] if value is True else [] if value is False else [f"--{name}", str(value)]
    return words


def read_token(file: str | None, key: str) -> str | None:
    """The token in a file, without the white space around it.

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
    """The interpreter of the environment that has this kind of server; Tandem's own for its own."""
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
    """The engine, its model loaded from ``folder``; ``threads`` are the run's, see `engine_threads`, and ``ranks`` its ranks
    on this machine.

    A fleet writes its fault table and its servers' logs into ``run_folder``, and watches the addresses there; its servers
    belong to ``run``, and may read weights below ``weights_folder``; those that cannot sample by ``gconfig`` are refused.
    ``keeping``: where servers that it starts are taken from if they run already, and left when this process ends.
    ``memory_limit_gib``: the run's. With one, or if it ``sleeps``, servers must give memory back when they are told to.

    Raises:
        ConfigError: `rollout.backend` is not known, or the folder holds a reward model.
    """
    servers = parse_backend(rollout.backend)
    refuse_classifier(folder, read_hf_config(folder))
    count = engine_threads(rollout, placement=placement, threads=threads)
    dtype, version = resolve_dtype(rollout.dtype, device), WeightVersion(0)
    devices = device_map(rollout, placement, device, ranks)
    config = replace(engine_settings(rollout, folder, device, devices, memory_limit_gib), threads=count)
    sleeps = sleeps or memory_limit_gib is not None
    if servers is not None:
        named = replace(version, run=run or "tandem")
        more = (run_folder, weights_folder, gconfig, keeping, devices, sleeps)
        terms = ServerTerms(rollout, config, folder, dtype, device, deterministic, named, *more)
        return build_fleet(terms, servers)
    if placement == "decoupled":
        own = device if devices is None else f"cuda:{devices.server('embedded-0').devices[0]}"
        return EmbeddedProcess.start(folder, config, dtype, own, version=version, threads=count, deterministic=deterministic)
    core = EngineCore(folder, config, dtype, device, version, deterministic)
    return EmbeddedEngine(
        core, version=version, threads=count, deterministic=deterministic, keep_kv=config.keep_kv_on_update
    )


def engine_settings(
    rollout: RolloutConfig, folder: Path, device: str, devices: DeviceMap | None, memory_limit_gib: float | None = None
) -> EmbeddedEngineConfig:
    """`rollout.engine` with the cache and the chunk decided that it leaves to the device."""
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
    """The GPUs of this machine among training and servers; None on a CPU. Raises `ConfigError`, see `devices_of`."""
    if device == "cpu":
        return None
    return devices_of(rollout, placement, ranks=ranks, devices=torch.cuda.device_count())


def build_fleet(terms: ServerTerms, servers: tuple[Servers, ...]) -> Fleet:
    """The servers that the run starts, started, and those that it attaches to, on their way.

    Raises:
        ConfigError: a kind of server that cannot be had this way.
        EngineDied, WaitTimeout: one of its own could not be started.
    """
    config = terms.rollout.fleet
    members = [started(terms, one.kind, name) for name, one in numbered(servers)]
    members += [attached(terms, *parse_address(text)) for text in config.servers]
    watched = Path(config.watch).expanduser() if config.watch else None
    if watched is None and terms.run_folder is not None:
        watched = terms.run_folder / DEFAULT_NAME
    return Fleet.start(
        members,
        config,
        capabilities=fleet_capabilities(terms.rollout, sleeps=terms.sleeps),
        version=terms.version,
        journal=terms.run_folder / JOURNAL_NAME if terms.run_folder is not None else None,
        watched=watched,
        attach=lambda kind, url: attached(terms, kind, url),
        first=lambda: folder_update(terms.folder, terms.version),
    )


def fleet_capabilities(rollout: RolloutConfig, *, sleeps: bool = False) -> frozenset[str]:
    """Capabilities that all servers of a fleet share; ``sleeps``: one that cannot sleep is refused. Weights go through
    shared memory where all are embedded and no other may join."""
    kinds = {one.kind for one in parse_backend(rollout.backend) or ()}
    if kinds == {"embedded"} and not rollout.fleet.servers and rollout.fleet.watch is None:
        return CAPABILITIES | {"shared_memory"}
    return frozenset({rollout.weights.terms.reads, *(("sleep_weights", "sleep_kv_cache") if sleeps else ())})


def folder_update(folder: Path, version: WeightVersion) -> WeightUpdate:
    """The weights of a model folder as an update: for servers of which nobody knows what they hold."""
    source = FolderSource(folder)
    digests = {name: tensor_digest(tensor) for name, tensor in source.tensors()}
    return WeightUpdate(replace(version, digest=version_digest(digests)), source, digests)


def engine_threads(rollout: RolloutConfig, *, placement: Literal["colocate", "decoupled"], threads: int) -> int:
    """CPU threads of one engine: what is configured; else its part of all where generation takes turns with training, of
    half of them where it does not."""
    together = threads if placement == "colocate" else threads // 2
    return rollout.engine.threads or max(1, together // servers_here(rollout))


def servers_here(rollout: RolloutConfig) -> int:
    """Engines that compute on this machine's cores: those that the run starts; at least 1."""
    return max(1, sum(one.count for one in parse_backend(rollout.backend) or ()))
