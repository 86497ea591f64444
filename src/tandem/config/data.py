"""Data sets: where rows come from and which columns mean what."""

from collections.abc import Mapping
from dataclasses import dataclass, field

COLUMNS = (
    "messages",
    "prompt",
    "question",
    "answer",
    "completion",
    "chosen",
    "rejected",
    "margin",
    "label",
    "completions",
    "labels",
)
"""Names that `columns` may map."""


@dataclass(frozen=True)
class SourceConfig:
    """One data set of a mixture."""

    path: str
    """Folder, file, hub name, `addition`, `addition_pairs`, or `reasoning_gym:NAME`."""

    weight: float = 1.0
    """Share of prompts drawn from this source, relative to the others."""

    reward: str | None = None
    """Reward of this source's rows; null takes the run's `reward`."""

    name: str | None = None
    """Name in metrics; null takes the last part of the path."""


@dataclass(frozen=True)
class DatasetConfig:
    """Rows for training or validation."""

    path: str | None = None
    """Folder, file, hub name, `addition`, `addition_pairs`, or `reasoning_gym:NAME`."""

    split: str | None = None
    """Split of a folder or hub data set; null takes `train` for training and `test` for validation."""

    sources: tuple[SourceConfig, ...] = ()
    """Several data sets mixed by weight, instead of `path`."""

    prompt_column: str | None = None
    """Column that holds the user's question; null looks for messages, prompt, question, problem."""

    answer_column: str | None = None
    """Column that holds the expected answer; null looks for answer, solution, completion."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """Other names of columns, ours first: `columns.chosen=winner`; see docs/preferences.md for the names."""

    max_rows: int | None = None
    """Use only the first rows of the data set; null uses all."""

    shuffle: bool = True
    """Draw the rows of each epoch in a new order that depends on the seed."""

    size: int = 2000
    """Rows made by a procedural data set."""

    prompt_suffix: str = ""
    """Text put behind every question, for example how to write the answer."""
