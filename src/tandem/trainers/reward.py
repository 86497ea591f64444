"""Training a reward model: `tandem reward`. From ranked pairs, from pairs labelled safe or not, or from judged steps."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tandem.api.failures import DataFailure
from tandem.config.load import Resolved
from tandem.config.preference import RewardModelConfig
from tandem.data.encoding import sequence
from tandem.data.examples import Reader, pairs, safety, steps
from tandem.lifecycle.summary import Summary
from tandem.roles.reward_model import RewardModel
from tandem.trainers.preference import encode_sides
from tandem.trainers.sft import chat_encoder
from tandem.trainers.supervised import Encoder, Recipe, Sequences, train_on_rows


class ScoredPairEncoder:
    """Ranked pairs with a margin."""

    keeps_rows_together = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: RewardModelConfig):
        self.chat, self.margin = chat_encoder(tokenizer, config, adds_end=False), config.margin

    def encode(self, row: Mapping[str, Any]) -> Sequences:
        """The better side first. Raises `DataFailure` as `encode_sides` does."""
        chosen, rejected = encode_sides(self.chat, row)
        margin = self.margin if row["margin"] is None else row["margin"]
        return [sequence(chosen, chosen=True, margin=margin), sequence(rejected, chosen=False, margin=margin)]


class SafetyEncoder:
    """Pairs of a safer and a less safe side, each labelled safe or not."""

    keeps_rows_together = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: RewardModelConfig):
        self.chat = chat_encoder(tokenizer, config, adds_end=False)

    def encode(self, row: Mapping[str, Any]) -> Sequences:
        """The safer side first.

        Raises:
            DataFailure: `labels_contradict`, or what `encode_sides` refuses.
        """
        if row["rejected_safe"] and not row["chosen_safe"]:
            raise DataFailure("labels_contradict", "the safer side is labelled unsafe, and the other one safe")
        sides = zip(encode_sides(self.chat, row), (True, False), (row["chosen_safe"], row["rejected_safe"]), strict=True)
        return [sequence(encoded, chosen=chosen, safe=safe) for encoded, chosen, safe in sides]


class StepEncoder:
    """Completions judged step by step."""

    keeps_rows_together = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: RewardModelConfig):
        self.chat, self.separator = chat_encoder(tokenizer, config, adds_end=False), config.step_separator

    def encode(self, row: Mapping[str, Any]) -> Sequences:
        """One sequence, its judged tokens marked. Raises `DataFailure` as `ChatEncoder.steps` does."""
        encoded, ends = self.chat.steps(row["messages"], row["steps"], self.separator)
        end = torch.zeros(len(encoded.ids), dtype=torch.bool)
        right = end.clone()
        end[ends] = True
        right[ends] = torch.tensor(row["labels"], dtype=torch.bool)
        return [sequence(encoded, step_end=end, step_right=right)]


def _recipe(reader: Reader, encoder: Callable[[PreTrainedTokenizerBase, Any], Encoder]) -> Recipe:
    return Recipe(reader, encoder, lambda engine, config, reference: RewardModel(engine))


RECIPES = {
    "pairs": _recipe(pairs, ScoredPairEncoder),
    "safety": _recipe(safety, SafetyEncoder),
    "steps": _recipe(steps, StepEncoder),
}


def train(resolved: Resolved[RewardModelConfig], **how: Any) -> Summary:
    """Trains a reward model; ``how``: see `run_training`."""
    return train_on_rows(resolved, RECIPES[resolved.config.supervision], **how)
