"""What is said of a metric."""

from typing import NamedTuple


class Metric(NamedTuple):
    """One row of the table."""

    unit: str
    meaning: str
    advice: str


Section = dict[str, Metric]
"""By name."""
