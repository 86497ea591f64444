"""Builds the delivery of a run's weights and the proof of their arrival: channel, publisher, archive, verifier."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tandem.api.engines import InferenceEngine, TrainEngine
from tandem.config.arithmetic import max_head_offpolicyness
from tandem.config.experiment import TrainConfig
from tandem.config.fleet import INSIDE
from tandem.config.machines import machines
from tandem.flow.extensions import own_weight_channel
from tandem.flow.process import Process
from tandem.models.precision import resolve_dtype
from tandem.proof.scoring import Scorer, beginning
from tandem.proof.verification import Schedule, Verifier
from tandem.weights.archive import VersionArchive
from tandem.weights.channel import WeightChannel
from tandem.weights.collective import CollectiveChannel
from tandem.weights.cuda_ipc import CudaIpcChannel
from tandem.weights.disk import DiskChannel
from tandem.weights.publisher import WeightPublisher

FOLDER = ".weights"
"""Folder in `run.root` from which servers read weights, unless `rollout.weights.folder` names another."""


def weights_folder(config: TrainConfig) -> Path:
    """The folder from which this machine's servers read weights. Other machines have their own: they cannot know which
    versions are in use here."""
    folder = Path(config.rollout.weights.folder or Path(config.run.root) / FOLDER).expanduser().absolute()
    return folder.with_name("-".join(filter(None, (folder.name, machines().folder))))


def make_disk_channel(config: TrainConfig, model: Path) -> DiskChannel:
    """The channel for servers that read from a folder. It keeps every version that may have to be scored again, and at least
    two."""
    return DiskChannel(**_folder_terms(config, model))


def _folder_terms(config: TrainConfig, model: Path) -> dict[str, Any]:
    kept = config.rollout.weights.folder is not None
    keep = max(2, max_head_offpolicyness(config) + 1)
    return {"parent": weights_folder(config), "base": model, "keep": keep, "keep_parent": kept}


def make_channel(config: TrainConfig, process: Process, model: Path) -> WeightChannel | None:
    """The user's channel, or that of `rollout.weights.channel`. None lets the engines choose; also None on ranks other than
    0."""
    if not process.is_main:
        return None
    if config.extend.weight_channel is not None:
        own = own_weight_channel(config.extend.weight_channel)
        channel: WeightChannel = own(**_folder_terms(config, model), device=process.device)
        return channel
    makers: dict[str, Callable[[], WeightChannel]] = {
        "disk": lambda: make_disk_channel(config, model),
        "ipc": lambda: CudaIpcChannel(process.device),
        "collective": lambda: CollectiveChannel(1, backend="nccl" if process.device.startswith("cuda") else "gloo"),
    }
    delivery = config.rollout.weights
    if delivery.terms.by_group and config.rollout.backend not in INSIDE:
        return None  # the tensors lie in memory, from where each server's client broadcasts them
    return makers[delivery.channel]() if delivery.channel in makers else None


def make_proof(
    config: TrainConfig, process: Process, trainer: TrainEngine, model: Path
) -> tuple[VersionArchive | None, Verifier]:
    """The archive of versions to be scored again (rank 0 only), and the verifier that scores them. Collective.

    Version 0 is the model's own folder.
    """
    verify, eta = config.rollout.verify, max_head_offpolicyness(config)
    schedule, archive = Schedule(verify, eta), None
    first = beginning(model, trainer) if verify.every_steps is not None else None
    if process.is_main:
        archive = VersionArchive(schedule.wants, max(1, eta))
        if first is not None:
            archive.keep(0, first)
    adapts = trainer.adapter is not None  # what is merged into weights of the engine is rounded there
    generated, trained = (resolve_dtype(name, process.device) for name in (config.rollout.dtype, config.actor.dtype))
    verifier = Verifier(
        Scorer(
            trainer,
            archive,
            generated,
            process.team,
            rounds=generated == torch.bfloat16 and (trained == torch.float32 or adapts),
        ),
        verify,
        torch.bfloat16 if torch.bfloat16 in (generated, trained) else torch.float32,
        schedule=schedule,
        keeps_kv=config.rollout.engine.keep_kv_on_update,
        hot_first_token=config.gconfig.first_token_temperature is not None,
        seed=config.seed,
    )
    return archive, verifier


def make_publisher(
    config: TrainConfig,
    process: Process,
    trainer: TrainEngine,
    engine: InferenceEngine | None,
    model: Path,
    *,
    run: str,
    archive: VersionArchive | None,
) -> WeightPublisher:
    """Makes the publisher, which delivers the actor's weights. Collective."""
    return WeightPublisher(
        trainer,
        () if engine is None else (engine,),
        run=run,
        dtype=resolve_dtype(config.rollout.dtype, process.device),
        channel=make_channel(config, process, model),
        disk=lambda: make_disk_channel(config, model),
        archive=archive,
        team=process.team,
    )
