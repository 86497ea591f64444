"""The prompts that several samples share: each is computed once, into a row that all of them read."""

from collections import Counter

from tandem.engines.inference.kv_cache import KVCache
from tandem.engines.inference.sequences import Sequence, SharedPrompt


class SharedPrompts:
    """The prompts that may be joined, and the waiting requests that ask for each."""

    def __init__(self, cache: KVCache):
        self._cache = cache
        self._waiting: Counter[tuple[int, ...]] = Counter()
        self._prompts: dict[tuple[int, ...], SharedPrompt] = {}
        self.read_tokens = 0
        """Prompt tokens that were not computed, because another sample's are read."""

    def __contains__(self, key: tuple[int, ...]) -> bool:
        return key in self._prompts

    def queued(self, sequence: Sequence) -> None:
        """The sequence waits."""
        self._waiting[sequence.request.key] += 1

    def left_queue(self, sequence: Sequence) -> None:
        """The sequence waits no more."""
        key = sequence.request.key
        self._waiting[key] -= 1
        if not self._waiting[key]:
            del self._waiting[key]

    def wanted(self, key: tuple[int, ...]) -> int:
        """Number of waiting requests with this prompt."""
        return self._waiting[key]

    def computed(self, key: tuple[int, ...]) -> bool:
        """True if a sequence with this prompt can begin at once."""
        return (prompt := self._prompts.get(key)) is not None and prompt.hidden is not None

    def join(self, sequence: Sequence) -> tuple[SharedPrompt, bool]:
        """The sequence reads the keys and values of this prompt. True: it is the first, so they have to be computed."""
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
        """The sequence reads its prompt no more. If nobody else does, gives back the row of that prompt, and returns it."""
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
        """Nobody may join the prompts that are there."""
        self._prompts.clear()
