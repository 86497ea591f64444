"""The share of the cache that a sequence gets when it is admitted, and its growth when that is used up.

A request may ask for far more tokens than it turns out to draw. A row is as long as most of the latest completions were; a
completion that outgrows it moves to a longer row. Before enough have ended for that, rows are whole if all that wait fit so,
and short if they do not. When the cache is full, the sequence that came last gives way: it gives
its rows back, goes to the front of the queue, keeps the tokens that it has drawn, and computes their keys and values again
when there is room. (vLLM calls this preemption by recomputation: Kwon et al. 2023, section 4.5.)
"""

from collections import Counter, deque
from collections.abc import Iterable
from itertools import islice

import torch

from tandem.engines.inference.kv_cache import KVCache
from tandem.engines.inference.sequences import Sequence, Slots

_LATEST = 64
"""Completions that the expected length is learned from."""

_FEWEST = 8
"""With fewer of them nobody knows what is usual."""

_FIRST_SHARE = 8
"""Then, in a small cache, a row has room for one in so many of the tokens that may be drawn."""

_SHARE = 0.75
"""This share of the latest completions would have fitted into a new row."""

_NO_LIMIT = 2**62


class Growth:
    """Lengths of rows.

    ``whole``: every row is as long as its sequence can ever get, so that none moves and none gives way. What a sequence
    computes is then the same whatever runs beside it: to the bit in bfloat16 with the compiled kernels and without top-p
    and top-k, otherwise within rounding (float32: about 1e-6), for a matrix product may sum in another order for another
    number of rows.
    """

    def __init__(self, cache: KVCache, slots: Slots, whole: bool):
        self._cache, self._slots, self._whole = cache, slots, whole
        self._lengths: deque[int] = deque(maxlen=_LATEST)
        self._limits = torch.full_like(slots.counts, _NO_LIMIT)
        """Tokens drawn by the sequence of each slot, the newest included, with which its row is exactly full."""

        self._roomy = True
        """All that waited last would have fitted in whole rows."""

        self.preempted = 0
        """Number of times that a sequence gave way."""

    def learn(self, sequence: Sequence) -> None:
        """The sequence has ended; it still has its slot."""
        if sequence.started:
            self._lengths.append(self._slots.num_drawn(sequence))

    def expect(self, waiting: Iterable[Sequence]) -> None:
        """Looks at those that may be admitted now, before `capacity` is asked for any of them."""
        if self._whole or len(self._lengths) >= _FEWEST:
            return
        next_ones = list(islice(waiting, self._slots.num_free))
        alike = Counter(sequence.request.key for sequence in next_ones)
        rows = [len(key) for key, count in alike.items() if count > 1]
        for sequence in next_ones:
            key = sequence.request.key
            rows.append(sequence.max_new_tokens + (len(key) if alike[key] == 1 else 0) - 1)
        self._roomy = self._cache.fits(map(self._cache.capacity_for, rows))

    def capacity(self, before: int, sequence: Sequence) -> int:
        """Capacity of the row for a sequence to be admitted.

        ``before``: tokens that stand in the row before the first that is drawn. The last that is drawn is never stored.
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
        """The sequence has a slot and a row."""
        assert sequence.row is not None
        self._limits[sequence.slot] = sequence.row.slab.capacity - sequence.tokens_before

    def forget(self, sequence: Sequence) -> None:
        """Its row is given back; it still has its slot."""
        self._limits[sequence.slot] = _NO_LIMIT

    def full(self, decoding: Iterable[Sequence]) -> list[Sequence]:
        """Sequences whose newest token has no place in their row, in order of their arrival."""
        full = self._slots.counts > self._limits
        if not bool(full.any()):
            return []
        return sorted((s for s in decoding if full[s.slot]), key=lambda s: s.arrival)

    def grow(self, sequence: Sequence) -> bool:
        """Moves the sequence to the next longer row; False if there is no room for that now."""
        assert sequence.row is not None
        longer = self._cache.capacity_for(sequence.row.slab.capacity + 1)
        longest = self._cache.capacity_for(sequence.tokens_before + sequence.max_new_tokens - 1)
        if not self._cache.fits([min(longer, longest)]):
            return False
        self._cache.move(sequence.row, min(longer, longest))
        self.watch(sequence)
        return True
