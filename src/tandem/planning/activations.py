"""Bytes of a forward and backward pass, in closed form: what autograd keeps, and what exists for a moment.

The forms follow the code that computes: transformers' layers with packed attention (`models/attention.py`), the chunked head
(`models/logprobs.py`). A test counts what autograd really keeps of every architecture and compares. ``shape`` is what one
rank computes with (`Shape.piece`); where ranks share tokens each has a part of them, ``ActivationSettings.context``.
"""

from dataclasses import dataclass

from tandem.models.cpu_attention import fits
from tandem.models.footprint import Adapters
from tandem.models.logprobs import ROWS_FOR_ONE
from tandem.models.shape import BYTES, Dtype, Shape
from tandem.planning.batches import MicroBatch
from tandem.planning.planned_model import PlannedModel

FLOAT32 = 4


@dataclass(frozen=True)
class ActivationSettings:
    """The settings of a model that change the activations of one rank."""

    checkpointing: bool = False
    selective: bool = False
    adapters: Adapters | None = None
    context: int = 1
    """Ranks that share the tokens."""

    gathers: bool = False
    """They gather keys and values, and do not exchange heads."""

    on_cpu: bool = False
    """Attention is one call of all sequences where the kernel takes heads of this dimension (`models/cpu_attention.py`)."""

    @classmethod
    def of(cls, model: PlannedModel) -> "ActivationSettings":
        """The spread of a model."""
        layout = (model.layout.context, model.gathers_keys)
        return cls(model.checkpointing, model.selective, model.adapters, *layout, model.on_cpu)

    def seen(self, batch: MicroBatch) -> MicroBatch:
        """The micro-batch as it is computed: where keys are gathered, prompts are not shared."""
        if not self.gathers:
            return batch
        alone = tuple((prompt, 1) for prompt, count in batch.groups for _ in range(count))
        return MicroBatch(alone, batch.length)


WHOLE = ActivationSettings()


def kept_by_layer(shape: Shape, batch: MicroBatch, dtype: Dtype, spread: ActivationSettings = WHOLE) -> float:
    """Bytes that autograd keeps of one layer until its backward pass.

    A norm keeps its float32 input and the normalised one; a projection its input; attention the rotated queries and keys,
    the values and its output; the gated MLP its gate before and after the activation, the other half, and their product.
    Beside adapters, norms and matrices are frozen: they keep what their input's gradient needs, and the adapters theirs.
    """
    size, tokens, adapters = BYTES[dtype], batch.tokens, spread.adapters
    norm = _norm(shape, dtype, adapters)
    inputs, product = 2, 1
    if adapters is not None:
        inputs = adapters.has("q_proj", "k_proj", "v_proj") + adapters.has("gate_proj", "up_proj")
        product = int(adapters.has("down_proj"))
    a_token = shape.norms * norm * shape.hidden + size * inputs * shape.hidden + size * (3 + product) * shape.intermediate
    if shape.qk_norm:
        a_token += norm * (shape.query + shape.key)
    a_token += size * (2 * shape.query + 2 * shape.key) + size * _of_adapters(shape, adapters)
    if spread.context > 1:  # the output goes back to the ranks whose tokens it is of, or is joined
        a_token += size * shape.query
    more = size * 2 * shape.key * tokens * (spread.context - 1) if spread.gathers else 0  # of all tokens
    return (tokens * a_token + more + _kept_by_attention(shape, batch, dtype, spread)) / spread.context


def _of_adapters(shape: Shape, adapters: Adapters | None) -> int:
    """Numbers of a token: what B gets; with dropout the mask and what is left of the input."""
    if adapters is None:
        return 0
    dropped = 2 * sum(shape.linears[name][0] for name in adapters.modules) if adapters.dropout else 0
    return adapters.rank * len(adapters.modules) + dropped


def _norm(shape: Shape, dtype: Dtype, adapters: Adapters | None = None) -> int:
    """Bytes that a norm keeps of each number; what its own gradient needs is not kept where it has none."""
    if adapters is not None:
        return FLOAT32
    gemma = shape.post_norms
    return FLOAT32 + (FLOAT32 if gemma else BYTES[dtype])


def _kept_by_attention(shape: Shape, batch: MicroBatch, dtype: Dtype, spread: ActivationSettings) -> float:
    """Beyond queries, keys, values and one output a token."""
    size = BYTES[dtype]
    if shape.attention_softcap:  # no fused kernel: keys and values for every head, and the scores
        repeated = batch.tokens if not batch.shared else batch.behind_prompts
        scores = size + FLOAT32 + (size if dtype == "bfloat16" else 0) + 1  # tanh, softmax, its rounded copy, the mask
        return size * 2 * repeated * shape.query + scores * shape.heads * batch.squares()
    joined = spread.adapters is None or spread.adapters.has("o_proj")  # the input of the next projection
    extra = FLOAT32 * shape.heads * batch.tokens  # log-sum-exps
    if spread.on_cpu and fits(shape.head_dim):
        return extra
    if batch.shared:
        extra += size * batch.behind_prompts * 2 * shape.key  # keys and values behind copies of their prompts
        extra += size * batch.predicted * 2 * shape.query  # their gathered queries, and their outputs
        for prompt, _ in batch.groups:
            extra += size * prompt * shape.query  # the prompt's output
            extra += size * batch.length * (prompt + batch.length)  # the mask
        extra += 9 * batch.predicted  # which row is whose
        extra -= 0 if joined else size * batch.tokens * shape.query
    elif len(batch.groups) > 1 and joined:
        extra += size * batch.tokens * shape.query  # outputs of several calls, joined; those of one length are one call
    return extra


