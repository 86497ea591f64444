"""Attention over packed sequences, registered with transformers as ``tandem_packed``.

Each token attends only to its own sequence, causally. On a CPU one compiled kernel computes all sequences and the prompts
that they share (see cpu_attention.py); if it is not available, torch's fused kernel is called for each sequence, or once for
neighbouring sequences of equal length. On a GPU one call of a variable-length kernel computes all sequences, and a second
one the completions that share a prompt. (If there are fewer key than query heads, torch 2.11 needs keys and values repeated,
later versions accept ``enable_gqa``; the causal mask is aligned at the last token.) The sequences are passed in the keyword
argument ``packing``, which transformers hands to every layer.

Shared prompts are computed once: the samples of a group begin with the same prompt, and causal attention makes its hidden
states the same in all of them. A forward pass therefore computes the prompt once, and its gradient is the sum over all
samples. This is exact, and with eight samples per prompt it saves most of the work on prompts.
"""

import functools
import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from tandem.models import cpu_attention
from tandem.models.context_parallel import Context
from tandem.models.cpu_attention import QueryRange, QueryRanges
from tandem.models.hardware import upload

MIN_SAVING = 0.05
"""Prompts are shared only if this saves at least this fraction of the tokens; below it, gathering costs more."""


@dataclass(frozen=True)
class PromptCompletions:
    """The lengths of a prompt and of its completions, in the order of their tokens in `Compact`, which has the prompt once.

    Example: a prompt of 40 tokens with completions of 3, 9 and 5 tokens → ``PromptCompletions(40, (3, 9, 5))``, 57 compact
    tokens
    """

    length: int
    completions: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Number of compact tokens."""
        return self.length + sum(self.completions)


@dataclass(frozen=True)
class Compact:
    """A packed batch of T tokens without repeated prompts, so that C tokens remain."""

    prompts: tuple[PromptCompletions, ...]
    tokens: torch.Tensor
    """``[C]``: index in the batch of each compact token."""

    place: torch.Tensor
    """``[T]``: index in the compact row of each token of the batch."""


def prompt_keys(input_ids: torch.Tensor, media: torch.Tensor | None) -> torch.Tensor:
    """Returns numbers by which prompts are compared, ``[T]``: `tandem.api.media.prompt_key` of each token of a packed batch.

    ``media [T]``: media number of each token; None: all are text."""
    return input_ids if media is None else torch.where(media != 0, media, input_ids)


def number_prompts(input_ids: torch.Tensor, bounds: Sequence[int], loss_mask: torch.Tensor) -> tuple[list[int], list[int]]:
    """Returns for each sequence a number of its prompt, equal for equal prompts, and the prompt's length, both ``[N]``.

    The prompt is all tokens before the first one in ``loss_mask``, or the whole sequence if ``loss_mask`` has none of it.
    ``bounds`` is ``cu_seqlens`` as a list. With media, ``input_ids`` must be `prompt_keys`.
    """
    ids, edges = input_ids.cpu().numpy(), torch.tensor(bounds)
    trained = torch.cat([loss_mask.cpu().nonzero().flatten(), edges[-1:]])
    first = trained[torch.searchsorted(trained, edges[:-1])]
    sizes = (first.minimum(edges[1:]) - edges[:-1]).tolist()
    numbers: dict[bytes, int] = {}
    prompts = (ids[start : start + size].tobytes() for start, size in zip(bounds, sizes, strict=False))
    return [numbers.setdefault(prompt, len(numbers)) for prompt in prompts], sizes


def compact(input_ids: torch.Tensor, bounds: Sequence[int], loss_mask: torch.Tensor) -> Compact | None:
    """Returns the compact form of a packed batch; None if sharing prompts would save less than `MIN_SAVING`.

    ``input_ids [T]`` and ``loss_mask [T]`` as in `number_prompts`; ``bounds`` is ``cu_seqlens`` as a list.
    """
    numbers, sizes = number_prompts(input_ids, bounds, loss_mask)
    members: dict[int, list[int]] = defaultdict(list)
    for i, number in enumerate(numbers):
        if bounds[i] < bounds[i + 1]:
            members[number if sizes[i] else -1 - i].append(i)
    total = bounds[-1]
    saved = sum(sizes[group[0]] * (len(group) - 1) for group in members.values())
    if saved < MIN_SAVING * total or saved == 0:
        return None

    prompts, tokens, place = [], [], torch.empty(total, dtype=torch.int64)
    filled = 0
    for group in members.values():
        size, first = sizes[group[0]], bounds[group[0]]
        completions = [torch.arange(bounds[i] + size, bounds[i + 1]) for i in group]
        for i in group:
            place[bounds[i] : bounds[i] + size] = torch.arange(filled, filled + size)
        prompts.append(PromptCompletions(size, tuple(len(part) for part in completions)))
        tokens += [torch.arange(first, first + size), *completions]
        filled += size
        for part in completions:
            place[part] = torch.arange(filled, filled + len(part))
            filled += len(part)
    device = input_ids.device
    return Compact(tuple(prompts), torch.cat(tokens).to(device), place.to(device))


class Varlen(Protocol):
    """A kernel for causal attention of sequences of different lengths. If a sequence has fewer queries than keys, its
    queries belong to the last keys."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_queries: torch.Tensor,
        cu_keys: torch.Tensor,
        longest_query: int,
        longest_key: int,
        *,
        scale: float,
        left: int,
    ) -> torch.Tensor:
        """``query [Tq, heads, D]``, ``key`` and ``value [Tk, kv_heads, D]`` → ``[Tq, heads, D]``. ``left``: number of
        preceding tokens to which a token attends; -1: all."""


