"""Who runs: admission by memory and by lines in the tables.

First come, first served. A request is admitted when the row that it begins with fits (`growth.py`); when the cache is full,
the one that came last gives way.
"""

from collections import Counter, deque

import torch

from tandem.engines.inference.growth import Growth
from tandem.engines.inference.kv_cache import KVCache, Pool
from tandem.engines.inference.prefill_queue import PrefillQueue
from tandem.engines.inference.sequences import Prefill, Sequence, SharedPrompt, Slots
from tandem.engines.inference.shared_prompts import SharedPrompts


class Scheduler:
    """Waiting, prefilling and decoding sequences, and the rows of the cache that they hold."""

    def __init__(self, cache: KVCache, slots: Slots, prefill_chunk_tokens: int, whole_rows: bool):
        self.cache, self.slots = cache, slots
        self.growth = Growth(cache, slots, whole_rows)
        self.sequences: dict[int, Sequence] = {}
        """All that are waiting or running, by request."""

        self.waiting: deque[Sequence] = deque()
        self.prefill = PrefillQueue(prefill_chunk_tokens)
        self.ready: list[Sequence] = []
        """Admitted to a prompt that was computed before; they can draw their first token."""

        self.decoding: list[Sequence] = []
        self.changed = True
        """The set of decoding sequences, or a place in the cache, is not what it was."""

        self._arrived = 0
        self._prompts = SharedPrompts(cache)

    @property
    def num_running(self) -> int:
        """Sequences that hold memory."""
        return len(self.sequences) - len(self.waiting)

    @property
    def shared_tokens(self) -> int:
        """Prompt tokens that were not computed, because another sample's could be read or copied."""
        return self._prompts.read_tokens + self.prefill.copied_tokens

    def needed(self, sequence: Sequence) -> int:
        """Tokens of cache that the sequence needs alone; the last token it draws is never stored."""
        return self.cache.capacity_for(len(sequence.request.input_ids) + max(0, sequence.max_new_tokens - 1))

    def add(self, sequence: Sequence) -> None:
        self.sequences[sequence.request_id] = sequence
        sequence.arrival = self._arrived = self._arrived + 1
        self.waiting.append(sequence)
        self._prompts.queued(sequence)

    def admit(self) -> None:
        """Takes in from the front of the queue what fits."""
        admitted: list[tuple[Sequence, Pool, int]] = []
        planned: list[int] = []
        new_prompts: set[tuple[int, ...]] = set()
        self.growth.expect(self.waiting)
        while self.waiting and len(admitted) < self.slots.num_free + (self.waiting[0].slot >= 0):
            sequence = self.waiting[0]  # never a later one, or a long request would wait for ever
            key, length = sequence.request.key, len(sequence.request.input_ids)
            # By default it joins a prompt that others computed or will compute: it needs a row for its own tokens only.
            pool: Pool = "suffix"
            needs = [self.growth.capacity(0, sequence)]
            if sequence.request.scores_prompt or (sequence.started and not self._prompts.computed(key)):
                # all of its prompt is computed here, or it gave way: its prompt and what it drew share a row
                pool, needs = "whole", [self.growth.capacity(length, sequence)]
            elif key not in self._prompts and key not in new_prompts:
                if self._prompts.wanted(key) > 1:  # it is the first of several: it brings the row of the prompt as well
                    needs.append(self.cache.capacity_for(length))
                    new_prompts.add(key)
                else:  # nobody shares its prompt: one row for everything
                    pool, needs = "whole", [self.growth.capacity(length, sequence)]
            if not self.cache.fits(planned + needs):
                new_prompts.discard(key)
                if self.num_running or admitted:
                    break  # until something that runs ends and frees its rows
                # two rows, each rounded up, can need more than the whole cache: then it runs alone, in one
                pool, needs = "whole", [self.needed(sequence)]
            planned += needs
            self._prompts.left_queue(self.waiting.popleft())
            admitted.append((sequence, pool, needs[0]))
        # Growing a slab copies it, so each grows once, by all its new rows, before the first of them is placed.
        for (pool, capacity), count in Counter((pool, capacity) for _, pool, capacity in admitted).items():
            self.cache.reserve(pool, capacity, count)
        for sequence, pool, capacity in admitted:
            self._place(sequence, pool, capacity)

    def _place(self, sequence: Sequence, pool: Pool, capacity: int) -> None:
        if sequence.slot < 0:
            self.slots.take(sequence)
        sequence.row = self.cache.allocate(pool, capacity)
        if pool == "suffix":
            prompt, is_new = self._prompts.join(sequence)
            if is_new:
                self.prefill.add(_whole_prompt(prompt))
            elif prompt.hidden is not None and not sequence.started:  # else it starts when the job of its prompt is done
                self.ready.append(sequence)
        elif not sequence.started:
            self.prefill.add(_whole_prompt(sequence))
        self.growth.watch(sequence)
        if sequence.started and len((lost := self._lost(sequence)).tokens):
            self.prefill.add(lost)
        elif sequence.started:
            self.start(sequence)

    def _lost(self, sequence: Sequence) -> Prefill:
        """The tokens that fill the row of a sequence that has drawn some; the newest has no place in it yet."""
        assert sequence.row is not None
        tokens, request = self.slots.drawn(sequence)[:-1].cpu(), sequence.request
        if sequence.prompt is not None:
            return Prefill(tokens, sequence.row, sequence, sequence.prompt)
        return Prefill(
            torch.cat((torch.tensor(request.input_ids), tokens)),
            sequence.row,
            sequence,
            media=request.media,
            positions=sequence.positions,
        )

    def start(self, sequence: Sequence) -> None:
        """The sequence has its first token, or again all that it lost when it gave way."""
        if not sequence.started:
            sequence.clock.mark("began")
        sequence.started = True
        self.decoding.append(sequence)
        self.changed = True

    def leave(self, sequences: list[Sequence]) -> None:
        """These draw no more, and keep what they hold until they end."""
        if sequences:
            self.decoding = [one for one in self.decoding if one not in sequences]
            self.changed = True

    def make_room(self) -> None:
        """Sequences whose rows are full get longer ones, the first come first; the last come give way for that."""
        for sequence in self.growth.full(self.decoding):
            while sequence.row is not None and not self.growth.grow(sequence):
                self._give_way(max(self.decoding, key=lambda one: one.arrival))
            self.changed = True

    def _give_way(self, sequence: Sequence) -> None:
        self._free([sequence])
        self.growth.preempted += 1
        self.waiting.appendleft(sequence)
        self._prompts.queued(sequence)

    def end(self, ended: list[Sequence]) -> None:
        """Frees all that these sequences hold, wherever they are."""
        for sequence in ended:
            del self.sequences[sequence.request_id]
            if sequence.row is None:
                self.waiting.remove(sequence)
                self._prompts.left_queue(sequence)
        self._free([sequence for sequence in ended if sequence.row is not None])
        for sequence in ended:
            self.growth.learn(sequence)
            if sequence.slot >= 0:
                self.slots.release(sequence)

    def _free(self, running: list[Sequence]) -> None:
        """Gives the rows of these sequences back, and those of prompts that nobody else reads."""
        if not running:
            return
        gone = set(running)
        self.decoding = [s for s in self.decoding if s not in gone]
        self.ready = [s for s in self.ready if s not in gone]
        owners: set[Sequence | SharedPrompt] = set(running)
        # From the last row to the first, so that rows that stay need not move.
        for sequence in sorted(running, key=lambda s: -s.row.index if s.row else 0):
            assert sequence.row is not None
            self.cache.free(sequence.row)
            self.growth.forget(sequence)
            owners |= self._prompts.leave(sequence)
            sequence.row = None
        self.prefill.drop(owners)
        self.changed = True

    def stop_sharing(self) -> None:
        """Nobody may join the prompts that are there: their keys are of older weights and are kept."""
        self._prompts.stop_sharing()
        self.prefill.stop_copying()

    def recompute_jobs(self) -> tuple[list[Prefill], list[Prefill]]:
        """Jobs that rebuild the cache of all that was computed: shared prompts, and then the tokens after them."""
        resumed = [job.owner for job in self.prefill.jobs if isinstance(job.owner, Sequence)]
        prompts = {id(p): p for s in [*self.decoding, *self.ready, *resumed] if (p := s.prompt) is not None}
        first = [_whole_prompt(prompt, shared=False) for prompt in prompts.values()]
        then = [job for job in map(self._lost, self.decoding) if len(job.tokens)]
        return first, then

    def ordered(self) -> list[Sequence]:
        """The decoding sequences as attention wants them: those of one slab together, shared prompts last."""

        def place(sequence: Sequence) -> tuple[bool, int, int]:
            assert sequence.row is not None
            return sequence.prompt is not None, sequence.row.slab.capacity, sequence.row.index

        return sorted(self.decoding, key=place)


def _whole_prompt(owner: Sequence | SharedPrompt, *, shared: bool = True) -> Prefill:
    """The job that fills the owner's row with its prompt. ``shared``: others may copy it, if nobody scores it."""
    assert owner.row is not None
    scored = owner.extras if isinstance(owner, Sequence) and owner.request.scores_prompt else None
    key = owner.request.key if shared and scored is None else ()
    return Prefill(
        torch.tensor(owner.request.input_ids),
        owner.row,
        owner,
        media=owner.request.media,
        positions=owner.positions,
        key=key,
        scored=scored,
    )
