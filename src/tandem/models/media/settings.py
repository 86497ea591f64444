"""The settings of a processor in a model folder, and transformers' classes that follow them."""

import json
from pathlib import Path
from typing import Any

import transformers

from tandem.config.errors import ConfigError
from tandem.models.foreign import UNREADABLE, error_words

PROCESSOR, PREPROCESSOR = FILES = ("processor_config.json", "preprocessor_config.json")


def read_processor(name: str, folder: Path) -> Any:
    """The image processor or feature extractor of transformers that is called ``name``, with the settings of a folder.

    Raises:
        ConfigError: the folder has none, or they cannot be read.
    """
    if not any((folder / file).is_file() for file in FILES):
        raise ConfigError(
            f"model folder {folder} has no {' or '.join(FILES)}, so it is not known how its model sees or hears: copy the "
            "processor's files of the base model into it"
        )
    try:
        return getattr(transformers, name).from_pretrained(folder)
    except UNREADABLE as error:
        raise ConfigError(f"the processor in {folder} cannot be read: {error_words(error)}") from error


def settings_of(folder: Path) -> dict[str, Any]:
    """`processor_config.json`; empty where there is none.

    Raises:
        ConfigError: it cannot be read.
    """
    file = folder / PROCESSOR
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return dict(found)
    except UNREADABLE as error:
        raise ConfigError(f"{file} cannot be read: {error_words(error)}") from error
