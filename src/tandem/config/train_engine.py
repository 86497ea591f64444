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


CHUNK_TOKENS, MICRO_BATCH_TOKENS = 1024, 4096
"""Rows of logits, and tokens of a micro-batch: those of a CPU, and the least of a GPU."""


@dataclass(frozen=True)
class TrainEngineConfig:
    """A model for training or scoring."""

    path: str = "smollm2-135m"
    """Model folder, hub name, or a built-in name such as smollm2-135m."""

    backend: str = "fsdp:d1"
    """Training backend and layout: `fsdp:d2` shards the model over 2 ranks; t, c, r and DeepSpeed: docs/parallelism.md."""

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Precision of forward and backward (auto: bfloat16 if the device has instructions for it); master weights are
    float32."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer and schedule."""

    lora: LoRAConfig = field(default_factory=LoRAConfig)
    """Train adapters (LoRA) instead of the weights."""

    freeze: tuple[str, ...] = ()
    """Parts of a media model that are not trained, such as `[vision]`: their features are computed once an image or sound.
    Adapters (`lora`) freeze all of them."""

    max_tokens_per_micro_batch: int | None = None
    """Most tokens of one forward and backward pass. It changes memory and speed, not the result. null: the most, up to
    40960, with which the plan of the run fits the GPU; 4096 on a CPU."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""

    selective_checkpointing: bool = False
    """With `gradient_checkpointing`: keep the results of matrix products and attention, and recompute only the rest."""

    compile: bool | None = None
    """Compile each layer, except for attention, with torch.compile: the first step is slow, later ones are faster. null: on
    a GPU with a C compiler, except with `deterministic=true`, `selective_checkpointing` and `deepspeed:zero3`."""

    offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory; each layer comes to the GPU only while it is
    computed."""

    context_parallel: Literal["auto", "all_to_all", "gather"] = "auto"
    """Attention with context parallelism (c): `all_to_all` exchanges heads for tokens, `gather` collects keys and
    values; auto takes `all_to_all` if the heads can be divided."""

    gradient_sync: Literal["step", "micro_batch"] | None = None
    """When ranks sum gradients: once a step, or after each micro-batch, which sends more and needs less memory. null: once a
    step, unless the plan of the run says that this does not fit the GPUs."""

    logprob_chunk_tokens: int | None = None
    """Number of tokens whose logits are in memory at a time when log-probabilities are computed; four times as many in
    bfloat16 on a CPU with compiled kernels, which need a quarter of the memory. null: on a GPU as many as take 1/32 of its
    memory in float32, if the plan of the run fits with them, else 1024."""

    @property
    def chunk_tokens(self) -> int:
        """`logprob_chunk_tokens`, or the default where nobody has planned it."""
        return self.logprob_chunk_tokens or CHUNK_TOKENS

    @property
    def micro_batch_tokens(self) -> int:
        """`max_tokens_per_micro_batch`, or the default where nobody has planned it."""
        return self.max_tokens_per_micro_batch or MICRO_BATCH_TOKENS
