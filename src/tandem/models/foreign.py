"""Reads model folders from untrusted sources: runs no code from them, and names files that cannot be read."""

import contextlib
import copy
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, GenerationConfig, PretrainedConfig
from transformers.utils import logging as their_logging

from tandem.api.weights import INDEX
from tandem.api.weights import UNREADABLE as FEWER
from tandem.config.errors import ConfigError, kind_and_text
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
    # of vision and audio towers
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
"""Upper limits for sizes in `config.json`, far above those of any model: transformers would allocate lists, modules and
buffers of these sizes."""

UNREADABLE = (*FEWER, ArithmeticError, EOFError, StrictDataclassError, UnpicklingError)
"""Errors that reading a folder may raise: those of `weight_files.UNREADABLE`, and those of transformers and torch."""


def error_words(error: Exception) -> str:
    """Returns the text of an error; with its class if the text alone says too little, such as only a key."""
    if "trust_remote_code" in str(error):
        return "it needs code from its folder (auto_map), which is not run; use a model that transformers supports itself"
    plain = isinstance(error, (OSError, ValueError, RuntimeError, SafetensorError)) and not isinstance(error, RecursionError)
    return str(error) if plain else kind_and_text(error)


def read_hf_config(place: str | os.PathLike[str]) -> PretrainedConfig:
    """Reads the `config.json` of a folder or of a hub name. Code that comes with a model (`auto_map`) is never run, and the
    user is not asked about it.

    Raises:
        ConfigError: the file cannot be read, needs the model's own code, or has sizes that no model has.
    """
    load_family()
    try:
        text = refuse_absurd(Path(place))
        if text is None:
            return AutoConfig.from_pretrained(place, trust_remote_code=False)
        return copy.deepcopy(_read_folder(os.fspath(place), text))
    except UNREADABLE as error:
        raise ConfigError(f"config.json of {place} cannot be read: {error_words(error)}") from error


@lru_cache(maxsize=8)
def _read_folder(folder: str, text: str) -> PretrainedConfig:
    """Reads the configuration of a folder whose `config.json` holds ``text``. A run asks a dozen times for the same one, and
    transformers takes ten times as long as a copy, because it formats each configuration for its log."""
    return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def read_generation_config(folder: Path) -> GenerationConfig | None:
    """Reads `generation_config.json`; returns None if the folder has none.

    Raises:
        ConfigError: the file cannot be read.
    """
    if not (folder / "generation_config.json").is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(folder)
    except UNREADABLE as error:
        raise ConfigError(f"generation_config.json of {folder} cannot be read: {error_words(error)}") from error


def refuse_absurd(folder: Path) -> str | None:
    """Raises `ValueError` for a `config.json` that would make transformers use unbounded memory or time; returns its text,
    or None if there is no such file."""
    file = folder / "config.json"
    if not file.is_file():
        return None
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise ValueError(f"the file has {file.stat().st_size} bytes, and at most {MAX_CONFIG_BYTES} are allowed")
    text = file.read_text(encoding="utf-8")
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError(f"the file must hold a JSON object, and holds a {type(content).__name__}")
    for part in (content, *(inner for inner in content.values() if isinstance(inner, dict))):
        for name, value in part.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} is {value}, which is not a finite number")
        for name, most in MAX_SIZES.items():
            value = part.get(name)
            if isinstance(value, (int, float)) and not 0 < value <= most:
                raise ValueError(f"{name} must be from 1 to {most}, got {value}")
    return text


def read_weights(
    kind: Any,
    folder: Path,
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: str | torch.device,
    attention: str | dict[str, str],
    may_miss: Iterable[str] = (),
) -> Any:
    """Opens a transformers model with packed attention, on the CPU; for the device ``meta`` only the headers of its files
    are read. ``kind``: the transformers class. ``attention``: transformers' ``attn_implementation``. ``may_miss``: tensors
    that may be missing in the folder; transformers then fills them with random numbers.

    Raises:
        ConfigError: weights cannot be read, are missing, or have wrong shapes; the message names the first.
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
    for name, stored, expected in sorted(report["mismatched_keys"]):
        raise ConfigError(
            f"the weights in {folder} do not belong to the model in its config.json: {name} has shape {list(stored)}, "
            f"expected {list(expected)}"
        )
    missing = sorted(report["missing_keys"].difference(may_miss))
    if missing:
        raise ConfigError(
            f"the weights in {folder} cannot be read: {len(missing)} are missing, first {missing[0]!r}; does config.json "
            "there belong to another model?"
        )
    unknown = sorted(set(report["unexpected_keys"]) - {"lm_head.weight", "score.weight"})
    if unknown:
        log.warning(
            "%s holds %d tensors that are not part of the model in its config.json, first %s: they are not used",
            folder,
            len(unknown),
            unknown[0],
        )
    vars(model.config).pop("transformers_weights", None)  # would be saved with the model, whose files will have other names
    return model


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Turns off transformers' progress bars for weights in a block, because a run shows its own progress."""
    shown = their_logging.is_progress_bar_enabled()
    their_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            their_logging.enable_progress_bar()


@contextlib.contextmanager
def no_report() -> Iterator[None]:
    """Silences transformers' report of missing weights in a block; the caller checks for these itself."""
    level = their_logging.get_verbosity()
    their_logging.set_verbosity_error()
    try:
        yield
    finally:
        their_logging.set_verbosity(level)
