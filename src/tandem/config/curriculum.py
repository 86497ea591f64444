"""The choice of prompts: the `curriculum` section."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CurriculumConfig:
    """Prompts drawn by their measured success rate, so that most are neither too easy nor too hard."""

    round_rows: int | None = None
    """Rows in one round. A round draws its rows by the success rates known so far, none twice; null: each row once an
    epoch."""

    target: float = 0.5
    """Success rate of the rows that are drawn most often."""

    width: float = 0.25
    """Standard deviation of the bell curve around `target` that gives each row its weight."""

    floor: float = 0.05
    """Smallest weight of a row, relative to a row at `target`, so that every row is tried again from time to time."""

    memory: float = 0.5
    """Weight of a row's earlier success rate when a new one is measured; 0 uses the newest only."""
