"""Attention over packed sequences, registered with transformers as ``tandem_packed``.

Each token sees its own sequence only, causally. On a CPU one compiled kernel takes all sequences and the prompts that they
share (see cpu_attention.py); where it cannot, each sequence is one call of torch's fused kernel, and neighbours of equal
length go together. On a GPU one variable-length kernel takes all of them, and a second one the completions that share a
prompt (see prefixes.py). All this arrives as the keyword argument ``packing``, which transformers hands down to every layer.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from tandem.models import cpu_attention
from tandem.models.context_parallel import Context
from tandem.models.cpu_attention import QueryRange, QueryRanges
from tandem.models.prefixes import PromptCompletions
from tandem.models.upload import upload
from tandem.models.varlen import KERNEL, Varlen, takes_kernel

NAME = "tandem_packed"


class LengthRun(NamedTuple):
    """Neighbouring sequences of equal length."""

    count: int
    length: int

    @property
    def tokens(self) -> int:
        return self.count * self.length


@dataclass(frozen=True)
class Packing:
    """The places of the sequences of a packed batch.

    Example: lengths 3, 3, 5 → ``cu_seqlens [0, 3, 6, 11]``, runs (2 of 3), (1 of 5)
    """

    cu_seqlens: torch.Tensor
    """``[N + 1]`` int32 on the device of the model."""

    runs: tuple[LengthRun | PromptCompletions, ...]
    """In the order of their tokens."""

    longest: int

    context: Context | None = None
    """The ranks that the tokens are divided among; all of them have the same packing, that of all tokens."""

    calls: tuple["AttentionCall", ...] = ()
    """The variable-length calls on a GPU that together are attention of all tokens."""

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: torch.Tensor) -> "Packing":
        """``cu_seqlens [N + 1]``; empty sequences are fine."""
        lengths = [length for length in cu_seqlens.diff().tolist() if length > 0]
        runs = tuple(LengthRun(len(list(same)), length) for length, same in itertools.groupby(lengths))
        return cls(cu_seqlens.to(torch.int32), runs, max(lengths, default=0))

    @classmethod
    def from_prompts(cls, cu_seqlens: torch.Tensor, prompts: Sequence[PromptCompletions]) -> "Packing":
        """Prompts with their completions; ``cu_seqlens`` is that of the batch that they came from."""
        longest = max(prompt.length + max(prompt.completions) for prompt in prompts)
        return cls(cu_seqlens.to(torch.int32), tuple(prompts), longest)

    @functools.cached_property
    def segments(self) -> QueryRanges:
        """The same for the kernel of a CPU."""
        groups, start = [], 0
        for run in self.runs:
            if isinstance(run, LengthRun):
                for _ in range(run.count):
                    rows = range(start, start + run.length)
                    groups.append([QueryRange(rows, rows)])
                    start = rows.stop
                continue
            prompt = range(start, start + run.length)
            group, start = [QueryRange(prompt, prompt)] if prompt else [], prompt.stop
            for length in run.completions:
                rows = range(start, start + length)
                group += [QueryRange(rows, rows, prompt)] if rows else []
                start = rows.stop
            groups.append(group)
        return QueryRanges.of(groups)

    def on(self, device: torch.device) -> "Packing":
        """The same for a device; a GPU that has a kernel for them gets the calls that it attends by."""
        moved = replace(self, cu_seqlens=upload(self.cu_seqlens, device))
        if device.type != "cuda" or not takes_kernel(device):
            return moved
        return replace(moved, calls=tuple(call.on(device) for call in plan_calls(self.runs)))

    def divided(self, context: Context, extra: int) -> "Packing":
        """The same for a row of which each rank of ``context`` has a piece; ``extra`` tokens behind it fill it up."""
        if extra == 0:
            return replace(self, context=context)
        runs = (*self.runs, LengthRun(1, extra))
        return Packing(pad(self.cu_seqlens, (0, 1), value=int(self.cu_seqlens[-1]) + extra), runs, self.longest, context)


class AttentionCall(NamedTuple):
    """One variable-length call. The queries of a sequence are the last of its keys."""

    cu_queries: torch.Tensor
    """``[sequences + 1]`` int32."""

    cu_keys: torch.Tensor
    longest_query: int
    longest_key: int
    queries: torch.Tensor | None = None
    """The tokens that ask, int64; None: all, in order."""

    keys: torch.Tensor | None = None
    """The tokens that are asked, those of a shared prompt once for each completion; None: all, in order."""

    def on(self, device: torch.device) -> "AttentionCall":
        """The same with its tensors on a device."""
        return AttentionCall(*(upload(x, device) if isinstance(x, torch.Tensor) else x for x in self))


def plan_calls(runs: Sequence[LengthRun | PromptCompletions]) -> tuple[AttentionCall, ...]:
    """The calls that together are attention of these tokens: one if no prompt is shared; else one for the prompts and what
    has none, and one for the completions, whose keys are those of their prompt and their own.

    Example: a prompt of 2 with completions of 1 and 3 → queries (0 1), keys (0 1); queries (2), (3 4 5), keys (0 1 2),
    (0 1 3 4 5)
    """
    alone: list[tuple[range, tuple[range, ...]]] = []
    completions: list[tuple[range, tuple[range, ...]]] = []
    start = 0
    for run in runs:
        lengths = run.completions if isinstance(run, PromptCompletions) else (run.length,) * run.count
        prompt = range(start, start + (run.length if isinstance(run, PromptCompletions) else 0))
        start = prompt.stop
        if prompt:
            alone.append((prompt, (prompt,)))
        for length in lengths:
            rows = range(start, start + length)
            start += length
            if rows:
                (completions if prompt else alone).append((rows, (prompt, rows)))
    if not completions:
        return (_call(alone, indexed=False),)
    return tuple(_call(part, indexed=True) for part in (alone, completions) if part)


def _call(sequences: Sequence[tuple[range, tuple[range, ...]]], *, indexed: bool) -> AttentionCall:
    """``sequences``: the tokens that ask, and the ranges of those that are asked. ``indexed``: not all, in order."""
    queries = [len(rows) for rows, _ in sequences]
    keys = [sum(map(len, parts)) for _, parts in sequences]
    bounds = (torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32) for lengths in (queries, keys))
    call = AttentionCall(*bounds, max(queries), max(keys))
    if not indexed:
        return call
    return call._replace(
        queries=torch.cat([torch.arange(rows.start, rows.stop) for rows, _ in sequences]),
        keys=torch.cat([torch.arange(part.start, part.stop) for _, parts in sequences for part in parts]),
    )


def positions(cu_seqlens: torch.Tensor, total: int) -> torch.Tensor:
    """Position of each token in its sequence, ``[T]`` int64."""
    return torch.arange(total, device=cu_seqlens.device) - torch.repeat_interleave(
        cu_seqlens[:-1], cu_seqlens.diff(), output_size=total
    )


@torch.compiler.disable
def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer.

    ``query [1, heads, T, D]``, ``key`` and ``value [1, kv_heads, T, D]``; returns ``([1, T, heads, D], None)``, as
    transformers expects. ``sliding_window``: token i sees i - window + 1 … i. ``softcap``: ``cap * tanh(logits / cap)``.
    ``dropout`` is 0: `load_causal_lm` turns it off, because log-probabilities of a policy must not be random.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if packing.context is not None and packing.context.way == "gather":
        return _attend_with_own(query, key, value, packing, scale, sliding_window, softcap), None
    if packing.context is not None:
        whole = [packing.context.tokens_for_heads(tensor) for tensor in (query, key, value)]
        output = _attend(*whole, packing, scale, sliding_window, softcap)
        return packing.context.heads_for_tokens(output), None
    return _attend(query, key, value, packing, scale, sliding_window, softcap), None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of all tokens: ``[1, heads, T, D]`` → ``[1, T, heads, D]``."""
    window = sliding_window if sliding_window is not None and sliding_window < packing.longest else None
    fast = softcap is None and query.dtype in (torch.bfloat16, torch.float16)
    if packing.calls and query.is_cuda and fast:
        return attend_by_calls(query, key, value, packing.calls, scale, window, KERNEL)

    if softcap is None and cpu_attention.takes(query):
        heads_first = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return cpu_attention.attend(*heads_first, packing.segments, scale, window)[None]

    sizes = [run.tokens for run in packing.runs]
    # `split` and `cat` have each other as gradients; slices would each make a gradient of the size of the whole
    tensors = [tensor[0].transpose(0, 1).split(sizes) for tensor in (query, key, value)]
    outputs = []
    for run, *parts in zip(packing.runs, *tensors, strict=True):
        if isinstance(run, PromptCompletions):
            outputs.append(_shared(run, parts, scale, window, softcap))
            continue
        q, k, v = (part.unflatten(0, (run.count, run.length)).transpose(1, 2) for part in parts)  # [B, heads, S, D]
        outputs.append(causal_attention(q, k, v, scale, window, softcap).transpose(1, 2).flatten(0, 1))
    # contiguous in either case: a compiled layer has a program for each layout of memory
    return (outputs[0].contiguous() if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0)


