"""A decode step that reads and writes the same memory each time, so that a GPU can record it once and run it again.

All that changes from step to step stands in tables on the device, padded to a bucket of rows: which sequences, where their
keys are, how they sample. The step draws the tokens and moves the tables on by one token itself; the host writes them only
when the batch changes. Padding rows read and write the scratch tokens of the arena and a line of `Slots` that nobody has.

A recording belongs to a bucket of rows, a bucket of keys and a way of sampling. The first step of each runs as it is, the
second is recorded. Attention gathers the keys and values of every row, up to the bucket's number of keys, from the arena.
"""

import logging
from collections import OrderedDict
from functools import partial
from typing import NamedTuple

import torch

from tandem.config.engine_memory import GATHERED_TOKENS, key_bucket, row_bucket
from tandem.config.errors import kind_and_text
from tandem.engines.inference.arena import Arena
from tandem.engines.inference.attention import Kernel
from tandem.engines.inference.decoder import Decoder
from tandem.engines.inference.fused_weights import FusedWeights
from tandem.engines.inference.graphs import Capture, CudaCapture, Replay
from tandem.engines.inference.noise import uniform
from tandem.engines.inference.sampler import sample_all
from tandem.engines.inference.sequences import SlotBatch, Slots
from tandem.models.upload import upload

logger = logging.getLogger("tandem.engine")

MOST_GRAPHS = 64
"""Recordings that are kept; the one that was not used for longest goes."""


class SamplingWay(NamedTuple):
    """The sampling that a step must be able to do."""

    greedy: bool
    truncates: bool
    minimums: bool


class Bucket(NamedTuple):
    """The shape of a step."""

    rows: int
    keys: int
    way: SamplingWay


