"""A model in a training engine, as far as it costs anything: what is trained of it, and how it lies over ranks."""

from dataclasses import dataclass

from tandem.config.backend import Layout, layout_problems, parse_layout
from tandem.config.errors import ConfigError
from tandem.config.lora import LoRAConfig
from tandem.config.train_engine import TrainEngineConfig
from tandem.models.lora import refuse_unknown_targets, targets
from tandem.models.shape import Dtype, Head, Shape
from tandem.planning.machine import Machine


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters on some of the matrices of every layer.

    Example: rank 2 on a matrix of 10 inputs and 5 outputs is A ``[2, 10]`` and B ``[5, 2]``: 30 parameters.
    """

    rank: int
    modules: tuple[str, ...]
    """Of the matrices that have one, see `Shape.linears`."""

    dropout: bool = False

    def parameters(self, shape: Shape) -> int:
        """Of all layers."""
        return shape.layers * self.rank * self.widths(shape)

    def widths(self, shape: Shape) -> int:
        """Inputs and outputs of one layer's matrices, added up."""
        return sum(sum(shape.linears[name]) for name in self.modules)

    def has(self, *names: str) -> bool:
        """Whether a matrix of one of these last names has one."""
        return any(module.endswith(f".{name}") for module in self.modules for name in names)


@dataclass(frozen=True)
class Held:
    """A model in a training engine."""

    role: str
    shape: Shape
    head: Head
    dtype: Dtype
    """That it computes in; what is trained of it is held in float32."""

    layout: Layout
    trained: bool
    max_tokens: int
    chunk_tokens: int
    checkpointing: bool = False
    selective: bool = False
    """Checkpointing keeps the results of products and attention."""

    adapters: Adapters | None = None
    """They alone are trained, beside new heads; all else is frozen, in the dtype of the computation."""

    sync_each: bool = False
    """Gradients are summed over ranks with each micro-batch, and not once a step."""

    offload: bool = False
    """Parameters, gradients and moments are in host memory, and layers come to the device as they are computed."""

    gathers_keys: bool = False
    """Ranks that share tokens gather keys and values, instead of exchanging heads for tokens."""

    compiled: bool = False
    frozen: bool = False
    """Its weights never change, so there is no float32 copy of them."""

    own: bool = True
    """False: the actor's model without its adapters, which is no second one."""

    mini_batches: int = 1
    epochs: int = 1
    entropy: bool = False
    """Its update computes the entropy of each token too."""

    @property
    def ranks(self) -> int:
        """Processes that hold it together."""
        return self.layout.ranks

    @property
    def fsdp(self) -> bool:
        """Whether FSDP holds it, and gathers its layers as they are needed; else one process does, or DeepSpeed."""
        return self.layout.zero is None and (self.layout.shards > 1 or self.layout.replicas > 1 or self.offload)

    @property
    def parts(self) -> int:
        """In so many parts what is trained, and its moments, lie over the ranks."""
        return self.layout.shards

    @property
    def piece(self) -> Shape:
        """The shape of what one rank computes with."""
        return self.shape.piece(self.layout.tensor)

    @property
    def parameters(self) -> int:
        """Of the whole model, without adapters."""
        return self.shape.parameters(self.head)

    @property
    def masters(self) -> int:
        """What has a float32 master on one rank, or over those that shard: all parameters of its piece, or its adapters and
        new heads."""
        if self.frozen:
            return 0
        if self.adapters is None:
            return self.piece.parameters(self.head)
        return self.adapters.parameters(self.shape) + self._new_head

    @property
    def base(self) -> int:
        """Frozen parameters without masters: all of a frozen model, and those beside adapters."""
        if self.frozen:
            return self.piece.parameters(self.head)
        return 0 if self.adapters is None else self.parameters - self._new_head

    @property
    def _new_head(self) -> int:
        return 0 if self.head == "lm" else self.shape.hidden


