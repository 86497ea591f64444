"""The parts of a run that come from a user's file (`extend`): checked when the run is planned, made where it needs them.

Each names the arguments that are there for it; a class asks for them by name, as `SpreadEngine` or `DiskChannel` do.
"""

from collections.abc import Callable
from typing import Any

from tandem.api.engines import InferenceEngine, TrainEngine
from tandem.api.extensions import OwnClass, own_class, own_function
from tandem.config.errors import ConfigError
from tandem.config.extend import ExtendConfig
from tandem.config.fleet import INSIDE
from tandem.models.families import use_family

TRAIN_GIVEN = ["config", "total_steps", "device", "process_group", "head", "key", "trained", "adapter", "trunk", "label"]
"""The arguments of `SpreadEngine`."""

INFERENCE_GIVEN = ["engine", "folder", "settings", "dtype", "device", "version", "threads", "deterministic"]
"""``engine``: that of `rollout.backend`; else what the embedded engine is made of. ``folder``: of the model; ``settings``:
`rollout.engine`; ``version``: the weights in the folder."""

CHANNEL_GIVEN = ["parent", "base", "keep", "keep_parent", "device"]
"""The arguments of `DiskChannel`, and the trainer's device."""


def load_extensions(extend: ExtendConfig, backend: str, step: Callable[..., Any] | None = None) -> Callable[..., Any] | None:
    """Checks all that the configuration names, and brings its family of models in; returns its step, if it has one.
    ``backend``: `rollout.backend`; ``step``: that of a script, which is returned otherwise.

    Raises:
        ConfigError: see `own_class`, `own_function` and `use_family`; or there are two steps.
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
        raise ConfigError(f"the script gives a step, and extend.step={extend.step} another; leave one of them out")
    return own_function(extend.step, "extend.step", "def step(run)", 1)


def own_train_engine(spec: str) -> OwnClass:
    """The class of `extend.train_engine`."""
    return own_class(spec, "extend.train_engine", TrainEngine, TRAIN_GIVEN)


def own_weight_channel(spec: str) -> OwnClass:
    """The class of `extend.weight_channel`."""
    from tandem.weights.channel import WeightChannel  # noqa: PLC0415 — plans are made without torch

    return own_class(spec, "extend.weight_channel", WeightChannel, CHANNEL_GIVEN)


def own_inference_engine(spec: str, backend: str) -> OwnClass:
    """The class of `extend.inference_engine`. ``backend``: `rollout.backend`.

    Raises:
        ConfigError: see `own_class`; or `rollout.backend` names an engine that it does not ask for.
    """
    own = own_class(spec, "extend.inference_engine", InferenceEngine, INFERENCE_GIVEN)
    if "engine" not in own.asked and backend not in INSIDE:
        raise ConfigError(
            f"rollout.backend={backend} would not be used: the class of extend.inference_engine={spec} has no argument "
            "`engine`, by which it is given the engine of rollout.backend; add it, or leave rollout.backend out"
        )
    return own
