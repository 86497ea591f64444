"""Reading of model folders of others: nothing of them is run, and files that cannot be read are named."""

import contextlib
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, GenerationConfig, PretrainedConfig
from transformers.utils import logging as their_logging

from tandem.api.weight_files import INDEX
from tandem.api.weight_files import UNREADABLE as FEWER
from tandem.config.errors import ConfigError, kind_and_text
from tandem.models.attention import NAME
from tandem.models.families import load_family

log = logging.getLogger(__name__)

MAX_CONFIG_BYTES = 2**24
MAX_SIZES = {
    "num_hidden_layers": 10_000,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "vocab_size": 2**24,
    # of what sees and hears
    "depth": 10_000,
    "encoder_layers": 10_000,
    "num_heads": 2**16,
    "encoder_attention_heads": 2**16,
    "embed_dim": 2**20,
    "d_model": 2**20,
    "out_hidden_size": 2**20,
    "encoder_ffn_dim": 2**22,
    "image_size": 2**16,
    "max_source_positions": 2**20,
    "num_position_embeddings": 2**20,
}
"""No model comes near; of as many as a configuration says lists, modules and buffers would be made."""

UNREADABLE = (*FEWER, ArithmeticError, EOFError, StrictDataclassError, UnpicklingError)
"""The errors of `weight_files.UNREADABLE`, and those of transformers and torch."""


def error_words(error: Exception) -> str:
    """In words; of an error whose text is only a key or a type also its kind."""
    if "trust_remote_code" in str(error):
        return "it brings code of its own (auto_map), which is not run here; give a model that transformers knows without"
    plain = isinstance(error, (OSError, ValueError, RuntimeError, SafetensorError)) and not isinstance(error, RecursionError)
    return str(error) if plain else kind_and_text(error)


def read_hf_config(place: str | os.PathLike[str]) -> PretrainedConfig:
    """The `config.json` of a folder, or of a name on the hub. Code that comes with a model (`auto_map`) is not run, and
    nobody is asked whether it may.

    Raises:
        ConfigError: it cannot be read, wants code of its own, or says what no model has.
    """
    load_family()
    try:
        refuse_absurd(Path(place))
        return AutoConfig.from_pretrained(place, trust_remote_code=False)
    except UNREADABLE as error:
        raise ConfigError(f"config.json of {place} cannot be read: {error_words(error)}") from error


def read_generation_config(folder: Path) -> GenerationConfig | None:
    """`generation_config.json`; None where there is none.

    Raises:
        ConfigError: it cannot be read.
    """
    if not (folder / "generation_config.json").is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(folder)
    except UNREADABLE as error:
        raise ConfigError(f"generation_config.json of {folder} cannot be read: {error_words(error)}") from error


def refuse_absurd(folder: Path) -> None:
    """Raises `ValueError` before transformers sees a `config.json` that would cost it memory or time without end."""
    file = folder / "config.json"
    if not file.is_file():
        return
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise ValueError(f"it has {file.stat().st_size} bytes, which no model's has")
    found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"it holds no object, but a {type(found).__name__}")
    for part in (found, *(inner for inner in found.values() if isinstance(inner, dict))):
        for name, value in part.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} is {value}, which is no number")
        for name, most in MAX_SIZES.items():
            value = part.get(name)
            if isinstance(value, (int, float)) and not 0 < value <= most:
                raise ValueError(f"{name} must be from 1 to {most}, got {value}")


def read_weights(
    kind: Any,
    folder: Path,
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: str | torch.device,
    may_miss: Iterable[str] = (),
    attention: str | dict[str, str] = NAME,
) -> Any:
    """A model of transformers with packed attention. For the device ``meta`` only the headers of its files are read, for any
    other it is on the CPU. ``may_miss``: tensors that the folder need not have, and that transformers then fills with noise.
    ``attention``: as transformers takes it, of a media model only its language model's.

    Raises:
        ConfigError: its weights cannot be read, are missing, or have other shapes; names the first.
    """
    if (folder / INDEX).is_file():  # transformers would take `model.safetensors` first
        config.transformers_weights = INDEX
    try:
        with no_progress_bars(), no_report():
            model, report = kind.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=attention,
                output_loading_info=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,
                device_map="meta" if device == "meta" else None,
            )
    except UNREADABLE as error:
        raise ConfigError(f"the weights in {folder} cannot be read: {error_words(error)}") from error
    for name, there, wanted in sorted(report["mismatched_keys"]):
        raise ConfigError(
            f"the weights in {folder} are not of the model that config.json there describes: {name} is {list(there)}, and "
            f"would be {list(wanted)}"
        )
    missing = sorted(report["missing_keys"].difference(may_miss))
    if missing:
        raise ConfigError(
            f"the weights in {folder} cannot be read: {len(missing)} are missing, first {missing[0]!r}; is config.json "
            "there of another model?"
        )
    unknown = sorted(set(report["unexpected_keys"]) - {"lm_head.weight", "score.weight"})
    if unknown:
        log.warning(
            "%s holds %d tensors that the model in config.json there does not have, first %s: they are not used",
            folder,
            len(unknown),
            unknown[0],
        )
    vars(model.config).pop("transformers_weights", None)  # it is saved with the model, whose files are then others
    return model


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keeps transformers' bars for reading and writing weights off the terminal, where a run shows its own progress."""
    shown = their_logging.is_progress_bar_enabled()
    their_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            their_logging.enable_progress_bar()


@contextlib.contextmanager
def no_report() -> Iterator[None]:
    """Silences transformers' report of what is missing in a folder: that is checked here, and refused."""
    level = their_logging.get_verbosity()
    their_logging.set_verbosity_error()
    try:
        yield
    finally:
        their_logging.set_verbosity(level)
