"""Bytes of a forward and backward pass, in closed form: what autograd keeps, and what exists for a moment.

The forms follow the code that computes: transformers' layers with packed attention (`models/attention.py`), the chunked head
(`models/logprobs.py`). A test counts what autograd really keeps of every architecture and compares. `PlannedModel.piece` is
what one rank computes with; where ranks share tokens (`context`) each has a part of them.
"""

from tandem.models.cpu_attention import fits
from tandem.models.footprint import FLOAT32
from tandem.models.logprobs import ROWS_FOR_ONE
from tandem.models.shape import BYTES
from tandem.planning.batches import MicroBatch
from tandem.planning.planned_model import PlannedModel


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
