"""What the roles add to the training engine they are given."""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from tandem.config.lora import LoRAConfig
from tandem.config.train_engine import OptimizerConfig, TrainEngineConfig


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

    backend: str | None = None
    """How it is spread over the actor's ranks; null is spread as the actor."""

    dtype: Literal["auto", "bfloat16", "float32"] | None = None
    """Precision of its forward pass; null takes the actor's."""

    refresh_every_steps: int | None = None
    """Copy the actor's weights into the reference every so many steps; null never does."""


@dataclass(frozen=True)
class CriticConfig:
    """The model that values each token; it exists only where the algorithm needs it, as `algorithm=ppo` does."""

    path: str | None = None
    """Model that it begins as: a language model, or a reward model's folder; null takes the actor's initial weights."""

    backend: str | None = None
    """How it is spread over the actor's ranks; null is spread as the actor."""

    dtype: Literal["auto", "bfloat16", "float32"] | None = None
    """Precision of its forward and backward pass; null takes the actor's."""

    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    """Its own optimizer and schedule."""

    lora: LoRAConfig = field(default_factory=LoRAConfig)
    """Adapters that are trained instead of its weights, beside its head; the actor's are the actor's alone."""

    max_tokens_per_micro_batch: int | None = None
    """Token budget of one forward and backward; null takes the actor's."""

    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass; null does as the actor."""

    mini_batches: int | None = None
    """Optimizer steps that one batch is cut into; null takes as many as the actor."""

    epochs_per_batch: int | None = None
    """Passes over each batch; null takes as many as the actor."""

    value_clip: float | None = 0.2
    """Within one batch a value earns nothing by moving further than this; null turns the clipping off."""

    shared: bool = False
    """No model of its own: a second head on the actor's, trained in the actor's optimizer steps; cheaper and less exact."""

    loss_weight: float = 0.1
    """With `shared`, the weight of the value loss beside the policy's."""

    warmup_steps: int = 0
    """Steps at the beginning in which only the critic learns, and the actor's weights stay as they are."""


def critic_engine_config(actor: ActorConfig, critic: CriticConfig) -> TrainEngineConfig:
    """The critic's training engine: what it leaves open is the actor's."""
    names = {f.name for f in dataclasses.fields(TrainEngineConfig)}
    own = {name: value for name, value in vars(critic).items() if name in names and value is not None}
    return TrainEngineConfig(**{name: getattr(actor, name) for name in names} | own)
