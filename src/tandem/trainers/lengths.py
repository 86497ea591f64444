"""Lengths of prompts and completions: from the first rows of the data if they can be read, else assumed."""

import contextlib
import itertools
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tandem.api.failures import DataFailure
from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig, SFTConfig
from tandem.config.preference import DistillConfig, PreferenceConfig, RewardModelConfig, training_config
from tandem.flow.parts import Rows, open_rows
from tandem.models.catalog import BUILT_IN, resolve
from tandem.models.tokenizer import load_tokenizer
from tandem.planning.job import Lengths
from tandem.rollout.chat import chat_of
from tandem.trainers.recipes import recipe_of

ASSUMED_PROMPT = 256
"""Tokens, where the data cannot be read."""

LOOKED_AT = 64
"""Rows whose lengths are taken."""


@dataclass(frozen=True)
class Known:
    """Lengths, the number of rows, and in words where they come from."""

    lengths: Lengths
    rows: int | None
    said: str


def known_lengths(config: BaseConfig, *, prompt: int | None = None) -> Known:
    """The lengths of a run. ``prompt``: what the caller knows better; the longest completion follows from
    `gconfig.max_new_tokens` or `max_length`."""
    try:
        found = _of_rows(config)
    except ConfigError as error:
        found = None
        why = str(error).splitlines()[0]
    if found is not None:
        mean_prompt, rows, looked = found
        said = f"prompts of {mean_prompt} tokens, the mean of the first {looked} rows"
    else:
        mean_prompt, rows = ASSUMED_PROMPT, None
        said = f"prompts of {ASSUMED_PROMPT} tokens, assumed because the data could not be read ({why})"
    if prompt is not None:
        mean_prompt, said = prompt, f"prompts of {prompt} tokens, as you said"
    if isinstance(config, SFTConfig | PreferenceConfig | RewardModelConfig):
        longest = max(1, config.max_length - mean_prompt)
    else:
        longest = config.gconfig.max_new_tokens  # type: ignore[attr-defined]
    return Known(Lengths(mean_prompt, longest), rows, f"{said}; completions of at most {longest} tokens")


def _of_rows(config: BaseConfig) -> tuple[int, int, int]:
    """(mean prompt, rows, rows looked at)."""
    tokenizer = load_tokenizer(_folder(config.actor.path), chats=True)
    if isinstance(config, SFTConfig | PreferenceConfig | RewardModelConfig):
        return _examples(config, tokenizer)
    run = training_config(config) if isinstance(config, DistillConfig) else config
    rows: Rows = open_rows(run)
    lengths = [
        len(chat_of(tokenizer, row, config.system_prompt, config.chat_template_kwargs).prompt_ids)
        for row in rows.train.rows[:LOOKED_AT]
    ]
    return round(sum(lengths) / len(lengths)), len(rows.train), len(lengths)


def _folder(path: str) -> Path:
    """The folder of the tokenizer, which needs no weights."""
    folder = Path(path).expanduser()
    if folder.is_dir() or path in BUILT_IN:
        return folder if folder.is_dir() else resolve(path)
    raise ConfigError(f"the tokenizer of {path} is not on this machine")


def _examples(config: BaseConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int, int]:
    recipe = recipe_of(config)
    rows, encoder = open_rows(config, recipe.reader), recipe.encoder(tokenizer, config)
    prompts = []
    for row in itertools.islice(rows.train.rows, LOOKED_AT):
        with contextlib.suppress(DataFailure):  # such a row is dropped in training, too
            for sequence in encoder.encode(row):
                mask = sequence["loss_mask"].tolist()
                prompts.append(next((i for i, trained in enumerate(mask) if trained), len(mask)))
    if not prompts:
        raise ConfigError(f"none of the first {LOOKED_AT} rows of train_dataset can be used")
    return round(sum(prompts) / len(prompts)), len(rows.train), len(prompts)
