"""Running sequences: each has a Python object and a row in tensor tables, so that a draw needs no Python code per row.

The tables are in host memory. A step uploads the parts that it needs and waits for the device once: for its own tokens, or
on a GPU for those of the step before.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from tandem.api.failures import NonFinite
from tandem.api.requests import LLMRequest, LLMResponse, NewTokens, NoiseKey, RequestClock, StopReason
from tandem.engines.inference.engine_calls import StopText
from tandem.engines.inference.kernels import Kernels
from tandem.engines.inference.kv_cache import Row
from tandem.engines.inference.sampler import SamplingRows, SamplingTable, sample, stream_of, uniform, widened
from tandem.engines.inference.watched import Extras, TopRows, Watched
from tandem.models.hardware import Download, upload


@dataclass(eq=False)
class SharedPrompt:
    """A prompt whose keys and values several samples read; computed once."""

    request: LLMRequest
    """The first one with this prompt; all others have the same `key`."""

    row: Row
    positions: torch.Tensor | None = None
    """Rotary positions ``[S, 3]`` of the prompt; None: each token's position is its index."""

    members: list["Sequence"] = field(default_factory=list)
    hidden: torch.Tensor | None = None
    """``[hidden]`` state of the last prompt token, from which each member draws its first token; None: not computed yet."""

    @property
    def length(self) -> int:
        return len(self.request.input_ids)


@dataclass(eq=False)
class Sequence:
    """One completion under way."""

    request_id: int
    request: LLMRequest
    max_new_tokens: int
    deadline: float | None = None
    """Time at which the request ends, in seconds of the monotonic clock; None: never."""

    stop_text: StopText | None = None
    positions: torch.Tensor | None = None
    """Rotary positions of its prompt, as in `SharedPrompt`."""

    slot: int = -1
    """Row of the sequence in the tables of `Slots`; −1 while it waits."""

    row: Row | None = None
    """Cache row with keys and values of the whole sequence, or of its own tokens alone if the prompt is shared."""

    prompt: SharedPrompt | None = None
    started: bool = False
    """True once the sequence has its first token and takes part in decode steps."""

    arrival: int = 0
    """Number of the sequence among all requests, in order of arrival."""

    clock: RequestClock = field(default_factory=RequestClock)
    hidden: torch.Tensor | None = None
    """``[hidden]`` state of the last prompt token, if the prompt is not shared; between prefill and the first draw."""

    extras: Extras | None = None
    """The request's extras beside tokens (grammar, top tokens); None if it has none."""

    def last_hidden(self) -> torch.Tensor:
        """Returns the hidden state ``[hidden]`` of the last prompt token, and drops the sequence's own copy."""
        hidden = (self.prompt or self).hidden
        assert hidden is not None
        self.hidden = None
        return hidden

    @property
    def offset(self) -> int:
        """Rotary position of a drawn token minus the token's index."""
        return 0 if self.positions is None else int(self.positions.max()) + 1 - len(self.positions)

    @property
    def tokens_before(self) -> int:
        """Number of prompt tokens in the sequence's own row; 0 if the prompt is shared."""
        return len(self.request.input_ids) if self.prompt is None else 0


@dataclass(eq=False)
class Prefill:
    """Tokens that the model still has to read into a cache row, in one piece or several."""

    tokens: torch.Tensor
    """``[n]`` int64."""

    row: Row
    owner: Sequence | SharedPrompt
    base: SharedPrompt | None = None
    """The shared prompt that precedes these tokens."""

    done: int = 0
    media: tuple[int, ...] = ()
    positions: torch.Tensor | None = None
    """Media numbers and rotary positions ``[n, 3]`` of the first tokens (all or fewer); the tokens after them are text."""

    key: tuple[int, ...] = ()
    """Identity of a whole prompt whose beginning other prompts may share (see `LLMRequest.key`); empty for other tokens."""

    alike: tuple[tuple["Prefill", int], ...] = ()
    """Earlier prefills with the same beginning, each with the number of common tokens; empty once these are copied."""

    gone: bool = False
    """True once the job's row is released, or must not be copied from."""

    scored: Extras | None = None
    """The extras that record the log-probabilities of these tokens; None: they are not computed."""

    def at(self, start: int, count: int) -> torch.Tensor:
        """Rotary positions of ``count`` tokens from index ``start`` on, ``[count]`` or ``[count, 3]``."""
        offset = self.owner.offset if isinstance(self.owner, Sequence) else 0
        before = 0 if self.base is None else self.base.length
        plain = torch.arange(start, start + count) + before + offset
        if self.positions is None:
            return plain
        known = self.positions[start : start + count]
        return torch.cat((known, plain[len(known) :, None].expand(-1, 3)))


