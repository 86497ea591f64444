"""Parts of a run that a class or function in a user's file takes the place of."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.config.terms import Spec

if TYPE_CHECKING:
    from tandem.config.experiment import BaseConfig


@dataclass(frozen=True)
class ExtendConfig:
    """Parts of your own, each as `my_file.py:Name`, with knobs as `my_file.py:Name(knob=1)` (docs/extending.md)."""

    train_engine: Spec | None = None
    """Training engine of the actor: a class derived from `TrainEngine`, such as one of `SpreadEngine`'s."""

    inference_engine: Spec | None = None
    """Inference engine: a class derived from `InferenceEngine`. It may ask for `engine`, which is that of
    `rollout.backend`, and hand requests on to it. For `tandem train` and `distill`."""

    weight_channel: Spec | None = None
    """The way of new weights to the inference engine: a class derived from `WeightChannel`. For `tandem train` and
    `distill`."""

    step: Spec | None = None
    """The training step: a function `step(run)`. For `tandem train`."""

    model_family: Spec | None = None
    """A family of models that Tandem does not know: a `ModelFamily`."""


def extension_problems(config: "BaseConfig") -> Iterator[str]:
    """A message for each part that this kind of run has no place for, or that contradicts another key."""
    extend, rollout = config.extend, getattr(config, "rollout", None)
    for name in ("inference_engine", "weight_channel"):
        if getattr(extend, name) and rollout is None:
            yield f"extend.{name} is for runs that generate, and this one learns from rows; leave it out"
    if rollout is None:
        return
    if extend.weight_channel and rollout.weights.channel != "auto":
        yield (
            f"extend.weight_channel={extend.weight_channel} takes the place of rollout.weights.channel="
            f"{rollout.weights.channel}; leave one of them out"
        )
    if extend.inference_engine and rollout.balance is not None:
        yield "rollout.balance moves threads of the embedded engine alone; leave it or extend.inference_engine out"
    for name in ("train_engine", "inference_engine", "weight_channel", "model_family"):
        if getattr(extend, name) and getattr(config, "runner", "local") == "ray":
            yield f"extend.{name} does not go with runner=ray; leave one of them out, or use runner=local"
