"""A Hugging Face causal language model that takes packed sequences and gives log-probabilities."""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tandem.api.engines import Outputs
from tandem.models.architecture import Architecture
from tandem.models.attention import NAME, SummedRows
from tandem.models.context_parallel import Context
from tandem.models.exchanges import sum_parts
from tandem.models.layout import TokenLayout, lay_out
from tandem.models.logprobs import Vocabulary, chunked_logprobs
from tandem.models.media.family import MediaFamily
from tandem.models.media.features import Features

_PRODUCTS = ("mm", "addmm", "bmm")
_ATTENTION = ("_scaled_dot_product", "packed_attention", "_varlen_attn")
"""Operators of torch's kernel and ours for a CPU, and of torch's for a GPU."""


def keeping_products() -> Any:
    """Contexts of a forward pass that keeps the results of matrix products and attention, and of the one that follows."""

    def policy(ctx: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        name = getattr(operator, "__name__", "").partition(".")[0]
        dear = name in _PRODUCTS or name.startswith(_ATTENTION)
        return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class PackedModel(nn.Module):
    """Wraps a transformers model, unchanged but for its attention function. Its head is a subclass's.

    Parameters keep their Hugging Face names under the prefix ``model.``.
    """

    def __init__(self, model: nn.Module, family: MediaFamily | None = None):
        """``model``: a transformers model whose backbone is called ``model``; ``family``: that of a media model.

        Raises:
            ConfigError: the architecture is not one that is computed exactly.
        """
        super().__init__()
        self.architecture = Architecture.from_config(model.config)
        self.context: Context | None = None
        """The ranks that the tokens are divided among, where there are several."""

        self.vocabulary: Vocabulary | None = None
        """The part of the vocabulary that this rank has, where it is cut."""

        self.compiled = False
        """True if `torch.compile` fuses layers, and what is done with logits."""

        # towers keep transformers' own attention
        model.set_attn_implementation(NAME if family is None else {"text_config": NAME})
        self.model = model
        self.media = None if family is None else Features(family, model)
        """The features of images and sounds, of a model that takes them."""

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def decoder(self) -> Any:
        """The language model of transformers without its head, which has ``layers``."""
        return self.model.model if self.media is None else self.media.family.text_model(self.model)

    def enable_gradient_checkpointing(self, selective: bool = False) -> None:
        """From now on only the input of each layer is kept, and the rest is computed again in the backward pass.

        ``selective``: the results of matrix products and of attention are kept too; the cheap rest is computed again.
        """
        newer = getattr(self.model, "activation_checkpointing_enable", None)  # the name in later transformers
        (newer or self.model.gradient_checkpointing_enable)(
            {"use_reentrant": False} | ({"context_fn": keeping_products} if selective else {})
        )
        # transformers recomputes only in training mode; nothing else depends on that, because dropout is 0
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
        """The arguments of `forward`, see `lay_out`. ``device``: of the model; None: these tensors are there."""
        given = input_ids, cu_seqlens, loss_mask, temperature
        family = None if self.media is None else self.media.family
        device = device or input_ids.device
        return lay_out(*given, device=device, context=self.context, media=media, family=family)

    def hidden(self, layout: TokenLayout) -> torch.Tensor:
        """States after each token, normalised, ``[C, H]``; under context parallelism this rank's."""
        decoder = self.decoder
        given = {"input_ids": layout.ids[None]} if self.media is None else self._shown(layout, self.media)
        return decoder(
            **given,
            position_ids=layout.at[None] if layout.at.dim() == 1 else layout.at.T[:, None],
            # nobody reads it; without one transformers would ask the device where sequences begin
            attention_mask=layout.ids.new_zeros(1, 1, 1, 1),
            use_cache=False,
            packing=layout.packing,
        ).last_hidden_state[0]

    def _shown(self, layout: TokenLayout, media: Features) -> dict[str, Any]:
        """Embeddings of the tokens with features where they stand, ``[1, C, H]``, and those that layers get."""
        embeddings = self.decoder.embed_tokens(layout.ids)
        if layout.media is None:
            return {"inputs_embeds": (embeddings + media.nothing())[None]}
        rows = SummedRows.apply(media.of(layout.media.numbers, layout.ids.device), layout.media.row)
        first, *others = rows.to(embeddings.dtype).chunk(1 + media.family.layers_fed, dim=-1)
        given = {"inputs_embeds": embeddings.index_copy(0, layout.media.place, first)[None]}
        if not others:
            return given
        shown = torch.zeros_like(layout.ids, dtype=torch.bool).index_fill(0, layout.media.place, True)
        return given | {"visual_pos_masks": shown[None], "deepstack_visual_embeds": others}

    def read_scalar(self, states: torch.Tensor, weight: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        """One number a token, ``[T]`` float32, from ``states [C, H]`` and ``weight [1, H]``."""
        # in float32: bfloat16 has steps of 1/128 between 1 and 2, coarser than what values must tell apart
        return self.place((states.float() @ weight.float().T)[:, 0], layout)

    def place(self, scores: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        """The numbers ``[C]`` of this rank's tokens where the batch has these tokens, ``[T]``."""
        if self.context is not None:
            scores = self.context.place(scores)
        return scores[: layout.total] if layout.place is None else scores[layout.place]


class PackedCausalLM(PackedModel):
    """A causal language model; `forward` is all that training needs."""

    def __init__(self, model: nn.Module, *, chunk_tokens: int = 1024, family: MediaFamily | None = None):
        """``model``: a transformers causal language model, or a media model of ``family``; ``chunk_tokens``: rows of logits
        that exist at a time.

        Raises:
            ConfigError: the architecture is not one that is computed exactly.
        """
        super().__init__(model, family)
        self.chunk_tokens = chunk_tokens

    def forward(self, layout: TokenLayout, entropy: bool = False) -> Outputs:
        """Log-probabilities (and entropies) of the tokens in the mask, given what precedes them in their sequence.

        Returns ``[T]`` float32 tensors, 0 where nothing is predicted: outside the mask, and at the first token of each
        sequence.
        """
        return self.predict(self.hidden(layout), layout, entropy)

    def predict(self, states: torch.Tensor, layout: TokenLayout, entropy: bool) -> Outputs:
        """The head of `forward`, from ``states [C, H]``."""
        wanted = layout.prediction
        assert wanted is not None, "a layout with temperatures"
        given = states.index_select(0, wanted.before), self.model.lm_head.weight, wanted.targets, wanted.temperature
        head = chunked_logprobs(
            *given,
            softcap=self.architecture.final_softcap,
            entropy=entropy,
            chunk_tokens=self.chunk_tokens,
            vocabulary=self.vocabulary,
            compiled=self.compiled,
        )
        spread = [None if x is None else x.new_zeros(layout.total).index_copy(0, wanted.index, x) for x in head]
        if self.context is not None:
            spread = [None if x is None else sum_parts(x, self.context.group) for x in spread]
        return Outputs(*spread)