def _attend_with_own(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of own tokens to those of all ranks: ``[1, heads, own tokens, D]`` → ``[1, own tokens, heads, D]``."""
    context = packing.context
    assert context is not None
    key, value = context.gather_tokens(key), context.gather_tokens(value)
    own_rows = context.rows(key.shape[2])
    lengths = [run.length for run in packing.runs if isinstance(run, LengthRun) for _ in range(run.count)]
    ends = list(itertools.accumulate(lengths))
    # of each sequence: how many tokens are this rank's, and where the last of them ends
    stops = [min(end, own_rows.stop) - (end - length) for end, length in zip(ends, lengths, strict=True)]
    counts = [
        max(0, min(end, own_rows.stop) - max(end - length, own_rows.start))
        for end, length in zip(ends, lengths, strict=True)
    ]
    if softcap is None and cpu_attention.takes(query):
        starts = itertools.accumulate(counts, initial=0)
        segments = QueryRanges.of([
            [QueryRange(range(start, start + count), range(end - length, end - length + max(stop, 0)))]
            for start, count, end, length, stop in zip(starts, counts, ends, lengths, stops, strict=False)
            if count
        ])  # fmt: skip
        tensors = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return cpu_attention.attend(*tensors, segments, scale, sliding_window)[None]
    outputs = []
    keys, values = key.split(lengths, 2), value.split(lengths, 2)
    for q, k, v, stop in zip(query.split(counts, 2), keys, values, stops, strict=True):
        if q.shape[2]:
            outputs.append(causal_attention(q, k[:, :, :stop], v[:, :, :stop], scale, sliding_window, softcap))
    return torch.cat(outputs, 2).transpose(1, 2)


def _shared(
    prompt: PromptCompletions, parts: Sequence[torch.Tensor], scale: float, window: int | None, softcap: float | None
) -> torch.Tensor:
    """Attention of a prompt and of the completions behind it: q, k, v ``[tokens, heads, D]`` → ``[tokens, heads, D]``.

    Completions are padded to the longest of them. What a shorter one has behind its end is later than all its tokens, so
    the causal mask, the same for all, hides it.
    """
    sizes = [prompt.length, sum(prompt.completions)]
    (q_prompt, q_rest), (k_prompt, k_rest), (v_prompt, v_rest) = (part.split(sizes) for part in parts)
    outputs = []
    if prompt.length:
        q, k, v = (x[None].transpose(1, 2) for x in (q_prompt, k_prompt, v_prompt))
        outputs.append(causal_attention(q, k, v, scale, window, softcap)[0].transpose(0, 1))
    if sizes[1]:
        count, longest = len(prompt.completions), max(prompt.completions)
        lengths = torch.tensor(prompt.completions, device=q_rest.device)
        column = torch.arange(longest, device=q_rest.device)
        valid = column < lengths[:, None]  # [count, longest]
        index = ((lengths.cumsum(0) - lengths)[:, None] + column).where(valid, 0)
        q, k, v = (x[index] for x in (q_rest, k_rest, v_rest))  # [count, longest, heads, D]
        k = torch.cat([k_prompt.expand(count, -1, -1, -1), k], 1).transpose(1, 2)
        v = torch.cat([v_prompt.expand(count, -1, -1, -1), v], 1).transpose(1, 2)
        outputs.append(causal_attention(q.transpose(1, 2), k, v, scale, window, softcap).transpose(1, 2)[valid])
    return torch.cat(outputs)


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None, softcap: float | None
) -> torch.Tensor:
    """``q [B, heads, Q, D]`` are the last Q of the K tokens of ``k`` and ``v`` (fewer heads) → ``[B, heads, Q, D]``."""
    queries, keys = q.shape[2], k.shape[2]
    grouped = q.shape[1] != k.shape[1]
    if softcap is not None:
        return _capped(q, k, v, scale, window, softcap)
    if queries == keys and (window is None or window >= keys):
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    mask = visible_keys(queries, keys, window, q.device)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)


def visible_keys(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """The keys (columns) that each of the last queries (rows) sees, ``[Q, K]`` bool."""
    last = keys - queries
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(last)
    return visible if window is None else visible.triu(last + 1 - window)


def _capped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None, softcap: float
) -> torch.Tensor:
    """The long way, because no fused kernel on the CPU knows soft-caps; softmax in float32 as transformers has it."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    logits = torch.tanh(q @ k.transpose(2, 3) * (scale / softcap)) * softcap
    logits = logits.masked_fill(~visible_keys(q.shape[2], k.shape[2], window, q.device), float("-inf"))
    return logits.softmax(-1, dtype=torch.float32).to(v.dtype) @ v


def attend_by_calls(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    calls: Sequence[AttentionCall],
    scale: float,
    window: int | None,
    kernel: Varlen,
) -> torch.Tensor:
    """Attention of all tokens by variable-length calls: ``[1, heads, T, D]`` → ``[1, T, heads, D]``.

    Keys of shared prompts are repeated by one index, whose gradient adds up what all completions send back (`SummedRows`).
    """
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))  # [T, heads, D]
    left, once = -1 if window is None else window - 1, lambda x, index: x.index_select(0, index)
    repeat, whole = SummedRows.apply, None
    for call in calls:
        tensors = (
            x if index is None else take(x, index)
            for x, index, take in (
                (q, call.queries, once),
                (k, call.keys, repeat),
                (v, call.keys, repeat),
            )
        )
        bounds = call.cu_queries, call.cu_keys, call.longest_query, call.longest_key
        output = kernel(*tensors, *bounds, scale=scale, left=left)
        if call.queries is None:
            return output[None]
        whole = q.new_zeros(len(q), *output.shape[1:]) if whole is None else whole
        whole = whole.index_copy(0, call.queries, output)
    assert whole is not None, "a batch has tokens"
    return whole[None]


