"""The context that a run needs, where its servers and its engine on a GPU are given no more than that."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tandem.api.failures import DataFailure
from tandem.config.arithmetic import evaluation_gconfig, workflow_of
from tandem.config.experiment import TrainConfig
from tandem.config.fleet import kinds_of
from tandem.engines.inference.check import context_of
from tandem.flow.parts import Rows
from tandem.rollout.chat import chat_of

ROUNDED = 256
"""A server's commands differ less often, so that one that is kept can be taken over."""


def with_room(config: TrainConfig, device: str, rows: Rows, tokenizer: PreTrainedTokenizerBase, folder: Path) -> TrainConfig:
    """The configuration with `rollout.engine.max_model_len`: the longest prompt and answer, rounded up, at most the model's
    context. As it is where somebody has set it, where a workflow makes its prompts turn by turn, and for the engine on a
    CPU, which keeps nothing of that size."""
    rollout, engine = config.rollout, config.rollout.engine
    plain = device == "cpu" and kinds_of(rollout.backend, rollout.fleet) == {"embedded"}
    if plain or engine.max_model_len is not None or workflow_of(config).name != "rlvr":
        return config
    asked = ((rows.train.rows, config.gconfig), (rows.valid, evaluation_gconfig(config)))
    most = max(longest_prompt(config, some, tokenizer) + sampling.max_new_tokens for some, sampling in asked)
    room = min(-(-most // ROUNDED) * ROUNDED, context_of(engine, folder))
    return replace(config, rollout=replace(rollout, engine=replace(engine, max_model_len=room)))


def longest_prompt(config: TrainConfig, rows: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of the longest prompt; 0 without rows. Rows of which the chat template makes none are dropped later."""
    most, around = 0, None
    for size, number in sorted(((len(str(row).encode()), i) for i, row in enumerate(rows)), reverse=True):
        if around is not None and size + around <= most:  # no token is less than a byte
            break
        with suppress(DataFailure):
            found = len(chat_of(tokenizer, rows[number], config.system_prompt, config.chat_template_kwargs).prompt_ids)
            most, around = max(most, found), found if around is None else min(around, found)
    return most
