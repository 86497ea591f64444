"""Bytes of a forward and backward pass, in closed form: what autograd keeps, and what exists for a moment.

The forms follow the code that computes: transformers' layers with packed attention (`models/attention.py`), the chunked head
(`models/logprobs.py`). A test counts what autograd really keeps of every architecture and compares.
"""

from tandem.trainers.planning.batches import MicroBatch
from tandem.trainers.planning.shape import BYTES, Dtype, Shape

FLOAT32 = 4


def kept_by_layer(shape: Shape, batch: MicroBatch, dtype: Dtype) -> float:
    """Bytes that autograd keeps of one layer until its backward pass.

    A norm keeps its float32 input and the normalised one; a projection its input; attention the rotated queries and keys,
    the values and its output; the gated MLP its gate before and after the activation, the other half, and their product.
    """
    size, tokens = BYTES[dtype], batch.tokens
    norm = _norm(shape, dtype)
    a_token = shape.norms * norm * shape.hidden + size * 2 * shape.hidden + size * 4 * shape.intermediate
    if shape.qk_norm:
        a_token += norm * (shape.query + shape.key)
    a_token += size * (2 * shape.query + 2 * shape.key)
    return tokens * a_token + _kept_by_attention(shape, batch, dtype)


def _norm(shape: Shape, dtype: Dtype) -> int:
    """Bytes that a norm keeps of each number."""
    gemma = shape.post_norms
    return FLOAT32 + (FLOAT32 if gemma else BYTES[dtype])


def _kept_by_attention(shape: Shape, batch: MicroBatch, dtype: Dtype) -> float:
    """Beyond queries, keys, values and one output a token."""
    size = BYTES[dtype]
    if shape.attention_softcap:  # no fused kernel: keys and values for every head, and the scores
        repeated = batch.tokens if not batch.shared else batch.behind_prompts
        scores = size + FLOAT32 + (size if dtype == "bfloat16" else 0) + 1  # tanh, softmax, its rounded copy, the mask
        return size * 2 * repeated * shape.query + scores * shape.heads * batch.squares()
    extra = FLOAT32 * shape.heads * batch.tokens  # log-sum-exps
    if batch.shared:
        extra += size * batch.behind_prompts * 2 * shape.key  # keys and values behind copies of their prompts
        extra += size * batch.predicted * 2 * shape.query  # their gathered queries, and their outputs
        for prompt, _ in batch.groups:
            extra += size * prompt * shape.query  # the prompt's output
            extra += size * batch.length * (prompt + batch.length)  # the mask
        extra += 9 * batch.predicted  # which row is whose
    elif len(batch.groups) > 1:
        extra += size * batch.tokens * shape.query  # outputs of several calls, joined; those of one length are one call
    return extra


def kept(shape: Shape, batch: MicroBatch, dtype: Dtype, *, checkpointing: bool = False) -> float:
    """Bytes that autograd keeps of all layers; with ``checkpointing`` the input of each, and one whole layer at a time."""
    one = kept_by_layer(shape, batch, dtype)
    final = _norm(shape, dtype) * shape.hidden * batch.tokens
    rotary = 2 * BYTES[dtype] * shape.head_dim * batch.tokens
    if checkpointing:
        return shape.layers * BYTES[dtype] * shape.hidden * batch.tokens + one + final + rotary
    return shape.layers * one + final + rotary


def passing(shape: Shape, batch: MicroBatch, dtype: Dtype, *, backward: bool) -> float:
    """Bytes that one layer needs for a moment: the widest part of the MLP and its neighbours; gradients in the backward
    pass."""
    width = 3 * shape.intermediate + 4 * shape.hidden
    scores = 0.0
    if shape.attention_softcap:
        scores = (FLOAT32 + 2 * BYTES[dtype]) * shape.heads * batch.squares()
    return BYTES[dtype] * width * batch.tokens * (2 if backward else 1) + scores


def head_kept(shape: Shape, batch: MicroBatch, dtype: Dtype) -> float:
    """Bytes that the head of a language model keeps: the state before each predicted token, and a few numbers of it."""
    return batch.predicted * (BYTES[dtype] * shape.hidden + 20)


def head_forward(shape: Shape, batch: MicroBatch, dtype: Dtype, chunk_tokens: int, *, entropy: bool = False) -> float:
    """Bytes of logits that exist at a time without gradients: the logits and their log-softmax in float32."""
    rows = min(chunk_tokens, batch.predicted)
    copies = 2 + shape.final_softcap
    return FLOAT32 * copies * rows * shape.vocab


def head_backward(shape: Shape, batch: MicroBatch, dtype: Dtype, chunk_tokens: int) -> tuple[float, float]:
    """Bytes at a time in the head's backward pass: of logits, and of the head's own gradient.

    Logits and their softmax are float32, a rounded copy stands beside them in bfloat16; the gradient of the weights is
    summed in float32.
    """
    rows = min(chunk_tokens, batch.predicted)
    a_logit = 2 * FLOAT32 + (BYTES[dtype] if dtype == "bfloat16" else 0) + 2 * FLOAT32 * shape.final_softcap
    gradient = FLOAT32 + (BYTES[dtype] if dtype == "bfloat16" else 0)
    return a_logit * rows * shape.vocab, gradient * shape.embedding