def held(
    role: str,
    config: TrainEngineConfig,
    machine: Machine,
    shape: Shape,
    *,
    head: Head = "lm",
    trained: bool = True,
    changes: bool = True,
    mini_batches: int = 1,
    epochs: int = 1,
    entropy: bool = False,
    key: str = "actor.backend",
) -> Held:
    """A model in a training engine of this configuration. ``key``: where its backend was written. ``changes``: False for a
    model whose weights stay what they are.

    Raises:
        ConfigError: what the engine itself would refuse.
    """
    layout = parse_layout(config.backend, key)
    dtype = resolved(config.dtype, machine)
    _refuse(role, config, layout, dtype, shape, machine, key)
    exchanges = config.context_parallel == "all_to_all" or (config.context_parallel == "auto" and _divides(shape, layout))
    return Held(
        role=role,
        shape=shape,
        head=head,
        dtype=dtype,
        layout=layout,
        trained=trained,
        max_tokens=config.max_tokens_per_micro_batch,
        chunk_tokens=config.logprob_chunk_tokens,
        checkpointing=config.gradient_checkpointing,
        selective=config.gradient_checkpointing and config.selective_checkpointing,
        adapters=adapters_of(config.lora, shape),
        sync_each=config.gradient_sync == "micro_batch" or config.offload,
        offload=config.offload,
        gathers_keys=layout.context > 1 and not exchanges,
        compiled=config.compile,
        frozen=not changes and layout.zero is None,
        mini_batches=mini_batches,
        epochs=epochs,
        entropy=entropy,
    )


def _divides(shape: Shape, layout: Layout) -> bool:
    """Whether each rank can have as many heads, and key-value heads."""
    ranks = layout.tensor * layout.context
    return shape.heads % ranks == 0 and shape.kv_heads % ranks == 0


def _refuse(
    role: str, config: TrainEngineConfig, layout: Layout, dtype: Dtype, shape: Shape, machine: Machine, key: str
) -> None:
    written = f"{key}={config.backend}"
    for problem in layout_problems(layout, written, config):
        raise ConfigError(problem)
    if config.lora.rank is not None and (layout.tensor > 1 or layout.zero is not None):
        raise ConfigError(f"{role}: lora does not go with {written}; use fsdp:d{layout.data}")
    if config.offload and machine.kind == "cpu":
        raise ConfigError(
            f"{role}: actor.offload=true keeps layers in host memory until a GPU computes them, and {machine.name} has no "
            "GPU: leave it out, or plan for another machine with --device"
        )
    if layout.zero == 1 and dtype != "float32":
        raise ConfigError(
            f"{role}: stage 1 of DeepSpeed is not there in bfloat16: use deepspeed:zero2:d{layout.data}, or "
            "actor.dtype=float32"
        )
    exchanges = layout.tensor > 1 or (layout.context > 1 and config.context_parallel == "all_to_all")
    ranks = layout.tensor * (layout.context if config.context_parallel == "all_to_all" else 1)
    if exchanges and (shape.heads % ranks or shape.kv_heads % ranks):
        raise ConfigError(
            f"{role}: {written} divides attention over {ranks} ranks, but this {shape.kind} has {shape.heads} heads on "
            f"{shape.kv_heads} key-value heads; use d instead of t, or actor.context_parallel=gather"
        )


def adapters_of(lora: LoRAConfig, shape: Shape) -> Adapters | None:
    """The adapters of a model, put where `tandem.models.lora` puts them; None without any.

    Raises:
        ConfigError: a name that no matrix ends with.
    """
    if lora.rank is None:
        return None
    refuse_unknown_targets(lora, shape.linears)
    return Adapters(lora.rank, tuple(module for module in shape.linears if targets(lora, module)), lora.dropout > 0)


def resolved(name: str, machine: Machine) -> Dtype:
    """`auto` as `tandem.models.precision.resolve_dtype` reads it, on a machine that need not be here."""
    if name == "auto":
        return "bfloat16" if machine.fast_bfloat16 else "float32"
    return "bfloat16" if name == "bfloat16" else "float32"
