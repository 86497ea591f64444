"""A Hugging Face language model that computes packed sequences: log-probabilities of tokens, or one number per token.

`lay_out` computes the layout of a batch: which tokens are computed, where, and which are predicted. It depends only on
lengths, masks and prompts, which are on the host. It is computed there in advance, so the host never waits for the GPU
during a pass. `compile_layers` compiles the decoder's layers, except for attention.
"""

import functools
import itertools
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from torch.utils._triton import has_triton
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tandem.api.engines import Outputs
from tandem.api.failures import BatchError
from tandem.api.media import occurrences
from tandem.config.errors import ConfigError
from tandem.config.train_engine import TrainEngineConfig
from tandem.media import store
from tandem.models.architecture import Architecture
from tandem.models.attention import NAME, Packing, SummedRows, check_lengths, compact, positions, prompt_keys
from tandem.models.context_parallel import Context, sum_parts
from tandem.models.hardware import upload
from tandem.models.logprobs import Vocabulary, chunked_logprobs
from tandem.models.media.family import Features, MediaFamily


@dataclass(frozen=True)
class Prediction:
    """The M tokens whose log-probabilities are computed."""

    index: torch.Tensor
    """``[M]``: index of each predicted token among the T tokens of the batch."""

    before: torch.Tensor
    """``[M]``: row of the state before each token, from which it is predicted."""

    targets: torch.Tensor
    """``[M]``: ids of the tokens."""

    temperature: torch.Tensor | None
    """``[M]``: sampling temperature of each token; None: all are 1."""


@dataclass(frozen=True)
class MediaRows:
    """The P computed tokens whose embeddings are replaced by features of media."""

    numbers: tuple[int, ...]
    """Numbers of the media, each once; their rows of features are concatenated in this order."""

    place: torch.Tensor
    """``[P]``: index of each replaced token among the computed tokens."""

    row: torch.Tensor
    """``[P]``: row of features of each token."""


@dataclass(frozen=True)
class TokenLayout:
    """The layout of T packed tokens, of which C are computed, because a prompt that several sequences share is computed
    once."""

    total: int
    """T, the number of tokens in the batch."""

    ids: torch.Tensor
    """``[C]``: ids of the computed tokens; under context parallelism this rank's part."""

    at: torch.Tensor
    """``[C]``: position of each computed token in its sequence; ``[C, 3]`` if rotary positions are three-dimensional."""

    packing: Packing
    place: torch.Tensor | None
    """``[T]``: row of each token among the computed tokens; None if C = T, so that row i is token i."""

    prediction: Prediction | None
    """The tokens that are predicted; None if there are none."""

    media: MediaRows | None = None
    """The tokens that are replaced by features of media; None if there are no media."""


def lay_out(
    input_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    loss_mask: torch.Tensor,
    temperature: torch.Tensor | None,
    *,
    device: torch.device,
    context: Context | None = None,
    media: torch.Tensor | None = None,
    family: MediaFamily | None = None,
) -> TokenLayout:
    """Returns the layout of ``input_ids [T]``, ``cu_seqlens [N + 1]``, with its tensors on ``device``.

    A prompt is all tokens before the first one in ``loss_mask [T]``; causal attention makes its states the same in all
    sequences that begin with it. ``temperature [N]``: of each sequence; None: nothing is predicted. ``media [T]``: media
    numbers of the tokens, for a model of ``family``; None: all are text.

    Raises:
        ValueError: ``cu_seqlens`` does not cover the tokens.
    """
    total = len(input_ids)
    bounds = check_lengths(cu_seqlens, total)
    if media is not None and not bool(media.any()):
        media = None
    ids, at = input_ids, positions(cu_seqlens, total)
    if family is not None and family.three_dimensional:
        at = _family_positions(family, ids, bounds, media)
    media_rows = None if media is None else _media_rows(family, media, bounds)
    shares = context is None or context.way == "all_to_all"
    shared = compact(prompt_keys(ids, media), bounds, loss_mask) if shares else None
    if shared is None:
        packing, place = Packing.from_cu_seqlens(cu_seqlens), None
    else:
        packing, place = Packing.from_prompts(cu_seqlens, shared.prompts), shared.place
        ids, at = ids[shared.tokens], at[shared.tokens]
        media_rows = None if media_rows is None else _among(media_rows, shared.tokens)
    local = slice(0, len(ids))
    if context is not None:
        extra = context.padding(len(ids))
        local = context.rows(len(ids) + extra)
        ids, at = pad(ids, (0, extra))[local], pad(at, (0, extra))[local]
        packing = packing.divided(context, extra)
    prediction = None
    if temperature is not None:
        index = _predicted(bounds, loss_mask)
        before = index - 1 if place is None else place[index - 1]
        if context is not None:
            is_local = (before >= local.start) & (before < local.stop)
            index, before = index[is_local], before[is_local] - local.start
        of_token = None
        if bool((temperature != 1).any()):
            of_token = torch.repeat_interleave(temperature, cu_seqlens.diff(), output_size=total)[index].float()
        prediction = Prediction(index, before, input_ids[index], of_token)
    return _on(TokenLayout(total, ids, at, packing, place, prediction, media_rows), device)