def by_torch(varlen_attn: Callable[..., torch.Tensor]) -> Varlen:
    """Wraps torch's kernel, whose arguments differ between releases."""
    repeats = "enable_gqa" not in inspect.signature(varlen_attn).parameters

    def attend(query: Any, key: Any, value: Any, *bounds: Any, scale: float, left: int) -> torch.Tensor:
        groups = query.shape[1] // key.shape[1]
        settings: dict[str, Any] = {"scale": scale, "window_size": (left, 0)}
        if not repeats:
            settings["enable_gqa"] = groups > 1
        elif groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return varlen_attn(query, key, value, *bounds, **settings)

    return attend


@functools.cache
def takes_kernel(device: torch.device) -> bool:
    """Tells whether a GPU supports torch's `varlen_attn` (Ampere or newer). On Hopper, also switches `varlen_attn` to
    FlashAttention 3 if that is installed and deterministic algorithms are not required."""
    generation = torch.cuda.get_device_capability(device)
    exact = torch.are_deterministic_algorithms_enabled()
    if generation[0] == 9 and not exact and find_spec("flash_attn_interface") is not None:
        activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
        if activate is not None and "FA3" in torch.nn.attention.list_flash_attention_impls():
            activate("FA3")
    return generation >= (8, 0)


KERNEL = by_torch(varlen_attn)


NAME = "tandem_packed"


class LengthRun(NamedTuple):
    """A run of ``count`` neighbouring sequences of equal length, in tokens."""

    count: int
    length: int

    @property
    def tokens(self) -> int:
        return self.count * self.length


@dataclass(frozen=True)
class Packing:
    """The boundaries of the sequences of a packed batch.

    Example: lengths 3, 3, 5 → ``cu_seqlens [0, 3, 6, 11]``, runs (2 of 3), (1 of 5)
    """

    cu_seqlens: torch.Tensor
    """``[N + 1]`` int32 on the device of the model."""

    runs: tuple[LengthRun | PromptCompletions, ...]
    """The sequences, in the order of their tokens."""

    longest: int

    context: Context | None = None
    """The ranks among which the tokens are divided; all have the same packing, which describes all tokens. None: one
    rank."""

    calls: tuple["AttentionCall", ...] = ()
    """The variable-length calls on a GPU that together compute the attention of all tokens; empty for other kernels."""

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: torch.Tensor) -> "Packing":
        """Makes the packing of ``cu_seqlens [N + 1]``; sequences may be empty."""
        lengths = [length for length in cu_seqlens.diff().tolist() if length > 0]
        runs = tuple(LengthRun(len(list(same)), length) for length, same in itertools.groupby(lengths))
        return cls(cu_seqlens.to(torch.int32), runs, max(lengths, default=0))

    @classmethod
    def from_prompts(cls, cu_seqlens: torch.Tensor, prompts: Sequence[PromptCompletions]) -> "Packing":
        """Makes the packing of prompts with their completions. ``cu_seqlens``: the boundaries in the original batch."""
        longest = max(prompt.length + max(prompt.completions) for prompt in prompts)
        return cls(cu_seqlens.to(torch.int32), tuple(prompts), longest)

    @functools.cached_property
    def segments(self) -> QueryRanges:
        """The sequences in the form that the CPU kernel needs."""
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
        """Returns the packing with tensors on a device; on a GPU with a variable-length kernel also with its calls."""
        moved = replace(self, cu_seqlens=upload(self.cu_seqlens, device))
        if device.type != "cuda" or not takes_kernel(device):
            return moved
        return replace(moved, calls=tuple(call.on(device) for call in plan_calls(self.runs)))

    def divided(self, context: Context, extra: int) -> "Packing":
        """Returns the packing for a row divided among the ranks of ``context``, with ``extra`` padding tokens at its end."""
        if extra == 0:
            return replace(self, context=context)
        runs = (*self.runs, LengthRun(1, extra))
        return Packing(pad(self.cu_seqlens, (0, 1), value=int(self.cu_seqlens[-1]) + extra), runs, self.longest, context)


