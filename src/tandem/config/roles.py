"""The settings that roles add to those of their training engine."""

from dataclasses import dataclass, field
from typing import Literal

from tandem.config.lora import LoRAConfig
from tandem.config.train_engine import OptimizerConfig, TrainEngineConfig


@dataclass(frozen=True)
class ActorConfig(TrainEngineConfig):
    """The policy that is trained."""

    mini_batches: int = 1
    """Number of optimizer steps a batch; each uses a part of the groups, and no group is divided."""

    epochs_per_batch: int = 1
    """Number of times that each batch is trained on."""


@dataclass(frozen=True)
class ReferenceConfig:
    """The frozen policy that the KL penalty compares with. It is loaded only if `algorithm.kl.coefficient` is above 0."""

    path: str | None = None
    """Model to load as the reference; null takes the actor's initial weights."""

    backend: str | None = None
    """Layout over all ranks, or `fsdp:dN` over N of them, in the form of `actor.backend`; null takes the actor's."""

    dtype: Literal["auto", "bfloat16", "float32"] | None = None
    """Precision of its forward pass; null takes the actor's."""

    refresh_every_steps: int | None = None
    """Copy the actor's weights into the reference every so many steps; null never does."""


@dataclass(frozen=True)
class CriticConfig:
    """The model that estimates a value for each token. It is loaded only if the algorithm needs one, like
    `algorithm=ppo`."""

    path: str | None = None
    """Initial weights: a language model or a reward model; null takes the actor's initial weights."""

    backend: str | None = None
    """Layout over all ranks, or `fsdp:dN` over N of them, in the form of `actor.backend`; null takes the actor's."""

    dtype: Literal["auto", "bfloat16", "float32"] | None = None
    """Precision of its forward and backward pass; null takes the actor's."""

    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    """Its own optimizer and schedule."""

    lora: LoRAConfig = field(default_factory=LoRAConfig)
    """The critic's own adapters (LoRA); its head is always trained. `actor.lora` does not apply to the critic."""

    max_tokens_per_micro_batch: int | None = None
    """Most tokens of one forward and backward pass; null takes the actor's."""

    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass; null takes the actor's setting."""

    mini_batches: int | None = None
    """Number of optimizer steps a batch; null takes the actor's."""

    epochs_per_batch: int | None = None
    """Number of times that each batch is trained on; null takes the actor's."""

    value_clip: float | None = 0.2
    """Value loss clipping: a value gains nothing by moving further than this within a batch; null turns it off."""

    shared: bool = False
    """Use a second head on the actor's model instead of a second model. It is trained in the actor's optimizer steps:
    cheaper, and less exact."""

    loss_weight: float = 0.1
    """With `shared`, the weight of the value loss beside the policy's."""

    warmup_steps: int = 0
    """Number of first steps in which only the critic is trained and the actor's weights do not change."""
