"""Training on rows: `tandem sft`, `tandem preference` and `tandem reward`.

Supervised fine-tuning trains on packed conversations, with the loss only on the assistant's tokens. Preference learning
(DPO, IPO, KTO, SimPO, ORPO) reads ranked pairs or labelled completions. A reward model learns from ranked pairs, from pairs
with safety labels, or from labelled steps.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tandem.algorithms.preference import PREFERENCE_LOSSES
from tandem.api.failures import DataFailure
from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig, SFTConfig
from tandem.config.load import Resolved
from tandem.config.preference import PreferenceConfig, RewardModelConfig
from tandem.data.encoding import ChatEncoder, Encoded, sequence
from tandem.data.examples import Reader, conversations, judged, pairs, safety, steps
from tandem.roles.components import choose
from tandem.roles.learners import LanguageModel, PreferenceLearner, RewardModel
from tandem.trainers.loop import Summary
from tandem.trainers.supervised import Encoder, Recipe, Sequences, train_on_rows


class ConversationEncoder(Encoder):
    """Encodes rows of `tandem.data.examples.conversations`, with the loss only on the assistant's tokens."""

    def encode(self, row: Mapping[str, Any]) -> Sequences:
        """Returns one sequence; several if the template rewrites the history, one for each part with an unchanged history.

        Raises:
            DataFailure: see `ChatEncoder.conversation`.
        """
        return [
            sequence(encoded) for encoded in self.chat.conversation(row["messages"], row["train_from"], row.get("tools"))
        ]


def encode_sides(chat: ChatEncoder, row: Mapping[str, Any]) -> tuple[Encoded, Encoded]:
    """Encodes both sides of a row of `tandem.data.examples.pairs`; returns (chosen, rejected).

    Raises:
        DataFailure: the sides are equal (`equal_sides`), or see `ChatEncoder.completion`.
    """
    chosen, rejected = (chat.completion(row["messages"], row[side], row.get("tools")) for side in ("chosen", "rejected"))
    if chosen.ids == rejected.ids:
        raise DataFailure("equal_sides", "chosen and rejected are the same, so there is nothing to prefer")
    return chosen, rejected


class PairEncoder(Encoder):
    """Encodes ranked pairs: two sequences per row, which share their prompt."""

    keeps_rows_together = True

    def encode(self, row: Mapping[str, Any]) -> Sequences:
        """Returns two sequences, the better side first. Raises `DataFailure` as `encode_sides` does."""
        chosen, rejected = encode_sides(self.chat, row)
        return [sequence(chosen, chosen=True), sequence(rejected, chosen=False)]


class JudgedEncoder(Encoder):
    """Encodes single completions, which are labelled desirable or undesirable."""

    def encode(self, row: Mapping[str, Any]) -> Sequences:
        """Returns one sequence. Raises `DataFailure` as `ChatEncoder.completion` does."""
        return [sequence(self.chat.completion(row["messages"], row["completion"], row.get("tools")), chosen=row["label"])]


class ScoredPairEncoder(Encoder):
    """Encodes ranked pairs with a margin."""

    keeps_rows_together, adds_end = True, False

    def encode(self, row: Mapping[str, Any]) -> Sequences:
        """Returns two sequences, the better side first. Raises `DataFailure` as `encode_sides` does."""
        chosen, rejected = encode_sides(self.chat, row)
        margin = self.config.margin if row["margin"] is None else row["margin"]
        return [sequence(chosen, chosen=True, margin=margin), sequence(rejected, chosen=False, margin=margin)]


class SafetyEncoder(Encoder):
    """Encodes pairs of a safer and a less safe side, each labelled safe or unsafe."""

    keeps_rows_together, adds_end = True, False

    def encode(self, row: Mapping[str, Any]) -> Sequences:
        """Returns two sequences, the safer side first.

        Raises:
            DataFailure: only the less safe side is labelled safe (`labels_contradict`), or see `encode_sides`.
        """
        if row["rejected_safe"] and not row["chosen_safe"]:
            raise DataFailure("labels_contradict", "the safer side is labelled unsafe, and the other one safe")
        sides = zip(encode_sides(self.chat, row), (True, False), (row["chosen_safe"], row["rejected_safe"]), strict=True)
        return [sequence(encoded, chosen=chosen, safe=safe) for encoded, chosen, safe in sides]


class StepEncoder(Encoder):
    """Encodes completions with a label for each step."""

    adds_end = False

    def encode(self, row: Mapping[str, Any]) -> Sequences:
        """Returns one sequence, with the last token of each step marked. Raises `DataFailure` as `ChatEncoder.steps`
        does."""
        encoded, ends = self.chat.steps(row["messages"], row["steps"], self.config.step_separator)
        end = torch.zeros(len(encoded.ids), dtype=torch.bool)
        right = end.clone()
        end[ends] = True
        right[ends] = torch.tensor(row["labels"], dtype=torch.bool)
        return [sequence(encoded, step_end=end, step_right=right)]


SUPERVISED: dict[str, tuple[Reader, type[Encoder]]] = {
    "pairs": (pairs, ScoredPairEncoder),
    "safety": (safety, SafetyEncoder),
    "steps": (steps, StepEncoder),
}
"""The rows of a reward model, by their kind of supervision."""


def recipe_of(config: BaseConfig) -> Recipe:
    """Returns the recipe of SFT, preference learning or a reward model.

    Raises:
        ConfigError: the configuration is of another kind, or names an unknown loss.
    """
    if isinstance(config, SFTConfig):
        return Recipe(conversations, ConversationEncoder, lambda engine, config, reference: LanguageModel(engine))
    if isinstance(config, PreferenceConfig):
        paired = choose(PREFERENCE_LOSSES, config.loss, "loss").part.is_paired
        return Recipe(
            pairs if paired else judged,
            PairEncoder if paired else JudgedEncoder,
            lambda engine, config, reference: PreferenceLearner(engine, config.loss, reference=reference),
        )
    if isinstance(config, RewardModelConfig):
        reader, encoder = SUPERVISED[config.supervision]
        return Recipe(reader, encoder, lambda engine, config, reference: RewardModel(engine))
    raise ConfigError(
        f"{type(config).__name__} does not learn from rows; use SFTConfig, PreferenceConfig or RewardModelConfig"
    )


def train(resolved: Resolved[Any], **how: Any) -> Summary:
    """Trains on rows, by the recipe of the configuration; ``how``: see `run_training`."""
    return train_on_rows(resolved, recipe_of(resolved.config), **how)
