"""The rounds of the embedded engine: each computes a piece of the waiting prompts, and a token of each running sequence."""

import time
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from tandem.api.activity import span
from tandem.api.failures import DataFailure
from tandem.api.requests import LLMRequest, LLMResponse, StopReason
from tandem.api.weights import WeightVersion
from tandem.engines.inference.decoder import FusedWeights
from tandem.engines.inference.engine_calls import Result, StopText, check_request
from tandem.engines.inference.passes import Passes
from tandem.engines.inference.scheduler import Scheduler
from tandem.engines.inference.sequences import Prefill, Sequence, SharedPrompt, SlotBatch
from tandem.engines.inference.tower import Tower
from tandem.engines.inference.watched import Extras, Grammars
from tandem.models.architecture import Architecture
from tandem.models.tokenizer import load_tokenizer

Finished = list[Result]

_EAGER_PREFILL = 4
"""Decoding waits while more than a quarter as many sequences are without a first token as are decoding, because a step costs
nearly the same for few sequences as for many."""


class Rounds:
    """Continuous batching over a slab cache, with `weights` that `EngineCore` brings and switches between two rounds."""

    def __init__(
        self,
        folder: Path,
        architecture: Architecture,
        scheduler: Scheduler,
        passes: Passes,
        tower: Tower | None,
        grammars: Grammars,
        max_model_len: int,
        version: WeightVersion,
        reads_late: bool,
    ):
        """``tower``: for models that see or hear. ``reads_late``: see `EngineCore`."""
        self.folder, self.passes, self.cache, self.slots = folder, passes, scheduler.cache, scheduler.slots
        self._architecture, self._scheduler, self._tower, self._grammars = architecture, scheduler, tower, grammars
        self._max_model_len, self._late = max_model_len, reads_late
        self._finished: Finished = []  # requests that ended between two rounds
        self._tokenizer: PreTrainedTokenizerBase | None = None  # loaded once a request has stop strings
        counted = "generated_tokens prefill_tokens recomputed_tokens steps busy_s prefill_s decode_s cancelled"
        self._counters = dict.fromkeys(counted.split(), 0.0)
        self.weights: FusedWeights | None = None  # they sleep
        self.version = version
        """Version of the weights that will compute the next token."""

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.sequences or self._finished)

    def add(self, request_id: int, request: LLMRequest) -> None:
        """Queues a request.

        Raises:
            DataFailure: ``prompt_too_long`` if no token fits after the prompt, ``bad_request`` if it cannot be sampled.
            WrongWorkflow: the request asks for something that this engine does not support.
        """
        ids, gconfig = request.input_ids, request.gconfig
        check_request(request, self._architecture.vocab_size, self._max_model_len, self._tower is not None, embedded=True)
        if self._tower is not None:
            self._tower.check(request)
        deadline = None if request.deadline_s is None else time.monotonic() + request.deadline_s
        if gconfig.stop and self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.folder)
        stop = StopText(self._tokenizer, gconfig.stop) if gconfig.stop and self._tokenizer is not None else None
        limit = min(gconfig.max_new_tokens, self._max_model_len - len(ids))
        positions = None if self._tower is None else self._tower.positions(request)
        extras = Extras.of(request, self._grammars)
        sequence = Sequence(request_id, request, limit, deadline, stop, positions, extras=extras)
        needed = self._scheduler.needed(sequence)
        if needed > self.cache.budget_tokens:
            raise DataFailure(
                "prompt_too_long",
                f"{len(ids)} prompt and {limit} new tokens need a cache of {needed}, rollout.engine.kv_cache_gib holds "
                f"{self.cache.budget_tokens}; make it larger or max_new_tokens smaller",
            )
        self._scheduler.add(sequence)

    @torch.inference_mode()
    def step(self) -> Finished:
        """Runs one round: admission, a piece of prefill and/or one token per started sequence. Returns finished requests."""
        if self.weights is None:
            raise RuntimeError("the weights sleep; deliver them again (stage, swap) before the next step")
        began = time.perf_counter()
        finished, self._finished = self._finished + self._expire(), []
        scheduler, unread = self._scheduler, len(self.slots.unread)
        scheduler.admit()
        if scheduler.prefill.jobs or scheduler.ready:
            with span("engine: prefill"):
                finished += self._prefill()
        self._counters["prefill_s"] += time.perf_counter() - began
        middle = time.perf_counter()
        if unread and scheduler.growth.full(scheduler.decoding):  # a sequence needs all its tokens to be preempted
            finished, unread = finished + self._read(), 0
        scheduler.make_room()
        pending = scheduler.num_running - len(scheduler.decoding)
        if scheduler.decoding and pending * _EAGER_PREFILL <= len(scheduler.decoding):
            with span("engine: decode"):
                finished += self._decode()
        finished += self._read(unread)
        self._counters["decode_s"] += time.perf_counter() - middle
        self._counters["busy_s"] += time.perf_counter() - began
        self._counters["steps"] += 1
        return finished

    def _expire(self) -> Finished:
        """Ends requests whose deadline has passed, with the tokens drawn so far."""
        now = time.monotonic()
        late = [s for s in self._scheduler.sequences.values() if s.deadline is not None and s.deadline <= now]
        self._counters["cancelled"] += len(late)
        return self._end([(sequence, StopReason.CANCELLED) for sequence in late])

    def _end(self, ended: list[tuple[Sequence, StopReason]]) -> Finished:
        finished: Finished = []
        for sequence, reason in ended:
            if sequence.slot >= 0:
                response = self.slots.response(sequence, reason)
            else:
                request = sequence.request
                response = LLMResponse(request.input_ids, (), (), (), reason, request.gconfig.temperature)
            response = replace(response, timing=sequence.clock.timing())
            finished.append((sequence.request_id, sequence.extras.result(response) if sequence.extras else response))
        if ended:
            self._scheduler.end([sequence for sequence, _ in ended])
        return finished

    def _prefill(self) -> Finished:
        """Runs one packed pass over prompts, and draws the first token of every sequence whose prompt is done."""
        scheduler = self._scheduler
        starting, scheduler.ready = scheduler.ready, []
        for job in self._run_jobs(scheduler.prefill.jobs, "prefill_tokens"):
            if isinstance(job.owner, Sequence) and job.owner.started:
                scheduler.start(job.owner)  # was preempted before; the next decode step continues from its newest token
            else:
                starting += job.owner.members if isinstance(job.owner, SharedPrompt) else [job.owner]
        scheduler.prefill.jobs = [job for job in scheduler.prefill.jobs if job.done < len(job.tokens)]
        scored = self._end([(sequence, StopReason.LENGTH) for sequence in starting if not sequence.max_new_tokens])
        starting = [sequence for sequence in starting if sequence.max_new_tokens]
        if not starting:
            return scored
        assert self.weights is not None
        logits = self.passes.logits(self.weights, [sequence.last_hidden() for sequence in starting])
        for sequence in starting:
            scheduler.start(sequence)
        return scored + self._draw(self.slots.batch(starting), logits)

    def _run_jobs(self, jobs: list[Prefill], counter: str) -> list[Prefill]:
        """Runs one prefill pass over the first jobs and hands hidden states to their owners. Returns completed jobs."""
        assert self.weights is not None
        selected, pieces = self._scheduler.prefill.next_pieces(jobs)
        media = ((job.media, piece.start, piece.count) for job, piece in zip(selected, pieces, strict=True))
        shown = None if self._tower is None else self._tower.shown(media)
        complete = self.passes.prefill(self.weights, selected, pieces, shown)
        self._counters[counter] += sum(piece.count for piece in pieces)
        return complete

    def _decode(self) -> Finished:
        """Draws the next token of every decoding sequence."""
        slots, scheduler = self.slots, self._scheduler
        assert self.weights is not None
        if scheduler.changed:  # else the batch is that of the last step
            self._batch = slots.batch(scheduler.ordered())
            self.passes.plan(self._batch.sequences, slots.positions[self._batch.slots].tolist())
            scheduler.changed = False
        else:
            self.passes.advance()
        batch = self._batch
        logits = self.passes.decode(
            self.weights, slots.last[batch.places], slots.positions[batch.slots] - 1 + slots.offsets[batch.slots]
        )
        return self._draw(batch, logits)

    def _draw(self, batch: SlotBatch, logits: torch.Tensor) -> Finished:
        """Draws a token for each sequence of the batch. If tokens are read at once, ends the sequences that are done."""
        at_once = batch.watched is not None and batch.watched.needs_tokens
        read = self._read() if at_once else []
        self.slots.draw(batch, logits, self.version.number)
        if not self._late or at_once:
            return read + self._read()
        self._scheduler.leave(self.slots.at_limit(batch))  # their last tokens are not read yet
        return []

    def _read(self, count: int | None = None) -> Finished:
        """Reads the tokens of the ``count`` oldest draws (None: all), and ends the sequences that are done."""
        finished: Finished = []
        for _ in range(min(len(self.slots.unread), len(self.slots.unread) if count is None else count)):
            batch, tokens, stopped, full = self.slots.record()
            self._counters["generated_tokens"] += len(batch)
            ended = dict.fromkeys(full, StopReason.LENGTH) | dict.fromkeys(stopped, StopReason.STOP)
            for i, sequence in enumerate(batch):
                said = sequence.stop_text is not None and sequence.stop_text.add(int(tokens[i]))
                if said and self.slots.num_drawn(sequence) >= sequence.request.gconfig.min_new_tokens:
                    ended[i] = StopReason.STOP
            finished += self._end([(batch[i], reason) for i, reason in sorted(ended.items())])
        return finished
