"""Which prompts are drawn: the `curriculum` section."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CurriculumConfig:
    """Prompts drawn by their measured success rate, so that most are neither too easy nor too hard."""

    round_rows: int | None = None
    """Rows in one round, each at most once, drawn anew by what is known then; null draws every row once an epoch."""

    target: float = 0.5
    """Success rate that is drawn most."""

    width: float = 0.25
    """Standard deviation of the bell around `target` by which rows are weighed."""

    floor: float = 0.05
    """Least weight of a row, relative to one at `target`, so that every row is tried again now and then."""

    memory: float = 0.5
    """Weight of what was known of a row against a new measurement; 0 keeps the newest only."""
