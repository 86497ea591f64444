"""Decides `rollout.backend=auto` on this machine, before anything reads it. The rule is `choose_backend`."""

import logging
import os
import sys
from dataclasses import replace
from typing import TypeVar

import torch

from tandem.config.backend import parse_layout
from tandem.config.choose_backend import Machine, choose_backend
from tandem.config.experiment import BaseConfig, TrainConfig
from tandem.config.fleet import FleetConfig
from tandem.config.load import Resolved
from tandem.config.preference import DistillConfig
from tandem.engines.inference.check import installed_servers
from tandem.flow.process import Process, uses_gpu
from tandem.state.resuming import value_before
from tandem.state.run_folder import run_path

log = logging.getLogger(__name__)
KEY = "rollout.backend"
C = TypeVar("C", bound=BaseConfig)


def decided(resolved: Resolved[C], machine: Machine | None = None) -> Resolved[C]:
    """The same configuration, its backend decided; the source of the key is the reason. ``machine``: another one than this.

    Raises:
        ConfigError: `device=cuda` where there is none; or nobody knows what the run that goes on began with.
    """
    config = resolved.config
    if not isinstance(config, (TrainConfig, DistillConfig)) or config.rollout.backend != "auto":
        return resolved
    before = value_before(run_path(config.run.root, config.experiment_name, config.trial_name), KEY)
    written = {key for key, source in resolved.sources.items() if source != "default"}
    choice = choose_backend(config, machine or machine_here(config), before, written)
    fleet = FleetConfig() if choice.backend == "embedded" else config.rollout.fleet
    rollout = replace(config.rollout, backend=choice.backend, fleet=fleet)
    return Resolved(replace(config, rollout=rollout), {**resolved.sources, KEY: f"auto: {choice.reason}"})


def machine_here(config: TrainConfig | DistillConfig) -> Machine:
    """This machine, for a run. Servers are only looked for where there is a GPU.

    Raises:
        ConfigError: `device=cuda` where there is none.
    """
    if not uses_gpu(config.device):
        return Machine()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", parse_layout(config.actor.backend).ranks))
    return Machine(torch.cuda.device_count(), ranks, installed_servers(config.rollout))


def told(resolved: Resolved[TrainConfig | DistillConfig]) -> str:
    """The backend and its reason, in a line."""
    return f"{KEY}={resolved.config.rollout.backend} ({resolved.sources.get(KEY, 'default')})"


def log_choice(resolved: Resolved[TrainConfig | DistillConfig], process: Process) -> None:
    """Writes the decision into the log of the run, whose folder is open, and on the terminal where there are GPUs."""
    log.info("%s", told(resolved))
    if process.is_main and process.device != "cpu":
        print(told(resolved), file=sys.stderr)
