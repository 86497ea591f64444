"""Rewards that need a model. The run holds the model, and requests scores of whole batches between rollout and update.

A cheap reward judges inside its episode (`tandem.api.workflow.RewardFn`). A `Score` cannot: its model shares the devices
with the others, so it works in a stage of its own, ``score:<name>``, when the episodes of a batch have ended.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tandem.api.engines import TrainEngine
from tandem.api.failures import DataFailure
from tandem.api.lazy_torch import TensorDict, torch
from tandem.api.samples import Group, Sample


@dataclass(frozen=True)
class FrozenModel:
    """A model that is read and never trained.

    Example: ``FrozenModel("runs/helpful/checkpoints/step_20", head="scalar")``
    """

    path: str
    """Model folder, hub name, or built-in name."""

    head: Literal["lm", "scalar", "text"] = "lm"
    """`lm` gives log-probabilities, `scalar` one number per token (the folder of a reward model), `text` writes."""

    dtype: Literal["auto", "bfloat16", "float32"] | None = None
    """Precision; None takes the actor's."""

    class_label: str | int | None = None
    """For `scalar` with a classifier of several classes: name or number of a class. A token's number is then its log-odds.
    """

    backend: str | None = None
    """Its layout over ranks: ``fsdp:d1`` is the first rank alone, ``fsdp:d1@1`` the second; None takes the actor's."""


class ScoreReader(Protocol):
    """Turns samples into the tokens of one model."""

    tokenizer: Any
    """The model's own tokenizer."""

    same_tokens: bool
    """True if every token of the actor has the same number in this tokenizer."""

    def conversation(self, sample: Sample, row: Mapping[str, Any]) -> dict[str, Any]:
        """The sample's conversation in the model's chat template, as `tandem reward` renders its rows.

        Returns ``input_ids [S]``, ``loss_mask [S]`` (true on the last reply) and ``temperature`` 1. Raises `DataFailure`
        if the template refuses it, or it is longer than the model's context.
        """
        ...

    def text(self, text: str) -> dict[str, Any]:
        """Tokenises any text, for a judge that answers a question. Same fields as `conversation`; ``loss_mask`` is true on
        all tokens but the first, because log-probabilities are computed where it is. Raises `DataFailure` if the text is
        longer than the model's context."""
        ...

    def steps(
        self, sample: Sample, row: Mapping[str, Any], separator: str, *, marker: str = "", place: bool = False
    ) -> dict[str, Any]:
        """Reads a reply made of steps as `conversation` does, and adds ``step_end [S]``: the last token of each step, or of
        the ``marker`` that replaces the separator. ``place``: also adds ``step_tokens``, the tokens of the actor's last
        trajectory at which the steps end, matched by characters."""
        ...

    def trajectory(self, sample: Sample) -> dict[str, Any]:
        """The sample's last trajectory, token for token, with ``rollout_logprobs [S]`` and its temperature. Raises
        `ConfigError` if the model has other tokens than the actor."""
        ...


class Score(ABC):
    """Scores samples with a model. The constructor takes the knobs of the configuration, and opens nothing.

    Example::

        class Brevity(Score):
            def __init__(self, path: str):
                self.model = FrozenModel(path, head="scalar")

            def score(self, batch, model):
                return model.forward(batch).scores[batch["cu_seqlens"][1:] - 1]
    """

    model: FrozenModel
    """The model that it needs."""

    name: str = ""
    """Its name in metrics and stages; empty takes the one in the configuration."""

    per_step: bool = False
    """True: each step has a reward of its own, on the actor's token that ends it; `read` must return the fields of
    `ScoreReader.steps` with ``place``."""

    def read(self, sample: Sample, row: Mapping[str, Any], reader: ScoreReader) -> Mapping[str, Any]:
        """The sequence that the model reads for a sample; by default its conversation.

        Raises:
            DataFailure: this sample cannot be judged; it leaves its group, and is counted under the reason.
        """
        return reader.conversation(sample, row)

    @abstractmethod
    def score(self, batch: TensorDict, model: TrainEngine) -> torch.Tensor:
        """One score for each sequence of the packed batch, ``[N]``. Called on every rank with the same batch.

        With `per_step` one for each token that is a ``step_end``, in order.
        """


class GroupScorer(Protocol):
    """Adds rewards that need a model to finished groups."""

    def __call__(self, groups: Sequence[Group]) -> list[Group | DataFailure]:
        """Returns each group with further rewards, or the reason why it cannot be trained on. Collective; only rank 0 passes
        groups."""

    def generate_again(self) -> None:
        """Announces that more groups will be generated, for which the engine must be awake. Collective."""
