"""The micro-batches of a step, cut by the engine's own rule, and what each of them computes."""

import functools
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from tandem.engines.train.micro_batches import PlannedSequence, plan
from tandem.models.prefixes import MIN_SAVING

MOST_SEQUENCES = 20_000
"""Only so many sequences of a larger batch are cut into micro-batches; the rest is assumed to be like them."""


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass: groups of completions behind a common prompt.

    Example: two groups of 3 completions of 5 tokens behind prompts of 10: ``MicroBatch(((10, 3), (10, 3)), 5)`` computes
    2 · (10 + 3 · 5) = 50 tokens and predicts 30.
    """

    groups: tuple[tuple[int, int], ...]
    """(tokens of the prompt, completions) each."""

    length: int
    """Tokens of each completion."""

    @property
    def predicted(self) -> int:
        """Tokens whose log-probability is computed."""
        return self.length * sum(count for _, count in self.groups)

    @property
    def alone(self) -> int:
        """Tokens with a copy of its prompt before each completion."""
        return sum(count * (prompt + self.length) for prompt, count in self.groups)

    @property
    def shared(self) -> bool:
        """True if prompts are computed once: where that saves too little, it is not worth its gathers."""
        saved = sum(prompt * (count - 1) for prompt, count in self.groups)
        return saved > 0 and saved >= MIN_SAVING * self.alone

    @property
    def tokens(self) -> int:
        """Tokens that go through the layers."""
        return sum(prompt + count * self.length for prompt, count in self.groups) if self.shared else self.alone

    def squares(self) -> float:
        """Pairs of a query and a key in one head, none skipped, as soft-capped attention holds them."""
        if not self.shared:
            return sum(count * (prompt + self.length) ** 2 for prompt, count in self.groups)
        return sum(prompt**2 + count * self.length * (prompt + self.length) for prompt, count in self.groups)


class Step(NamedTuple):
    """The work of one optimizer step, or of one pass without gradients."""

    largest: MicroBatch
    count: int
    """Micro-batches of each rank."""


@functools.lru_cache(64)
def cut_step(
    groups: int, completions: int, prompt: int, length: int, *, most: int, ranks: int = 1, together: bool = False
) -> Step:
    """``groups`` prompts with ``completions`` each, cut into micro-batches of at most ``most`` tokens for each rank.

    ``together``: the completions of a prompt are one unit, as the sides of a pair are.
    """
    taken = max(min(groups, ranks), min(groups, MOST_SEQUENCES // completions))
    owner = [group for group in range(taken) for _ in range(completions)]
    items = [PlannedSequence(group, prompt, length, group if together else None) for group in owner]
    planned = plan(items, most, ranks)
    counts = (Counter(owner[i] for i in indices) for rank in planned for indices in rank)
    batches = [MicroBatch(tuple((prompt, count) for count in one.values()), length) for one in counts]
    return Step(max(batches, key=lambda batch: batch.tokens), len(planned[0]))
