"""A model in a training engine, as far as it costs anything: what is trained of it, and how it lies over ranks."""

from dataclasses import dataclass

from tandem.config.backend import Layout, layout_problems, parse_layout
from tandem.config.errors import ConfigError
from tandem.config.train_engine import TrainEngineConfig
from tandem.models.footprint import Footprint, adapters_of
from tandem.models.shape import Dtype, Head, Shape
from tandem.planning.machine import Machine


@dataclass(frozen=True, kw_only=True)
class PlannedModel(Footprint):
    """A model in a training engine, with what its passes cost."""

    role: str
    max_tokens: int
    chunk_tokens: int
    checkpointing: bool = False
    selective: bool = False
    """Checkpointing keeps the results of products and attention."""

    sync_each: bool = False
    """Gradients are summed over ranks with each micro-batch, and not once a step."""

    gathers_keys: bool = False
    """Ranks that share tokens gather keys and values, instead of exchanging heads for tokens."""

    on_cpu: bool = False
    """Computed on a CPU, which has attention of its own for short sequences."""

    own: bool = True
    """False: the actor's model without its adapters, which is no second one."""

    trunk_of: str | None = None
    """The model in whose memory its frozen weights are."""

    mini_batches: int = 1

    @property
    def ranks(self) -> int:
        """Processes that hold it together."""
        return self.layout.ranks


def planned_model(
    role: str,
    config: TrainEngineConfig,
    machine: Machine,
    shape: Shape,
    *,
    head: Head = "lm",
    trained: bool = True,
    changes: bool = True,
    trunk_of: str | None = None,
    mini_batches: int = 1,
    key: str = "actor.backend",
) -> PlannedModel:
    """A model in a training engine of this configuration. ``key``: where its backend was written. ``changes``: False for a
    model whose weights stay what they are. ``trunk_of``: the model whose trunk it shares.

    Raises:
        ConfigError: what the engine itself would refuse.
    """
    layout = parse_layout(config.backend, key)
    dtype = resolved(config.dtype, machine)
    _refuse(role, config, layout, dtype, shape, machine, key)
    exchanges = config.context_parallel == "all_to_all" or (config.context_parallel == "auto" and _divides(shape, layout))
    return PlannedModel(
        role=role,
        shape=shape,
        head=head,
        dtype=dtype,
        layout=layout,
        trained=trained,
        max_tokens=config.micro_batch_tokens,
        chunk_tokens=config.chunk_tokens,
        checkpointing=config.gradient_checkpointing,
        selective=config.gradient_checkpointing and config.selective_checkpointing,
        adapters=adapters_of(config.lora, shape),
        sync_each=config.gradient_sync == "micro_batch" or config.offload,
        offload=config.offload,
        gathers_keys=layout.context > 1 and not exchanges,
        on_cpu=machine.kind == "cpu",
        frozen=not changes and layout.zero is None,
        borrows=trunk_of is not None,
        trunk_of=trunk_of,
        mini_batches=mini_batches,
    )


def _divides(shape: Shape, layout: Layout) -> bool:
    """True if each rank can have as many heads, and key-value heads."""
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


def resolved(name: str, machine: Machine) -> Dtype:
    """`auto` as `tandem.models.precision.resolve_dtype` reads it, on a machine that need not be here."""
    if name == "auto":
        return "bfloat16" if machine.fast_bfloat16 else "float32"
    return "bfloat16" if name == "bfloat16" else "float32"
