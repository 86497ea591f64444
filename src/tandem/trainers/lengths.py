"""Estimates the lengths of prompts and completions from the first rows of the data, or assumes them."""

import contextlib
import itertools
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tandem.api.failures import DataFailure
from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig, SFTConfig
from tandem.config.preference import DistillConfig, PreferenceConfig, RewardModelConfig, training_config
from tandem.data.dataset import Dataset, load_dataset
from tandem.data.examples import Reader
from tandem.data.rows import normalise
from tandem.models.catalog import BUILT_IN, resolve
from tandem.models.tokenizer import load_tokenizer
from tandem.planning.fit import PROMPT_TOKENS
from tandem.planning.job import Lengths, longest_of
from tandem.rollout.workflows import chat_of

LOOKED_AT = 64
"""Number of rows whose lengths are measured."""


@dataclass(frozen=True)
class RunLengths:
    """Lengths of prompts and completions in tokens, the number of training rows (None: unknown), and the source of the
    lengths in words."""

    lengths: Lengths
    rows: int | None
    source: str


def known_lengths(config: BaseConfig, *, prompt: int | None = None) -> RunLengths:
    """Returns the lengths of a run. ``prompt``: length of a prompt, if the caller knows it. The longest completion follows
    from `gconfig.max_new_tokens` or `max_length`."""
    try:
        measured = _of_rows(config)
    except ConfigError as error:
        measured = None
        why = str(error).splitlines()[0]
    if measured is not None:
        mean_prompt, rows, looked = measured
        source = f"prompts of {mean_prompt} tokens, the mean of the first {looked} rows"
    else:
        mean_prompt, rows = PROMPT_TOKENS, None
        source = f"prompts of {PROMPT_TOKENS} tokens, assumed because the data could not be read ({why})"
    if prompt is not None:
        mean_prompt, source = prompt, f"prompts of {prompt} tokens, as given"
    longest = longest_of(config, mean_prompt)
    return RunLengths(Lengths(mean_prompt, longest), rows, f"{source}; completions of at most {longest} tokens")


def _of_rows(config: BaseConfig) -> tuple[int, int, int]:
    """Returns (mean tokens of a prompt, number of rows, number of measured rows)."""
    tokenizer = load_tokenizer(_folder(config.actor.path), chats=True)
    if isinstance(config, SFTConfig | PreferenceConfig | RewardModelConfig):
        return _examples(config, tokenizer)
    run = training_config(config) if isinstance(config, DistillConfig) else config
    rows = _rows(run, normalise)
    lengths = [
        len(chat_of(tokenizer, row, config.system_prompt, config.chat_template_kwargs).prompt_ids)
        for row in rows.rows[:LOOKED_AT]
    ]
    return round(sum(lengths) / len(lengths)), len(rows), len(lengths)


def _rows(config: BaseConfig, reader: Reader) -> Dataset:
    return load_dataset(config.train_dataset, seed=config.seed, reader=reader, section="train_dataset.")


def _folder(path: str) -> Path:
    """Returns the folder of the tokenizer, without downloading from the hub."""
    folder = Path(path).expanduser()
    if folder.is_dir() or path in BUILT_IN:
        return folder if folder.is_dir() else resolve(path)
    raise ConfigError(f"the tokenizer of {path} is not on this machine")


def _examples(config: BaseConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int, int]:
    from tandem.trainers.recipes import recipe_of  # noqa: PLC0415 - the plan of an RL run loads no trainers

    recipe = recipe_of(config)
    rows, encoder = _rows(config, recipe.reader), recipe.encoder(tokenizer, config)
    prompts = []
    for row in itertools.islice(rows.rows, LOOKED_AT):
        with contextlib.suppress(DataFailure):  # such a row is also dropped in training
            for sequence in encoder.encode(row):
                mask = sequence["loss_mask"].tolist()
                prompts.append(next((i for i, trained in enumerate(mask) if trained), len(mask)))
    if not prompts:
        raise ConfigError(f"none of the first {LOOKED_AT} rows of train_dataset can be used")
    return round(sum(prompts) / len(prompts)), len(rows), len(prompts)
