"""The sizes of a model that its memory and its time follow from, read from config.json alone."""

from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tandem.config.errors import ConfigError
from tandem.models.architecture import Architecture
from tandem.models.catalog import BUILT_IN, resolve
from tandem.models.foreign import read_hf_config
from tandem.models.media.families import TowerSize, tower_sizes

Head = Literal["lm", "scalar", "both"]
Dtype = Literal["float32", "bfloat16"]

BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}


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
    """Sliding window of each layer; empty: none has one."""

    stored: int = 4
    """Bytes of a number in the files of the model, as its configuration says; 4 where it does not."""

    towers: tuple[TowerSize, ...] = ()
    """The parts of a media model that see or hear."""

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
        """Parameters of the embedding."""
        return self.vocab * self.hidden

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Module of each matrix of a layer → (inputs, outputs)."""
        hidden, query, key, middle = self.hidden, self.query, self.key, self.intermediate
        attention = {"q_proj": (hidden, query), "k_proj": (hidden, key), "v_proj": (hidden, key), "o_proj": (query, hidden)}
        mlp = {"gate_proj": (hidden, middle), "up_proj": (hidden, middle), "down_proj": (middle, hidden)}
        return {f"self_attn.{n}": size for n, size in attention.items()} | {f"mlp.{n}": size for n, size in mlp.items()}

    @property
    def matrices(self) -> int:
        """Parameters of the matrices of one layer: what every token is multiplied with there."""
        return self.hidden * (2 * self.query + 2 * self.key + 3 * self.intermediate)

    @property
    def norms(self) -> int:
        """Norms of one layer over the hidden width."""
        return 4 if self.post_norms else 2

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        biases = self.qkv_bias * (self.query + 2 * self.key) + self.o_bias * self.hidden
        biases += self.mlp_bias * (2 * self.intermediate + self.hidden)
        return self.matrices + biases + self.norms * self.hidden + self.qk_norm * 2 * self.head_dim

    def parameters(self, head: Head = "lm") -> int:
        """All parameters, tied ones once, with the head of a language model, of a scalar model, or both."""
        heads = {"lm": 0, "scalar": self.hidden, "both": self.hidden}[head]
        if head != "scalar" and not self.tied:
            heads += self.embedding
        return self.embedding + self.layers * self.layer + self.hidden + heads + self.tower_parameters()

    def tower_parameters(self, names: Container[str] | None = None) -> int:
        """Parameters of the towers; ``names``: of these alone."""
        return sum(tower.parameters for tower in self.towers if names is None or tower.name in names)

    def tower_matrices(self, names: Container[str]) -> dict[str, list[int]]:
        """Path of each matrix of these towers → inputs and outputs."""
        return {path: sizes for tower in self.towers if tower.name in names for path, *sizes in tower.matrices}

    def tensors(self) -> Iterator[int]:
        """Numbers in each tensor of a language model, in the order in which a trained model gives them; a tower is one."""
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
        """Parameters outside the layers: what FSDP keeps gathered through a forward and backward pass."""
        return self.parameters(head) - self.layers * self.layer

    def piece(self, ranks: int) -> "Shape":
        """The piece that tensor parallelism over so many ranks leaves the one that has most: a part of the heads, of the
        inner width and of the vocabulary. Norms, and the width between the matrices, stay whole
        (`tandem.models.tensor_parallel`).
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
        """Numbers that the KV cache holds of one token."""
        return 2 * self.layers * self.key

    @classmethod
    def of(cls, a: Architecture) -> "Shape":
        """The shape in a description that was read from a configuration."""
        windows = a.sliding_windows if any(window is not None for window in a.sliding_windows) else ()
        return cls(
            kind=a.model_type, layers=a.num_layers, hidden=a.hidden_size, intermediate=a.intermediate_size,
            heads=a.num_heads, kv_heads=a.num_kv_heads, head_dim=a.head_dim, vocab=a.vocab_size,
            context=a.max_position_embeddings, tied=a.tied, qkv_bias=a.qkv_bias, o_bias=a.o_bias, mlp_bias=a.mlp_bias,
            qk_norm=a.qk_norm, post_norms=a.post_norms, attention_softcap=a.attention_softcap is not None,
            final_softcap=a.final_softcap is not None, windows=windows,
        )  # fmt: skip


def read_shape(path: str) -> Shape:
    """The shape of the model at ``path``: a folder with a config.json, a hub name (of which only config.json is fetched), or
    a built-in name. No weights are read.

    Raises:
        ConfigError: there is no configuration, or its architecture is not one that is computed here.
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
    stored = 2 if str(getattr(config, "dtype", None)).removeprefix("torch.") in ("bfloat16", "float16") else 4
    return replace(Shape.of(Architecture.from_config(config)), stored=stored, towers=tower_sizes(config))
