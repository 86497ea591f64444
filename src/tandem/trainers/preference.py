"""Preference learning: `tandem preference`. DPO, IPO, KTO, SimPO and ORPO on ranked pairs or judged completions."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from tandem.algorithms.preference import PREFERENCE_LOSSES
from tandem.api.engines import TrainEngine
from tandem.api.failures import DataFailure
from tandem.config.load import Resolved
from tandem.config.preference import PreferenceConfig
from tandem.data.encoding import ChatEncoder, Encoded, sequence
from tandem.data.examples import judged, pairs
from tandem.lifecycle.summary import Summary
from tandem.roles.components import Choice, choose
from tandem.roles.preference import PreferenceLearner
from tandem.roles.reference import Reference
from tandem.trainers.sft import chat_encoder
from tandem.trainers.supervised import Recipe, Sequences, train_on_rows


def encode_sides(chat: ChatEncoder, row: Mapping[str, Any]) -> tuple[Encoded, Encoded]:
    """Both sides of a row of `tandem.data.examples.pairs`.

    Raises:
        DataFailure: equal sides (`equal_sides`), or what `ChatEncoder.conversation` refuses.
    """
    chosen, rejected = (chat.completion(row["messages"], row[side], row.get("tools")) for side in ("chosen", "rejected"))
    if chosen.ids == rejected.ids:
        raise DataFailure("equal_sides", "chosen and rejected are the same, so there is nothing to prefer")
    return chosen, rejected


class PairEncoder:
    """Ranked pairs: two sequences a row, which share their prompt."""

    keeps_rows_together = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: PreferenceConfig):
        self.chat = chat_encoder(tokenizer, config)

    def encode(self, row: Mapping[str, Any]) -> Sequences:
        """The better side first. Raises `DataFailure` as `encode_sides` does."""
        chosen, rejected = encode_sides(self.chat, row)
        return [sequence(chosen, chosen=True), sequence(rejected, chosen=False)]


class JudgedEncoder:
    """Single completions that are desirable or not."""

    keeps_rows_together = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: PreferenceConfig):
        self.chat = chat_encoder(tokenizer, config)

    def encode(self, row: Mapping[str, Any]) -> Sequences:
        """One sequence. Raises `DataFailure` as `ChatEncoder.completion` does."""
        return [sequence(self.chat.completion(row["messages"], row["completion"], row.get("tools")), chosen=row["label"])]


def make_loss(config: PreferenceConfig) -> Choice:
    """The loss that `loss` names.

    Raises:
        ConfigError: there is none of that name, or it has no such knob.
    """
    return choose(PREFERENCE_LOSSES, config.loss, "loss")


def recipe_of(config: PreferenceConfig) -> Recipe:
    """The recipe for the rows that the loss wants."""
    paired = make_loss(config).part.is_paired
    return Recipe(reader=pairs if paired else judged, encoder=PairEncoder if paired else JudgedEncoder, learner=_learner)


def _learner(engine: TrainEngine, config: PreferenceConfig, reference: Reference | None) -> PreferenceLearner:
    return PreferenceLearner(engine, config.loss, reference=reference)


def train(resolved: Resolved[PreferenceConfig], **how: Any) -> Summary:
    """Runs preference learning; ``how``: see `run_training`."""
    return train_on_rows(resolved, recipe_of(resolved.config), **how)