class GatheredAttention:
    """Attention of one new token a row to keys that are gathered from the arena.

    Args:
        kernel: the model's.
        arena: the keys and values.
        positions: ``[B]`` tokens of each row, the newest included.
        own: ``[B]`` where the row's own tokens begin in the arena.
        prompt: ``[B]`` where the shared prompt before them begins.
        start: ``[B]`` tokens of that prompt, 0 without.
        keys: the number of keys that are gathered of each row.
        windows: the sliding windows of the model.
    """

    def __init__(
        self,
        kernel: Kernel,
        arena: Arena,
        positions: torch.Tensor,
        own: torch.Tensor,
        prompt: torch.Tensor,
        start: torch.Tensor,
        keys: int,
        windows: set[int | None],
    ):
        self._kernel, self._arena, self._keys = kernel, arena, keys
        numbers = torch.arange(keys, device=positions.device)
        heads = torch.arange(kernel.kv_heads, device=positions.device) * arena.size
        own = own - start
        places = torch.where(numbers < start[:, None], prompt[:, None], own[:, None]) + numbers
        unseen = numbers >= positions[:, None]
        places = places.masked_fill(unseen, 0)  # a scratch token
        self._places = places[:, None] + heads[:, None]  # [B, kv_heads, keys], in the arena seen as [kv_heads · size, D]
        self._writes = ((own + positions - 1)[:, None] + heads).flatten()
        self._masks = {}
        for window in windows:
            hidden = unseen if window is None else unseen | (positions[:, None] - 1 - numbers >= window)
            self._masks[window] = kernel.additive(hidden[:, None, None])

    def __call__(
        self, layer: int, window: int | None, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Writes keys and values ``[B, kv_heads, D]`` and attends with ``[B, heads, D]``; returns ``[B, heads · D]``."""
        kernel, head_dim = self._kernel, self._kernel.head_dim
        flat = [tensors[layer].view(-1, head_dim) for tensors in (self._arena.keys, self._arena.values)]
        for there, new in zip(flat, (keys, values), strict=True):
            there.index_copy_(0, self._writes, new.reshape(-1, head_dim))
        queries = queries.view(-1, kernel.kv_heads, kernel.group, head_dim)
        outs, most = [], max(1, GATHERED_TOKENS // self._keys)
        for some, places, mask in zip(
            queries.split(most), self._places.split(most), self._masks[window].split(most), strict=True
        ):
            old_keys, old_values = (one.index_select(0, places.flatten()).view(*places.shape, head_dim) for one in flat)
            outs.append(kernel.attend(some, old_keys, old_values, mask)[0])
        return (outs[0] if len(outs) == 1 else torch.cat(outs)).reshape(len(queries), -1)


class StaticDecode:
    """Decode steps of up to ``max_running`` sequences of up to ``max_len`` tokens."""

    @torch.inference_mode()
    def __init__(self, decoder: Decoder, kernel: Kernel, arena: Arena, slots: Slots, max_running: int, max_len: int):
        self._decoder, self._kernel, self._arena, self._slots, self._max_len = decoder, kernel, arena, slots, max_len
        self._device, rows = kernel.device, row_bucket(max_running)
        self.capture: Capture | None = CudaCapture(kernel.device) if kernel.device.type == "cuda" else None
        """Makes recordings; None: every step runs as it is."""

        self._ints = torch.zeros((11, rows), dtype=torch.long, device=self._device)
        self._floats = torch.ones((2, rows), device=self._device)
        self._stop = torch.zeros((rows, 0), dtype=torch.long, device=self._device)
        self._found = torch.zeros((2, rows), dtype=torch.float64, device=self._device)
        self._replays: OrderedDict[Bucket, Replay | None] = OrderedDict()
        """Bucket → its recording; None: it has run once."""

        self._weights: FusedWeights | None = None
        self._memory = -1
        self.refused: dict[SamplingWay, str] = {}
        """Sampling → the reason for which its steps could not be recorded."""

        self._layout = -1
        self._count = self._longest = 0
        self._way = SamplingWay(False, False, False)

    @property
    def stale(self) -> bool:
        """True if the tables do not say where the rows are."""
        return self._layout != self._arena.layout

    @property
    def captured(self) -> int:
        """Recordings that are there."""
        return sum(replay is not None for replay in self._replays.values())

    @property
    def buckets(self) -> list[Bucket]:
        """Shapes of the steps that have run and are not forgotten, the one used last at the end."""
        return list(self._replays)

    @property
    def tables(self) -> tuple[torch.Tensor, ...]:
        """Tensors that a step reads besides weights and cache, and where its draws go; recordings hold their addresses."""
        return self._ints, self._floats, self._stop, self._found

    def held_bytes(self) -> int:
        """Bytes of the tables."""
        return sum(one.nbytes for one in self.tables)

    def plan(self, batch: SlotBatch) -> None:
        """Writes the tables for a batch, which `step` goes on with until one joins or leaves."""
        count, (ints, floats, stop) = len(batch.sequences), self._slots.lines(batch.slots)
        lines = torch.zeros((4, count), dtype=torch.long)
        for i, sequence in enumerate(batch.sequences):
            assert sequence.row is not None
            lines[0, i] = sequence.row.slab.offset  # type: ignore[attr-defined]
            if (prompt := sequence.prompt) is not None:
                lines[1, i], lines[2, i] = prompt.row.slab.offset, len(prompt.tokens)  # type: ignore[attr-defined]
        lines[3] = 1
        self._count, self._longest = count, int(ints[1].max())
        self._way = SamplingWay(batch.rows.greedy is not None, batch.rows.top_p is not None, bool((ints[4] < ints[5]).any()))
        padding = row_bucket(count) - count
        unused = torch.tensor([self._slots.unused, 1, 0, int(ints[3].max()), 0, 0, 0, 0, 0, 0, 0])
        table = torch.cat((torch.cat((ints, lines)), unused[:, None].expand(-1, padding)), dim=1)
        self._ints[:, : table.shape[1]] = upload(table.contiguous(), self._device)
        self._floats[:, :count] = upload(floats, self._device)
        self._floats[:, count : count + padding] = 1.0
        if self._way.minimums:
            if stop.shape[1] != self._stop.shape[1]:
                self._stop = torch.full((len(self._stop), stop.shape[1]), -1, device=self._device)
                self.forget()
            self._stop[:count] = upload(stop, self._device)
            self._stop[count:] = -1
        self._layout = self._arena.layout

    def step(self, weights: FusedWeights) -> torch.Tensor:
        """Draws a token for each sequence: tokens and log-probabilities ``[2, B]`` float64, on the device."""
        if weights is not self._weights or self._arena.memory != self._memory:  # recordings read what is no longer there
            self.forget()
            self._weights, self._memory = weights, self._arena.memory
        bucket = Bucket(row_bucket(self._count), key_bucket(self._longest, self._max_len), self._way)
        run = partial(self._compute, weights, bucket)
        replay = self._replays.get(bucket)
        if replay is None and bucket in self._replays:
            replay = self._record(bucket, run)
        self._replays[bucket] = replay
        self._replays.move_to_end(bucket)
        if len(self._replays) > MOST_GRAPHS:
            self._replays.popitem(last=False)
        (replay or run)()
        self._longest += 1
        return self._found[:, : self._count].clone()  # the next step writes there

    def forget(self) -> None:
        """Lets go of all recordings, and of the memory that they compute in."""
        self._replays.clear()
        self._weights = None
        if isinstance(self.capture, CudaCapture):
            self.capture.reset()

    def _record(self, bucket: Bucket, run: Replay) -> Replay | None:
        if self.capture is None or bucket.way in self.refused:
            return None
        try:
            return self.capture(run)
        except Exception as error:  # the boundary to the driver: what cannot be recorded still runs
            self.refused[bucket.way] = kind_and_text(error)
            sampling = ", ".join(name for name, value in bucket.way._asdict().items() if value) or "plain"
            logger.warning(
                "a decode step of %d rows and %d keys (sampling: %s) could not be recorded as a CUDA graph, so such steps "
                "run without: %s; rollout.engine.cuda_graphs=false spares the attempt",
                bucket.rows,
                bucket.keys,
                sampling,
                self.refused[bucket.way],
            )
            return None

    def _compute(self, weights: FusedWeights, bucket: Bucket) -> None:
        """All that is recorded; reads and writes the tables, the arena and the newest tokens, and waits for nothing."""
        table = self._ints[:, : bucket.rows].unbind()
        slots, positions, streams, top_k, counts, minimums, greedy, own, prompt, start, live = table
        temperatures, top_p = self._floats[:, : bucket.rows].unbind()
        where = positions, own, prompt, start
        attend = GatheredAttention(self._kernel, self._arena, *where, bucket.keys, self._decoder.windows)
        hidden = self._decoder.hidden(weights, self._slots.last.index_select(0, slots), positions - 1, attend)
        tokens, logprobs = sample_all(
            self._decoder.logits(weights, hidden),
            uniform(streams, positions),
            temperatures,
            greedy=greedy.bool() if bucket.way.greedy else None,
            kept=(top_p, top_k) if bucket.way.truncates else None,
            forbidden=(self._stop[: bucket.rows], counts < minimums) if bucket.way.minimums else None,
        )
        self._slots.last.index_copy_(0, slots, tokens)
        self._found[0, : bucket.rows] = tokens
        self._found[1, : bucket.rows] = logprobs
        positions += live
        counts += live