class AttentionCall(NamedTuple):
    """The arguments of one variable-length call. If a sequence has fewer queries than keys, its queries belong to the last
    keys."""

    cu_queries: torch.Tensor
    """``[sequences + 1]`` int32."""

    cu_keys: torch.Tensor
    longest_query: int
    longest_key: int
    queries: torch.Tensor | None = None
    """Indices of the query tokens, int64; None: all tokens in order."""

    keys: torch.Tensor | None = None
    """Indices of the key tokens, with a shared prompt once for each completion; None: all tokens in order."""

    def on(self, device: torch.device) -> "AttentionCall":
        """Returns the call with its tensors on a device."""
        return AttentionCall(*(upload(x, device) if isinstance(x, torch.Tensor) else x for x in self))


def plan_calls(runs: Sequence[LengthRun | PromptCompletions]) -> tuple[AttentionCall, ...]:
    """Returns the calls that together compute attention: one if no prompt is shared; otherwise one for prompts and sequences
    without a shared prompt, and one for completions, whose keys are those of their prompt and their own.

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
    """Makes a call. ``sequences``: for each sequence its query tokens and its ranges of key tokens. ``indexed``: False if
    the call takes all tokens in order, so that it needs no indices."""
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
    """Returns the position of each token in its sequence, ``[T]`` int64."""
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
    """Computes the attention of one layer.

    ``query [1, heads, T, D]``, ``key`` and ``value [1, kv_heads, T, D]``; returns ``([1, T, heads, D], None)``, as
    transformers expects. ``sliding_window``: token i attends to i - window + 1 … i. ``softcap``: logits become
    ``cap * tanh(logits / cap)``. ``dropout`` is always 0: `load_causal_lm` turns it off, because log-probabilities of a
    policy must not be random.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if packing.context is not None and packing.context.way == "gather":
        return _attend_with_local_queries(query, key, value, packing, scale, sliding_window, softcap), None
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
    """Computes attention of all tokens: ``[1, heads, T, D]`` → ``[1, T, heads, D]``."""
    window = sliding_window if sliding_window is not None and sliding_window < packing.longest else None
    fast = softcap is None and query.dtype in (torch.bfloat16, torch.float16)
    if packing.calls and fast:
        return attend_by_calls(query, key, value, packing.calls, scale, window, KERNEL)

    counted = query.is_meta and cpu_attention.fits(query.shape[-1])  # `tandem.planning.planned_model` wants sizes
    if softcap is None and not packing.calls and (cpu_attention.takes(query) or counted):
        heads_first = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return cpu_attention.attend(*heads_first, packing.segments, scale, window)[None]

    sizes = [run.tokens for run in packing.runs]
    # the gradient of `split` is one `cat`; slices would each make a gradient as large as the whole tensor
    tensors = [tensor[0].transpose(0, 1).split(sizes) for tensor in (query, key, value)]
    outputs = []
    for run, *parts in zip(packing.runs, *tensors, strict=True):
        if isinstance(run, PromptCompletions):
            outputs.append(_shared(run, parts, scale, window, softcap))
            continue
        q, k, v = (part.unflatten(0, (run.count, run.length)).transpose(1, 2) for part in parts)  # [B, heads, S, D]
        outputs.append(causal_attention(q, k, v, scale, window, softcap).transpose(1, 2).flatten(0, 1))
    # contiguous in both cases, because a compiled layer is compiled again for each memory layout
    return (outputs[0].contiguous() if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0)


