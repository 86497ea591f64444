"""A model in a training engine, as far as it costs anything: what is trained of it, and how it lies over ranks."""

from dataclasses import dataclass, replace

from tandem.engines.train.check import check_heads, check_layout
from tandem.flow.plan import Resident
from tandem.flow.state_parts import Where, footprint
from tandem.models.footprint import Footprint
from tandem.models.shape import Dtype, Shape
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


def planned_model(resident: Resident, machine: Machine, shape: Shape) -> PlannedModel:
    """A resident of a run that has a train engine, or a judge's model, which is in an inference engine.

    Raises:
        ConfigError: what the engine itself would refuse.
    """
    config, head = resident.engine, "lm" if resident.head == "text" else resident.head
    assert config is not None, "the inference engine is no model of its own"
    found = footprint(replace(resident, head=head), shape, where_of(machine))
    layout, ranks = found.layout, found.layout.tensor * found.layout.context
    check_layout(config, layout, resident.key, cpu=machine.kind == "cpu", rounded=found.dtype != "float32")
    check_heads(config, layout, shape.heads, shape.kv_heads, resident.key)
    divides = shape.heads % ranks == 0 == shape.kv_heads % ranks
    exchanges = config.context_parallel == "all_to_all" or (config.context_parallel == "auto" and divides)
    return PlannedModel(
        **vars(found),
        role=resident.name,
        max_tokens=config.micro_batch_tokens,
        chunk_tokens=config.chunk_tokens,
        checkpointing=config.gradient_checkpointing,
        selective=config.gradient_checkpointing and config.selective_checkpointing,
        sync_each=config.gradient_sync == "micro_batch" or config.offload,
        gathers_keys=layout.context > 1 and not exchanges,
        on_cpu=machine.kind == "cpu",
        trunk_of=resident.trunk_of,
        mini_batches=resident.mini_batches,
    )


def where_of(machine: Machine) -> Where:
    """The machine as the plan of sleeping sees it."""
    gpu = machine.memory_gib if machine.kind == "gpu" else None
    return Where(gpu is None, lambda name: resolved(name, machine), machine.fast_bfloat16, gpu)


def resolved(name: str, machine: Machine) -> Dtype:
    """`auto` as `tandem.models.precision.resolve_dtype` reads it, on a machine that need not be here."""
    if name == "auto":
        return "bfloat16" if machine.fast_bfloat16 else "float32"
    return "bfloat16" if name == "bfloat16" else "float32"
