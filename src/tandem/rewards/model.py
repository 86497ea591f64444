"""A reward model as a reward: the folder that `tandem reward` wrote, or any classifier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from tandem.api.batch import sequence_index
from tandem.api.engines import TrainEngine
from tandem.api.lazy_torch import TensorDict, torch
from tandem.api.samples import Sample
from tandem.api.scoring import FrozenModel, Score, ScoreReader
from tandem.config.errors import ConfigError

Aggregate = Literal["min", "last", "mean", "product", "none"]


class ModelReward(Score):
    """The scalar that a reward model gives the whole conversation, read after its last token.

    The conversation is rendered by the reward model's own tokenizer and chat template, so it may be of another family than
    the actor. ``path``: its folder. ``name``: its name in metrics, where a reward has several. ``center`` is subtracted, and
    ``scale`` divides: rewards of pairs have no zero and no unit of their own. ``above``: the reward is 1 where this is
    exceeded, else 0. ``backend``: how the model is spread, as `FrozenModel.backend`. ``class_label``: of a classifier with
    several classes, the one whose log-odds are the score. ``probability``: σ(score) instead of the score.

    With ``steps``, the text between the steps of a reply, it is a process reward model: the value of a step is the
    probability σ(score) that it is right, read after its last token, or after the ``marker`` that the model was trained to
    see behind each step in place of the separator. ``aggregate`` makes one number of them; ``none`` gives each to the token
    of the actor that ends its step.
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
        """The conversation, with the ends of its steps if these are judged."""
        if self.steps is None:
            return reader.conversation(sample, row)
        return reader.steps(sample, row, self.steps, marker=self.marker, place=self.per_step)

    def score(self, batch: TensorDict, model: TrainEngine) -> torch.Tensor:
        """(score − center) / scale of each sequence ``[N]``, or of each step; or whether that is above the threshold."""
        scores = model.forward(batch).scores
        assert scores is not None, "its head is scalar"
        if self.steps is None:
            found = scores[batch["cu_seqlens"][1:] - 1]
            found = found.float().sigmoid() if self.probability else found
        else:
            ends = batch["step_end"]
            found = aggregated(scores[ends].float().sigmoid(), sequence_index(batch)[ends], self.aggregate)
        found = (found - self.center) / self.scale
        return found if self.above is None else torch.where(found.isfinite(), (found > self.above).to(found), found)


def aggregated(values: torch.Tensor, sequence: torch.Tensor, how: Aggregate) -> torch.Tensor:
    """One number for each sequence ``[N]`` from those of its steps: ``values [K]``, each in ``sequence [K]``, in order."""
    if how == "none":
        return values
    counts = torch.bincount(sequence)
    if how == "last":
        return values[counts.cumsum(0) - 1]
    reduce = {"min": "amin", "mean": "mean", "product": "prod"}[how]
    return values.new_ones(len(counts)).scatter_reduce(0, sequence, values, reduce, include_self=False)
