"""From a configuration to a training engine."""

import torch

from tandem.api.engines import TrainEngine
from tandem.api.team import Team
from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.train.engine import SpreadEngine
from tandem.engines.train.spread import Head

__all__ = ["Head", "build_train_engine"]


def build_train_engine(
    config: TrainEngineConfig,
    total_steps: int,
    device: str | torch.device = "cpu",
    head: Head = "lm",
    key: str = "actor.backend",
    trained: bool = True,
    team: Team | None = None,
) -> TrainEngine:
    """The engine of ``config.backend``, over the ranks of ``team``; None: all processes of torch.distributed
    where it is initialised.

    ``head``: ``lm`` gives log-probabilities, ``scalar`` one number a token (critics, reward models), ``both`` both.
    ``key``: where ``config.backend`` was written, for errors. ``trained``: False for a model that only computes `forward`:
    it has no float32 masters, and neither steps nor states.

    Raises:
        ConfigError: another backend than is there, or another number of ranks than it says.
    """
    group = None if team is None else team.group
    return SpreadEngine(
        config, total_steps=total_steps, device=device, process_group=group, head=head, key=key, trained=trained
    )
