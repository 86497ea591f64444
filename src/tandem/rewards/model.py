"""A reward model as a reward: a folder that `tandem reward` wrote, or any classifier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from tandem.api.batch import sequence_index
from tandem.api.engines import TrainEngine
from tandem.api.lazy_torch import TensorDict, torch
from tandem.api.workflow import FrozenModel, Sample, Score, ScoreReader
from tandem.config.errors import ConfigError

Aggregate = Literal["min", "last", "mean", "product", "none"]


class ModelReward(Score):
    """The scalar score of a reward model for the whole conversation, read after its last token.

    The conversation is rendered by the reward model's own tokenizer and chat template, so the model may be of another family
    than the actor. ``path``: its folder. ``name``: its name in metrics, if a reward has several terms. The reward is (score
    − ``center``) / ``scale``, because scores trained on pairs have no zero or unit of their own. ``above``: makes the reward
    1 if it exceeds this threshold, else 0. ``backend``: how the model is distributed, see `FrozenModel.backend`.
    ``class_label``: for a classifier with several classes, the class whose log-odds are the score. ``probability``: use
    σ(score) instead of the score.

    With ``steps``, the separator of a reply's steps, it is a process reward model: a step's value is the probability
    σ(score) that the step is right, read after its last token, or after the ``marker`` that the model was trained to see
    instead of the separator behind each step. ``aggregate`` combines the values into one number; ``none`` gives each value
    to the actor's token that ends its step.
    """

    def __init__(
        self,
        path: str,
        name: str = "model",
        center: float = 0.0,
        scale: float = 1.0,
        above: float | None = None,
        backend: str | None = None,
        steps: str | None = None,
        marker: str | None = None,
        aggregate: Aggregate = "min",
        class_label: str | int | None = None,
        probability: bool = False,
    ):
        if scale <= 0:
            raise ConfigError(f"reward model({path}): scale must be above 0, got {scale}")
        if steps is None and (marker or aggregate != "min"):
            unused = "marker" if marker else "aggregate"
            raise ConfigError(f"reward model({path}): {unused} is not used without steps, such as steps='\\n\\n'")
        if steps is not None and probability:
            raise ConfigError(f"reward model({path}): the value of a step is a probability already; leave probability out")
        if steps == "" or marker == "":
            raise ConfigError(f"reward model({path}): steps and marker must not be empty")
        self.model = FrozenModel(path, head="scalar", backend=backend, class_label=class_label)
        self.name, self.center, self.scale, self.above = name, center, scale, above
        self.probability, self.steps, self.marker, self.aggregate = probability, steps, marker or "", aggregate
        self.per_step = steps is not None and aggregate == "none"

    def read(self, sample: Sample, row: Mapping[str, Any], reader: ScoreReader) -> Mapping[str, Any]:
        """Returns the conversation as tokens; if steps are scored, also the position at which each step ends."""
        if self.steps is None:
            return reader.conversation(sample, row)
        return reader.steps(sample, row, self.steps, marker=self.marker, place=self.per_step)

    def score(self, batch: TensorDict, model: TrainEngine) -> torch.Tensor:
        """Returns (score − center) / scale for each sequence ``[N]``, or for each step. With ``above`` returns 1 where that
        exceeds the threshold, else 0."""
        scores = model.forward(batch).scores
        assert scores is not None, "its head is scalar"
        if self.steps is None:
            values = scores[batch["cu_seqlens"][1:] - 1]
            values = values.float().sigmoid() if self.probability else values
        else:
            ends = batch["step_end"]
            values = aggregated(scores[ends].float().sigmoid(), sequence_index(batch)[ends], self.aggregate)
        values = (values - self.center) / self.scale
        return values if self.above is None else torch.where(values.isfinite(), (values > self.above).to(values), values)


def aggregated(values: torch.Tensor, sequence: torch.Tensor, how: Aggregate) -> torch.Tensor:
    """Combines the values of steps into one value for each sequence, ``[N]``. ``values [K]``: the values in order;
    ``sequence [K]``: the sequence of each value."""
    if how == "none":
        return values
    counts = torch.bincount(sequence)
    if how == "last":
        return values[counts.cumsum(0) - 1]
    reduce = {"min": "amin", "mean": "mean", "product": "prod"}[how]
    return values.new_ones(len(counts)).scatter_reduce(0, sequence, values, reduce, include_self=False)