class SlotBatch(NamedTuple):
    """Sequences that draw their next token together, with the tensors that stay the same between two draws."""

    sequences: list[Sequence]
    slots: torch.Tensor
    places: torch.Tensor
    """``[B]`` int64 rows in the tables, on the host and on the device."""

    rows: SamplingRows
    watched: Watched | None


@dataclass(frozen=True)
class DrawnTokens:
    """Tokens that a step has drawn; the host may not have read them yet."""

    sequences: list[Sequence]
    slots: torch.Tensor
    counts: torch.Tensor
    """``[B]`` int64 each: rows in the tables, and the number of tokens that each sequence had drawn before this step."""

    version: int
    downloads: tuple[Download, ...]
    """Tokens ``[B]`` and log-probabilities ``[B]``. A device sends both as one float64 ``[2, B]``, which represents either
    exactly."""

    top: TopRows | None = None


class Slots:
    """State of up to ``count`` running sequences. ``compiled``: the kernels that sample; None: torch samples."""

    def __init__(self, count: int, vocab_size: int, eos: Iterable[int], device: torch.device, compiled: Kernels | None):
        self._device, self._compiled = device, compiled
        self._free = list(range(count - 1, -1, -1))

        def table(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros((count, *shape), dtype=dtype)

        self.last = torch.zeros(count, dtype=torch.long, device=device)
        """Newest token of each row, not in the cache yet; on the device, where the next step reads it."""

        self.positions = table(torch.long)  # absolute position of the next token to be drawn
        self.offsets = table(torch.long)  # rotary position of that token minus `positions`
        self.counts = table(torch.long)  # tokens drawn so far
        self._known = table(torch.long)  # those that the host has read: `counts` minus the draws in `unread`

        self._limits, self._streams = table(torch.long), table(torch.long)
        self._sampling = SamplingTable(count, vocab_size, eos, device)
        self.unread: list[DrawnTokens] = []
        """Draws whose tokens the host has not read yet, oldest first."""

        self._tokens, self._versions = table(torch.long, 16), table(torch.long, 16)
        self._logprobs = table(torch.float32, 16)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, sequence: Sequence) -> None:
        slot = sequence.slot = self._free.pop()
        sequence.clock.mark("admitted")
        request = sequence.request
        self.positions[slot], self.counts[slot], self._known[slot] = len(request.input_ids), 0, 0
        self.offsets[slot], self._limits[slot] = sequence.offset, sequence.max_new_tokens
        key = request.noise_key if request.noise_key is not None else NoiseKey(seed=0, sample=sequence.request_id)
        self._streams[slot] = stream_of(key)
        self._sampling.set(slot, request.gconfig)
        tables = self._tokens, self._versions, self._logprobs
        self._tokens, self._versions, self._logprobs = (widened(table, sequence.max_new_tokens, 0) for table in tables)

    def release(self, sequence: Sequence) -> None:
        self._free.append(sequence.slot)
        sequence.slot = -1

    def batch(self, sequences: list[Sequence]) -> SlotBatch:
        """Returns a batch of these sequences, for `draw`."""
        slots = torch.tensor([sequence.slot for sequence in sequences])
        watched = Watched.among((sequence.extras for sequence in sequences), self._device)
        return SlotBatch(sequences, slots, upload(slots, self._device), self._sampling.rows(slots), watched)

    def draw(self, batch: SlotBatch, logits: torch.Tensor, version: int) -> None:
        """Draws the next tokens from ``logits [B, V]`` on the device. The host does not wait here; `record` waits."""
        slots, rows = batch.slots, batch.rows
        positions, counts = self.positions[slots], self.counts[slots]
        forbidden = self._sampling.forbidden(slots, counts) if rows.minimums else None
        if rows.first_temperatures is not None:
            first = upload(counts == 0, self._device)
            rows = replace(rows, temperatures=torch.where(first, rows.first_temperatures, rows.temperatures))
        uniforms = upload(uniform(self._streams[slots], positions), self._device)
        inputs = logits, uniforms, rows, forbidden, self._compiled
        drawn, top = (sample(*inputs), None) if batch.watched is None else batch.watched.sample(*inputs)
        self.last[batch.places] = drawn[0]
        sent = drawn if self._device.type == "cpu" else (torch.stack([tensor.double() for tensor in drawn]),)
        self.positions[slots] += 1
        self.counts[slots] = counts + 1
        self.unread.append(DrawnTokens(batch.sequences, slots, counts, version, tuple(map(Download, sent)), top))

    def at_limit(self, batch: SlotBatch) -> list[Sequence]:
        """Returns the sequences that have drawn their maximum number of tokens."""
        full = (self.counts[batch.slots] >= self._limits[batch.slots]).nonzero().flatten().tolist()
        return [batch.sequences[i] for i in full]

    def record(self) -> tuple[list[Sequence], torch.Tensor, list[int], list[int]]:
        """Stores the tokens of the oldest unread draw; tokens of sequences that have ended meanwhile are dropped.

        Returns:
            The remaining sequences, their tokens, and the indices of those that drew a stop token or reached their limit.

        Raises:
            NonFinite: the logits are not numbers.
        """
        drawn = self.unread.pop(0)
        sent = [download.wait() for download in drawn.downloads]
        tokens, logprobs = sent if len(sent) == 2 else (sent[0][0].long(), sent[0][1].float())
        batch, slots, counts = drawn.sequences, drawn.slots, drawn.counts
        if drawn.top is not None:
            drawn.top.record(tokens)
        if len(live := [i for i, sequence in enumerate(batch) if sequence.slot >= 0]) < len(batch):
            batch = [batch[i] for i in live]
            tokens, logprobs, slots, counts = tokens[live], logprobs[live], slots[live], counts[live]
        self._tokens[slots, counts] = tokens
        self._logprobs[slots, counts] = logprobs
        self._versions[slots, counts] = drawn.version
        self._known[slots] = counts + 1
        stopped = self._sampling.stopped(slots, tokens)
        full = (counts + 1 >= self._limits[slots]) & ~stopped
        ended = torch.stack((stopped, full, logprobs.isnan()))
        if not bool(ended.any()):
            return batch, tokens, [], []
        if bool(ended[2].any()):
            raise NonFinite(
                f"version {drawn.version} of the weights gives logits that are not finite, so no token can be drawn; lower "
                "actor.optimizer.lr, or use a model whose weights are finite"
            )
        return batch, tokens, ended[0].nonzero().flatten().tolist(), ended[1].nonzero().flatten().tolist()

    def num_drawn(self, sequence: Sequence) -> int:
        """Number of drawn tokens that the host has read; 0 before the sequence has a slot."""
        return int(self._known[sequence.slot]) if sequence.slot >= 0 else 0

    def drawn(self, sequence: Sequence) -> torch.Tensor:
        """Returns the drawn tokens that the host has read, ``[n]``."""
        return self._tokens[sequence.slot, : int(self._known[sequence.slot])]

    def drawn_since(self, sequence: Sequence, start: int) -> NewTokens:
        """Returns the drawn tokens from index ``start`` on, with their log-probabilities."""
        new = slice(start, int(self._known[sequence.slot]))
        tokens, logprobs = (table[sequence.slot, new].tolist() for table in (self._tokens, self._logprobs))
        return NewTokens(tuple(tokens), tuple(logprobs), tuple(sequence.extras.top[new]) if sequence.extras else ())

    def response(self, sequence: Sequence, reason: StopReason) -> LLMResponse:
        count = int(self._known[sequence.slot])
        tables = self._tokens, self._logprobs, self._versions
        tokens, logprobs, versions = (tuple(table[sequence.slot, :count].tolist()) for table in tables)
        ids, gconfig = sequence.request.input_ids, sequence.request.gconfig
        untrained = min(count, int(gconfig.first_token_temperature is not None))
        return LLMResponse(ids, tokens, logprobs, versions, reason, gconfig.temperature, untrained_tokens=untrained)
