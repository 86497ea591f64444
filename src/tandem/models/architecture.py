"""The properties of a decoder, read from its Hugging Face configuration, for both packed training and generation.

Only properties listed here are supported; a model with any other property is refused when it is opened; the
message names the property.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from tandem.config.errors import ConfigError
from tandem.models.families import FAMILIES, with_facts

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "smollm3")
"""The supported ``model_type`` values. SmolLM and SmolLM2 are ``llama``."""

_INSIDE = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""``model_type`` of the language model in a media model → ``model_type`` of the text model with the same layers."""

_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
_REFUSED = {
    "gemma3": "it attends to images bidirectionally; use a text-only Gemma 3 checkpoint (model_type gemma3_text)",
}


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of one layer: angles are ``position * inv_freq``, cosine and sine times ``attention_scaling``."""

    inv_freq: torch.Tensor
    """``[head_dim / 2]`` float32, radians per position."""

    attention_scaling: float = 1.0
    axes: torch.Tensor | None = None
    """``[head_dim / 2]`` int64: for each frequency the position that it uses, 0 time, 1 height, 2 width; None: positions
    have one dimension."""


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer with rotary positions and gated MLPs.

    Example: SmolLM2-135M has 30 layers, 9 heads on 3 key-value heads of 64, hidden 576, tied, no biases, no windows.
    """

    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    """Context length: the largest number of tokens in a sequence."""

    rms_eps: float
    norm_offset: float
    """0: ``weight * x̂.to(dtype)``. 1 (Gemma): ``(x̂ * (1 + weight)).to(dtype)``, multiplied in float32."""

    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """True if an RMS norm is applied to each head of queries and keys before the rotation."""

    post_norms: bool
    """True for Gemma: norms after attention (``post_attention_layernorm``), before and after the MLP
    (``…_feedforward_layernorm``)."""

    activation: str
    """Name in transformers' ``ACT2FN``."""

    query_scale: float
    """Attention logits are ``q·k * query_scale``."""

    attention_softcap: float | None
    """Attention logits become ``cap * tanh(logits / cap)`` before the mask."""

    final_softcap: float | None
    """Logits of the vocabulary become ``cap * tanh(logits / cap)`` before the temperature."""

    embedding_scale: float
    """Embeddings are multiplied by this, rounded to the weights' dtype."""

    tied: bool
    """True if the head and the embedding are one tensor."""

    sliding_windows: tuple[int | None, ...]
    """Window of each layer: token i attends to tokens i - window + 1 … i; None: to all earlier ones."""

    rope: tuple[Rope | None, ...]
    """Rotary embedding of each layer; None for a layer without positions (SmolLM3)."""

    @classmethod
    def from_config(cls, config: Any) -> "Architecture":
        """Reads a transformers configuration; for a media model, that of its language model.

        Raises:
            ConfigError: the model is not supported; names the architecture or feature, and what is supported.
        """
        from tandem.models.media.families import text_config  # noqa: PLC0415 - avoids an import cycle

        whole, config = config, text_config(config)
        family = FAMILIES.get(config.model_type)
        kind = family.like if family is not None else _INSIDE.get(config.model_type, config.model_type)
        _refuse_unsupported(whole, config, kind)
        gemma = kind in ("gemma2", "gemma3_text")
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        attention_bias = bool(getattr(config, "attention_bias", False))
        architecture = cls(
            model_type=kind,
            num_layers=config.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=head_dim,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_position_embeddings,
            rms_eps=config.rms_norm_eps,
            norm_offset=1.0 if gemma else 0.0,
            qkv_bias=True if kind == "qwen2" else attention_bias,
            o_bias=False if kind == "qwen2" else attention_bias,
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            qk_norm=kind in ("qwen3", "gemma3_text"),
            post_norms=gemma,
            activation=config.hidden_activation if gemma else config.hidden_act,
            query_scale=float(config.query_pre_attn_scalar if gemma else head_dim) ** -0.5,
            # Gemma 3 has this field too, but does not use it
            attention_softcap=config.attn_logit_softcapping if kind == "gemma2" else None,
            final_softcap=config.final_logit_softcapping if gemma else None,
            embedding_scale=float(config.hidden_size) ** 0.5 if gemma else 1.0,
            tied=bool(getattr(whole, "tie_word_embeddings", False)),
            sliding_windows=tuple(_window(config, i) for i in range(config.num_hidden_layers)),
            rope=_ropes(config, head_dim),
        )
        return architecture if family is None else replace(architecture, **with_facts(family, config, architecture))


