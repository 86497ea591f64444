"""The micro-batches of a step, cut by the engine's own rule, and what each of them computes."""

from collections import Counter
from dataclasses import dataclass

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
    def shared(self) -> bool:
        """True if prompts are computed once: where that saves too little, it is not worth its gathers."""
        saved = sum(prompt * (count - 1) for prompt, count in self.groups)
        return saved > 0 and saved >= MIN_SAVING * sum(count * (prompt + self.length) for prompt, count in self.groups)

    @property
    def tokens(self) -> int:
        """Tokens that go through the layers."""
        if self.shared:
            return sum(prompt + count * self.length for prompt, count in self.groups)
        return sum(count * (prompt + self.length) for prompt, count in self.groups)

    @property
    def behind_prompts(self) -> int:
        """Keys that are laid out anew, each completion's behind a copy of its prompt's; 0 where prompts are not shared."""
        return sum(count * (prompt + self.length) for prompt, count in self.groups) if self.shared else 0

    def squares(self) -> float:
        """Pairs of a query and a key in one head, none skipped, as soft-capped attention holds them."""
        if not self.shared:
            return sum(count * (prompt + self.length) ** 2 for prompt, count in self.groups)
        return sum(prompt**2 + count * self.length * (prompt + self.length) for prompt, count in self.groups)


@dataclass(frozen=True)
class Step:
    """The work of one optimizer step, or of one pass without gradients, on the rank that has most to do."""

    micro_batches: tuple[MicroBatch, ...]
    times: float = 1.0
    """So many of each: more than 1 where only a part of a large batch was cut."""

    @property
    def count(self) -> float:
        """Micro-batches."""
        return len(self.micro_batches) * self.times

    @property
    def tokens(self) -> float:
        """Tokens that go through the layers."""
        return sum(batch.tokens for batch in self.micro_batches) * self.times

    @property
    def largest(self) -> MicroBatch:
        """The one with most tokens."""
        return max(self.micro_batches, key=lambda batch: batch.tokens)


@dataclass(frozen=True)
class Batches:
    """The largest micro-batches of each model, at full length."""

    update: dict[str, Step]
    score: dict[str, Step]


def cut_step(
    groups: int, completions: int, prompt: int, length: int, *, most: int, ranks: int = 1, together: bool = False
) -> Step:
    """``groups`` prompts with ``completions`` each, cut into micro-batches of at most ``most`` tokens for each rank.

    ``together``: the completions of a prompt are one unit, as the sides of a pair are.
    """
    taken = max(min(groups, ranks), min(groups, MOST_SEQUENCES // completions))
    items, owner = [], []
    for group in range(taken):
        items += [PlannedSequence(group, prompt, length, group if together else None)] * completions
        owner += [group] * completions
    planned = [[indices for indices in rank if indices] for rank in plan(items, most, ranks)]
    busiest = max(planned, key=lambda rank: sum(_micro(indices, owner, prompt, length).tokens for indices in rank))
    return Step(tuple(_micro(indices, owner, prompt, length) for indices in busiest), groups / taken)


def _micro(indices: list[int], owner: list[int], prompt: int, length: int) -> MicroBatch:
    counts = Counter(owner[i] for i in indices)
    return MicroBatch(tuple((prompt, count) for count in counts.values()), length)
