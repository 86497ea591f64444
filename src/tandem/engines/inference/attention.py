"""Attention over the KV cache: one new token per sequence (decode), or pieces of prompts packed end to end (prefill).

Everything that depends on lengths alone (masks, indices to write to, the row of each query) is planned once per step for all
layers. The samples of one prompt attend to its shared keys in one product; this part and the attention to each sample's own
keys are joined by their log-sum-exps. Grouped queries are a batch of small matrices per key head, so keys are not repeated.

On a GPU, `PagedDecode` reads rows in place by a kernel, and `PackedPrefill` makes variable-length calls.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from tandem.engines.inference import paged_kernel
from tandem.engines.inference.kv_cache import Row, Slab, numbered
from tandem.models import attention
from tandem.models.architecture import Architecture
from tandem.models.hardware import upload

_NEVER = -1e30
"""Mask value of a hidden key. Finite, so a row that sees no key gives an average instead of NaN; its log-sum-exp makes the
weight of this average 0."""


@dataclass(frozen=True)
class Kernel:
    """Properties of the model and the device that attention needs."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(a: Architecture, dtype: torch.dtype, device: torch.device) -> "Kernel":
        """Returns the properties of this model on this device."""
        return Kernel(a.num_heads, a.num_kv_heads, a.head_dim, a.query_scale, a.attention_softcap, dtype, device)

    @property
    def group(self) -> int:
        """Number of query heads that share a key head."""
        return self.heads // self.kv_heads

    def additive(self, hidden: torch.Tensor) -> torch.Tensor:
        """Turns a boolean mask (True: hidden) into an additive one."""
        return torch.zeros(hidden.shape, dtype=self.dtype, device=hidden.device).masked_fill_(hidden, _NEVER)

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, lse: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of ``[R, kv_heads, Q, D]`` to ``[R, kv_heads, S, D]``, additive mask ``[R, 1, 1 or Q, S]``.

        Returns the output, shaped like the queries, and with ``lse`` the log-sum-exps ``[R, kv_heads, Q]`` in float32.
        """
        if self.dtype != torch.float32 and self.device.type == "cpu" and self.softcap is None:
            mask = mask.expand(-1, 1, queries.shape[2], -1)
            flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            return flash(queries, keys, values, 0.0, False, attn_mask=mask, scale=self.scale)
        rows, kv_heads, count, head_dim = queries.shape
        # [R · kv_heads, ...] is a view of the cache; the batched product of small float32 matrices beats flash by a third.
        flat_keys = keys.flatten(0, 1) if keys.is_contiguous() else _merged(keys)
        flat_values = values.flatten(0, 1) if values.is_contiguous() else _merged(values)
        flat_queries = queries.reshape(rows * kv_heads, count, head_dim)
        flat_mask = mask.expand(rows, kv_heads, mask.shape[2], mask.shape[3]).reshape(rows * kv_heads, mask.shape[2], -1)
        if self.softcap is None:
            scores = torch.baddbmm(flat_mask, flat_queries, flat_keys.transpose(1, 2), alpha=self.scale)
        else:
            scores = torch.bmm(flat_queries, flat_keys.transpose(1, 2)).mul_(self.scale / self.softcap).tanh_()
            scores = scores.mul_(self.softcap).add_(flat_mask)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
        total = None
        if lse:
            # For the largest score, score - log(weight) is the log-sum-exp: two maxima cost a fifth of `logsumexp`.
            total = (scores.amax(dim=-1).float() - weights.amax(dim=-1).log()).view(rows, kv_heads, count)
        out = torch.bmm(weights.to(self.dtype), flat_values).view(rows, kv_heads, count, head_dim)
        return out, total


def _merged(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view ``[R · kv_heads, S, D]`` of ``[R, kv_heads, S, D]``, the first S tokens of a slab's rows."""
    rows, heads, length, dim = tensor.shape
    return tensor.as_strided((rows * heads, length, dim), (tensor.stride(1), tensor.stride(2), 1))


@dataclass
class _OwnPart:
    """Rows of one slab and the batch rows ``[start, stop)`` that they serve."""

    slab: Slab
    start: int
    stop: int
    used: int
    """Number of slab rows that are read: all up to the last in use."""

    length: int
    """Number of keys that are read per row."""

    counts: torch.Tensor
    """Number of tokens in each slab row, the new one included, ``[used, 1]``."""

    writes: torch.Tensor
    """Indices of the new keys, ``[n · kv_heads]``, into the slab viewed as ``[rows · kv_heads · capacity, D]``."""

    to_slab: torch.Tensor | None
    """Batch row, counted from ``start``, of each slab row; None if both have the same order."""

    from_slab: torch.Tensor | None
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)
    """Window → additive mask ``[used, 1, 1, length]``."""


