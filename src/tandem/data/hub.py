"""The one file that uses the optional library `datasets`: data sets by hub name, and parquet files."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.config.errors import ConfigError, kind_and_text
from tandem.config.extras import install_extra


def _need(what: str) -> None:
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(f"{what} needs the library `datasets`: {install_extra('data')}")


def without_nulls(value: Any, calls: bool = False) -> Any:
    """A row without the nulls within tools and tool calls: arrow gives each function the arguments of all others."""
    if isinstance(value, dict):
        parts = {key: without_nulls(part, calls or key in ("tools", "tool_calls")) for key, part in value.items()}
        return {key: part for key, part in parts.items() if not (calls and part is None)}
    return [without_nulls(part, calls) for part in value] if isinstance(value, list) else value


def read_parquet(file: Path) -> Iterator[dict[str, Any]]:
    """Rows of a parquet file.

    Raises:
        ConfigError: the library is not installed, or the file is not parquet.
    """
    _need(f"reading {file}")
    import pyarrow  # noqa: PLC0415 comes with the optional library
    import pyarrow.parquet  # noqa: PLC0415

    try:
        table = pyarrow.parquet.read_table(file)
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"{file} is not a parquet file: {error}") from error
    yield from map(without_nulls, table.to_pylist())


def read_hub(name: str, split: str) -> Iterator[dict[str, Any]]:
    """Rows of a data set of the Hugging Face hub; ``openai/gsm8k:main`` chooses a configuration.

    Raises:
        ConfigError: the library is not installed; no such data set, configuration or split; the hub is out of reach.
    """
    _need(f"there is no file or folder {name}, and a data set of the hub")
    import datasets  # noqa: PLC0415 optional library

    path, _, configuration = name.partition(":")
    try:
        if not configuration:
            there = datasets.get_dataset_config_names(path)
            configuration = "default" if "default" in there else "main" if "main" in there else there[0]
        rows = datasets.load_dataset(path, configuration, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(
            f"data set {name} (split {split!r}) could not be loaded: there is no such file or folder, and the hub said: "
            f"{' '.join(kind_and_text(error).split())[:300]}"
        ) from error
    if _has_media(rows.features):  # as they are stored, ``{"bytes": …, "path": …}``: reading rows decodes none of them
        rows = (row for table in rows.with_format("arrow").iter(256) for row in table.to_pylist())
    yield from map(without_nulls, rows)


def _has_media(feature: Any) -> bool:
    import datasets  # noqa: PLC0415 optional library

    inner = feature.values() if isinstance(feature, dict) else [getattr(feature, "feature", None)]
    return isinstance(feature, datasets.Image | datasets.Audio | datasets.Video) or any(map(_has_media, filter(None, inner)))


def hub_folders() -> list[Path]:
    """The folders of files that data sets of the hub were downloaded to; none without the library."""
    if importlib.util.find_spec("datasets") is None:
        return []
    import datasets  # noqa: PLC0415 optional library
    import huggingface_hub.constants  # noqa: PLC0415

    return [Path(datasets.config.HF_DATASETS_CACHE), Path(huggingface_hub.constants.HF_HUB_CACHE)]