class SummedRows(torch.autograd.Function):
    """``x[index]``, rows of which may be taken several times. Their gradients are summed in float32, in the order of
    ``index``: `index_add` would round each sum to bfloat16, and on a GPU take them in any order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        order = index.argsort(stable=True)  # all that go to one row together
        counts = torch.zeros(ctx.rows, dtype=index.dtype, device=index.device).index_add_(0, index, torch.ones_like(index))
        ordered = grad.flatten(1)[order].float()
        sums = torch.segment_reduce(ordered, "sum", lengths=counts, axis=0, unsafe=True, initial=0)
        return sums.to(grad.dtype).view(ctx.rows, *grad.shape[1:]), None


def _no_mask(*_: Any, **__: Any) -> None:
    """The sequences travel as ``packing``; a dense mask is never made."""
    return None


def register() -> None:
    """Makes ``attn_implementation="tandem_packed"`` known to transformers; needs both of its registries."""
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def check_lengths(cu_seqlens: torch.Tensor, total: int) -> list[int]:
    """The bounds as a list, if they cover ``total`` tokens.

    Raises:
        ValueError: they do not start at 0, fall, or end elsewhere.
    """
    bounds = cu_seqlens.tolist()
    if not bounds or bounds[0] != 0 or bounds[-1] != total or any(a > b for a, b in zip(bounds, bounds[1:], strict=False)):
        raise ValueError(f"cu_seqlens must rise from 0 to {total} (the number of tokens), got {bounds[:8]}")
    return bounds


register()
