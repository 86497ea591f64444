"""Settings of a training engine: model, layout over ranks (`actor.backend`), precision, optimizer, micro-batches, low-rank
adapters; and the settings of actor, reference and critic.

If another role does not set a value, the actor's is used (`either`).
"""

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tandem.config.errors import ConfigError
from tandem.config.keys import leaves
from tandem.config.parts import Count, Decay, Natural, NotNegative, Positive, Share

if TYPE_CHECKING:
    from tandem.config.experiment import BaseConfig


_AXES = {"d": "data", "t": "tensor", "c": "context", "r": "replicas"}
_EXAMPLES = (
    "fsdp:d2 (sharded over 2 ranks), fsdp:d1t2 (tensor parallel), fsdp:d1c2 (context parallel), fsdp:d2r2 (replicas), "
    "deepspeed:zero2:d2 (DeepSpeed)"
)


@dataclass(frozen=True)
class Layout:
    """The division of a model and its batch over ranks.

    Example: ``fsdp:d2t2`` is 4 ranks in 2 pairs. Each pair trains on its own sequences; each rank of a pair has half of
    every matrix.
    """

    data: int = 1
    """Number of ranks that shard parameters; each trains on its own sequences."""

    tensor: int = 1
    """Number of ranks that divide every matrix; all train on the same sequences."""

    context: int = 1
    """Number of ranks that divide the tokens of the same sequences; they shard parameters too."""

    replicas: int = 1
    """Number of copies of the model over further ranks; each copy trains on its own sequences."""

    zero: int | None = None
    """DeepSpeed's ZeRO stage, 1 to 3; None with FSDP2."""

    first: int = 0
    """First rank of the run that this model uses."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.batches * self.context * self.tensor

    @property
    def batches(self) -> int:
        """Number of different micro-batches that are computed at the same time."""
        return self.data * self.replicas

    @property
    def shards(self) -> int:
        """Number of pieces into which a parameter (with tensor parallelism: a rank's part of it) is cut."""
        return self.data * self.context


def parse_layout(backend: str, key: str = "actor.backend") -> Layout:
    """Parses ``fsdp:d2t2``, ``fsdp:d1@3`` (from rank 3 on) or ``deepspeed:zero2:d2``. ``key``: the configuration key, for
    errors.

    Raises:
        ConfigError: the text is not a layout, or a layout that Tandem does not support; the message says what to write.
    """
    name, _, axes = backend.partition(":")
    if name == "deepspeed":
        return _zero_layout(backend, axes, key)
    if name != "fsdp":
        what = "not in this version" if name == "megatron" else "not a training backend"
        raise ConfigError(f"{key}={backend}: {name!r} is {what}; use {_EXAMPLES}")
    if re.search(r"p\d", axes):
        raise ConfigError(
            f"{key}={backend}: pipeline parallelism (p) is not in this version: the layers stay together on a rank. "
            "Divide the model with d (parameters) and t (matrices) instead, for example fsdp:d4 or fsdp:d2t2"
        )
    axes, at, first = axes.partition("@")
    if at and not re.fullmatch(r"[0-9]{1,6}", first):
        raise ConfigError(f"{key}={backend}: behind @ stands the first rank of the model, as in fsdp:d1@3")
    sizes = re.findall(r"([a-z])([1-9][0-9]{0,5})", axes)
    letters = [letter for letter, _ in sizes]
    if "".join(letter + number for letter, number in sizes) != axes or len(set(letters)) != len(letters):
        raise ConfigError(
            f"{key}={backend} must be fsdp: and letters, each with a number of at least 1 (and six digits at most) behind "
            f"it: {_EXAMPLES}"
        )
    if letters[:1] != ["d"] or not set(letters) <= set(_AXES):
        raise ConfigError(f"{key}={backend} must begin with fsdp:dN, and t, c or r may follow: {_EXAMPLES}")
    return Layout(**{_AXES[letter]: int(number) for letter, number in sizes}, first=int(first or 0))


def _zero_layout(backend: str, text: str, key: str) -> Layout:
    """Parses the text after ``deepspeed:``, such as ``zero2:d2``."""
    match = re.fullmatch(r"zero([123]):d([1-9][0-9]{0,5})", text)
    if match is not None:
        return Layout(data=int(match[2]), zero=int(match[1]))
    ranks = re.search(r"\bd([0-9]{1,6})\b", text)
    raise ConfigError(
        f"{key}={backend} must be deepspeed:zero1, zero2 or zero3, and the number of ranks, all of which shard: "
        f"deepspeed:zero2:d{ranks[1] if ranks else 2}. Tensor and context parallelism (t, c) and replicas (r) are fsdp's"
    )


def fewer_ranks_problems(layout: Layout, written: str, config: "TrainEngineConfig") -> Iterator[str]:
    """Yields a message for each reason why a model of this layout cannot use a part of the actor's ranks. ``written``: the
    key and the backend, ``critic.backend=…``. ``config``: the actor's section."""
    ranks = parse_layout(config.backend).ranks
    if layout.ranks > ranks:
        yield (
            f"{written} is {layout.ranks} rank(s), but there are {ranks} (actor.backend={config.backend}); use at most as "
            "many, or leave it out"
        )
    elif layout.first + layout.ranks > ranks:
        yield (
            f"{written} needs ranks {layout.first} to {layout.first + layout.ranks - 1}, and those of the run are 0 to "
            f"{ranks - 1} (actor.backend={config.backend}); put a smaller number behind @"
        )
    elif layout.ranks < ranks:
        if layout != Layout(data=layout.ranks, first=layout.first):
            yield (
                f"{written} is on {layout.ranks} of {ranks} ranks (actor.backend={config.backend}), and a model on some of "
                f"them can only be sharded (d): use fsdp:d{layout.ranks}, or all ranks"
            )
        if config.offload and layout.ranks == 1:
            yield (
                f"{written} is on one of {ranks} ranks, which does not go with actor.offload=true: use fsdp:d2 or more, or "
                "leave one of them out"
            )


def layout_problems(layout: Layout, written: str, config: "TrainEngineConfig") -> Iterator[str]:
    """Yields a message for each setting that does not work with a layout. ``written``: the key and the backend,
    ``actor.backend=…``."""
    if layout.tensor > 1 and config.offload:
        yield (
            f"actor.offload=true does not work with {written}: ranks that share matrices (t) exchange gradients from "
            "GPU to GPU; use d alone, or leave it out"
        )
    if layout.zero is not None and config.offload:
        yield (
            f"actor.offload=true does not work with {written}: use fsdp:d{layout.data}, whose parameters, gradients and "
            "optimizer state can be in host memory, or leave it out"
        )
    if layout.zero == 3 and config.gradient_checkpointing and config.selective_checkpointing:
        yield (
            f"actor.selective_checkpointing=true does not work with {written}, which gathers parameters inside of what "
            "would be computed again: leave it out, actor.gradient_checkpointing alone works"
        )
    if config.compile and config.gradient_checkpointing and config.selective_checkpointing:
        yield (
            f"actor.selective_checkpointing=true does not work with actor.compile=true ({written}): what is kept is then "
            "the compiler's choice; leave one of them out: actor.gradient_checkpointing alone works"
        )
    if layout.zero == 3 and config.compile:
        yield (
            f"actor.compile=true does not work with {written}, which gathers parameters inside of what would be compiled: "
            f"use deepspeed:zero2:d{layout.data} or fsdp:d{layout.data}, or leave it out"
        )


ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters (LoRA, arXiv:2106.09685), which are trained instead of the weights; see docs/lora.md."""

    rank: Count | None = None
    """Rank of each adapter, for example 16; null trains all weights."""

    alpha: Positive | None = None
    """The adapter's output is multiplied by alpha / rank; null takes twice the rank."""

    target_modules: tuple[str, ...] = (ALL_LINEAR,)
    """Matrices that get an adapter: `all-linear` for all matrices of every layer, or the ends of their names, such as
    `[q_proj, v_proj]`."""

    towers: tuple[str, ...] = ()
    """Parts of a media model whose matrices get adapters too, such as `[vision]`; docs/media_models.md lists the names."""

    dropout: Decay = 0.0
    """Dropout of the adapter's inputs; for `tandem sft` and `tandem reward` only."""

    @property
    def scaling(self) -> float:
        """The factor on an adapter's output, alpha / rank; 0 without adapters."""
        return 0.0 if self.rank is None else (2.0 if self.alpha is None else self.alpha / self.rank)


def lora_problems(config: "BaseConfig", *, compares: bool) -> Iterator[str]:
    """Yields a message for each broken rule of `actor.lora` and `critic.lora`. ``compares``: True if the loss compares
    log-probabilities of several passes."""
    for role in ("actor", "critic"):
        part: Any = getattr(config, role, None)
        if part is None:
            continue
        lora = LoRAConfig(**vars(part.lora))
        key = f"{role}.lora"
        if lora.rank is None:
            default = dict(leaves(LoRAConfig()))
            for name, value in leaves(lora):
                if value != default[name]:
                    shown = f"[{', '.join(value)}]" if isinstance(value, tuple) else value
                    yield f"{key}.{name}={shown} is not used because {key}.rank is null: set it, for example to 16"
            continue
        if not lora.target_modules:
            yield f"{key}.target_modules is empty, so nothing would be trained; name matrices, or write {ALL_LINEAR}"
        elif ALL_LINEAR in lora.target_modules and len(lora.target_modules) > 1:
            yield f"{key}.target_modules has {ALL_LINEAR}, which is all of them, and more; keep one"
        for tower in lora.towers:
            if tower in getattr(part, "freeze", ()):
                yield f"{role}.freeze and {key}.towers both name {tower!r}: its adapters would learn nothing; keep one"
        if lora.dropout and compares:
            yield (
                f"{key}.dropout={lora.dropout:g} would make log-probabilities random, and this training compares those of "
                "one pass with another's: leave it out"
            )
        yield from _cut(key, f"{role}.backend", either(part, config.actor, "backend"))


def _cut(key: str, name: str, backend: str) -> Iterator[str]:
    if not backend.startswith("fsdp:"):
        yield f"{key} goes with {name}=fsdp:dN, got {backend}: other backends have no adapters here"
        return
    try:
        cut = parse_layout(backend).tensor
    except ConfigError:
        return  # reported by another check
    if cut > 1:
        yield (
            f"{key} does not go with {name}={backend}: t cuts every matrix, and an adapter's two are not cut with it. Use "
            "d, which shards the base, with c or r where they are needed"
        )


@dataclass(frozen=True)
class AdamWConfig:
    """AdamW and its learning-rate schedule."""

    lr: NotNegative = 1e-6
    """Peak learning rate."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up, over the remaining optimizer steps."""

    warmup_steps: Natural = 0
    """Optimizer steps over which the learning rate rises linearly from 0 to its peak."""

    min_lr_ratio: Share = 0.0
    """The linear and cosine schedules end at this share of the peak."""

    weight_decay: NotNegative = 0.0
    """Decoupled weight decay, applied to matrices and not to biases and norms."""

    max_grad_norm: Positive | None = 1.0
    """Gradients are scaled down to this global norm; null turns clipping off."""


@dataclass(frozen=True)
class OptimizerConfig(AdamWConfig):
    """AdamW and its learning-rate schedule."""

    beta1: Decay = 0.9
    """Decay of AdamW's first moment."""

    beta2: Decay = 0.999
    """Decay of AdamW's second moment."""

    eps: Positive = 1e-8
    """AdamW's denominator offset."""


CHUNK_TOKENS, MICRO_BATCH_TOKENS = 1024, 4096
"""Rows of logits and tokens of a micro-batch: the defaults on a CPU, the smallest defaults on a GPU."""


@dataclass(frozen=True)
class TrainEngineConfig:
    """A model for training or scoring."""

    path: str = "smollm2-135m"
    """Model folder, hub name, or a built-in name such as smollm2-135m."""

    backend: str = "fsdp:d1"
    """Training backend and layout: `fsdp:d2` shards the model over 2 ranks; t, c, r and DeepSpeed: docs/parallelism.md."""

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Precision of forward and backward passes (auto: bfloat16 if the device has instructions for it, else float32); master
    weights are float32."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer and schedule."""

    lora: LoRAConfig = field(default_factory=LoRAConfig)
    """Train adapters (LoRA) instead of the weights."""

    freeze: tuple[str, ...] = ()
    """Parts of a media model that are not trained, such as `[vision]`; their features are computed once per image or sound.
    With `lora`, all parts are frozen."""

    max_tokens_per_micro_batch: Count | None = None
    """Maximum tokens of one forward and backward pass. It affects memory and speed, not the result. null: on a GPU the
    largest number up to 40960 with which the planned run fits; 4096 on a CPU."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""

    selective_checkpointing: bool = False
    """With `gradient_checkpointing`: keep the results of matrix products and attention, and recompute only the rest."""

    compile: bool | None = None
    """Compile each layer, except for attention, with torch.compile: the first step is slow, later ones are faster. null: on
    a GPU with a C compiler, except with `deterministic=true`, `selective_checkpointing` and `deepspeed:zero3`."""

    offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory; each layer is copied to the GPU only while it is
    computed."""

    gradient_sync: Literal["step", "micro_batch"] | None = None
    """When ranks sum gradients: once per optimizer step, or after each micro-batch, which sends more data and needs less
    memory. null: once per step, unless the planned run would not fit the GPUs."""

    logprob_chunk_tokens: Count | None = None
    """Number of tokens whose logits are in memory at a time when log-probabilities are computed; four times as many in
    bfloat16 on a CPU with compiled kernels, which need a quarter of the memory. null: on a GPU as many as take 1/32 of its
    memory in float32, if the planned run fits with them, else 1024."""

    @property
    def chunk_tokens(self) -> int:
        """`logprob_chunk_tokens`, or the default if neither the user nor the plan has set it."""
        return self.logprob_chunk_tokens or CHUNK_TOKENS

    @property
    def micro_batch_tokens(self) -> int:
        """`max_tokens_per_micro_batch`, or the default if neither the user nor the plan has set it."""
        return self.max_tokens_per_micro_batch or MICRO_BATCH_TOKENS


T = TypeVar("T")


def either(own: object, base: object, name: str) -> Any:
    """Returns the field ``name`` of ``own``, or of ``base`` if ``own`` has no such field or it is null."""
    value = getattr(own, name, None)
    return getattr(base, name) if value is None else value


def overlay(kind: type[T], own: object, base: object, **fixed: Any) -> T:
    """Constructs a ``kind`` whose fields are taken from ``own`` or ``base`` by `either`, except for those in ``fixed``.

    Example: ``overlay(TrainEngineConfig, config.reference, config.actor, lora=LoRAConfig())``
    """
    names = [field.name for field in dataclasses.fields(kind) if field.name not in fixed]  # type: ignore[arg-type]
    return kind(**{name: either(own, base, name) for name in names}, **fixed)


def key_of(config: object, role: str, name: str) -> str:
    """Returns the configuration key that sets a role's value: the role's own key if it is set, otherwise the actor's."""
    return f"{role if getattr(getattr(config, role), name, None) is not None else 'actor'}.{name}"


@dataclass(frozen=True)
class ActorConfig(TrainEngineConfig):
    """The policy that is trained."""

    mini_batches: Count = 1
    """Number of optimizer steps per batch; each uses a part of the groups, and no group is split."""

    epochs_per_batch: Count = 1
    """Number of passes over each batch."""


@dataclass(frozen=True)
class ReferenceConfig:
    """The frozen policy that the KL penalty compares with. It is loaded only if `algorithm.kl.coefficient` is above 0."""

    path: str | None = None
    """Model to load as the reference; null takes the actor's initial weights."""

    backend: str | None = None
    """Layout over all ranks, or `fsdp:dN` over N of them, in the form of `actor.backend`; null takes the actor's."""

    dtype: Literal["auto", "bfloat16", "float32"] | None = None
    """Precision of its forward pass; null takes the actor's."""

    refresh_every_steps: Count | None = None
    """Copy the actor's weights into the reference every `refresh_every_steps` steps; null: never."""


@dataclass(frozen=True)
class CriticLoRAConfig:
    """Low-rank adapters (LoRA, arXiv:2106.09685) for all matrices of the critic's layers; see docs/lora.md."""

    rank: Count | None = None
    """Rank of each adapter, for example 16; null trains all weights."""


@dataclass(frozen=True)
class CriticConfig:
    """The model that estimates a value for each token. It is loaded only if the algorithm needs one, like
    `algorithm=ppo`."""

    path: str | None = None
    """Initial weights: a language model or a reward model; null takes the actor's initial weights."""

    backend: str | None = None
    """Layout over all ranks, or `fsdp:dN` over N of them, in the form of `actor.backend`; null takes the actor's."""

    optimizer: AdamWConfig = field(default_factory=lambda: AdamWConfig(lr=1e-5))
    """The critic's own optimizer and schedule."""

    lora: CriticLoRAConfig = field(default_factory=CriticLoRAConfig)
    """The critic's own adapters (LoRA); its head is always trained. `actor.lora` does not apply to the critic."""

    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass; null takes the actor's setting."""

    epochs_per_batch: Count | None = None
    """Number of passes over each batch; null takes the actor's."""

    value_clip: Positive | None = 0.2
    """Clipping of the value loss: it does not reward a value for moving further than this within a batch; null turns it
    off."""

    shared: bool = False
    """Use a second head on the actor's model instead of a second model. The head is trained in the actor's optimizer steps,
    which is cheaper and less accurate."""

    loss_weight: Positive = 0.1
    """With `shared`: weight of the value loss, which is added to the policy loss."""

    warmup_steps: Natural = 0
    """Number of first steps in which only the critic is trained and the actor's weights do not change."""


def critic_engine(critic: CriticConfig, actor: TrainEngineConfig) -> TrainEngineConfig:
    """Returns the configuration of the critic's engine: that of the actor's, except for what ``critic`` sets."""
    optimizer, lora = OptimizerConfig(**vars(critic.optimizer)), LoRAConfig(critic.lora.rank)
    return overlay(TrainEngineConfig, critic, actor, optimizer=optimizer, lora=lora, freeze=())


def frozen_engine(actor: TrainEngineConfig, section: object) -> TrainEngineConfig:
    """Returns the engine configuration of a frozen model, without adapters; keys that ``section`` leaves unset have the
    actor's values."""
    return overlay(TrainEngineConfig, section, actor, lora=LoRAConfig(), freeze=())
