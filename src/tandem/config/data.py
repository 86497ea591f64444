"""Data sets: where rows come from and which columns mean what."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

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

    @property
    def label(self) -> str:
        """Its name in metrics."""
        return self.name or Path(self.path.rpartition(":")[2]).stem


@dataclass(frozen=True)
class DatasetConfig:
    """Rows for training."""

    path: str | None = None
    """Folder, file, hub name, `addition`, `addition_pairs`, or `reasoning_gym:NAME`."""

    split: str | None = None
    """Split of a folder, hub or procedural data set; null takes `train`."""

    sources: tuple[SourceConfig, ...] = ()
    """Several data sets mixed by weight, instead of `path`."""

    prompt_column: str | None = None
    """Column that holds the user's question; null looks for messages, prompt, question, problem."""

    answer_column: str | None = None
    """Column that holds the expected answer; null looks for answer, solution, completion."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """Other names of columns that are read, ours first: `columns.chosen=winner`; see docs/preferences.md for the names."""

    max_rows: int | None = None
    """Use only the first rows of the data set; null uses all."""

    shuffle: bool = True
    """Draw the rows of each epoch in a new order that depends on the seed."""

    size: int = 2000
    """Most rows that a procedural data set makes."""

    prompt_suffix: str = ""
    """Text put behind every question, for example how to write the answer; whole conversations (SFT) have none."""


@dataclass(frozen=True)
class ValidDatasetConfig:
    """Rows for validation. Without `path` they are another split of `train_dataset`, read in the same way."""

    path: str | None = None
    """Folder, file, hub name, `addition`, `addition_pairs`, or `reasoning_gym:NAME`; null takes that of `train_dataset`."""

    split: str | None = None
    """Split of a folder, hub or procedural data set; null takes `test`."""

    sources: tuple[SourceConfig, ...] = ()
    """Several data sets mixed by weight, instead of `path`."""

    prompt_column: str | None = None
    """Column that holds the user's question; null is as in `train_dataset` where `path` is null, else looks for it."""

    answer_column: str | None = None
    """Column that holds the expected answer; null is as in `train_dataset` where `path` is null, else looks for it."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """Other names of columns; empty is as in `train_dataset` where `path` is null."""

    max_rows: int | None = None
    """Use only the first rows of the data set; null uses all, up to `evaluate.max_rows`."""

    size: int | None = None
    """Most rows that a procedural data set makes; null is as in `train_dataset` where `path` is null, else 2000."""

    prompt_suffix: str | None = None
    """Text put behind every question; null is as in `train_dataset` where `path` is null, else nothing."""


def is_procedural(path: str) -> bool:
    """Whether a path names rows that are computed."""
    return path in ("addition", "addition_pairs") or path.startswith("reasoning_gym:")
