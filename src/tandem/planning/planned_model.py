"""A model in a training engine, as far as it costs anything: how it lies over ranks, and the bytes of its passes.

What autograd keeps, and what exists for a moment, is in closed form. The forms follow the code that computes: transformers'
layers with packed attention (`models/attention.py`), the chunked head (`models/logprobs.py`). A test counts what autograd
really keeps of every architecture and compares. `PlannedModel.piece` is what one rank computes with; where ranks share
tokens (`context`) each has a part of them.
"""

import functools
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

from tandem.engines.train.check import check_heads, check_layout
from tandem.engines.train.micro_batches import PlannedSequence, plan
from tandem.flow.plan import Resident
from tandem.flow.state_parts import Where, footprint
from tandem.models.cpu_attention import fits
from tandem.models.footprint import FLOAT32, Footprint
from tandem.models.logprobs import ROWS_FOR_ONE
from tandem.models.prefixes import MIN_SAVING
from tandem.models.shape import BYTES, Dtype, Shape
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


MOST_SEQUENCES = 20_000
"""Only so many sequences of a larger batch are cut into micro-batches; the rest is assumed to be like them."""


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass: groups of completions behind a common prompt.

    Example: two groups of 3 completions of 5 tokens behind prompts of 10: ``MicroBatch(((10, 3), (10, 3)), 5)`` computes
    2 · (10 + 3 · 5) = 50 tokens and predicts 30.
    """

    groups: tuple[tuple[int, int], ...]
    """(tokens of the prompt, completions) each."""

    length: int
    """Tokens of each completion."""

    @property
    def predicted(self) -> int:
        """Tokens whose log-probability is computed."""
        return self.length * sum(count for _, count in self.groups)

    @property
    def alone(self) -> int:
        """Tokens with a copy of its prompt before each completion."""
        return sum(count * (prompt + self.length) for prompt, count in self.groups)

    @property
    def shared(self) -> bool:
        """True if prompts are computed once: where that saves too little, it is not worth its gathers."""
        saved = sum(prompt * (count - 1) for prompt, count in self.groups)
        return saved > 0 and saved >= MIN_SAVING * self.alone

    @property
    def tokens(self) -> int:
        """Tokens that go through the layers."""
        return sum(prompt + count * self.length for prompt, count in self.groups) if self.shared else self.alone

    def squares(self) -> float:
        """Pairs of a query and a key in one head, none skipped, as soft-capped attention holds them."""
        if not self.shared:
            return sum(count * (prompt + self.length) ** 2 for prompt, count in self.groups)
        return sum(prompt**2 + count * self.length * (prompt + self.length) for prompt, count in self.groups)


class Step(NamedTuple):
    """The work of one optimizer step, or of one pass without gradients."""

    largest: MicroBatch
    count: int
    """Micro-batches of each rank."""


@functools.lru_cache(64)
def cut_step(
    groups: int, completions: int, prompt: int, length: int, *, most: int, ranks: int = 1, together: bool = False
) -> Step:
    """``groups`` prompts with ``completions`` each, cut into micro-batches of at most ``most`` tokens for each rank.

    ``together``: the completions of a prompt are one unit, as the sides of a pair are.
    """
    taken = max(min(groups, ranks), min(groups, MOST_SEQUENCES // completions))
    owner = [group for group in range(taken) for _ in range(completions)]
    items = [PlannedSequence(group, prompt, length, group if together else None) for group in owner]
    planned = plan(items, most, ranks)
    counts = (Counter(owner[i] for i in indices) for rank in planned for indices in rank)
    batches = [MicroBatch(tuple((prompt, count) for count in one.values()), length) for one in counts]
    return Step(max(batches, key=lambda batch: batch.tokens), len(planned[0]))


def kept_by_layer(model: PlannedModel, batch: MicroBatch) -> float:
    """Bytes that autograd keeps of one layer until its backward pass.

    A norm keeps its float32 input and the normalised one; a projection its input; attention the rotated queries and keys,
    the values and its output; the gated MLP its gate before and after the activation, the other half, and their product.
    Beside adapters, norms and matrices are frozen: they keep what their input's gradient needs, and the adapters theirs.
    """
    shape, size, context, adapters = model.piece, BYTES[model.dtype], model.layout.context, model.adapters
    norm = _norm(model)
    inputs, product, low_rank = 2, 1, 0
    if adapters is not None:
        inputs = adapters.has("q_proj", "k_proj", "v_proj") + adapters.has("gate_proj", "up_proj")
        product, low_rank = int(adapters.has("down_proj")), adapters.rank * len(adapters.modules)
        low_rank += 2 * sum(shape.linears[name][0] for name in adapters.modules) if adapters.dropout else 0
    a_token = shape.norms * norm * shape.hidden + size * inputs * shape.hidden + size * (3 + product) * shape.intermediate
    if shape.qk_norm:
        a_token += norm * (shape.query + shape.key)
    a_token += size * (2 * shape.query + 2 * shape.key + low_rank)
    if context > 1:  # the output goes back to the ranks whose tokens it is of, or is joined
        a_token += size * shape.query
    gathered = size * 2 * shape.key * batch.tokens * (context - 1) if model.gathers_keys else 0
    return (batch.tokens * a_token + gathered + _kept_by_attention(model, batch)) / context


def _norm(model: PlannedModel) -> int:
    """Bytes that a norm keeps of each number; what its own gradient needs is not kept where it has none."""
    if model.adapters is not None:
        return FLOAT32
    return FLOAT32 + (FLOAT32 if model.shape.post_norms else BYTES[model.dtype])


def _kept_by_attention(model: PlannedModel, batch: MicroBatch) -> float:
    """Beyond queries, keys, values and one output a token."""
    shape, size = model.piece, BYTES[model.dtype]
    if shape.attention_softcap:  # no fused kernel: keys and values for every head, and the scores
        repeated = batch.alone
        scores = size + FLOAT32 + (size if model.dtype == "bfloat16" else 0) + 1  # tanh, softmax, its rounded copy, the mask
        return size * 2 * repeated * shape.query + scores * shape.heads * batch.squares()
    extra = FLOAT32 * shape.heads * batch.tokens  # log-sum-exps
    if model.on_cpu and fits(shape.head_dim):
        return extra
    output = size * batch.tokens * shape.query  # the input of the next projection
    joined = model.adapters is None or model.adapters.has("o_proj")
    if batch.shared:  # keys and values behind copies of their prompts; gathered queries and outputs; the masks
        extra += size * batch.alone * 2 * shape.key + (size * 2 * shape.query + 9) * batch.predicted
        for prompt, _ in batch.groups:
            extra += size * (prompt * shape.query + batch.length * (prompt + batch.length))
        return extra if joined else extra - output
    return extra + output if len(batch.groups) > 1 and joined else extra


def activation_bytes(model: PlannedModel, batch: MicroBatch) -> float:
    """Bytes that autograd keeps of all layers and the head; with checkpointing the input of each layer (and the results of
    products and attention, where it is selective), and one whole layer at a time."""
    shape, size, context = model.piece, BYTES[model.dtype], model.layout.context
    tokens = batch.tokens / context
    one = kept_by_layer(model, batch)
    around = (_norm(model) * shape.hidden + 2 * size * shape.head_dim) * tokens
    if model.head != "scalar":  # the state before each predicted token, and a few numbers of it
        around += batch.predicted * (size * shape.hidden + 20) / context
    if not model.checkpointing:
        begun = 1 if model.adapters is None else 0.9  # before the first adapter nothing has a gradient
        return (shape.layers - 1 + begun) * one + around
    results = shape.hidden
    if model.selective:
        results += 2 * shape.query + 2 * shape.key + 2 * shape.hidden + 2 * shape.intermediate
    return shape.layers * size * results * tokens + one + around


def passing(model: PlannedModel, batch: MicroBatch, *, backward: bool) -> float:
    """Bytes that one layer needs for a moment: the widest part of the MLP and its neighbours, or the gradients of keys and
    values of each head in float32; gradients in the backward pass."""
    shape, size = model.piece, BYTES[model.dtype]
    widest = size * (3 * shape.intermediate + 4 * shape.hidden) * batch.tokens * (2 if backward else 1)
    if shape.attention_softcap:
        widest += (FLOAT32 + 2 * size) * shape.heads * batch.squares()
    elif backward and model.on_cpu and fits(shape.head_dim):
        widest = max(widest, (2 * FLOAT32 * shape.query + size * (2 * shape.query + 2 * shape.key)) * batch.tokens)
    return widest / model.layout.context


def head_bytes(model: PlannedModel, batch: MicroBatch, *, backward: bool) -> tuple[float, float]:
    """Bytes of logits at a time, and of the head's own gradient in its backward pass, if it is trained.

    Logits and their softmax are float32, and in bfloat16 a rounded copy of them, and of their gradient, stands beside them;
    the gradient of the weights is summed in float32. Compiled kernels (bfloat16 on a CPU, `models/logit_kernels.py`) hold
    four times as many rows in bfloat16 alone, and make a float32 sum only of several chunks.
    """
    shape, size = model.piece, BYTES[model.dtype]
    predicted, rounded = -(-batch.predicted // model.layout.context), 0 if model.dtype == "float32" else size
    a_logit, rows, summed = FLOAT32 * (2 + shape.final_softcap) + rounded, model.chunk_tokens, True
    if backward:
        a_logit = 2 * FLOAT32 * (1 + shape.final_softcap) + 2 * rounded
    if model.on_cpu and model.dtype == "bfloat16" and model.layout.tensor == 1:
        a_logit, rows = size, ROWS_FOR_ONE * rows
        summed = predicted > rows
    gradient = (rounded + FLOAT32 * summed) * shape.embedding if backward and model.adapters is None else 0
    return float(a_logit * min(rows, predicted) * shape.vocab), float(gradient)
