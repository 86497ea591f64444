"""A Hugging Face causal language model that takes packed sequences and gives log-probabilities."""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tandem.api.engines import Outputs
from tandem.models.architecture import Architecture
from tandem.models.attention import NAME, Packing, check_lengths, positions
from tandem.models.context_parallel import Context
from tandem.models.exchanges import sum_parts
from tandem.models.logprobs import chunked_logprobs
from tandem.models.prefixes import compact
from tandem.models.vocabulary import Vocabulary, vocabulary_parallel_logprobs

_PRODUCTS = ("mm", "addmm", "bmm")


def keeping_products() -> Any:
    """Contexts of a forward pass that keeps the results of matrix products and attention, and of the one that follows."""

    def policy(ctx: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        name = getattr(operator, "__name__", "").partition(".")[0]
        dear = name in _PRODUCTS or name.startswith("_scaled_dot_product")
        return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Hidden(NamedTuple):
    """Last hidden states, without those of repeated prompts."""

    states: torch.Tensor
    """``[C, H]``, normalised."""

    place: torch.Tensor | None
    """``[T]``: the row of each token; None where C = T and every token has its own."""

    first: int = 0
    """Row of ``states[0]``: under context parallelism they are this rank's, ``[C / ranks, H]``."""

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """Which of ``rows`` are among ``states``, bool."""
        return (rows >= self.first) & (rows < self.first + len(self.states))


class PackedModel(nn.Module):
    """Wraps a transformers model, unchanged but for its attention function. Its head is a subclass's.

    Parameters keep their Hugging Face names under the prefix ``model.``.
    """

    def __init__(self, model: nn.Module):
        """``model``: a transformers model whose backbone is called ``model``.

        Raises:
            ConfigError: the architecture is not one that is computed exactly.
        """
        super().__init__()
        self.architecture = Architecture.from_config(model.config)
        self.context: Context | None = None
        """The ranks that the tokens are divided among, where there are several."""

        self.vocabulary: Vocabulary | None = None
        """The part of the vocabulary that this rank has, where it is cut."""

        model.set_attn_implementation(NAME)
        self.model = model

    @property
    def config(self) -> Any:
        return self.model.config

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

    def hidden(self, input_ids: torch.Tensor, cu_seqlens: torch.Tensor, loss_mask: torch.Tensor) -> Hidden:
        """States after each token, ``input_ids [T]``, ``cu_seqlens [N + 1]``.

        A prompt (the tokens before the first one in ``loss_mask [T]``) that several sequences begin with is computed once:
        causal attention makes its states the same in all of them.
        """
        bounds = check_lengths(cu_seqlens, len(input_ids))
        ids, at = input_ids, positions(cu_seqlens, len(input_ids))
        shares = self.context is None or self.context.way == "all_to_all"
        shared = compact(input_ids, bounds, loss_mask) if shares else None
        if shared is None:
            packing = Packing.from_cu_seqlens(cu_seqlens)
        else:
            packing = Packing.from_prompts(cu_seqlens, shared.prompts)
            ids, at = ids[shared.tokens], at[shared.tokens]
        first = 0
        if self.context is not None:
            extra = self.context.padding(len(ids))
            mine = self.context.rows(len(ids) + extra)
            ids, at, first = pad(ids, (0, extra))[mine], pad(at, (0, extra))[mine], mine.start
            packing = packing.divided(self.context, extra)
        states = self.model.model(
            input_ids=ids[None], position_ids=at[None], use_cache=False, packing=packing
        ).last_hidden_state[0]  # [C, H]
        return Hidden(states, None if shared is None else shared.place, first)

    def read_scalar(self, hidden: Hidden, weight: torch.Tensor, total: int) -> torch.Tensor:
        """One number a token, ``[T]`` float32, ``total`` being T, from ``weight [1, H]``."""
        # in float32: bfloat16 has steps of 1/128 between 1 and 2, coarser than what values must tell apart
        scores = (hidden.states.float() @ weight.float().T)[:, 0]  # [C]
        if self.context is not None:
            scores = self.context.place(scores)
        return scores[:total] if hidden.place is None else scores[hidden.place]


class PackedCausalLM(PackedModel):
    """A causal language model; `forward` is all that training needs."""

    def __init__(self, model: nn.Module, *, chunk_tokens: int = 1024):
        """``model``: a transformers causal language model; ``chunk_tokens``: rows of logits that exist at a time.

        Raises:
            ConfigError: the architecture is not one that is computed exactly.
        """
        super().__init__(model)
        self.chunk_tokens = chunk_tokens

    def forward(
        self,
        input_ids: torch.Tensor,
        cu_seqlens: torch.Tensor,
        temperature: torch.Tensor,
        loss_mask: torch.Tensor,
        entropy: bool = False,
    ) -> Outputs:
        """Log-probabilities (and entropies) of the tokens in ``loss_mask``, given what precedes them in their sequence.

        ``input_ids [T]``, ``cu_seqlens [N + 1]``, ``temperature [N]``, ``loss_mask [T]`` bool. Returns ``[T]`` float32
        tensors, 0 where nothing is predicted: outside the mask and at the first token of each sequence.
        """
        states = self.hidden(input_ids, cu_seqlens, loss_mask)
        return self.predict(states, input_ids, cu_seqlens, temperature, loss_mask, entropy)

    def predict(
        self,
        hidden: Hidden,
        input_ids: torch.Tensor,
        cu_seqlens: torch.Tensor,
        temperature: torch.Tensor,
        loss_mask: torch.Tensor,
        entropy: bool,
    ) -> Outputs:
        """The head of `forward`."""
        bounds = cu_seqlens.tolist()
        predicted = loss_mask.clone()
        predicted[[start for start, end in zip(bounds, bounds[1:], strict=False) if start < end]] = False
        index = predicted.nonzero().flatten()  # [M]
        before = index - 1  # the state before a token predicts it
        before = before if hidden.place is None else hidden.place[before]
        if self.context is not None:
            own = hidden.own(before)
            index, before = index[own], before[own] - hidden.first
        of_token = torch.repeat_interleave(temperature, cu_seqlens.diff(), output_size=len(input_ids))
        given = hidden.states.index_select(0, before), self.model.lm_head.weight, input_ids[index], of_token[index]
        settings: dict[str, Any] = {
            "softcap": self.architecture.final_softcap,
            "entropy": entropy,
            "chunk_tokens": self.chunk_tokens,
        }
        if self.vocabulary is None:
            head = chunked_logprobs(*given, **settings)
        else:
            head = vocabulary_parallel_logprobs(*given, self.vocabulary, **settings)
        spread = [None if x is None else x.new_zeros(len(input_ids)).index_copy(0, index, x) for x in head]
        if self.context is not None:
            spread = [None if x is None else sum_parts(x, self.context.group) for x in spread]
        return Outputs(*spread)
