"""The sizes of a model from which its memory and its time follow, read from config.json alone.

Also computes the bytes that a model occupies for as long as it is loaded: by part in a training engine, and in the embedded
engine. The planner adds temporary memory such as activations; the plan of sleeping parts decides by these bytes what sleeps.
"""

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from tandem.config.errors import ConfigError
from tandem.config.train_engine import ALL_LINEAR, Layout, LoRAConfig
from tandem.models.architecture import Architecture
from tandem.models.catalog import BUILT_IN, resolve
from tandem.models.foreign import read_hf_config

Head = Literal["lm", "scalar", "both"]
Dtype = Literal["float32", "bfloat16"]

BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}


class TowerSize(NamedTuple):
    """The size of one part of a media model outside its language model: a tower or a connector."""

    name: str
    """The part's name in ``actor.freeze``."""

    parameters: int
    matrices: tuple[tuple[str, int, int], ...]
    """Path, number of inputs and number of outputs of each matrix that can have an adapter."""


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer as `tandem.models.architecture` describes it, without its rotary tables.

    Example: SmolLM2-135M is ``Shape("llama", 30, 576, 1536, 9, 3, 64, 49152, 8192, tied=True)``: 134,515,008 parameters.
    """

    kind: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    attention_softcap: bool = False
    final_softcap: bool = False
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer in tokens, None for a layer without one; empty: no layer has one."""

    stored: int = 4
    """Bytes per number in the model's files, by the dtype in its configuration; 4 if the configuration has none."""

    towers: tuple[TowerSize, ...] = ()
    """The encoders of a media model, for images or sounds."""

    @property
    def query(self) -> int:
        """Width of the queries of one token."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of the keys, and of the values, of one token."""
        return self.kv_heads * self.head_dim

    @property
    def embedding(self) -> int:
        """Number of parameters of the embedding."""
        return self.vocab * self.hidden

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Maps the module name of each matrix of a layer to (number of inputs, number of outputs)."""
        hidden, query, key, middle = self.hidden, self.query, self.key, self.intermediate
        attention = {"q_proj": (hidden, query), "k_proj": (hidden, key), "v_proj": (hidden, key), "o_proj": (query, hidden)}
        mlp = {"gate_proj": (hidden, middle), "up_proj": (hidden, middle), "down_proj": (middle, hidden)}
        return {f"self_attn.{n}": size for n, size in attention.items()} | {f"mlp.{n}": size for n, size in mlp.items()}

    @property
    def matrices(self) -> int:
        """Number of parameters in the matrices of one layer, with which each token is multiplied."""
        return self.hidden * (2 * self.query + 2 * self.key + 3 * self.intermediate)

    @property
    def norms(self) -> int:
        """Number of norms of one layer over the hidden width."""
        return 4 if self.post_norms else 2

    @property
    def layer(self) -> int:
        """Number of parameters of one layer."""
        biases = self.qkv_bias * (self.query + 2 * self.key) + self.o_bias * self.hidden
        biases += self.mlp_bias * (2 * self.intermediate + self.hidden)
        return self.matrices + biases + self.norms * self.hidden + self.qk_norm * 2 * self.head_dim

    def parameters(self, head: Head = "lm") -> int:
        """Returns the number of parameters; a tied parameter counts once. ``head``: of a language model, of a scalar model,
        or both."""
        heads = {"lm": 0, "scalar": self.hidden, "both": self.hidden}[head]
        if head != "scalar" and not self.tied:
            heads += self.embedding
        return self.embedding + self.layers * self.layer + self.hidden + heads + self.tower_parameters()

    def tower_parameters(self, names: Container[str] | None = None) -> int:
        """Returns the number of parameters of the towers; ``names``: only of these towers."""
        return sum(tower.parameters for tower in self.towers if names is None or tower.name in names)

    def tower_matrices(self, names: Container[str]) -> dict[str, list[int]]:
        """Maps the path of each matrix in the named towers to ``[inputs, outputs]``."""
        return {path: sizes for tower in self.towers if tower.name in names for path, *sizes in tower.matrices}

    def tensors(self) -> Iterator[int]:
        """Yields the number of parameters of each tensor of a language model, in the order of a trained model's weights; a
        tower counts as one tensor."""
        yield from (tower.parameters for tower in self.towers)
        biased = {"o_proj": self.o_bias} | dict.fromkeys(("q_proj", "k_proj", "v_proj"), self.qkv_bias)
        yield self.embedding
        for _ in range(self.layers):
            for module, (inputs, outputs) in self.linears.items():
                yield inputs * outputs
                if biased.get(module.rpartition(".")[2], self.mlp_bias):
                    yield outputs
                if self.qk_norm and module.endswith("o_proj"):
                    yield from (self.head_dim, self.head_dim)
            yield from [self.hidden] * self.norms
        yield self.hidden
        if not self.tied:
            yield self.embedding

    def root(self, head: Head = "lm") -> int:
        """Returns the number of parameters outside the layers; FSDP keeps them gathered in both passes."""
        return self.parameters(head) - self.layers * self.layer

    def piece(self, ranks: int) -> "Shape":
        """Returns the largest piece that a rank has under tensor parallelism over ``ranks`` ranks: a part of the heads, of
        the MLP's inner width and of the vocabulary. Norms and the hidden width stay whole (`tandem.models.tensor_parallel`).
        """
        if ranks == 1:
            return self
        return replace(
            self,
            heads=self.heads // ranks,
            kv_heads=self.kv_heads // ranks,
            intermediate=-(-self.intermediate // ranks),
            vocab=-(-self.vocab // ranks),
        )

    @property
    def kv_values(self) -> int:
        """Number of values in the KV cache for one token."""
        return 2 * self.layers * self.key

    @classmethod
    def of(cls, a: Architecture) -> "Shape":
        """Returns the shape of an architecture that was read from a configuration."""
        windows = a.sliding_windows if any(window is not None for window in a.sliding_windows) else ()
        return cls(
            kind=a.model_type, layers=a.num_layers, hidden=a.hidden_size, intermediate=a.intermediate_size,
            heads=a.num_heads, kv_heads=a.num_kv_heads, head_dim=a.head_dim, vocab=a.vocab_size,
            context=a.max_position_embeddings, tied=a.tied, qkv_bias=a.qkv_bias, o_bias=a.o_bias, mlp_bias=a.mlp_bias,
            qk_norm=a.qk_norm, post_norms=a.post_norms, attention_softcap=a.attention_softcap is not None,
            final_softcap=a.final_softcap is not None, windows=windows,
        )  # fmt: skip


def read_shape(path: str) -> Shape:
    """Returns the shape of the model at ``path``: a folder with a config.json, a Hugging Face name (only config.json is
    downloaded), or a built-in name. Reads no weights.

    Raises:
        ConfigError: there is no configuration, or its architecture is not supported.
    """
    folder = Path(path).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(f"model folder {path} has no config.json, which the plan is made from")
    place = str(folder) if folder.is_dir() else str(resolve(path)) if path in BUILT_IN else path
    try:
        config = read_hf_config(place)
    except ConfigError as error:
        raise ConfigError(
            f"{error}. Give a folder that holds one (no weights are needed), or a built-in model: {', '.join(BUILT_IN)}"
        ) from error
    towers: tuple[TowerSize, ...] = ()
    if config.get_text_config() is not config:
        from tandem.models.media.families import tower_sizes  # noqa: PLC0415 — transformers' model classes take a second

        towers = tower_sizes(config)
    stored = 2 if str(getattr(config, "dtype", None)).removeprefix("torch.") in ("bfloat16", "float16") else 4
    return replace(Shape.of(Architecture.from_config(config)), stored=stored, towers=towers)


FLOAT32 = 4

SMALLEST_ROW = 32
"""Capacity of the smallest row of the KV cache, in tokens."""


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
    """Sum of the inputs and outputs of the tower matrices that have an adapter."""

    def parameters(self, shape: Shape) -> int:
        """Returns the number of adapter parameters in all layers and towers."""
        return self.rank * (shape.layers * self.widths(shape) + self.tower_widths)

    def widths(self, shape: Shape) -> int:
        """Returns the sum of the inputs and outputs of the matrices in one layer that have an adapter."""
        return sum(sum(shape.linears[name]) for name in self.modules)

    def has(self, *names: str) -> bool:
        """True if a matrix with an adapter has a name whose last part (after the last dot) is one of ``names``."""
        return any(module.endswith(f".{name}") for module in self.modules for name in names)


def targets(lora: LoRAConfig, module: str) -> list[str]:
    """Returns the entries of ``lora.target_modules`` that match ``module``, a matrix of a layer such as
    ``self_attn.q_proj``."""
    return [name for name in lora.target_modules if name == ALL_LINEAR or f".{module}".endswith(f".{name}")]


def refuse_unknown_targets(lora: LoRAConfig, modules: Iterable[str]) -> None:
    """Checks that each entry of ``lora.target_modules`` matches one of ``modules``, the matrices of a layer.

    Raises:
        ConfigError: an entry matches none; the message lists the matrices.
    """
    matrices = sorted(modules)
    named = {name for module in matrices for name in targets(lora, module)}
    shown = sorted({".".join(module.split(".")[-2:]) for module in matrices})
    for name in lora.target_modules:
        if name not in named:
            raise ConfigError(
                f"lora.target_modules has {name!r}, which no matrix of this model's layers ends with; there are "
                f"{', '.join(shown)}, and {ALL_LINEAR}"
            )


def adapters_of(lora: LoRAConfig, shape: Shape) -> Adapters | None:
    """Returns the adapters that `tandem.models.lora` adds to a model; None without `lora.rank`.

    Raises:
        ConfigError: no matrix has a name that ends with one of the configured names.
    """
    if lora.rank is None:
        return None
    seen = shape.tower_matrices(lora.towers)
    refuse_unknown_targets(lora, [*shape.linears, *seen])
    modules = tuple(module for module in shape.linears if targets(lora, module))
    return Adapters(lora.rank, modules, lora.dropout > 0, sum(sum(seen[path]) for path in seen if targets(lora, path)))


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """A model in a training engine, with the properties from which its bytes follow.

    Example: a trained model of P float32 parameters on one rank has 4 P bytes of parameters, 4 P of gradients while it is
    updated, and 8 P of optimizer state; the same model frozen in bfloat16 has 2 P bytes of parameters.
    """

    shape: Shape
    head: Head
    dtype: Dtype
    """Dtype of the computation; trained parameters are held in float32."""

    layout: Layout
    trained: bool
    adapters: Adapters | None = None
    """If set, only adapters and new heads are trained; all else is frozen, in the dtype of the computation."""

    frozen: bool = False
    """True if the model's weights never change, so that there is no float32 copy of them."""

    borrows: bool = False
    """True if the model's frozen weights, except for heads and adapters, are in another model's memory."""

    fixed: int = 0
    """Number of parameters of the towers that are frozen with `actor.freeze`."""

    offload: bool = False
    """True if parameters, gradients and moments are in host memory; a layer is copied to the device when it is computed."""

    @property
    def fsdp(self) -> bool:
        """True if FSDP shards the model and gathers layers when they are needed; False for one process and for DeepSpeed."""
        return self.layout.zero is None and (self.layout.shards > 1 or self.layout.replicas > 1 or self.offload)

    @property
    def parts(self) -> int:
        """Number of parts into which trained parameters and their moments are divided over the ranks."""
        return self.layout.shards

    @property
    def piece(self) -> Shape:
        """The shape of the piece with which one rank computes."""
        return self.shape.piece(self.layout.tensor)

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model, without adapters."""
        return self.shape.parameters(self.head)

    @property
    def masters(self) -> int:
        """Number of parameters with a float32 master: all of the tensor-parallel piece, or with adapters only the adapters
        and new heads. Ranks that shard parameters have a part of them each."""
        if self.frozen:
            return 0
        if self.adapters is None:
            return self.piece.parameters(self.head) - self.fixed
        return self.adapters.parameters(self.shape) + self._new_head

    @property
    def base(self) -> int:
        """Number of frozen parameters, which have no masters: those of a frozen model, those beside trained adapters, or
        those of frozen towers."""
        if not self.frozen and self.adapters is None:
            return self.fixed
        whole = self.parameters - self._new_head + self.beside_base
        if self.frozen and self.adapters is None:
            whole = self.piece.parameters(self.head)
        return whole - (self.trunk if self.borrows else 0)

    @property
    def beside_base(self) -> int:
        """Number of parameters of a frozen model's adapters, and of the head that belongs to them."""
        return self.adapters.parameters(self.shape) + self._new_head if self.frozen and self.adapters is not None else 0

    @property
    def trunk(self) -> int:
        """Number of parameters outside heads and adapters."""
        return self.piece.parameters("scalar") - self.piece.hidden

    @property
    def _new_head(self) -> int:
        return 0 if self.head == "lm" else self.shape.hidden

    @property
    def weight_bytes(self) -> float:
        """Bytes of masters and frozen parameters on one rank, without the rounded copy (see `rounded_bytes`)."""
        return (FLOAT32 * self.masters + BYTES[self.dtype] * self.base) / self.parts

    @property
    def rounded_bytes(self) -> float:
        """Bytes of the rounded copy of the masters with which one process computes, if it computes in another dtype."""
        return 0.0 if self.fsdp or self.dtype == "float32" else float(BYTES[self.dtype] * self.masters)

    @property
    def gradient_bytes(self) -> float:
        """Bytes of the gradients on one rank while the optimizer works."""
        return FLOAT32 * self.masters / self.parts if self.trained else 0.0

    @property
    def optimizer_bytes(self) -> float:
        """Bytes of AdamW's two moments on one rank, which exist from the first step on."""
        return 2 * self.gradient_bytes


def engine_bytes(shape: Shape, dtype: Dtype, *, cpu: bool) -> float:
    """Returns the bytes of the weights in one embedded engine; on a CPU this includes a second, packed copy of a tied
    head."""
    packed_head = shape.embedding if shape.tied and cpu else 0
    return float(BYTES[dtype] * (shape.parameters() + packed_head))


def cache_bytes(shape: Shape, dtype: Dtype, tokens: float) -> float:
    """Returns the bytes of the keys and values of ``tokens`` tokens of the cache."""
    return tokens * BYTES[dtype] * shape.kv_values


def row_capacity(tokens: int) -> int:
    """Returns the capacity in tokens of the KV cache row for ``tokens`` tokens, see `KVCache.capacity_for`."""
    step = SMALLEST_ROW
    while tokens > 4 * step:
        step *= 2
    return -(-tokens // step) * step
