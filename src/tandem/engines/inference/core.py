"""The core of the embedded engine: runs scheduling rounds, and switches weights between two rounds.

One thread calls `EngineCore.step` and all other methods; only `stage` may run in another thread at the same time.
"""

import os
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from tandem.api.activity import span
from tandem.api.engines import InferencePart
from tandem.api.failures import DataFailure
from tandem.api.requests import LLMRequest, LLMResponse, NewTokens, StopReason
from tandem.api.weights import FolderSource, WeightVersion
from tandem.config.rollout import EmbeddedEngineConfig, chunk_tokens, places
from tandem.engines.inference.decoder import FusedWeights, FusedWeightsBuilder, NewWeights, check_stored, compute_dtype
from tandem.engines.inference.engine_calls import Result, StopText, check_request
from tandem.engines.inference.kv_cache import make_cache
from tandem.engines.inference.passes import Passes
from tandem.engines.inference.scheduler import Scheduler
from tandem.engines.inference.sequences import Prefill, Sequence, SharedPrompt, SlotBatch, Slots
from tandem.engines.inference.tower import Tower
from tandem.engines.inference.watched import Extras, Grammars
from tandem.models.architecture import Architecture
from tandem.models.foreign import read_hf_config
from tandem.models.media.families import family_of
from tandem.models.tokenizer import load_tokenizer, stop_ids

Finished = list[Result]

_EAGER_PREFILL = 4
"""Decode waits while sequences without a first token number more than 1/4 of the decoding ones, because a step costs nearly
the same for few sequences as for many."""


class EngineCore:
    """Continuous batching over a slab cache.

    ``deterministic``: other requests change a request's numbers by rounding at most; costs memory (`Growth`).
    ``reads_late``: the host reads a step's tokens after it has launched the next step, so the device never waits.
    A sequence that has ended then draws one more token, which is dropped. Default: True on a GPU, False on a CPU.

    Example: ``core.add(0, LLMRequest((1, 2, 3), GenerationConfig()))``, then ``core.step()`` while ``core.has_work``.
    """

    def __init__(
        self,
        folder: Path,
        config: EmbeddedEngineConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        version: WeightVersion,
        deterministic: bool = False,
        reads_late: bool | None = None,
    ):
        device = torch.device(device)
        self._late = device.type != "cpu" if reads_late is None else reads_late
        self._finished: Finished = []
        """Requests that ended between two rounds."""

        self._tokenizer: PreTrainedTokenizerBase | None = None  # loaded once a request has stop strings
        self.folder, self.device, self._dtype = folder, device, dtype
        a = self._architecture = Architecture.from_config(hf_config := read_hf_config(folder))
        self._max_model_len = config.max_model_len or a.max_position_embeddings
        compute = compute_dtype(dtype, device)
        if deterministic:  # must precede this process's first matrix product on CUDA
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        self.cache = make_cache(a, config, compute, device)
        passes = self.passes = Passes(a, dtype, compute, device, self._max_model_len)
        self.slots = Slots(places(config), a.vocab_size, stop_ids(folder, hf_config), device, passes.decoder.kernels)
        self._grammars = Grammars(folder, a.vocab_size, stop_ids(folder, hf_config))
        self._scheduler = Scheduler(self.cache, self.slots, chunk_tokens(config, device.type), whole_rows=deterministic)
        counted = "generated_tokens prefill_tokens recomputed_tokens steps busy_s prefill_s decode_s cancelled"
        self._counters = dict.fromkeys(counted.split(), 0.0)
        self.version = version
        """Version of the weights that will compute the next token."""

        family = family_of(folder, hf_config)
        self._tower = None if family is None else Tower(family, hf_config, compute, device)
        check_stored(folder, a, self._tower)
        self.weights: FusedWeights | None = None
        self._take(self.stage(FolderSource(folder).tensors()))

    # ------------------------------------------------------------------ requests

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
    def cancel(self, request_id: int) -> None:
        """Ends a request without a response and frees its memory. An unknown number is ignored."""
        sequence = self._scheduler.sequences.get(request_id)
        if sequence is not None:
            self._counters["cancelled"] += 1
            self._scheduler.end([sequence])

    def drawn(self, request_id: int, start: int) -> NewTokens:
        """Returns the drawn tokens from index ``start`` on; none for a request that waits or has ended."""
        sequence = self._scheduler.sequences.get(request_id)
        return NewTokens((), ()) if sequence is None or sequence.slot < 0 else self.slots.drawn_since(sequence, start)

    def flush(self) -> None:
        """Keeps later requests from sharing the prompts of running ones."""
        self._scheduler.stop_sharing()

    # ------------------------------------------------------------------ one round

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
        shown = None
        if self._tower is not None:
            shown = self._tower.shown(
                (job.media, piece.start, piece.count) for job, piece in zip(selected, pieces, strict=True)
            )
        complete = self.passes.prefill(self.weights, selected, pieces, shown)
        self._counters[counter] += sum(piece.count for piece in pieces)
        return complete

    def _decode(self) -> Finished:
        """Draws the next token of every decoding sequence."""
        slots, scheduler = self.slots, self._scheduler
        assert self.weights is not None
        if scheduler.changed or not self.passes.planned:  # else the batch is that of the last step
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
                if sequence.stop_text is not None and self._says_stop(sequence, int(tokens[i])):
                    ended[i] = StopReason.STOP
            finished += self._end([(batch[i], reason) for i, reason in sorted(ended.items())])
        return finished

    def _says_stop(self, sequence: Sequence, token: int) -> bool:
        assert sequence.stop_text is not None
        count = self.slots.num_drawn(sequence)
        return sequence.stop_text.add(token) and count >= sequence.request.gconfig.min_new_tokens

    # ------------------------------------------------------------------ weights and memory

    def own_name(self, name: str) -> str:
        """Returns the trainer's name of the weight that a file calls ``name``."""
        return name if self._tower is None else self._tower.family.own_name(name)

    def stage(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> NewWeights:
        """Builds a second copy of the weights from a stream of tensors under their Hugging Face names.

        May run in another thread while `step` runs. Each tensor must be valid only until the next one is requested.

        Raises:
            WeightUpdateFailed: a tensor is missing, unknown, has another shape or came twice; the message names it.
        """
        builder = FusedWeightsBuilder(self._architecture, self._dtype, self.device, self._tower)
        for name, tensor in named_tensors:
            builder.add(name, tensor)
        return builder.finish()

    @torch.inference_mode()
    def swap(self, staged: NewWeights, version: WeightVersion, keep_kv: bool = False) -> dict[str, float]:
        """Switches to staged weights between two steps.

        The cache of running requests is recomputed under the new weights, unless ``keep_kv``. Tokens drawn before keep their
        log-probabilities and versions.

        Returns:
            ``pause_s`` without the recompute, and ``recompute_s``.
        """
        began = time.perf_counter()
        self._take(staged)
        self.version = version
        scheduler = self._scheduler
        self._finished += self._read()
        if keep_kv:
            scheduler.stop_sharing()
        else:
            scheduler.prefill.restart()
        switched = time.perf_counter()
        if not keep_kv:
            for jobs in scheduler.recompute_jobs():
                while jobs:
                    self._run_jobs(jobs, "recomputed_tokens")
                    jobs = [job for job in jobs if job.done < len(job.tokens)]
        return {"pause_s": switched - began, "recompute_s": time.perf_counter() - switched}

    def _take(self, staged: NewWeights) -> None:
        self.weights = staged.weights
        if self._tower is not None:
            self._tower.load(staged.tower)

    def sleep(self, parts: tuple[InferencePart, ...]) -> None:
        """Frees the memory of ``parts``. Raises `RuntimeError` while requests are waiting or running."""
        if self.has_work:
            raise RuntimeError(f"sleep needs an idle engine; {len(self._scheduler.sequences)} requests are under way")
        if "kv_cache" in parts:
            self.passes.forget()
            self.cache.clear()
        if "weights" in parts:
            self.weights = None
            if self._tower is not None:
                self._tower.sleep()

    def wake(self, parts: tuple[InferencePart, ...]) -> None:
        """Does nothing: the first request allocates the cache again, and `stage` and `swap` bring weights."""

    def statistics(self) -> dict[str, float]:
        scheduler, cache = self._scheduler, self.cache
        seen = {} if self._tower is None else self._tower.statistics()
        return (
            self._counters
            | seen
            | {
                "running": float(scheduler.num_running),
                "waiting": float(len(scheduler.waiting)),
                "preempted": float(scheduler.growth.preempted),
                "shared_prompt_tokens": float(scheduler.shared_tokens),
                "kv_reserved_tokens": float(cache.reserved_tokens),
                "kv_budget_tokens": float(cache.budget_tokens),
                "kv_held_bytes": float(cache.held_bytes()),
            }
        )