def _media_rows(family: MediaFamily | None, media: torch.Tensor, bounds: Sequence[int]) -> MediaRows:
    """Returns the rows of features for the T tokens of the batch."""
    if family is None:
        raise BatchError("the batch has images or sounds, and this model reads only text")
    numbers = tuple(dict.fromkeys(media[media != 0].tolist()))
    count = {number: family.count(store.medium(number)) for number in numbers}
    begin = dict(zip(numbers, [0, *itertools.accumulate(count.values())], strict=False))
    sequences = ((start, media[start:end].tolist()) for start, end in zip(bounds, bounds[1:], strict=False))
    places = [
        (start + token.place, begin[token.number] + token.row)
        for start, of_sequence in sequences
        for token in occurrences(of_sequence, count)
    ]
    place, row = torch.tensor(places).T
    return MediaRows(numbers, place, row)


def _among(rows: MediaRows, tokens: torch.Tensor) -> MediaRows:
    """Translates the rows of features to the computed tokens: ``tokens [C]`` are their indices in the batch."""
    of_token = torch.full((int(tokens.max()) + 1,), -1)
    inside = rows.place < len(of_token)
    of_token[rows.place[inside]] = rows.row[inside]
    row = of_token[tokens]
    place = (row >= 0).nonzero().flatten()
    return replace(rows, place=place, row=row[place])


def _family_positions(
    family: MediaFamily, ids: torch.Tensor, bounds: Sequence[int], media: torch.Tensor | None
) -> torch.Tensor:
    """Returns the three-dimensional position of each token, ``[T, 3]`` (time, height, width)."""
    numbers = torch.zeros_like(ids) if media is None else media
    parts = []
    for start, end in zip(bounds, bounds[1:], strict=False):
        sequence = numbers[start:end]
        media_of_sequence = [store.medium(number) for number in dict.fromkeys(sequence[sequence != 0].tolist())]
        parts.append(family.positions(ids[start:end], sequence, media_of_sequence))
    return torch.cat(parts)


def _predicted(bounds: list[int], loss_mask: torch.Tensor) -> torch.Tensor:
    """Returns the indices of the tokens in the mask, except first tokens of sequences, ``[M]``."""
    predicted = loss_mask.clone()
    predicted[[start for start, end in zip(bounds, bounds[1:], strict=False) if start < end]] = False
    return predicted.nonzero().flatten()


def _on(layout: TokenLayout, device: torch.device) -> TokenLayout:
    """Returns the layout with its tensors on a device."""

    def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else upload(tensor, device)

    prediction = layout.prediction
    if prediction is not None:
        prediction = Prediction(
            *(moved(x) for x in (prediction.index, prediction.before, prediction.targets, prediction.temperature))
        )  # type: ignore[arg-type]
    packing, media = layout.packing.on(device), layout.media
    if media is not None:
        media = replace(media, place=upload(media.place, device), row=upload(media.row, device))
    return replace(
        layout,
        ids=upload(layout.ids, device),
        at=upload(layout.at, device),
        packing=packing,
        place=moved(layout.place),
        prediction=prediction,
        media=media,
    )