@dataclass
class _PromptPart:
    """One slab of shared prompts and the samples that read them."""

    slab: Slab
    lengths: torch.Tensor
    """Number of tokens of each prompt, ``[used, 1]``."""

    length: int
    positions: torch.Tensor
    """Absolute position of each sample's new token, ``[used, samples]``; ``samples``: the most samples of one prompt."""

    queries: torch.Tensor
    """Index of each query into the batch viewed as ``[B · heads, D]``; ``[used · kv_heads · samples · group]``."""

    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)


class DecodePlan:
    """Attention of one new token of each sequence; built when the set of sequences changes, advanced at each step.

    Args:
        rows: each sequence's own row; rows of one slab are adjacent, and sequences with a shared prompt come last.
        prompts: the row of each sequence's shared prompt, or None.
        own: number of tokens in each own row, the new one included.
        starts: number of tokens of each sequence's shared prompt, 0 without one.
        windows: the sliding windows of the model's layers; None stands for full attention.
    """

    def __init__(
        self,
        kernel: Kernel,
        rows: Sequence[Row],
        prompts: Sequence[Row | None],
        own: list[int],
        starts: list[int],
        windows: set[int | None],
    ):
        self.kernel = kernel
        self._windows = windows
        self._own_parts: list[_OwnPart] = []
        self._prompt_parts: list[_PromptPart] = []
        self._first_shared = next((i for i, prompt in enumerate(prompts) if prompt is not None), len(rows))
        self._back: torch.Tensor | None = None
        start = 0
        for stop in range(1, len(rows) + 1):
            if stop == len(rows) or rows[stop].slab is not rows[start].slab:
                self._own_parts.append(self._own_part(rows, own, start, stop))
                start = stop
        if self._first_shared < len(rows):
            self._plan_prompts(prompts, own, starts)
        self._make_masks()

    def advance(self) -> None:
        """Moves the plan on by one token per sequence."""
        for part in self._own_parts:
            part.counts += 1
            part.writes += 1
            part.length += 1
        for shared in self._prompt_parts:
            shared.positions += 1
        self._make_masks()

    def _own_part(self, rows: Sequence[Row], own: list[int], start: int, stop: int) -> _OwnPart:
        slab = rows[start].slab
        index = torch.tensor([row.index for row in rows[start:stop]])
        used = int(index.max()) + 1
        same = torch.equal(index, torch.arange(used))
        count = torch.tensor(own[start:stop])
        counts = torch.ones(used, 1, dtype=torch.long)
        counts[index, 0] = count
        to_slab = torch.zeros(used, dtype=torch.long)
        to_slab[index] = torch.arange(stop - start)
        heads = torch.arange(self.kernel.kv_heads)
        writes = (index[:, None] * self.kernel.kv_heads + heads) * slab.capacity + count[:, None] - 1
        places = (None, None) if same else (self._to_device(to_slab), self._to_device(index))
        length, writes = max(own[start:stop]), self._to_device(writes.flatten())
        return _OwnPart(slab, start, stop, used, length, self._to_device(counts), writes, *places)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return upload(tensor, self.kernel.device)

    def _plan_prompts(self, prompts: Sequence[Row | None], own: list[int], starts: list[int]) -> None:
        kernel = self.kernel
        members: dict[int, dict[int, list[int]]] = {}  # slab → row → batch rows
        slabs: dict[int, Slab] = {}
        for batch_row, prompt in enumerate(prompts):
            if prompt is not None:
                slabs[id(prompt.slab)] = prompt.slab
                members.setdefault(id(prompt.slab), {}).setdefault(prompt.index, []).append(batch_row)
        back = torch.zeros((len(prompts) - self._first_shared, kernel.heads), dtype=torch.long)
        heads = torch.arange(kernel.heads).view(1, kernel.kv_heads, 1, kernel.group)
        base = 0
        for key, by_row in members.items():
            samples = max(len(batch_rows) for batch_rows in by_row.values())
            table = torch.zeros((max(by_row) + 1, samples), dtype=torch.long)
            for index, batch_rows in by_row.items():
                table[index, : len(batch_rows)] = torch.tensor(batch_rows)
            queries = table[:, None, :, None] * kernel.heads + heads  # [used, kv_heads, samples, group]
            places = torch.arange(queries.numel()).view(queries.shape) + base
            lengths = torch.ones((len(table), 1), dtype=torch.long)
            for index, batch_rows in by_row.items():
                sources = places[index, :, : len(batch_rows)].transpose(0, 1).reshape(len(batch_rows), kernel.heads)
                back[torch.tensor(batch_rows) - self._first_shared] = sources
                lengths[index] = starts[batch_rows[0]]
            base += queries.numel()
            positions = torch.tensor(starts)[table] + torch.tensor(own)[table] - 1
            part = (
                self._to_device(lengths),
                int(lengths.max()),
                self._to_device(positions),
                self._to_device(queries.flatten()),
            )
            self._prompt_parts.append(_PromptPart(slabs[key], *part))
        self._back = self._to_device(back.flatten())

    def _make_masks(self) -> None:
        for part in self._own_parts:
            keys = torch.arange(part.length, device=self.kernel.device)
            for window in self._windows:
                hidden = keys >= part.counts
                if window is not None:
                    hidden = hidden | (part.counts - 1 - keys >= window)
                part.masks[window] = self.kernel.additive(hidden[:, None, None])
        for shared in self._prompt_parts:
            keys = torch.arange(shared.length, device=self.kernel.device)
            for window in self._windows:
                if window is None and None in shared.masks:
                    continue
                hidden = (keys >= shared.lengths)[:, None, None]  # [used, 1, 1, length]
                if window is not None:
                    far = shared.positions[:, :, None] - keys >= window  # [used, samples, length]
                    hidden = hidden | far.repeat_interleave(self.kernel.group, dim=1)[:, None]
                shared.masks[window] = self.kernel.additive(hidden)

    def __call__(
        self, layer: int, window: int | None, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Writes keys and values ``[B, kv_heads, D]`` and attends with ``[B, heads, D]``; returns ``[B, heads · D]``."""
        kernel = self.kernel
        shape = (-1, kernel.kv_heads, kernel.group, kernel.head_dim)
        outs, totals = [], []
        for part in self._own_parts:
            slab, places = part.slab, slice(part.start, part.stop)
            for cache, new in ((slab.keys[layer], keys), (slab.values[layer], values)):
                flat = new[places].reshape(-1, kernel.head_dim)
                cache.view(-1, kernel.head_dim).index_copy_(0, part.writes, flat)
            own = (
                queries[places].view(shape)
                if part.to_slab is None
                else queries[places].index_select(0, part.to_slab).view(shape)
            )
            args = slab.keys[layer][: part.used, :, : part.length], slab.values[layer][: part.used, :, : part.length]
            shared = part.start >= self._first_shared
            out, total = kernel.attend(own, *args, part.masks[window], lse=shared)
            if part.from_slab is not None:
                out = out.index_select(0, part.from_slab)
                total = total.index_select(0, part.from_slab) if shared and total is not None else None
            outs.append(out.reshape(-1, kernel.heads, kernel.head_dim))
            if shared and total is not None:
                totals.append(total.reshape(-1, kernel.heads))
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        if self._back is not None:
            out = self._with_prompts(layer, window, queries, out, totals)
        return out.view(len(out), -1)

    def _with_prompts(
        self, layer: int, window: int | None, queries: torch.Tensor, own: torch.Tensor, totals: list[torch.Tensor]
    ) -> torch.Tensor:
        """Joins the attention to own keys, ``[B, heads, D]``, with the attention to shared prompts."""
        kernel = self.kernel
        outs, lses = [], []
        flat = queries.reshape(-1, kernel.head_dim)
        for part in self._prompt_parts:
            used, samples = part.positions.shape
            shape = (used, kernel.kv_heads, samples * kernel.group, kernel.head_dim)
            gathered = flat.index_select(0, part.queries).view(shape)
            keys, values = part.slab.keys[layer], part.slab.values[layer]
            args = keys[:used, :, : part.length], values[:used, :, : part.length]
            out, lse = kernel.attend(gathered, *args, part.masks[window], lse=True)
            outs.append(out.reshape(-1, kernel.head_dim))
            assert lse is not None
            lses.append(lse.reshape(-1))
        assert self._back is not None
        prompt = (outs[0] if len(outs) == 1 else torch.cat(outs)).index_select(0, self._back)
        prompt_lse = (lses[0] if len(lses) == 1 else torch.cat(lses)).index_select(0, self._back)
        prompt = prompt.view(-1, kernel.heads, kernel.head_dim)
        prompt_lse = prompt_lse.view(-1, kernel.heads)
        own_lse = totals[0] if len(totals) == 1 else torch.cat(totals)
        weight = torch.sigmoid(own_lse - prompt_lse).unsqueeze(-1).to(own.dtype)
        first = self._first_shared
        joined = torch.lerp(prompt, own[first:], weight)
        return joined if first == 0 else torch.cat((own[:first], joined))


@dataclass
class PrefillSpan:
    """Tokens ``[start, start + count)`` of one row, computed in one prefill pass, behind ``prompt_length`` shared tokens."""

    row: Row
    start: int
    count: int
    prompt: Row | None = None
    prompt_length: int = 0


class PrefillPlan:
    """Attention of several pieces of sequences, packed end to end. The tokens of a piece attend causally to their own
    sequence's row of the cache, and to the shared prompt before it."""

    def __init__(self, kernel: Kernel, pieces: Sequence[PrefillSpan], windows: set[int | None]):
        self.kernel = kernel
        self._pieces = pieces
        self._masks = [{window: self._mask(piece, window) for window in windows} for piece in pieces]

    def _mask(self, piece: PrefillSpan, window: int | None) -> torch.Tensor | None:
        """Returns the additive mask ``[1, 1, count, keys]``, or None if plain causal attention suffices."""
        before = piece.prompt_length + piece.start
        total = before + piece.count
        if not before and self.kernel.softcap is None and (window is None or total <= window):
            return None
        keys = torch.arange(total, device=self.kernel.device)
        queries = keys[before:, None]
        hidden = keys > queries
        if window is not None:
            hidden = hidden | (queries - keys >= window)
        return self.kernel.additive(hidden[None, None])

    def __call__(
        self, layer: int, window: int | None, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Writes keys and values ``[T, kv_heads, D]`` and attends with ``[T, heads, D]``; returns ``[T, heads · D]``."""
        out = torch.empty_like(queries)
        start = 0
        for piece, masks in zip(self._pieces, self._masks, strict=True):
            stop = start + piece.count
            part = slice(start, stop)
            row, end = piece.row, piece.start + piece.count
            own_keys, own_values = row.slab.keys[layer][row.index, :, :end], row.slab.values[layer][row.index, :, :end]
            own_keys[:, piece.start :] = keys[part].transpose(0, 1)
            own_values[:, piece.start :] = values[part].transpose(0, 1)
            if piece.prompt is not None:
                slab, place = piece.prompt.slab, (piece.prompt.index, slice(None), slice(piece.prompt_length))
                own_keys = torch.cat((slab.keys[layer][place], own_keys), dim=1)
                own_values = torch.cat((slab.values[layer][place], own_values), dim=1)
            out[part] = self._attend(queries[part], own_keys, own_values, masks[window])
            start = stop
        return out.flatten(1)

    def _attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention of ``[Q, heads, D]`` to ``[kv_heads, S, D]``; returns ``[Q, heads, D]``."""
        kernel = self.kernel
        grouped = queries.transpose(0, 1)[None]  # [1, heads, Q, D]
        if kernel.softcap is None and (mask is None or kernel.device.type == "cpu"):  # a GPU would repeat heads for a mask
            args = grouped, keys[None], values[None], mask
            out = functional.scaled_dot_product_attention(*args, is_causal=mask is None, scale=kernel.scale, enable_gqa=True)
            return out[0].transpose(0, 1)
        assert mask is not None
        shape = (1, kernel.kv_heads, kernel.group * len(queries), kernel.head_dim)
        repeated = mask.repeat(1, 1, kernel.group, 1)
        out, _ = kernel.attend(grouped.reshape(shape), keys[None].contiguous(), values[None].contiguous(), repeated)
        return out.view(kernel.heads, len(queries), kernel.head_dim).transpose(0, 1)


class PagedDecode:
    """Attention of one new token of each sequence; planned when the set of sequences changes, advanced at each step.

    Args:
        rows: each sequence's own row.
        prompts: the row of each sequence's shared prompt, or None.
        own: number of tokens in each own row, the new one included.
        starts: number of tokens of each sequence's shared prompt, 0 without one.
    """

    def __init__(
        self,
        kernel: Kernel,
        rows: Sequence[Row],
        prompts: Sequence[Row | None],
        own: Sequence[int],
        starts: Sequence[int],
    ):
        self._kernel = kernel
        self._slabs, places = numbered([*prompts, *rows])
        numbers, indices = torch.tensor(places).T
        capacities = torch.tensor([slab.capacity for slab in self._slabs])[numbers]
        lines = torch.stack((numbers, indices * kernel.kv_heads * capacities, capacities, torch.tensor([*starts, *own])))
        self._table = upload(lines.unflatten(1, (2, -1)).transpose(0, 1).flatten(0, 1), kernel.device)  # [8, B]
        self._longest = max(map(sum, zip(own, starts, strict=True)))
        self._look_up_addresses()

    def advance(self) -> None:
        """Moves the plan on by one token per sequence."""
        self._table[7] += 1
        self._longest += 1
        self._look_up_addresses()

    def _look_up_addresses(self) -> None:
        """Reads the addresses of all slabs, because a slab that has grown has other tensors."""
        both = [[[layer.data_ptr() for layer in tensors] for tensors in (s.keys, s.values)] for s in self._slabs]
        self._addresses = upload(torch.tensor(both).permute(2, 1, 0).contiguous(), self._kernel.device)  # [layers, 2, slabs]

    def __call__(
        self, layer: int, window: int | None, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Writes keys and values ``[B, kv_heads, D]`` and attends with ``[B, heads, D]``; returns ``[B, heads · D]``."""
        kernel, tensors = self._kernel, (queries, keys, values, self._table, self._addresses[layer])
        return paged_kernel.attend(*tensors, self._longest, window, kernel.scale, kernel.softcap).flatten(1)


_Places = list[tuple[Slab, torch.Tensor, torch.Tensor]]
"""For each slab, indices ``[n · kv_heads]`` of tokens into the slab viewed as ``[rows · kv_heads · capacity, D]``, and
indices ``[n]`` of the same tokens in the packed order."""


class PackedPrefill:
    """Attention of several pieces packed end to end, by one variable-length call per layer."""

    def __init__(self, kernel: Kernel, pieces: Sequence[PrefillSpan]):
        self._kernel = kernel
        queries = [piece.count for piece in pieces]
        keys = [piece.prompt_length + piece.start + piece.count for piece in pieces]
        ends = (torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32) for lengths in (queries, keys))
        self._queries, self._keys = (upload(end, kernel.device) for end in ends)
        self._longest = max(queries), max(keys)
        rows = [[(piece.row, 0, piece.start), (piece.row, piece.start, piece.count)] for piece in pieces]
        self._writes = self._by_slab([own for _, own in rows])
        self._total, self._reads = sum(keys), _Places()
        if self._total > sum(queries):  # earlier tokens are attended to as well
            prompts = [(piece.prompt or piece.row, 0, piece.prompt_length) for piece in pieces]
            self._reads = self._by_slab(part for prompt, own in zip(prompts, rows, strict=True) for part in (prompt, *own))

    @staticmethod
    def takes(kernel: Kernel) -> bool:
        """True if a variable-length kernel computes this model's attention on this device."""
        supported = kernel.device.type == "cuda" and kernel.dtype != torch.float32 and kernel.softcap is None
        return supported and attention.takes_kernel(kernel.device)

    def _by_slab(self, parts: Iterable[tuple[Row, int, int]]) -> _Places:
        """Groups tokens by slab. ``parts``: (row, first token, number of tokens), in packed order."""
        slabs: dict[Slab, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        heads, done = torch.arange(self._kernel.kv_heads), 0
        for row, first, count in parts:
            lines = (row.index * len(heads) + heads) * row.slab.capacity
            cached = (torch.arange(first, first + count)[:, None] + lines).flatten()
            slabs.setdefault(row.slab, []).append((cached, torch.arange(done, done := done + count)))
        device = self._kernel.device
        return [(slab, *(upload(torch.cat(one), device) for one in zip(*some, strict=True))) for slab, some in slabs.items()]  # type: ignore[misc]

    def __call__(
        self, layer: int, window: int | None, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Writes keys and values ``[T, kv_heads, D]`` and attends with ``[T, heads, D]``; returns ``[T, heads · D]``."""
        inputs = []
        for which, new in (("keys", keys), ("values", values)):
            whole = new.new_empty(self._total, *new.shape[1:]) if self._reads else new.contiguous()
            for slab, cached, packed in self._writes:
                flat = getattr(slab, which)[layer].view(-1, self._kernel.head_dim)
                flat.index_copy_(0, cached, new[packed].view(-1, self._kernel.head_dim))
            for slab, cached, packed in self._reads:
                flat = getattr(slab, which)[layer].view(-1, self._kernel.head_dim)
                whole.index_copy_(0, packed, flat[cached].view(-1, *new.shape[1:]))
            inputs.append(whole)
        tensors = queries.contiguous(), inputs[0], inputs[1], self._queries, self._keys
        left = -1 if window is None else window - 1
        return attention.KERNEL(*tensors, *self._longest, scale=self._kernel.scale, left=left).flatten(1)
