"""Keys of how a model is spread and computed that nothing would read."""

import contextlib

from tandem.config.backend import Layout, parse_layout
from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig, TrainConfig
from tandem.config.overlay import either
from tandem.config.unused_rule import Unused


def _layouts(config: BaseConfig) -> list[Layout]:
    """The layouts of all models; unknown backends are refused elsewhere."""
    roles = (getattr(config, name, None) for name in ("actor", "critic", "reference", "teacher"))
    found = []
    for role in roles:
        with contextlib.suppress(ConfigError):
            found.append(parse_layout(either(role, config.actor, "backend")))
    return found


def _critic_checkpoints(config: BaseConfig) -> bool:
    return isinstance(config, TrainConfig) and bool(config.critic.gradient_checkpointing)


SPREAD = (
    Unused(
        ("actor.context_parallel",),
        lambda config, _: all(layout.context == 1 for layout in _layouts(config)),
        "because no ranks share tokens: set actor.backend, for example to fsdp:d1c2, or leave it out",
    ),
    Unused(
        ("actor.gradient_sync",),
        lambda config, _: all(layout.shards * layout.replicas == 1 for layout in _layouts(config)),
        "because no ranks have sequences of their own: set actor.backend, for example to fsdp:d2, or leave it out",
    ),
    Unused(
        ("actor.gradient_sync",),
        lambda config, _: all(layout.zero is not None for layout in _layouts(config)),
        "by DeepSpeed, whose stage 1 sums gradients once a step and whose stages 2 and 3 with each micro-batch: choose the "
        "stage with actor.backend, or leave it out",
    ),
    Unused(
        ("actor.gradient_sync",),
        lambda config, _: config.actor.offload,
        "with actor.offload=true, which brings gradients to host memory with each micro-batch: leave it out",
    ),
    Unused(
        ("actor.selective_checkpointing",),
        lambda config, _: not (config.actor.gradient_checkpointing or _critic_checkpoints(config)),
        "because nothing is recomputed: set actor.gradient_checkpointing=true, or leave it out",
    ),
)
