"""What the roles add to the training engine they are given."""

from dataclasses import dataclass
from typing import Literal

from tandem.config.train_engine import TrainEngineConfig


@dataclass(frozen=True)
class ActorConfig(TrainEngineConfig):
    """The policy that is trained."""

    mini_batches: int = 1
    """Optimizer steps that one batch is cut into; groups are never divided."""

    epochs_per_batch: int = 1
    """Passes over each batch."""


@dataclass(frozen=True)
class ReferenceConfig:
    """The frozen policy that KL is measured against; it exists only when the algorithm uses it."""

    path: str | None = None
    """Model to load as the reference; null takes the actor's initial weights."""

    dtype: Literal["auto", "bfloat16", "float32"] | None = None
    """Precision of its forward pass; null takes the actor's."""
