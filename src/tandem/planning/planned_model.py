"""Predicts the memory of a model in a training engine: its layout over ranks, and the bytes of its passes.

The bytes of the layers are counted, by running their code on tensors without memory: two layers, which stand for all others,
are on the device ``meta``, where operators compute only sizes. Temporary memory inside compiled kernels is not seen. Closed
formulas give the bytes of the chunked head (`models/logprobs.py`). A test compares them with the bytes that autograd keeps
in every architecture. `PlannedModel.piece` is the tensor-parallel piece of one rank; with context parallelism each rank has
a part of the tokens.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.fx.experimental import _config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.config.errors import ConfigError, kind_and_text
from tandem.config.train_engine import LoRAConfig, TrainEngineConfig
from tandem.engines.train.micro_batches import PlannedSequence, plan
from tandem.engines.train.spread import check_layout
from tandem.flow.planned_models import Resident
from tandem.flow.sleep_plan import footprint
from tandem.models.attention import MIN_SAVING, plan_calls
from tandem.models.context_parallel import refuse_uneven_heads
from tandem.models.hardware import Hardware
from tandem.models.logprobs import ROWS_FOR_ONE
from tandem.models.lora import put_adapters
from tandem.models.packed import PackedCausalLM, TokenLayout
from tandem.models.shape import BYTES, FLOAT32, Adapters, Dtype, Footprint, Shape

META = torch.device("meta")


class NotCounted(ConfigError):
    """A model whose memory cannot be planned, because its code does not run without memory."""


class PassBytes(NamedTuple):
    """Bytes of the layers of one pass, without parameters, gradients of parameters, and the head."""

    kept: int
    """Bytes that autograd keeps of all layers from the forward to the backward pass."""

    backward: int
    """Most bytes of temporary tensors in the backward pass, in addition to ``kept``."""

    scoring: int
    """Most bytes of a pass without gradients."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operators make, for as long as these exist."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def know(self, *tensors: torch.Tensor) -> None:
        """Leaves out the memory of these tensors."""
        self._known.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = operator(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in self._known:
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return made

    def _gone(self, known: int, num_bytes: int) -> None:
        self._known.discard(known)
        self.now -= num_bytes


@functools.lru_cache(256)
def count_pass(
    shape: Shape, dtype: Dtype, groups: Sequence[tuple[int, int]], length: int, *, adapters: Adapters | None = None,
    checkpointing: bool = False, selective: bool = False, gpu: bool = False,
) -> PassBytes:  # fmt: skip
    """Returns the bytes of the layers of a model in a pass over one micro-batch: ``groups`` of completions of ``length``
    tokens, see `MicroBatch`. ``gpu``: computes attention with the kernel for GPUs.

    Raises:
        NotCounted: the code of this architecture does not run on tensors without memory.
    """
    try:
        model = _model(shape, dtype, adapters)
        return _count(model, shape, _layout(model, groups, length, gpu=gpu), checkpointing, selective)
    except Exception as error:  # boundary: code of transformers and torch, whose versions differ
        raise NotCounted(
            f"the memory of a model of type {shape.kind} cannot be planned: its layers do not run on tensors without memory "
            f"({kind_and_text(error)})"
        ) from error


def _count(model: PackedCausalLM, shape: Shape, layout: TokenLayout, checkpointing: bool, selective: bool) -> PassBytes:
    if checkpointing:
        model.enable_gradient_checkpointing(selective)
    live, at = LiveBytes(), list[int]()
    live.know(*model.parameters(), *model.buffers())
    for module in (model.decoder.layers[-1], model.decoder.norm):
        module.register_forward_pre_hook(lambda *_: at.append(live.now))
    for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    # all completions are equally long, so that no padding is left out
    with _config.patch(meta_nonzero_assume_all_nonzero=True), live:
        with torch.no_grad():
            model.hidden(layout)
        scoring, live.most = live.most, 0
        at.clear()
        states = model.hidden(layout)
        kept = live.now - states.untyped_storage().nbytes()
        loss = states.sum()
        del states
        live.most = 0
        loss.backward()
    return PassBytes(kept + (shape.layers - 2) * (at[1] - at[0]), live.most - kept, scoring)


def _model(shape: Shape, dtype: Dtype, adapters: Adapters | None) -> PackedCausalLM:
    """Returns a model of two layers of this shape, with a small vocabulary. With adapters all else is frozen."""
    config = AutoConfig.for_model(
        shape.kind, num_hidden_layers=2, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        attention_bias=shape.qkv_bias, mlp_bias=shape.mlp_bias, max_position_embeddings=shape.context,
        vocab_size=8, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    if not shape.attention_softcap:
        config.attn_logit_softcapping = None
    number = getattr(torch, dtype)
    with META:
        model = PackedCausalLM(AutoModelForCausalLM.from_config(config, dtype=number))
    if adapters is not None:
        lora = LoRAConfig(rank=adapters.rank, target_modules=adapters.modules, dropout=0.5 if adapters.dropout else 0.0)
        put_adapters(model, lora, number, seed=0)
        model.to(number)
    return model


def _layout(model: PackedCausalLM, groups: Sequence[tuple[int, int]], length: int, *, gpu: bool) -> TokenLayout:
    rows = [
        torch.cat([torch.full((prompt,), number), torch.zeros(length, dtype=torch.int64)])
        for number, (prompt, count) in enumerate(groups, 1)
        for _ in range(count)
    ]
    mask = torch.cat([torch.arange(len(row)) >= len(row) - length for row in rows])
    bounds = torch.tensor([0, *map(len, rows)]).cumsum(0)
    layout = model.lay_out(torch.cat(rows), bounds, mask, torch.ones(len(rows)), META)
    calls = tuple(call.on(META) for call in plan_calls(layout.packing.runs)) if gpu else ()
    return replace(layout, packing=replace(layout.packing, calls=calls))


@dataclass(frozen=True, kw_only=True)
class PlannedModel(Footprint):
    """A model in a training engine, with the properties from which the bytes of its passes follow."""

    role: str
    config: TrainEngineConfig
    on_cpu: bool = False
    """True if the model computes on a CPU, which has its own attention kernel."""

    own: bool = True
    """False: this is the actor's model without its adapters, which uses the actor's memory."""

    trunk_of: str | None = None
    """Name of the model in whose memory the frozen weights are; None: in its own."""

    mini_batches: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks over which the model is distributed."""
        return self.layout.ranks

    @property
    def sync_each(self) -> bool:
        """True if gradients are summed over ranks after each micro-batch; False: once a step."""
        return self.config.gradient_sync == "micro_batch" or self.offload

    @property
    def gathers_keys(self) -> bool:
        """True if context parallelism gathers keys and values; False: it exchanges heads for tokens."""
        ranks = self.layout.tensor * self.layout.context
        return self.layout.context > 1 and bool(self.shape.heads % ranks or self.shape.kv_heads % ranks)


def planned_model(resident: Resident, where: Hardware, shape: Shape) -> PlannedModel:
    """Returns the planned model of a resident with a train engine, or of a judge's model, which is in an inference engine.

    Raises:
        ConfigError: the engine would refuse the configuration.
    """
    config, head = resident.engine, "lm" if resident.head == "text" else resident.head
    assert config is not None, "the inference engine is no model of its own"
    found = footprint(replace(resident, head=head), shape, where)
    check_layout(config, found.layout, resident.key, cpu=where.cpu, rounded=found.dtype != "float32")
    refuse_uneven_heads(shape.heads, shape.kv_heads, found.layout.tensor, resident.key)
    more = {"trunk_of": resident.trunk_of, "mini_batches": resident.mini_batches}
    return PlannedModel(**vars(found), role=resident.name, config=config, on_cpu=where.cpu, **more)


MOST_SEQUENCES = 20_000
"""Largest number of sequences that are cut into micro-batches; the others of a larger batch are assumed to be alike."""


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass: groups of completions, each group with a common prompt.

    Example: two groups of 3 completions of 5 tokens behind prompts of 10: ``MicroBatch(((10, 3), (10, 3)), 5)`` computes
    2 · (10 + 3 · 5) = 50 tokens and predicts 30.
    """

    groups: tuple[tuple[int, int], ...]
    """(tokens of the prompt, number of completions) of each group."""

    length: int
    """Tokens of each completion."""

    @property
    def predicted(self) -> int:
        """Number of tokens whose log-probability is computed."""
        return self.length * sum(count for _, count in self.groups)

    @property
    def alone(self) -> int:
        """Number of tokens if each completion has its own copy of the prompt."""
        return sum(count * (prompt + self.length) for prompt, count in self.groups)

    @property
    def shared(self) -> bool:
        """True if each prompt is computed once for its group; False if it saves less than `MIN_SAVING` of the tokens."""
        saved = sum(prompt * (count - 1) for prompt, count in self.groups)
        return saved > 0 and saved >= MIN_SAVING * self.alone

    @property
    def tokens(self) -> int:
        """Number of tokens that the layers compute."""
        return sum(prompt + count * self.length for prompt, count in self.groups) if self.shared else self.alone


class Step(NamedTuple):
    """The work of one optimizer step, or of one pass without gradients."""

    largest: MicroBatch
    count: int
    """Number of micro-batches of each rank."""


@functools.lru_cache(64)
def cut_step(
    groups: int, completions: int, prompt: int, length: int, *, most: int, ranks: int = 1, together: bool = False
) -> Step:
    """Cuts ``groups`` prompts with ``completions`` each into micro-batches of at most ``most`` tokens for each rank.

    ``together``: True keeps the completions of a prompt in one micro-batch, such as the two sides of a pair.
    """
    taken = max(min(groups, ranks), min(groups, MOST_SEQUENCES // completions))
    owner = [group for group in range(taken) for _ in range(completions)]
    items = [PlannedSequence(group, prompt, length, group if together else None) for group in owner]
    planned = plan(items, most, ranks)
    counts = (Counter(owner[i] for i in indices) for rank in planned for indices in rank)
    batches = [MicroBatch(tuple((prompt, count) for count in one.values()), length) for one in counts]
    return Step(max(batches, key=lambda batch: batch.tokens), len(planned[0]))


def pass_bytes(model: PlannedModel, batch: MicroBatch) -> PassBytes:
    """Returns the bytes of the layers in a pass on one rank, without those of the head.

    Ranks that share the tokens of sequences (context parallelism) have a part each, and besides it the output of attention,
    which is sent back to them, or keys and values of all tokens.
    """
    config, context, shape = model.config, model.layout.context, model.piece
    counted = count_pass(
        shape, model.dtype, batch.groups, batch.length, adapters=model.adapters, gpu=not model.on_cpu,
        checkpointing=config.gradient_checkpointing, selective=config.selective_checkpointing,
    )  # fmt: skip
    if context == 1:
        return counted
    sent = shape.query + (2 * shape.key * (context - 1) if model.gathers_keys else 0)
    layers = 1 if config.gradient_checkpointing else shape.layers
    kept, *moments = (one // context for one in counted)
    return PassBytes(kept + layers * BYTES[model.dtype] * sent * batch.tokens // context, *moments)


def kept_by_head(model: PlannedModel, batch: MicroBatch) -> int:
    """Returns the bytes that the head keeps: the hidden state before each predicted token, and a few numbers per token."""
    if model.head == "scalar":
        return 0
    return batch.predicted * (BYTES[model.dtype] * model.piece.hidden + 20) // model.layout.context


def head_bytes(model: PlannedModel, batch: MicroBatch, *, backward: bool) -> tuple[float, float]:
    """Returns (bytes of one chunk of logits, bytes of the gradient of the head's weights in the backward pass, if trained).

    Logits and their softmax are float32; in bfloat16 there are also rounded copies of the logits and of their gradient. The
    gradient of the weights is summed in float32. Compiled kernels (bfloat16 on a CPU, `models/logprobs.py`) hold four times
    as many rows, only in bfloat16, and sum in float32 only if there are several chunks.
    """
    shape, size = model.piece, BYTES[model.dtype]
    predicted, rounded = -(-batch.predicted // model.layout.context), 0 if model.dtype == "float32" else size
    a_logit, rows, summed = FLOAT32 * (2 + shape.final_softcap) + rounded, model.config.chunk_tokens, True
    if backward:
        a_logit = 2 * FLOAT32 * (1 + shape.final_softcap) + 2 * rounded
    if model.on_cpu and model.dtype == "bfloat16" and model.layout.tensor == 1:
        a_logit, rows = size, ROWS_FOR_ONE * rows
        summed = predicted > rows
    gradient = (rounded + FLOAT32 * summed) * shape.embedding if backward and model.adapters is None else 0
    return float(a_logit * min(rows, predicted) * shape.vocab), float(gradient)
