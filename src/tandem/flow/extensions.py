"""The parts of a run that come from a user's file (`extend`): checked when the run is planned, made when it starts.

A user's class receives the arguments that its constructor names; the lists below say which exist for each kind of class.
"""

from collections.abc import Callable
from typing import Any

from tandem.api.engines import InferenceEngine, TrainEngine
from tandem.api.services import OwnClass, own_class, own_function
from tandem.config.errors import ConfigError
from tandem.config.fleet import INSIDE
from tandem.config.services import ExtendConfig
from tandem.models.families import use_family

TRAIN_GIVEN = ["config", "total_steps", "device", "process_group", "head", "key", "trained", "adapter", "trunk", "label"]
"""The constructor arguments that a train engine may ask for: those of `SpreadEngine`."""

INFERENCE_GIVEN = ["engine", "folder", "settings", "dtype", "device", "version", "threads", "deterministic"]
"""The constructor arguments that an inference engine may ask for. ``engine``: the engine of `rollout.backend`. The other
arguments are those of the embedded engine; ``folder``: the model's folder; ``settings``: `rollout.engine`; ``version``:
version of the weights in that folder."""

CHANNEL_GIVEN = ["parent", "base", "keep", "keep_parent", "device"]
"""The constructor arguments that a weight channel may ask for: those of `DiskChannel`, and the trainer's device."""


def load_extensions(extend: ExtendConfig, backend: str, step: Callable[..., Any] | None = None) -> Callable[..., Any] | None:
    """Checks every class and function of ``extend``, registers its model family, and returns the step that ``extend`` names,
    or else ``step``.

    ``backend``: `rollout.backend`. ``step``: the script's step, if it has one.

    Raises:
        ConfigError: see `own_class`, `own_function` and `use_family`; or both ``extend`` and the script give a step.
    """
    if extend.model_family is not None:
        use_family(extend.model_family)
    if extend.train_engine is not None:
        own_train_engine(extend.train_engine)
    if extend.weight_channel is not None:
        own_weight_channel(extend.weight_channel)
    if extend.inference_engine is not None:
        own_inference_engine(extend.inference_engine, backend)
    if extend.step is None:
        return step
    if step is not None:
        raise ConfigError(f"the script gives a step, and extend.step={extend.step} gives another; leave one of them out")
    return own_function(extend.step, "extend.step", "def step(run)", 1)


def own_train_engine(spec: str) -> OwnClass:
    """Returns the class of `extend.train_engine`."""
    return own_class(spec, "extend.train_engine", TrainEngine, TRAIN_GIVEN)


def own_weight_channel(spec: str) -> OwnClass:
    """Returns the class of `extend.weight_channel`."""
    from tandem.weights.channel import WeightChannel  # noqa: PLC0415 — plans are made without torch

    return own_class(spec, "extend.weight_channel", WeightChannel, CHANNEL_GIVEN)


def own_inference_engine(spec: str, backend: str) -> OwnClass:
    """Returns the class of `extend.inference_engine`. ``backend``: `rollout.backend`.

    Raises:
        ConfigError: see `own_class`; or `rollout.backend` names an engine, and the class has no argument ``engine``.
    """
    user_class = own_class(spec, "extend.inference_engine", InferenceEngine, INFERENCE_GIVEN)
    if "engine" not in user_class.asked and backend not in INSIDE:
        raise ConfigError(
            f"rollout.backend={backend} would not be used: the class of extend.inference_engine={spec} has no argument "
            "`engine` to receive the engine of rollout.backend; add it, or leave rollout.backend out"
        )
    return user_class
