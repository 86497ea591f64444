"""From a configuration to a training engine."""

import re

import torch

from tandem.api.engines import TrainEngine
from tandem.api.failures import ConfigError
from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.train.fsdp import FSDPEngine, Head

__all__ = ["Head", "build_train_engine"]


def build_train_engine(
    config: TrainEngineConfig, total_steps: int, device: str | torch.device = "cpu", head: Head = "lm"
) -> TrainEngine:
    """The engine that ``config.backend`` names, over all processes of torch.distributed where it is initialised.

    ``head``: ``lm`` gives log-probabilities, ``scalar`` one number a token (critics, reward models), ``both`` both.

    Raises:
        ConfigError: another backend than ``fsdp:dN``.
    """
    if not re.fullmatch(r"fsdp:d[1-9]\d*", config.backend):
        raise ConfigError(
            f"actor.backend must be fsdp:dN with N data-parallel ranks, such as fsdp:d1; got {config.backend!r}"
        )
    return FSDPEngine(config, total_steps=total_steps, device=device, head=head)