def _refuse_unsupported(whole: Any, config: Any, kind: str) -> None:
    """Raises `ConfigError` for an unsupported model. ``config``: the part of ``whole`` that describes the language model."""
    from tandem.models.media.families import media_types  # noqa: PLC0415

    experts = next((n for n in ("num_experts", "num_local_experts", "n_routed_experts") if getattr(config, n, None)), None)
    if experts is not None:
        raise ConfigError(
            f"model type {kind!r} is a mixture of experts ({experts}={getattr(config, experts)}); packed training and "
            f"generation do not support these. These work: {', '.join(SUPPORTED)}"
        )
    if kind not in SUPPORTED:
        reason, works = _REFUSED.get(kind, "its results have not been tested against transformers"), SUPPORTED
        if any(hasattr(config, f"{part}_config") for part in ("vision", "audio")):
            reason, works = f"it reads images or sounds, and {reason}", media_types()
        raise ConfigError(f"model type {kind!r} is not supported: {reason}. These work: {', '.join(works)}")
    if getattr(config, "use_bidirectional_attention", False):
        raise ConfigError(f"{kind} with use_bidirectional_attention=true is no causal language model; set it to false")
    if getattr(config, "is_causal", True) is False:
        raise ConfigError(f"{kind} with is_causal=false is no causal language model")
    if any(getattr(part, "quantization_config", None) is not None for part in (whole, config)):
        raise ConfigError(
            "the model is quantised (quantization_config in config.json); training needs the full-precision checkpoint"
        )


def _window(config: Any, layer: int) -> int | None:
    """Returns the sliding window of a layer, or None. Mistral has no layer types and uses its window in all layers."""
    types = getattr(config, "layer_types", None)
    if types is None:
        return getattr(config, "sliding_window", None)
    if types[layer] not in ("full_attention", "sliding_attention"):
        raise ConfigError(
            f"{config.model_type} layer {layer} has layer type {types[layer]!r}; full_attention and sliding_attention work"
        )
    return config.sliding_window if types[layer] == "sliding_attention" else None


def _ropes(config: Any, head_dim: int) -> tuple[Rope | None, ...]:
    by_type = config.rope_parameters
    layers = range(config.num_hidden_layers)
    if "rope_type" in by_type or "rope_theta" in by_type:
        rope = _rope(config, by_type, head_dim, None)
        has_rope = getattr(config, "no_rope_layers", None) or [1] * config.num_hidden_layers
        return tuple(rope if has_rope[i] else None for i in layers)
    ropes = {name: _rope(config, by_type[name], head_dim, name) for name in set(config.layer_types)}
    return tuple(ropes[config.layer_types[i]] for i in layers)


def _rope(config: Any, parameters: dict[str, Any], head_dim: int, layer_type: str | None) -> Rope:
    kind = parameters.get("rope_type", "default")
    if kind not in _STATIC_ROPE:
        raise ConfigError(
            f"rope type {kind!r} changes its frequencies with the sequence length, so packed and cached computation "
            f"would differ from transformers'. These work: {', '.join(_STATIC_ROPE)}"
        )
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"{config.model_type} with partial_rotary_factor={parameters['partial_rotary_factor']}; only 1 works"
        )
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
        return Rope(1.0 / parameters["rope_theta"] ** exponents, axes=_axes(config, parameters))
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415 - slow to import

    arguments = {} if layer_type is None else {"layer_type": layer_type}
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **arguments)
    return Rope(inv_freq.float(), float(scaling), _axes(config, parameters))


def _axes(config: Any, parameters: dict[str, Any]) -> torch.Tensor | None:
    """Returns `Rope.axes` from ``mrope_section``: all frequencies of time, then of height, then of width. Qwen3-VL
    interleaves them instead: every third frequency belongs to height (from index 1) and to width (from index 2), the others
    to time."""
    interleaved = config.model_type == "qwen3_vl_text"
    sections = parameters.get("mrope_section", [24, 20, 20] if interleaved else None)
    if sections is None or not interleaved:
        return None if sections is None else torch.repeat_interleave(torch.arange(3), torch.tensor(sections))
    axes = torch.zeros(config.head_dim // 2, dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes
