"""Decides which requests run. First come, first served: a request is admitted when there is a slot and its first row fits
(`admission.Growth`). When the cache is full, the latest request is preempted."""

from collections import Counter, deque

import torch

from tandem.engines.inference.admission import Growth, PrefillQueue, SharedPrompts
from tandem.engines.inference.kv_cache import KVCache, Pool
from tandem.engines.inference.sequences import Prefill, Sequence, SharedPrompt, Slots


class Scheduler:
    """Waiting, prefilling and decoding sequences, and the rows of the cache that they hold."""

    def __init__(self, cache: KVCache, slots: Slots, prefill_chunk_tokens: int, whole_rows: bool):
        self.cache, self.slots = cache, slots
        self.growth = Growth(cache, slots, whole_rows)
        self.sequences: dict[int, Sequence] = {}
        """All waiting and running sequences, by request number."""

        self.waiting: deque[Sequence] = deque()
        self.prefill = PrefillQueue(prefill_chunk_tokens)
        self.ready: list[Sequence] = []
        """Admitted sequences whose shared prompt is computed already; they can draw their first token."""

        self.decoding: list[Sequence] = []
        self.changed = True
        """True if a sequence has joined or left the decoding ones, or a row has moved, since the last plan."""

        self._arrived = 0
        self.prompts = SharedPrompts(cache)

    @property
    def num_running(self) -> int:
        """Number of sequences that hold memory."""
        return len(self.sequences) - len(self.waiting)

    def needed(self, sequence: Sequence) -> int:
        """Returns the cache tokens that the sequence needs when it runs alone; its last drawn token is never stored."""
        return self.cache.capacity_for(len(sequence.request.input_ids) + max(0, sequence.max_new_tokens - 1))

    def add(self, sequence: Sequence) -> None:
        self.sequences[sequence.request_id] = sequence
        sequence.arrival = self._arrived = self._arrived + 1
        self.waiting.append(sequence)
        self.prompts.queued(sequence)

    def admit(self) -> None:
        """Admits sequences from the front of the queue while they fit."""
        admitted: list[tuple[Sequence, Pool, int]] = []
        planned: list[int] = []
        new_prompts: set[tuple[int, ...]] = set()
        self.growth.expect(self.waiting)
        while self.waiting and len(admitted) < self.slots.num_free + (self.waiting[0].slot >= 0):
            sequence = self.waiting[0]  # never a later one, or a long request would wait for ever
            key, length = sequence.request.key, len(sequence.request.input_ids)
            # By default a sequence joins a prompt that others compute, and needs a row for its own tokens only.
            pool: Pool = "suffix"
            needs = [self.growth.capacity(0, sequence)]
            if sequence.request.scores_prompt or (sequence.started and not self.prompts.computed(key)):
                # its whole prompt is scored, or it was preempted: prompt and drawn tokens share a row
                pool, needs = "whole", [self.growth.capacity(length, sequence)]
            elif key not in self.prompts and key not in new_prompts:
                if self.prompts.wanted(key) > 1:  # the first of several: the prompt needs a row, too
                    needs.append(self.cache.capacity_for(length))
                    new_prompts.add(key)
                else:  # its prompt is not shared: one row for all its tokens
                    pool, needs = "whole", [self.growth.capacity(length, sequence)]
            if not self.cache.fits(planned + needs):
                new_prompts.discard(key)
                if self.num_running or admitted:
                    break  # until a running sequence ends and frees its rows
                # two rows, each rounded up, can need more than the whole cache: then it runs alone, in one row
                pool, needs = "whole", [self.needed(sequence)]
            planned += needs
            self.prompts.left_queue(self.waiting.popleft())
            admitted.append((sequence, pool, needs[0]))
        # Growing a slab copies it, so each slab grows once, by all its new rows, before sequences are placed.
        for (pool, capacity), count in Counter((pool, capacity) for _, pool, capacity in admitted).items():
            self.cache.reserve(pool, capacity, count)
        for sequence, pool, capacity in admitted:
            self._place(sequence, pool, capacity)

    def _place(self, sequence: Sequence, pool: Pool, capacity: int) -> None:
        if sequence.slot < 0:
            self.slots.take(sequence)
        sequence.row = self.cache.allocate(pool, capacity)
        if pool == "suffix":
            prompt, is_new = self.prompts.join(sequence)
            if is_new:
                self.prefill.add(_whole_prompt(prompt))
            elif prompt.hidden is not None and not sequence.started:  # else it starts when the job of its prompt is done
                self.ready.append(sequence)
        elif not sequence.started:
            self.prefill.add(_whole_prompt(sequence))
        self.growth.watch(sequence)
        if sequence.started and len((job := self._refill(sequence)).tokens):
            self.prefill.add(job)
        elif sequence.started:
            self.start(sequence)

    def _refill(self, sequence: Sequence) -> Prefill:
        """Returns the job that fills the row of a sequence again, with all its own tokens but the newest drawn one."""
        assert sequence.row is not None
        tokens, request = self.slots.drawn(sequence)[:-1].cpu(), sequence.request
        if sequence.prompt is not None:
            return Prefill(tokens, sequence.row, sequence, sequence.prompt)
        tokens = torch.cat((torch.tensor(request.input_ids), tokens))
        return Prefill(tokens, sequence.row, sequence, media=request.media, positions=sequence.positions)

    def start(self, sequence: Sequence) -> None:
        """Adds a sequence to the decoding ones, once it has its first token or its row was filled again after preemption."""
        if not sequence.started:
            sequence.clock.mark("began")
        sequence.started = True
        self.decoding.append(sequence)
        self.changed = True

    def leave(self, sequences: list[Sequence]) -> None:
        """Stops decoding these sequences; they keep their memory until they end."""
        if sequences:
            self.decoding = [sequence for sequence in self.decoding if sequence not in sequences]
            self.changed = True

    def make_room(self) -> None:
        """Moves sequences with full rows to longer rows, in order of arrival; preempts the latest if there is no room."""
        for sequence in self.growth.full(self.decoding):
            while sequence.row is not None and not self.growth.grow(sequence):
                self._preempt(max(self.decoding, key=lambda candidate: candidate.arrival))
            self.changed = True

    def _preempt(self, sequence: Sequence) -> None:
        self._free([sequence])
        self.growth.preempted += 1
        self.waiting.appendleft(sequence)
        self.prompts.queued(sequence)

    def end(self, ended: list[Sequence]) -> None:
        """Removes these sequences, waiting or running, and frees all that they hold."""
        for sequence in ended:
            del self.sequences[sequence.request_id]
            if sequence.row is None:
                self.waiting.remove(sequence)
                self.prompts.left_queue(sequence)
        self._free([sequence for sequence in ended if sequence.row is not None])
        for sequence in ended:
            self.growth.learn(sequence)
            if sequence.slot >= 0:
                self.slots.release(sequence)

    def _free(self, running: list[Sequence]) -> None:
        """Frees the rows of these sequences, and those of prompts that no other sequence reads."""
        if not running:
            return
        freed = set(running)
        self.decoding = [s for s in self.decoding if s not in freed]
        self.ready = [s for s in self.ready if s not in freed]
        owners: set[Sequence | SharedPrompt] = set(running)
        # From the last row to the first, so that fewer rows move.
        for sequence in sorted(running, key=lambda s: -s.row.index if s.row else 0):
            assert sequence.row is not None
            self.cache.free(sequence.row)
            self.growth.forget(sequence)
            owners |= self.prompts.leave(sequence)
            sequence.row = None
        self.prefill.drop(owners)
        self.changed = True

    def stop_sharing(self) -> None:
        """Keeps later sequences from joining the present prompts, whose keys and values older weights have computed."""
        self.prompts.stop_sharing()
        self.prefill.stop_copying()

    def recompute_jobs(self) -> tuple[list[Prefill], list[Prefill]]:
        """Returns the jobs that recompute the whole cache: first shared prompts, then the tokens after them."""
        resumed = [job.owner for job in self.prefill.jobs if isinstance(job.owner, Sequence)]
        prompts = {id(p): p for s in [*self.decoding, *self.ready, *resumed] if (p := s.prompt) is not None}
        first = [_whole_prompt(prompt, shared=False) for prompt in prompts.values()]
        then = [job for job in map(self._refill, self.decoding) if len(job.tokens)]
        return first, then

    def ordered(self) -> list[Sequence]:
        """Returns the decoding sequences in the order of attention: those of one slab together, shared prompts last."""

        def place(sequence: Sequence) -> tuple[bool, int, int]:
            assert sequence.row is not None
            return sequence.prompt is not None, sequence.row.slab.capacity, sequence.row.index

        return sorted(self.decoding, key=place)


def _whole_prompt(owner: Sequence | SharedPrompt, *, shared: bool = True) -> Prefill:
    """Returns the job that fills the owner's row with its prompt. ``shared``: other prompts may copy from this row, unless
    the prompt's tokens are scored."""
    assert owner.row is not None
    scored = owner.extras if isinstance(owner, Sequence) and owner.request.scores_prompt else None
    key = owner.request.key if shared and scored is None else ()
    tokens, media = torch.tensor(owner.request.input_ids), owner.request.media
    return Prefill(tokens, owner.row, owner, media=media, positions=owner.positions, key=key, scored=scored)
