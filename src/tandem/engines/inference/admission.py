"""The order in which prompts enter the cache, and the share of it that each gets.

Prompts are prefilled in order of arrival, in chunks of at most `prefill_chunk_tokens` tokens. A prompt that several samples
share is computed once, into a row that all of them read. A prompt that begins like an earlier one copies the keys and values
of the common beginning. A sequence gets a row of the cache when it is admitted, and a longer one when the row is full.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable
from itertools import islice

import torch

from tandem.engines.inference.attention import PrefillSpan
from tandem.engines.inference.kv_cache import KVCache
from tandem.engines.inference.sequences import Prefill, Sequence, SharedPrompt, Slots

_LATEST = 64
"""Number of latest completions from which the expected length is estimated."""

_FEWEST = 8
"""Below this number of completions, no length is estimated from them."""

_FIRST_SHARE = 8
"""Without an estimate, and with too little cache for whole rows, a row has room for 1/8 of ``max_new_tokens``."""

_SHARE = 0.75
"""Quantile: a new row has room for as many tokens as this share of the latest completions needed at most."""

_NO_LIMIT = 2**62


class Growth:
    """Chooses the lengths of cache rows.

    ``whole``: every row is as long as its sequence can ever get, so no sequence is moved or preempted. The results of a
    sequence then do not depend on the others in the batch: to the bit in bfloat16 with the compiled kernels and without
    top-p and top-k, otherwise within rounding (float32: about 1e-6), because a matrix product may sum in another order for
    another number of rows.
    """

    def __init__(self, cache: KVCache, slots: Slots, whole: bool):
        self._cache, self._slots, self._whole = cache, slots, whole
        self._lengths: deque[int] = deque(maxlen=_LATEST)
        self._limits = torch.full_like(slots.counts, _NO_LIMIT)
        """For each slot, the number of drawn tokens (the newest included) at which the sequence's row is exactly full."""

        self._roomy = True
        """True if whole rows for all waiting sequences would have fitted at the last `expect`."""

        self.preempted = 0
        """Number of preemptions. A preempted sequence loses its row to an earlier sequence and waits again."""

    def learn(self, sequence: Sequence) -> None:
        """Records the length of a sequence that has ended and still has its slot."""
        if sequence.started:
            self._lengths.append(self._slots.num_drawn(sequence))

    def expect(self, waiting: Iterable[Sequence]) -> None:
        """Checks whether whole rows fit for all sequences that may be admitted now. Call it before `capacity`."""
        if self._whole or len(self._lengths) >= _FEWEST:
            return
        candidates = list(islice(waiting, self._slots.num_free))
        alike = Counter(sequence.request.key for sequence in candidates)
        rows = [len(key) for key, count in alike.items() if count > 1]
        for sequence in candidates:
            key = sequence.request.key
            rows.append(sequence.max_new_tokens + (len(key) if alike[key] == 1 else 0) - 1)
        self._roomy = self._cache.fits(map(self._cache.capacity_for, rows))

    def capacity(self, before: int, sequence: Sequence) -> int:
        """Returns the capacity, in tokens, of the row for a sequence to be admitted.

        ``before``: number of tokens in the row before the first drawn token. The last drawn token is never stored.
        """
        drawn, most = self._slots.num_drawn(sequence), sequence.max_new_tokens
        if self._whole:
            usual = most
        elif len(self._lengths) >= _FEWEST:
            usual = sorted(self._lengths)[int(_SHARE * (len(self._lengths) - 1))]
        else:
            usual = most if self._roomy and not drawn else drawn + most // _FIRST_SHARE
        expected = min(most, max(usual, drawn + 1))
        return self._cache.capacity_for(before + max(1, expected - 1))

    def watch(self, sequence: Sequence) -> None:
        """Sets the limit of a sequence that has a slot and a row."""
        assert sequence.row is not None
        self._limits[sequence.slot] = sequence.row.slab.capacity - sequence.tokens_before

    def forget(self, sequence: Sequence) -> None:
        """Removes the limit of a sequence that has lost its row and still has its slot."""
        self._limits[sequence.slot] = _NO_LIMIT

    def full(self, decoding: Iterable[Sequence]) -> list[Sequence]:
        """Returns the sequences whose rows have no place for the newest token, in order of arrival."""
        full = self._slots.counts > self._limits
        if not bool(full.any()):
            return []
        return sorted((s for s in decoding if full[s.slot]), key=lambda s: s.arrival)

    def grow(self, sequence: Sequence) -> bool:
        """Moves the sequence to the next longer row. Returns False if the cache has no room for it now."""
        assert sequence.row is not None
        longer = self._cache.capacity_for(sequence.row.slab.capacity + 1)
        longest = self._cache.capacity_for(sequence.tokens_before + sequence.max_new_tokens - 1)
        if not self._cache.fits([min(longer, longest)]):
            return False
        self._cache.move(sequence.row, min(longer, longest))
        self.watch(sequence)
        return True