def _attend_with_local_queries(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Computes attention of this rank's tokens to those of all ranks: ``[1, heads, own tokens, D]`` →
    ``[1, own tokens, heads, D]``."""
    context = packing.context
    assert context is not None
    key, value = context.gather_tokens(key), context.gather_tokens(value)
    own_rows = context.rows(key.shape[2])
    lengths = [run.length for run in packing.runs if isinstance(run, LengthRun) for _ in range(run.count)]
    ends = list(itertools.accumulate(lengths))
    # for each sequence: the end of this rank's part within the sequence, and the number of this rank's tokens
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
    """Computes attention of a prompt and its completions: q, k, v ``[tokens, heads, D]`` → ``[tokens, heads, D]``.

    Completions are padded to the longest one. Padding comes after all tokens of a completion, so the causal mask, which is
    the same for all completions, hides it.
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
    """Computes causal attention. ``q [B, heads, Q, D]``: the last Q of K tokens; ``k``, ``v [B, kv_heads, K, D]``. Returns
    ``[B, heads, Q, D]``."""
    queries, keys = q.shape[2], k.shape[2]
    if softcap is not None:
        return _capped(q, k, v, scale, window, softcap)
    causal = queries == keys and (window is None or window >= keys)
    mask = None if causal else visible_keys(queries, keys, window, q.device)
    if q.is_meta:  # torch would not choose a fused kernel here; `tandem.planning.planned_model` wants its sizes
        numbers = None if mask is None else q.new_empty(mask.shape)  # which torch makes of booleans
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return fused(q, k, v, is_causal=causal, attn_mask=numbers, scale=scale)[0]
    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)


def visible_keys(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Returns the mask ``[Q, K]`` bool: True where a query (row, the last Q of K tokens) attends to a key (column)."""
    last = keys - queries
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(last)
    return visible if window is None else visible.triu(last + 1 - window)


def _capped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None, softcap: float
) -> torch.Tensor:
    """Computes soft-capped attention without a fused kernel, because no fused kernel supports the cap. The softmax is in
    float32, as in transformers."""
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
    """Computes attention of all tokens by variable-length calls: ``[1, heads, T, D]`` → ``[1, T, heads, D]``.

    Keys and values of a shared prompt are repeated for each completion; the gradients of all completions are summed
    (`SummedRows`).
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
    """Computes ``x[index]``, where a row may occur several times. Gradients of a row are summed in float32, in the order of
    ``index``: `index_add` would round each partial sum to bfloat16, and on a GPU sum in any order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        order = index.argsort(stable=True)  # gradients of the same row become neighbours
        counts = torch.zeros(ctx.rows, dtype=index.dtype, device=index.device).index_add_(0, index, torch.ones_like(index))
        ordered = grad.flatten(1)[order].float()
        sums = torch.segment_reduce(ordered, "sum", lengths=counts, axis=0, unsafe=True, initial=0)
        return sums.to(grad.dtype).view(ctx.rows, *grad.shape[1:]), None


def _no_mask(*_: Any, **__: Any) -> None:
    """Returns None, so that transformers makes no dense mask: sequences are passed as ``packing``."""
    return None


def register() -> None:
    """Registers ``attn_implementation="tandem_packed"`` with transformers, for attention and for masks."""
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def check_lengths(cu_seqlens: torch.Tensor, total: int) -> list[int]:
    """Returns ``cu_seqlens`` as a list, after checking that it covers ``total`` tokens.

    Raises:
        ValueError: it does not start at 0, decreases, or does not end at ``total``.
    """
    bounds = cu_seqlens.tolist()
    if not bounds or bounds[0] != 0 or bounds[-1] != total or any(a > b for a, b in zip(bounds, bounds[1:], strict=False)):
        raise ValueError(f"cu_seqlens must rise from 0 to {total} (the number of tokens), got {bounds[:8]}")
    return bounds


register()
