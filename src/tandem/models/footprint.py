"""Bytes that a model keeps, counted from its description before it exists: by part in a training engine, and in the
embedded engine.

The planner adds what comes and goes, the residency decides by them what sleeps, and both read them here.
"""

from dataclasses import dataclass

from tandem.config.backend import Layout
from tandem.config.lora import LoRAConfig
from tandem.models.lora import refuse_unknown_targets, targets
from tandem.models.shape import BYTES, Dtype, Head, Shape

FLOAT32 = 4

SMALLEST_ROW = 32
"""Smallest row of the KV cache, tokens."""


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters on some of the matrices of every layer.

    Example: rank 2 on a matrix of 10 inputs and 5 outputs is A ``[2, 10]`` and B ``[5, 2]``: 30 parameters.
    """

    rank: int
    modules: tuple[str, ...]
    """Names of the matrices that have an adapter, see `Shape.linears`."""

    dropout: bool = False
    tower_widths: int = 0
    """Inputs and outputs of the matrices of towers that have one, added up."""

    def parameters(self, shape: Shape) -> int:
        """Number of parameters of all layers and towers."""
        return self.rank * (shape.layers * self.widths(shape) + self.tower_widths)

    def widths(self, shape: Shape) -> int:
        """Inputs and outputs of one layer's matrices, added up."""
        return sum(sum(shape.linears[name]) for name in self.modules)

    def has(self, *names: str) -> bool:
        """True if a matrix of one of these last names has one."""
        return any(module.endswith(f".{name}") for module in self.modules for name in names)


def adapters_of(lora: LoRAConfig, shape: Shape) -> Adapters | None:
    """The adapters of a model, put where `tandem.models.lora` puts them; None without any.

    Raises:
        ConfigError: a name that no matrix ends with.
    """
    if lora.rank is None:
        return None
    seen = shape.tower_matrices(lora.towers)
    refuse_unknown_targets(lora, [*shape.linears, *seen])
    modules = tuple(module for module in shape.linears if targets(lora, module))
    return Adapters(lora.rank, modules, lora.dropout > 0, sum(sum(seen[path]) for path in seen if targets(lora, path)))


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """A model in a training engine, as far as its bytes follow from it.

    Example: a trained model of P float32 parameters on one rank has 4 P of parameters, 4 P of gradients while it is updated,
    and 8 P of optimizer state; the same model frozen in bfloat16 has 2 P of parameters.
    """

    shape: Shape
    head: Head
    dtype: Dtype
    """Dtype that it computes in; its trained parameters are held in float32."""

    layout: Layout
    trained: bool
    adapters: Adapters | None = None
    """They alone are trained, beside new heads; all else is frozen, in the dtype of the computation."""

    frozen: bool = False
    """Its weights never change, so there is no float32 copy of them."""

    borrows: bool = False
    """Its frozen weights but for heads and adapters are in another model's memory."""

    fixed: int = 0
    """Parameters of towers that are frozen, `actor.freeze`."""

    offload: bool = False
    """Parameters, gradients and moments are in host memory, and layers come to the device as they are computed."""

    @property
    def fsdp(self) -> bool:
        """True if FSDP holds it, and gathers its layers as they are needed; else one process does, or DeepSpeed."""
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
        """Number of parameters of the whole model, without adapters."""
        return self.shape.parameters(self.head)

    @property
    def masters(self) -> int:
        """Number of parameters with a float32 master on one rank, or over those that shard: all parameters of its piece, or
        its adapters and new heads."""
        if self.frozen:
            return 0
        if self.adapters is None:
            return self.piece.parameters(self.head) - self.fixed
        return self.adapters.parameters(self.shape) + self._new_head

    @property
    def base(self) -> int:
        """Frozen parameters without masters: all of a frozen model, and those beside adapters."""
        if not self.frozen and self.adapters is None:
            return self.fixed
        whole = self.parameters - self._new_head + self.beside_base
        if self.frozen and self.adapters is None:
            whole = self.piece.parameters(self.head)
        return whole - (self.trunk if self.borrows else 0)

    @property
    def beside_base(self) -> int:
        """Parameters of a frozen model's adapters and of the head that comes with them."""
        return self.adapters.parameters(self.shape) + self._new_head if self.frozen and self.adapters is not None else 0

    @property
    def trunk(self) -> int:
        """All parameters but those of heads and adapters."""
        return self.piece.parameters("scalar") - self.piece.hidden

    @property
    def _new_head(self) -> int:
        return 0 if self.head == "lm" else self.shape.hidden

    @property
    def weight_bytes(self) -> float:
        """Masters and frozen parameters of one rank, without the rounded copy that `rounded_bytes` counts."""
        return (FLOAT32 * self.masters + BYTES[self.dtype] * self.base) / self.parts

    @property
    def rounded_bytes(self) -> float:
        """The copy of the masters that one process computes with if that is in another dtype."""
        return 0.0 if self.fsdp or self.dtype == "float32" else float(BYTES[self.dtype] * self.masters)

    @property
    def gradient_bytes(self) -> float:
        """Gradients of one rank, while its optimizer works."""
        return FLOAT32 * self.masters / self.parts if self.trained else 0.0

    @property
    def optimizer_bytes(self) -> float:
        """AdamW's two moments on one rank, from the first step on."""
        return 2 * self.gradient_bytes


def engine_bytes(shape: Shape, dtype: Dtype, *, cpu: bool) -> float:
    """One copy of the weights in the embedded engine; on a CPU a tied head is laid out anew for its kernels."""
    packed_head = shape.embedding if shape.tied and cpu else 0
    return float(BYTES[dtype] * (shape.parameters() + packed_head))


def cache_bytes(shape: Shape, dtype: Dtype, tokens: float) -> float:
    """Keys and values of so many tokens, in rows of `row_capacity`."""
    return tokens * BYTES[dtype] * shape.kv_values


def row_capacity(tokens: int) -> int:
    """Tokens of the KV cache row that holds so many: see `KVCache.capacity_for`."""
    step = SMALLEST_ROW
    while tokens > 4 * step:
        step *= 2
    return -(-tokens // step) * step
