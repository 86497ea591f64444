"""The training engine: model, precision, optimizer, micro-batches."""

from dataclasses import dataclass, field
from typing import Literal

from tandem.config.lora import LoRAConfig


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = 1e-6
    """Peak learning rate."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up, over the remaining optimizer steps."""

    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises linearly from 0 to its peak."""

    min_lr_ratio: float = 0.0
    """The linear and cosine schedules end at this share of the peak."""

    weight_decay: float = 0.0
    """Decoupled weight decay, applied to matrices and not to biases and norms."""

    beta1: float = 0.9
    """Decay of AdamW's first moment."""

    beta2: float = 0.999
    """Decay of AdamW's second moment."""

    eps: float = 1e-8
    """AdamW's denominator offset."""

    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this global norm; null turns clipping off."""

    max_consecutive_skips: int = 3
    """The run stops after this many steps in a row whose loss or gradient was not finite."""


@dataclass(frozen=True)
class TrainEngineConfig:
    """One trained (or frozen) model and how it is held."""

    path: str = "smollm2-135m"
    """Model folder, hub name, or a built-in name such as smollm2-135m."""

    backend: str = "fsdp:d1"
    """How the model is spread: `fsdp:d2` over 2 data-parallel ranks; t, c and r may follow (docs/parallelism.md)."""

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Precision of forward and backward (auto: bfloat16 where the device is fast in it); master weights are float32."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer and schedule."""

    lora: LoRAConfig = field(default_factory=LoRAConfig)
    """Adapters that are trained instead of the weights."""

    max_tokens_per_micro_batch: int = 4096
    """Token budget of one forward and backward; the result does not depend on it, memory and speed do."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""

    selective_checkpointing: bool = False
    """With `gradient_checkpointing`, keep results of matrix products and attention, and recompute the cheap rest only."""

    compile: bool = False
    """Fuse the small operations of each layer with torch.compile: the first step waits for a compiler, later ones gain."""

    offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory, and bring each layer to the GPU as it is computed."""

    context_parallel: Literal["auto", "all_to_all", "gather"] = "auto"
    """How ranks that share tokens attend: exchange heads for tokens (auto: if heads divide), or gather keys and values."""

    gradient_sync: Literal["step", "micro_batch"] = "step"
    """Sum gradients over ranks once a step, or with each micro-batch: more to send, and a rank never holds all gradients."""

    logprob_chunk_tokens: int = 1024
    """Tokens whose logits exist at the same time while log-probabilities are computed."""