class SharedPrompts:
    """Prompts whose keys and values several sequences read, and the number of waiting requests for each prompt."""

    def __init__(self, cache: KVCache):
        self._cache = cache
        self._waiting: Counter[tuple[int, ...]] = Counter()
        self._prompts: dict[tuple[int, ...], SharedPrompt] = {}
        self.read_tokens = 0
        """Number of prompt tokens that were not computed, because another sample's keys and values are read."""

    def __contains__(self, key: tuple[int, ...]) -> bool:
        return key in self._prompts

    def queued(self, sequence: Sequence) -> None:
        """Adds a sequence to the count of waiting ones."""
        self._waiting[sequence.request.key] += 1

    def left_queue(self, sequence: Sequence) -> None:
        """Removes a sequence from the count of waiting ones."""
        key = sequence.request.key
        self._waiting[key] -= 1
        if not self._waiting[key]:
            del self._waiting[key]

    def wanted(self, key: tuple[int, ...]) -> int:
        """Returns the number of waiting requests with this prompt."""
        return self._waiting[key]

    def computed(self, key: tuple[int, ...]) -> bool:
        """True if a sequence with this prompt can begin at once."""
        return (prompt := self._prompts.get(key)) is not None and prompt.hidden is not None

    def join(self, sequence: Sequence) -> tuple[SharedPrompt, bool]:
        """Lets the sequence read its prompt's keys and values. Returns the prompt, and True if it is not computed yet."""
        request = sequence.request
        if is_new := request.key not in self._prompts:
            row = self._cache.allocate("prompt", self._cache.capacity_for(len(request.input_ids)))
            self._prompts[request.key] = SharedPrompt(request, row, sequence.positions)
        else:
            self.read_tokens += len(request.input_ids)
        prompt = sequence.prompt = self._prompts[request.key]
        prompt.members.append(sequence)
        return prompt, is_new

    def leave(self, sequence: Sequence) -> set[SharedPrompt]:
        """Ends the sequence's use of its prompt. If no sequence reads the prompt any more, frees the prompt's row and
        returns the prompt."""
        prompt, sequence.prompt = sequence.prompt, None
        if prompt is None:
            return set()
        prompt.members.remove(sequence)
        if prompt.members:
            return set()
        self._cache.free(prompt.row)
        if self._prompts.get(prompt.request.key) is prompt:
            del self._prompts[prompt.request.key]
        return {prompt}

    def stop_sharing(self) -> None:
        """Keeps later sequences from joining the present prompts."""
        self._prompts.clear()


SMALLEST = 16
"""A common beginning of two prompts is copied if it has at least this many tokens. A job waits for a longer beginning if
that has at least this many tokens more."""

_CANDIDATES = 4
"""Number of latest jobs with the same first tokens that a new job is compared with."""


