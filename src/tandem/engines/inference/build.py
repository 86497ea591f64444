"""Makes the inference engine that the configuration names: one engine, or a fleet of servers."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from tandem.api.engines import InferenceEngine
from tandem.api.weights import FolderSource, WeightUpdate, WeightVersion, tensor_digest, version_digest
from tandem.config.fleet import parse_address, parse_backend
from tandem.config.generation import GenerationConfig
from tandem.config.rollout import RolloutConfig
from tandem.engines.inference.core import EngineCore
from tandem.engines.inference.embedded import CAPABILITIES, EmbeddedEngine, EmbeddedProcess
from tandem.engines.inference.fleet.addresses import DEFAULT_NAME, JOURNAL_NAME
from tandem.engines.inference.fleet.kinds import Terms, attached, started
from tandem.engines.inference.fleet.pool import Fleet
from tandem.engines.inference.remote.kept import Keeping
from tandem.models.foreign import read_hf_config
from tandem.models.heads import refuse_classifier
from tandem.models.precision import resolve_dtype


def build_inference_engine(
    rollout: RolloutConfig,
    *,
    folder: Path,
    placement: Literal["colocate", "decoupled"],
    threads: int,
    device: str,
    deterministic: bool,
    run_folder: Path | None = None,
    run: str = "",
    weights_folder: Path | None = None,
    gconfig: GenerationConfig | None = None,
    keeping: Keeping | None = None,
) -> InferenceEngine:
    """The engine, its model loaded from ``folder``; ``threads`` are the run's, see `engine_threads`.

    A fleet writes its fault table and its servers' logs into ``run_folder``, and watches the addresses there; its servers
    belong to ``run``, and may read weights below ``weights_folder``; those that cannot sample by ``gconfig`` are refused.
    ``keeping``: where servers that it starts are taken from if they run already, and left when this process ends.

    Raises:
        ConfigError: `rollout.backend` is not known, or the folder holds a reward model.
    """
    servers = parse_backend(rollout.backend)
    refuse_classifier(folder, read_hf_config(folder))
    count = engine_threads(rollout, placement=placement, threads=threads)
    config = replace(rollout.engine, threads=count)
    dtype, version = resolve_dtype(rollout.dtype, device), WeightVersion(0)
    if servers is not None:
        named = replace(version, run=run or "tandem")
        more = (run_folder, weights_folder, gconfig, keeping)
        terms = Terms(rollout, config, folder, dtype, device, deterministic, named, *more)
        return build_fleet(terms, servers)
    if placement == "decoupled":
        return EmbeddedProcess.start(
            folder, config, dtype, device, version=version, threads=count, deterministic=deterministic
        )
    core = EngineCore(folder, config, dtype, device, version)
    return EmbeddedEngine(
        core, version=version, threads=count, deterministic=deterministic, keep_kv=config.keep_kv_on_update
    )


def build_fleet(terms: Terms, servers: tuple[tuple[str, int], ...]) -> Fleet:
    """The servers that the run starts, started, and those that it attaches to, on their way.

    Raises:
        ConfigError: a kind of server that cannot be had this way.
        EngineDied, WaitTimeout: one of its own could not be started.
    """
    config = terms.rollout.fleet
    members = [started(terms, kind, number) for kind, count in servers for number in range(count)]
    members += [attached(terms, *parse_address(text)) for text in config.servers]
    watched = Path(config.watch).expanduser() if config.watch else None
    if watched is None and terms.run_folder is not None:
        watched = terms.run_folder / DEFAULT_NAME
    return Fleet.start(
        members,
        config,
        capabilities=fleet_capabilities(terms.rollout),
        version=terms.version,
        journal=terms.run_folder / JOURNAL_NAME if terms.run_folder is not None else None,
        watched=watched,
        attach=lambda kind, url: attached(terms, kind, url),
        first=lambda: folder_update(terms.folder, terms.version),
    )


def fleet_capabilities(rollout: RolloutConfig) -> frozenset[str]:
    """What all servers of a fleet can do. Weights go through shared memory where all are embedded and no other may join."""
    kinds = {kind for kind, _ in parse_backend(rollout.backend) or ()}
    if kinds == {"embedded"} and not rollout.fleet.servers and rollout.fleet.watch is None:
        return CAPABILITIES | {"shared_memory"}
    return frozenset({"disk"})


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
    return max(1, sum(count for _, count in parse_backend(rollout.backend) or ()))
