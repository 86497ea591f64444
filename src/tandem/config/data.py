"""Data sets: where rows come from and which columns mean what."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

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
"""Keys that a row has beside the columns of its data set: the name of the source, its place and pass, its file and line, and
the reward that its source brings. No column of a user's can have these names."""

OURS = (SOURCE, INDEX, EPOCH, WHERE, REWARD)

WITH_MEDIA = ("clevr_count", "easy_vqa", "easy_vqa_open", "easy_vqa_yes_no", "spoken_digits", "spoken_sums")
"""Data sets of pictures and sounds; each also as ``…_shuffled``, with the media of other rows."""

PROCEDURAL = (
    *("addition", "addition_pairs", "functions", "functions_shuffled", "seeds"),
    *(f"{name}{ending}" for name in WITH_MEDIA for ending in ("", "_shuffled")),
)
"""Data sets that are computed or put together, beside the families of reasoning-gym."""


@dataclass(frozen=True)
class SourceConfig:
    """One data set of a mixture."""

    path: str
    """Folder, file, hub name, `my_file.py:rows` (a list of dicts, or a function that gives them), `addition`,
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
        """Its name in metrics."""
        return self.name or Path(self.path.rpartition(":")[2]).stem


@dataclass(frozen=True)
class DatasetConfig:
    """Rows for training."""

    path: str | None = None
    """Folder, file, hub name, `my_file.py:rows` (a list of dicts, or a function that gives them), `addition`,
    `addition_pairs`, `functions`, `seeds`, `clevr_count` and others with media (docs/vision.md, docs/audio.md), or
    `reasoning_gym:NAME`."""

    split: str | None = None
    """Split of the data set; null takes `train`."""

    sources: tuple[SourceConfig, ...] = ()
    """Several data sets mixed by weight, instead of `path`."""

    prompt_column: str | None = None
    """Column of the user's question, `a.b` for a value within one; null finds it by the usual names (docs/data.md)."""

    answer_column: str | None = None
    """Column of the expected answer, or of what `tandem sft` learns; null finds it by the usual names (docs/data.md)."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """Names of your columns, by ours: `columns.chosen=winner` reads `winner` as `chosen` (docs/preferences.md)."""

    max_rows: int | None = None
    """Use only the first rows of the data set; null uses all."""

    shuffle: bool = True
    """Shuffle the rows in each epoch, depending on the seed."""

    size: int = 2000
    """Most rows of a generated data set (`addition`, `addition_pairs`, `functions`, `seeds`, `reasoning_gym:NAME`)."""

    prompt_suffix: str = ""
    """Text after every question, for example how to write the answer; not used for whole conversations (SFT)."""

    media: bool = True
    """Read the images and sounds of rows (docs/media.md); false reads the text alone."""

    media_folders: tuple[str, ...] = ()
    """More folders that paths of images and sounds may lie in, beside the folder of the data file."""


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
    """Column of the user's question; null: as in `train_dataset` if `path` is null, else it is looked for."""

    answer_column: str | None = None
    """Column of the expected answer; null: as in `train_dataset` if `path` is null, else it is looked for."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """Other names of columns; if it is empty and `path` is null, those of `train_dataset`."""

    max_rows: int | None = None
    """Use only the first rows of the data set; null uses all, up to `evaluate.max_rows`."""

    size: int | None = None
    """Most rows of a generated data set; null: as in `train_dataset` if `path` is null, else 2000."""

    prompt_suffix: str | None = None
    """Text after every question; null: as in `train_dataset` if `path` is null, else none."""

    media: bool | None = None
    """Read the images and sounds of rows; null: as in `train_dataset` if `path` is null, else true."""

    media_folders: tuple[str, ...] = ()
    """More folders for paths of images and sounds; if it is empty and `path` is null, those of `train_dataset`."""


def is_procedural(path: str) -> bool:
    """True if a path names rows that are computed."""
    return path in PROCEDURAL or path.startswith("reasoning_gym:")