class PrefixIndex:
    """Jobs whose rows hold, or will hold, the keys and values of a whole prompt."""

    def __init__(self) -> None:
        self._by_beginning: dict[tuple[int, ...], list[Prefill]] = {}
        self.copied_tokens = 0
        """Number of prompt tokens whose keys and values were copied and not computed."""

    def enter(self, job: Prefill) -> None:
        """Finds the jobs that begin like this one, and lets later jobs copy from it."""
        job.alike = self.find(job.key)
        self.add(job)

    def copied(self, job: Prefill) -> bool:
        """Copies the beginning of the job's prompt from another row. Returns False if the job should wait to copy more.

        A job waits if at least `SMALLEST` more tokens could be copied later. Jobs wait only for earlier jobs, so the first
        in the queue never waits.
        """
        sources = [(other, min(common, other.done), common) for other, common in job.alike if not other.gone]
        best, count, _ = max(sources, key=lambda source: source[1], default=(None, 0, 0))
        if max((common for _, _, common in sources), default=0) - count >= SMALLEST:
            return False
        job.alike = ()
        if best is not None and count >= SMALLEST:
            for target, source in ((job.row.slab.keys, best.row.slab.keys), (job.row.slab.values, best.row.slab.values)):
                for layer, tensor in enumerate(target):
                    tensor[job.row.index, :, :count] = source[layer][best.row.index, :, :count]
            job.done = count
            self.copied_tokens += count
        return True

    def find(self, key: tuple[int, ...]) -> tuple[tuple[Prefill, int], ...]:
        """Returns the jobs that begin like ``key``, each with its number of common tokens: at most all but one, because the
        hidden state of the last token must be computed. A common beginning may end within an image or a sound."""
        latest = self._by_beginning.get(key[:SMALLEST], ())[-_CANDIDATES:]
        matches = [(job, min(_common(key, job.key), len(key) - 1)) for job in latest]
        return tuple((job, common) for job, common in matches if common >= SMALLEST)

    def add(self, job: Prefill) -> None:
        """Lets later jobs copy from this one."""
        if len(job.key) > SMALLEST:
            self._by_beginning.setdefault(job.key[:SMALLEST], []).append(job)

    def remove(self, jobs: Iterable[Prefill]) -> None:
        """Removes jobs whose rows were freed. A job that waited for one of them computes its prompt itself."""
        for job in jobs:
            job.gone = True
            same = self._by_beginning.get(job.key[:SMALLEST], [])
            if job in same:
                same.remove(job)
                if not same:
                    del self._by_beginning[job.key[:SMALLEST]]

    def clear(self) -> None:
        """Forbids copies from all present rows, because older weights computed them."""
        self.remove([job for same in self._by_beginning.values() for job in same])


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Returns the length of the common beginning."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


class PrefillQueue:
    """Prefill jobs that are not done, and the prompt beginnings that they can copy from each other."""

    def __init__(self, chunk_tokens: int):
        self._chunk = chunk_tokens
        self.jobs: list[Prefill] = []
        self._beginnings = PrefixIndex()
        self._job_of: dict[Sequence | SharedPrompt, Prefill] = {}
        """The job that fills each owner's row; kept after the job is done."""

    @property
    def copied_tokens(self) -> int:
        """Number of prompt tokens that were copied from another row and not computed."""
        return self._beginnings.copied_tokens

    def add(self, job: Prefill) -> None:
        """Queues a job. Its beginning will be copied if another prompt begins the same."""
        self._beginnings.enter(job)
        self._job_of[job.owner] = job
        self.jobs.append(job)

    def drop(self, owners: Collection[Sequence | SharedPrompt]) -> None:
        """Removes the jobs of owners whose rows were freed."""
        self.jobs = [job for job in self.jobs if job.owner not in owners]
        self._beginnings.remove([self._job_of.pop(owner) for owner in owners if owner in self._job_of])

    def restart(self) -> None:
        """Restarts jobs that were computed in part, because the weights have changed."""
        for job in self.jobs:
            job.done = 0
            job.alike = ()

    def stop_copying(self) -> None:
        """Forbids copies from all present rows, because older weights computed them."""
        self._beginnings.clear()

    def next_pieces(self, jobs: list[Prefill]) -> tuple[list[Prefill], list[PrefillSpan]]:
        """Returns the first of ``jobs`` and their pieces for one prefill pass of at most ``chunk_tokens`` tokens. The last
        piece may be part of its job; jobs that wait to copy a beginning are passed over."""
        room, selected, pieces = self._chunk, [], []
        for job in jobs:
            if room <= 0:
                break
            if job.alike and not self._beginnings.copied(job):
                continue
            count = min(room, len(job.tokens) - job.done)
            base = (job.base.row, job.base.length) if job.base is not None else (None, 0)
            pieces.append(PrefillSpan(job.row, job.done, count, *base))
            selected.append(job)
            room -= count
        return selected, pieces