_PRODUCTS = ("mm", "addmm", "bmm")
_ATTENTION = ("_scaled_dot_product", "packed_attention", "_varlen_attn")
"""Beginnings of the names of attention operators: torch's and Tandem's on a CPU, torch's on a GPU."""


def keeping_products() -> Any:
    """Returns the contexts of selective checkpointing, which keeps the results of matrix products and attention: one for the
    forward pass and one for its recomputation."""

    def policy(ctx: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        name = getattr(operator, "__name__", "").partition(".")[0]
        expensive = name in _PRODUCTS or name.startswith(_ATTENTION)
        return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class PackedModel(nn.Module):
    """Wraps a transformers model and replaces only its attention function. Subclasses compute the head.

    Parameters keep their Hugging Face names under the prefix ``model.``.
    """

    def __init__(self, model: nn.Module, family: MediaFamily | None = None):
        """``model``: a transformers model whose backbone is called ``model``; ``family``: the family of a media model.

        Raises:
            ConfigError: the architecture is not supported.
        """
        super().__init__()
        self.architecture = Architecture.from_config(model.config)
        self.context: Context | None = None
        """The ranks among which the tokens are divided; None if they are not divided."""

        self.vocabulary: Vocabulary | None = None
        """This rank's part of the vocabulary; None if it is not divided."""

        self.compiled = False
        """True if `torch.compile` fuses layers and the operations on logits."""

        # towers keep transformers' own attention
        model.set_attn_implementation(NAME if family is None else {"text_config": NAME})
        self.model = model
        self.media = None if family is None else Features(family, model)
        """The features of images and sounds; None for a model that reads only text."""

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def decoder(self) -> Any:
        """The transformers language model without its head; it has ``layers``."""
        return self.model.model if self.media is None else self.media.family.text_model(self.model)

    def enable_gradient_checkpointing(self, selective: bool = False) -> None:
        """Keeps only the input of each layer, and computes the rest again in the backward pass.

        ``selective``: keeps the results of matrix products and attention too, so that only cheap operations are repeated.
        """
        newer = getattr(self.model, "activation_checkpointing_enable", None)  # the name in later transformers
        (newer or self.model.gradient_checkpointing_enable)(
            {"use_reentrant": False} | ({"context_fn": keeping_products} if selective else {})
        )
        # transformers recomputes only in training mode; this changes nothing else, because dropout is 0
        self.model.train()

    def lay_out(
        self,
        input_ids: torch.Tensor,
        cu_seqlens: torch.Tensor,
        loss_mask: torch.Tensor,
        temperature: torch.Tensor | None = None,
        device: torch.device | None = None,
        media: torch.Tensor | None = None,
    ) -> TokenLayout:
        """Returns the argument of `forward`, see `lay_out`. ``device``: the model's; None: the device of
        ``input_ids``."""
        fields = input_ids, cu_seqlens, loss_mask, temperature
        family = None if self.media is None else self.media.family
        device = device or input_ids.device
        return lay_out(*fields, device=device, context=self.context, media=media, family=family)

    def hidden(self, layout: TokenLayout) -> torch.Tensor:
        """Returns the hidden state after each token, with the final norm, ``[C, H]``; under context parallelism of
        this rank's tokens."""
        decoder = self.decoder
        inputs = {"input_ids": layout.ids[None]} if self.media is None else self._with_features(layout, self.media)
        return decoder(
            **inputs,
            position_ids=layout.at[None] if layout.at.dim() == 1 else layout.at.T[:, None],
            # not used; without a mask transformers would wait for the device to find where sequences begin
            attention_mask=layout.ids.new_zeros(1, 1, 1, 1),
            use_cache=False,
            packing=layout.packing,
        ).last_hidden_state[0]

    def _with_features(self, layout: TokenLayout, media: Features) -> dict[str, Any]:
        """Returns the decoder's inputs: embeddings ``[1, C, H]`` with features of media, and features for deeper layers."""
        embeddings = self.decoder.embed_tokens(layout.ids)
        if layout.media is None:
            return {"inputs_embeds": (embeddings + media.nothing())[None]}
        rows = SummedRows.apply(media.of(layout.media.numbers, layout.ids.device), layout.media.row)
        first, *others = rows.to(embeddings.dtype).chunk(1 + media.family.layers_fed, dim=-1)
        inputs = {"inputs_embeds": embeddings.index_copy(0, layout.media.place, first)[None]}
        if not others:
            return inputs
        is_media = torch.zeros_like(layout.ids, dtype=torch.bool).index_fill(0, layout.media.place, True)
        return inputs | {"visual_pos_masks": is_media[None], "deepstack_visual_embeds": others}

    def read_scalar(self, states: torch.Tensor, weight: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        """Computes one number per token, ``[T]`` float32, from ``states [C, H]`` and ``weight [1, H]``."""
        # in float32: bfloat16 has steps of 1/128 between 1 and 2, which is too coarse for values
        return self.place((states.float() @ weight.float().T)[:, 0], layout)

    def place(self, scores: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        """Expands numbers of this rank's computed tokens ``[C]`` to all tokens of the batch, ``[T]``."""
        if self.context is not None:
            scores = self.context.place(scores)
        return scores[: layout.total] if layout.place is None else scores[layout.place]


class PackedCausalLM(PackedModel):
    """A causal language model for training; `forward` computes log-probabilities and entropies."""

    def __init__(self, model: nn.Module, *, chunk_tokens: int = 1024, family: MediaFamily | None = None):
        """``model``: a transformers causal language model, or a media model of ``family``; ``chunk_tokens``: how many rows
        of logits exist at a time.

        Raises:
            ConfigError: the architecture is not supported.
        """
        super().__init__(model, family)
        self.chunk_tokens = chunk_tokens

    def forward(self, layout: TokenLayout, entropy: bool = False) -> Outputs:
        """Computes log-probabilities (and entropies) of the tokens in the mask, given the preceding tokens of their
        sequence.

        Returns ``[T]`` float32 tensors, which are 0 for tokens that are not predicted: those outside the mask, and the first
        token of each sequence.
        """
        return self.predict(self.hidden(layout), layout, entropy)

    def predict(self, states: torch.Tensor, layout: TokenLayout, entropy: bool) -> Outputs:
        """Computes the outputs of `forward` from ``states [C, H]``."""
        predicted = layout.prediction
        assert predicted is not None, "a layout with temperatures"
        head = chunked_logprobs(
            states.index_select(0, predicted.before),
            self.model.lm_head.weight,
            predicted.targets,
            predicted.temperature,
            softcap=self.architecture.final_softcap,
            entropy=entropy,
            chunk_tokens=self.chunk_tokens,
            vocabulary=self.vocabulary,
            compiled=self.compiled,
        )
        spread = [None if x is None else x.new_zeros(layout.total).index_copy(0, predicted.index, x) for x in head]
        if self.context is not None:
            spread = [None if x is None else sum_parts(x, self.context.group) for x in spread]
        return Outputs(*spread)


class PackedScalarModel(PackedModel):
    """A transformers sequence classifier that scores every token. ``chosen``: for several classes, the number of the class
    whose log-odds against all others are the score; None for a classifier with one label."""

    def __init__(self, model: nn.Module, chosen: int | None = None, family: MediaFamily | None = None):
        """``model``, ``family``: as `PackedCausalLM` takes them, with a head called ``score``."""
        super().__init__(model, family)
        self.chosen = chosen

    def forward(self, layout: TokenLayout) -> Outputs:
        """Computes ``scores [T]`` float32: position t holds the head's output for the state *after* token t.

        ``logprobs`` is empty, because no logits are computed.
        """
        states, head = self.hidden(layout), self.model.score
        if self.chosen is not None:
            return Outputs(states.new_zeros(0), scores=self.place(log_odds(states, head, self.chosen), layout))
        scores = self.read_scalar(states, head.weight, layout)
        return Outputs(states.new_zeros(0), scores=scores if head.bias is None else scores + head.bias.float())


def log_odds(states: torch.Tensor, head: nn.Linear, chosen: int) -> torch.Tensor:
    """Computes the log-odds of a class against all others, log p - log(1 - p), ``[C]`` float32, from ``states [C, H]``."""
    logits = states.float() @ head.weight.float().T  # [C, K]
    if head.bias is not None:
        logits = logits + head.bias.float()
    others = [number for number in range(logits.shape[1]) if number != chosen]
    return logits[:, chosen] - logits[:, others].logsumexp(-1)


class PackedActorCritic(PackedCausalLM):
    """A causal language model with a second head, which computes a value after each token from the same states."""

    def __init__(self, model: nn.Module, *, chunk_tokens: int = 1024, family: MediaFamily | None = None):
        """``model``, ``family``: as `PackedCausalLM` takes them; the value head begins at 0."""
        super().__init__(model, chunk_tokens=chunk_tokens, family=family)
        weight = model.get_input_embeddings().weight
        self.value = nn.Linear(weight.shape[1], 1, bias=False, device=weight.device, dtype=weight.dtype)
        nn.init.zeros_(self.value.weight)

    def forward(self, layout: TokenLayout, entropy: bool = False) -> Outputs:
        """Computes the outputs of `PackedCausalLM.forward`, and ``scores [T]`` as in `PackedScalarModel.forward`."""
        states = self.hidden(layout)
        outputs = self.predict(states, layout, entropy)
        return outputs._replace(scores=self.read_scalar(states, self.value.weight, layout))


def compiles(config: TrainEngineConfig, device: torch.device) -> bool:
    """Returns `actor.compile`, or its default: True on a GPU with Triton and a C compiler, unless determinism, selective
    checkpointing or DeepSpeed ZeRO-3 forbids compilation."""
    if config.compile is not None:
        return config.compile
    refused = config.selective_checkpointing or config.backend.startswith("deepspeed:zero3")
    exact = torch.are_deterministic_algorithms_enabled()
    return device.type == "cuda" and not (refused or exact) and has_triton() and has_compiler()


def has_compiler() -> bool:
    """Tells whether this machine has the C compiler that Triton needs."""
    return _has(os.environ.get("CC"), "gcc", "clang")


def _has(*names: str | None) -> bool:
    return any(name and shutil.which(name) for name in names)


def refuse_without_compiler(device: torch.device) -> None:
    """Checks that this machine has the compiler that `compile_layers` needs.

    Raises:
        ConfigError: ``device`` is a CPU, and there is no C++ compiler.
    """
    if device.type == "cpu" and not _has(os.environ.get("CXX"), "g++", "clang++"):
        raise ConfigError(
            "actor.compile=true needs a C++ compiler on a CPU, and neither $CXX nor g++ nor clang++ is there: install one "
            "(Debian: apt-get install g++), or leave actor.compile out"
        )


def compile_layers(model: PackedModel, device: torch.device) -> None:
    """Makes `torch.compile` fuse the norms, rotary embeddings, activations and residuals of each layer, and the head's
    softmax.

    Attention (`packed_attention`) is not compiled: it is one large operation whose arguments differ in each micro-batch.
    Layers of one class share the compiled code, for any number of tokens. The first pass waits for compilation.

    Raises:
        ConfigError: see `refuse_without_compiler`.
    """
    refuse_without_compiler(device)
    model.compiled = True
    for layer in model.decoder.layers:
        layer.__class__ = _compiled_kind(type(layer))


@functools.cache
def _compiled_kind(kind: type[nn.Module]) -> type[nn.Module]:
    """Returns a subclass of a layer with a compiled forward pass. transformers wraps `forward` of each layer class with
    checkpointing, which cannot be compiled; so the inner `forward` is compiled, and transformers wraps it again."""
    inner = getattr(kind.forward, "__wrapped__", kind.forward)
    return type(f"Compiled{kind.__name__}", (kind,), {"forward": torch.compile(inner, dynamic=True)})
