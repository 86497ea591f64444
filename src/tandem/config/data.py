"""Data sets: the source of rows, the meaning of columns, and the choice of prompts (the `curriculum` section)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tandem.config.parts import Count, Share, whole
from tandem.config.terms import Spec

COLUMNS = (
    "messages",
    "image",
    "images",
    "audio",
    "audios",
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
    "chosen_safe",
    "rejected_safe",
    "response_0",
    "response_1",
    "better_response_id",
    "safer_response_id",
    "is_response_0_safe",
    "is_response_1_safe",
)
"""Names that `columns` may map."""

SOURCE, INDEX, EPOCH, WHERE, REWARD = (f"tandem.{name}" for name in ("source", "index", "epoch", "where", "reward"))
"""Keys that Tandem adds to each row: name of the source, index, epoch, file and line, and the reward of its source. A user's
columns cannot have these names."""

OURS = (SOURCE, INDEX, EPOCH, WHERE, REWARD)

WITH_MEDIA = ("clevr_count", "easy_vqa", "easy_vqa_open", "easy_vqa_yes_no", "spoken_digits", "spoken_sums")
"""Data sets with images or sounds. Each also exists as ``…_shuffled``, in which rows have the media of other rows."""

PROCEDURAL = (
    *("addition", "addition_pairs", "functions", "functions_shuffled", "seeds"),
    *(f"{name}{ending}" for name in WITH_MEDIA for ending in ("", "_shuffled")),
)
"""Data sets that Tandem generates, in addition to those of reasoning-gym."""


@dataclass(frozen=True)
class SourceConfig:
    """One data set of a mixture."""

    path: str
    """Folder, file, hub name, `my_file.py:rows` (a list of dicts, or a function that returns one), `addition`,
    `addition_pairs`, `functions`, `seeds`, `clevr_count` and others with media (docs/vision.md, docs/audio.md), or
    `reasoning_gym:NAME`."""

    weight: float = 1.0
    """Share of prompts drawn from this source, relative to the others."""

    reward: Spec | None = None
    """Reward of this source's rows; null takes the run's `reward`."""

    name: str | None = None
    """Name in metrics; null takes the last part of the path."""

    @property
    def label(self) -> str:
        """Name of the data set in metrics."""
        return self.name or Path(self.path.rpartition(":")[2]).stem


@dataclass(frozen=True)
class DatasetConfig:
    """Rows for training."""

    path: str | None = None
    """Folder, file, hub name, `my_file.py:rows` (a list of dicts, or a function that returns one), `addition`,
    `addition_pairs`, `functions`, `seeds`, `clevr_count` and others with media (docs/vision.md, docs/audio.md), or
    `reasoning_gym:NAME`."""

    split: str | None = None
    """Split of the data set; null takes `train`."""

    sources: tuple[SourceConfig, ...] = ()
    """Several data sets mixed by weight, instead of `path`."""

    prompt_column: str | None = None
    """Column of the user's question, or `a.b` for the value `b` inside column `a`; null looks for the usual names
    (docs/data.md)."""

    answer_column: str | None = None
    """Column of the expected answer, for `tandem sft` of the text to learn; null looks for the usual names
    (docs/data.md)."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """Tandem's name of a column → your name: `columns.chosen=winner` reads `winner` as `chosen` (docs/preferences.md)."""

    max_rows: Count | None = None
    """Use only the first rows of the data set; null uses all."""

    shuffle: bool = True
    """Shuffle the rows in each epoch, depending on the seed."""

    size: Annotated[int, whole(1, 10**7)] = 2000
    """Maximum number of rows of a generated data set (`addition`, `addition_pairs`, `functions`, `seeds`,
    `reasoning_gym:NAME`)."""

    prompt_suffix: str = ""
    """Text after every question, for example how to write the answer; not used for whole conversations (SFT)."""

    media: bool = True
    """Read the images and sounds of rows, validation rows too (docs/media.md); false reads only the text."""

    media_folders: tuple[str, ...] = ()
    """Additional folders in which paths of images and sounds are allowed, besides the folder of the data file. For
    validation rows too."""


@dataclass(frozen=True)
class ValidDatasetConfig:
    """Rows for validation. Without `path` they are another split of `train_dataset`, read in the same way."""

    path: str | None = None
    """Folder, file, hub name, `my_file.py:rows`, `addition`, `addition_pairs`, `functions`, `seeds`,
    `clevr_count` and others with media, `reasoning_gym:NAME`; null: as `train_dataset`."""

    split: str | None = None
    """Split of the data set; null takes `test`."""

    sources: tuple[SourceConfig, ...] = ()
    """Several data sets mixed by weight, instead of `path`."""

    prompt_column: str | None = None
    """Column of the user's question; null: as in `train_dataset` if `path` is null, else looks for the usual names."""

    answer_column: str | None = None
    """Column of the expected answer; null: as in `train_dataset` if `path` is null, else looks for the usual names."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """Tandem's name of a column → your name; if empty and `path` is null: as in `train_dataset`."""

    max_rows: Count | None = None
    """Use only the first rows of the data set; null uses all, up to `evaluate.max_rows`."""

    size: Annotated[int, whole(1, 10**7)] | None = None
    """Maximum number of rows of a generated data set; null: as in `train_dataset` if `path` is null, else 2000."""

    prompt_suffix: str | None = None
    """Text after every question; null: as in `train_dataset` if `path` is null, else none."""


def is_procedural(path: str) -> bool:
    """True if a path names a generated data set."""
    return path in PROCEDURAL or path.startswith("reasoning_gym:")


@dataclass(frozen=True)
class CurriculumConfig:
    """Prompts drawn by their measured success rate, so that most are neither too easy nor too hard."""

    round_rows: Count | None = None
    """Number of rows in one round. Each round draws rows by their success rates so far, without repeats. null: no
    curriculum, each row comes once per epoch."""

    target: Share = 0.5
    """Success rate at which a row is drawn most often."""
