"""Supervised fine-tuning: `tandem sft`. Conversations, packed, trained on the assistant's tokens only."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from tandem.config.experiment import BaseConfig, SFTConfig
from tandem.config.load import Resolved
from tandem.data.encoding import ChatEncoder, sequence
from tandem.data.examples import conversations
from tandem.lifecycle.summary import Summary
from tandem.models.tokenizer import check_chat_template
from tandem.roles.language_model import LanguageModel
from tandem.trainers.supervised import Recipe, Sequences, train_on_rows


def chat_encoder(tokenizer: PreTrainedTokenizerBase, config: BaseConfig, *, adds_end: bool = True) -> ChatEncoder:
    """The encoder of a run. ``adds_end``: see `ChatEncoder`; where the model is to write and not to score.

    Raises:
        ConfigError: the tokenizer has no chat template, or it has no end and can be given none.
    """
    check_chat_template(tokenizer)
    return ChatEncoder(
        tokenizer,
        max_length=config.max_length,  # type: ignore[attr-defined]
        system_prompt=config.system_prompt,
        chat_template_kwargs=config.chat_template_kwargs,
        adds_end=adds_end,
    )


class ConversationEncoder:
    """Turns rows of `tandem.data.examples.conversations` into sequences, the loss on the assistant's tokens alone."""

    keeps_rows_together = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: SFTConfig):
        self.chat = chat_encoder(tokenizer, config)

    def encode(self, row: Mapping[str, Any]) -> Sequences:
        """One sequence, or one for each stretch of a conversation whose history the template rewrites.

        Raises:
            DataFailure: see `ChatEncoder.conversation`.
        """
        return [
            sequence(encoded) for encoded in self.chat.conversation(row["messages"], row["train_from"], row.get("tools"))
        ]


RECIPE = Recipe(
    reader=conversations, encoder=ConversationEncoder, learner=lambda engine, config, reference: LanguageModel(engine)
)


def train(resolved: Resolved[SFTConfig], **how: Any) -> Summary:
    """Runs supervised fine-tuning; ``how``: see `run_training`."""
    return train_on_rows(resolved, RECIPE, **how)