def activation_bytes(shape: Shape, batch: MicroBatch, dtype: Dtype, spread: ActivationSettings = WHOLE) -> float:
    """Bytes that autograd keeps of all layers; with checkpointing the input of each (and the results of products and
    attention, where it is selective), and one whole layer at a time."""
    seen = spread.seen(batch)
    tokens = seen.tokens / spread.context
    one = kept_by_layer(shape, seen, dtype, spread)
    final = _norm(shape, dtype, spread.adapters) * shape.hidden * tokens
    rotary = 2 * BYTES[dtype] * shape.head_dim * tokens
    if spread.checkpointing:
        an_input = BYTES[dtype] * shape.hidden * tokens
        results = _results_of_layer(shape, dtype, spread) * tokens if spread.selective else 0
        return shape.layers * (an_input + results) + one + final + rotary
    return shape.layers * one + final + rotary - _not_begun(shape, dtype, spread) * tokens


def _not_begun(shape: Shape, dtype: Dtype, spread: ActivationSettings) -> float:
    """Bytes of a token that the first layer does not keep: before the first adapter nothing has a gradient."""
    if spread.adapters is None:
        return 0.0
    norm = _norm(shape, dtype, spread.adapters)
    found = norm * shape.hidden
    if not spread.adapters.has("q_proj", "k_proj", "v_proj"):
        found += BYTES[dtype] * (shape.query + 2 * shape.key) + FLOAT32 * shape.heads
        found += norm * (shape.query + shape.key) if shape.qk_norm else 0
        found += 0 if spread.adapters.has("o_proj") else BYTES[dtype] * shape.query
    return found


def _results_of_layer(shape: Shape, dtype: Dtype, spread: ActivationSettings) -> float:
    """Bytes of a token: what a layer's products and attention give."""
    width = 2 * shape.query + 2 * shape.key + 2 * shape.hidden + 2 * shape.intermediate
    if spread.adapters is not None:
        width += spread.adapters.rank * len(spread.adapters.modules)
        width += sum(shape.linears[name][1] for name in spread.adapters.modules)
    return BYTES[dtype] * width + FLOAT32 * shape.heads


def passing(shape: Shape, batch: MicroBatch, dtype: Dtype, *, backward: bool, spread: ActivationSettings = WHOLE) -> float:
    """Bytes that one layer needs for a moment: the widest part of the MLP and its neighbours, or the gradients of keys and
    values of each head in float32; gradients in the backward pass."""
    seen = spread.seen(batch)
    width = 3 * shape.intermediate + 4 * shape.hidden
    scores = 0.0
    if shape.attention_softcap:
        scores = (FLOAT32 + 2 * BYTES[dtype]) * shape.heads * seen.squares()
    widest = BYTES[dtype] * width * seen.tokens * (2 if backward else 1) + scores
    if backward and spread.on_cpu and fits(shape.head_dim) and not shape.attention_softcap:
        sums = 2 * FLOAT32 * shape.query
        widest = max(widest, (sums + BYTES[dtype] * (2 * shape.query + 2 * shape.key)) * seen.tokens)
    return widest / spread.context


def head_kept(shape: Shape, batch: MicroBatch, dtype: Dtype, *, context: int = 1) -> float:
    """Bytes that the head of a language model keeps: the state before each predicted token, and a few numbers of it."""
    return batch.predicted * (BYTES[dtype] * shape.hidden + 20) / context


def head_forward(
    shape: Shape,
    batch: MicroBatch,
    chunk_tokens: int,
    dtype: Dtype = "float32",
    *,
    context: int = 1,
    compiled: bool = False,
) -> float:
    """Bytes of logits that exist at a time without gradients: the logits and their log-softmax in float32, beside the logits
    in bfloat16 that they were; ``compiled``: the logits of four times as many rows in bfloat16."""
    rows = -(-batch.predicted // context)
    if compiled:
        return float(BYTES["bfloat16"] * min(ROWS_FOR_ONE * chunk_tokens, rows) * shape.vocab)
    a_logit = FLOAT32 * (2 + shape.final_softcap) + _rounded(dtype)
    return float(a_logit * min(chunk_tokens, rows) * shape.vocab)


def _rounded(dtype: Dtype) -> int:
    """Bytes of a logit as it leaves the product, where the softmax is of another number."""
    return BYTES[dtype] if dtype == "bfloat16" else 0


def head_backward(
    shape: Shape,
    batch: MicroBatch,
    dtype: Dtype,
    chunk_tokens: int,
    *,
    context: int = 1,
    frozen: bool = False,
    compiled: bool = False,
) -> tuple[float, float]:
    """Bytes at a time in the head's backward pass: of logits, and of the head's own gradient.

    Logits and their softmax are float32, a rounded copy of them and of their gradient stands beside them in bfloat16; the
    gradient of the weights is summed in float32, if they are not ``frozen``.
    ``compiled``: the gradient of the logits is written over them, and a sum in float32 is made only of several chunks.
    """
    if compiled:
        logits = head_forward(shape, batch, chunk_tokens, context=context, compiled=True)
        several = -(-batch.predicted // context) > ROWS_FOR_ONE * chunk_tokens
        return logits, 0.0 if frozen else float((BYTES[dtype] + FLOAT32 * several) * shape.embedding)
    rows = min(chunk_tokens, -(-batch.predicted // context))
    a_logit = 2 * FLOAT32 + 2 * _rounded(dtype) + 2 * FLOAT32 * shape.final_softcap
    gradient = FLOAT32 + _rounded(dtype)
    return a_logit * rows * shape.vocab, 0.0 if frozen else gradient * shape.embedding
