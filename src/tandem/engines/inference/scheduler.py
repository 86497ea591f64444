"""Who runs: admission by memory and by lines in the tables, sharing of prompts, and which tokens are prefilled next.

A request is admitted when all memory that it can ever need is there, so nothing that runs is evicted. First come, first
served.
"""

from collections import Counter, deque

import torch

from tandem.engines.inference.attention import Piece
from tandem.engines.inference.kv_cache import KVCache, Pool
from tandem.engines.inference.prefix_index import SMALLEST, PrefixIndex
from tandem.engines.inference.sequences import Job, Sequence, SharedPrompt
from tandem.engines.inference.slots import Slots


class Scheduler:
    """Waiting, prefilling and decoding sequences, and the rows of the cache that they hold."""

    def __init__(self, cache: KVCache, slots: Slots, prefill_chunk_tokens: int):
        self.cache, self.slots = cache, slots
        self._chunk = prefill_chunk_tokens
        self.sequences: dict[int, Sequence] = {}
        """All that are waiting or running, by request."""

        self.waiting: deque[Sequence] = deque()
        self.jobs: list[Job] = []
        self.ready: list[Sequence] = []
        """Admitted to a prompt that was computed before; they can draw their first token."""

        self.decoding: list[Sequence] = []
        self.changed = True
        """The set of decoding sequences, or a place in the cache, is not what it was."""

        self.shared_tokens = 0
        """Prompt tokens that were not computed, because another sample's could be read or copied."""

        self._alike: Counter[tuple[int, ...]] = Counter()
        """Waiting requests by prompt."""

        self._prompts: dict[tuple[int, ...], SharedPrompt] = {}
        self._beginnings = PrefixIndex()
        self._job_of: dict[Sequence | SharedPrompt, Job] = {}
        """The job that fills the owner's row with a prompt, also after it is done."""

    @property
    def num_running(self) -> int:
        """Sequences that hold memory."""
        return len(self.sequences) - len(self.waiting)

    def needed(self, sequence: Sequence) -> int:
        """Tokens of cache that the sequence needs alone; the last token it draws is never stored."""
        return self.cache.capacity_for(len(sequence.request.input_ids) + sequence.max_new_tokens - 1)

    def add(self, sequence: Sequence) -> None:
        self.sequences[sequence.request_id] = sequence
        self.waiting.append(sequence)
        self._alike[sequence.request.input_ids] += 1

    def admit(self) -> None:
        """Takes in from the front of the queue what fits."""
        admitted: list[tuple[Sequence, Pool, int]] = []
        planned: list[int] = []
        new_prompts: set[tuple[int, ...]] = set()
        while self.waiting and len(admitted) < self.slots.num_free:
            sequence = self.waiting[0]  # never a later one, or a long request would wait for ever
            tokens = sequence.request.input_ids
            # By default it joins a prompt that others computed or will compute: it needs a row for its own tokens only.
            pool: Pool = "suffix"
            needs = [self.cache.capacity_for(max(1, sequence.max_new_tokens - 1))]
            if tokens not in self._prompts and tokens not in new_prompts:
                if self._alike[tokens] > 1:  # it is the first of several: it brings the row of the prompt as well
                    needs.append(self.cache.capacity_for(len(tokens)))
                    new_prompts.add(tokens)
                else:  # nobody shares its prompt: one row for everything
                    pool, needs = "whole", [self.needed(sequence)]
            if not self.cache.fits(planned + needs):
                new_prompts.discard(tokens)
                if self.num_running or admitted:
                    break  # until something that runs ends and frees its rows
                # two rows, each rounded up, can need more than the whole cache: then it runs alone, in one
                pool, needs = "whole", [self.needed(sequence)]
            planned += needs
            self._leave_queue(self.waiting.popleft())
            admitted.append((sequence, pool, needs[0]))
        # Growing a slab copies it, so each grows once, by all its new rows, before the first of them is placed.
        for (pool, capacity), count in Counter((pool, capacity) for _, pool, capacity in admitted).items():
            self.cache.reserve(pool, capacity, count)
        for sequence, pool, capacity in admitted:
            self._place(sequence, pool, capacity)

    def _leave_queue(self, sequence: Sequence) -> None:
        tokens = sequence.request.input_ids
        self._alike[tokens] -= 1
        if not self._alike[tokens]:
            del self._alike[tokens]

    def _place(self, sequence: Sequence, pool: Pool, capacity: int) -> None:
        self.slots.take(sequence)
        tokens = sequence.request.input_ids
        sequence.row = self.cache.allocate(pool, capacity)
        if pool == "whole":
            self._compute(tokens, Job(torch.tensor(tokens), sequence.row, sequence, prompt=tokens))
            return
        prompt = self._prompts.get(tokens)
        if prompt is None:
            row = self.cache.allocate("prompt", self.cache.capacity_for(len(tokens)))
            prompt = self._prompts[tokens] = SharedPrompt(tokens, row)
            self._compute(tokens, Job(torch.tensor(tokens), row, prompt, prompt=tokens))
        else:
            self.shared_tokens += len(tokens)
        prompt.members.append(sequence)
        sequence.prompt = prompt
        if prompt.hidden is not None:  # else it starts when the job of its prompt is done
            self.ready.append(sequence)

    def _compute(self, tokens: tuple[int, ...], job: Job) -> None:
        """Queues a prompt, its beginning to be copied where another prompt has the same."""
        job.alike = self._beginnings.find(tokens)
        self._beginnings.add(job)
        self._job_of[job.owner] = job
        self.jobs.append(job)

    def next_pieces(self, jobs: list[Job]) -> tuple[list[Job], list[Piece]]:
        """The front of the jobs, as many tokens as one prefill pass takes; packed, the last job perhaps in part."""
        room, taken, pieces = self._chunk, [], []
        for job in jobs:
            if room <= 0:
                break
            if job.alike and not self._copied(job):
                continue
            count = min(room, len(job.tokens) - job.done)
            base = (job.base.row, len(job.base.tokens)) if job.base is not None else (None, 0)
            pieces.append(Piece(job.row, job.done, count, *base))
            taken.append(job)
            room -= count
        return taken, pieces

    def _copied(self, job: Job) -> bool:
        """Copies what another row has of the job's beginning; False if the job had better wait for more of it.

        Waiting is worth it where at least `SMALLEST` tokens more could be copied later; jobs wait for earlier ones only, so
        the first in the queue never does.
        """
        other, count, soon = job.beginning()
        if soon - count >= SMALLEST:
            return False
        job.alike = ()
        if other is not None and count >= SMALLEST:
            job.copy_beginning(other, count)
            self.shared_tokens += count
        return True

    def start(self, sequence: Sequence) -> None:
        """The sequence has its first token."""
        sequence.clock.mark("began")
        sequence.started = True
        self.decoding.append(sequence)
        self.changed = True

    def end(self, ended: list[Sequence]) -> None:
        """Frees all that these sequences hold, wherever they are."""
        for sequence in ended:
            del self.sequences[sequence.request_id]
            if sequence.row is None:
                self.waiting.remove(sequence)
                self._leave_queue(sequence)
        running = [sequence for sequence in ended if sequence.row is not None]
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
            self.slots.release(sequence)
            prompt = sequence.prompt
            if prompt is not None:
                prompt.members.remove(sequence)
                if not prompt.members:
                    owners.add(prompt)
                    self.cache.free(prompt.row)
                    if self._prompts.get(prompt.tokens) is prompt:
                        del self._prompts[prompt.tokens]
            sequence.row = sequence.prompt = None
        self.jobs = [job for job in self.jobs if job.owner not in owners]
        self._beginnings.remove([self._job_of.pop(owner) for owner in owners if owner in self._job_of])
        self.changed = True

    def restart_prefill(self) -> None:
        """Prompts that were computed in part begin again: the weights have changed."""
        for job in self.jobs:
            job.done = 0
            job.alike = ()

    def stop_sharing(self) -> None:
        """Nobody may join the prompts that are there: their keys are of older weights and are kept."""
        self._prompts.clear()
        self._beginnings.clear()

    def recompute_jobs(self) -> tuple[list[Job], list[Job]]:
        """What rebuilds the cache of all that was computed: shared prompts, and then what comes after them."""
        prompts = {id(p): p for s in [*self.decoding, *self.ready] if (p := s.prompt) is not None}
        first = [Job(torch.tensor(prompt.tokens), prompt.row, prompt) for prompt in prompts.values()]
        then = []
        for sequence in self.decoding:
            assert sequence.row is not None
            tokens = self.slots.drawn(sequence)[:-1].cpu()
            if sequence.prompt is None:
                tokens = torch.cat((torch.tensor(sequence.request.input_ids), tokens))
            if len(tokens):
                then.append(Job(tokens, sequence.row, sequence, sequence.prompt))
        return first, then

    def ordered(self) -> list[Sequence]:
        """The decoding sequences as attention wants them: those of one slab together, shared prompts last."""

        def place(sequence: Sequence) -> tuple[bool, int, int]:
            assert sequence.row is not None
            return sequence.prompt is not None, sequence.row.slab.capacity, sequence.row.index

        return sorted(self.decoding, key=place)
