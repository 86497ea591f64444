"""Resolves the functions that a configuration names: registered, or in a user's file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.algorithms.registry import PREPARATIONS, REQUIRED, Registry, knobs_of, own_knobs, preparation_of
from tandem.api.failures import UserCodeFailed
from tandem.api.lazy_torch import torch
from tandem.api.plugins import is_file_spec, load_object, run_user_code
from tandem.config.algorithm import Component
from tandem.config.errors import ConfigError, nearest_names
from tandem.config.parts import PartRecord, keep_part


@dataclass(frozen=True)
class Choice:
    """A function that the configuration names, with its knobs."""

    name: str
    function: Callable[..., Any]
    inputs: tuple[str, ...]
    """Names of the tensors that the function takes."""

    knobs: Mapping[str, Any]
    """Name → value of each knob; the default if the configuration does not set it."""

    part: PartRecord
    """The function's record."""

    preparation: Choice | None = None
    """A function that is called before this one, once for the whole batch; its result is the tensor ``prepared``."""

    def __call__(self, **tensors: Any) -> Any:
        """Calls the function with its knobs, and with those of ``tensors`` that it takes.

        Raises:
            UserCodeFailed: a user's function, ``my_file.py:function``, raised.
        """
        arguments = {name: tensors[name] for name in self.inputs} | dict(self.knobs)
        if is_file_spec(self.name):
            return run_user_code(self.name, self.function, **arguments)
        return self.function(**arguments)

    def require(self, fine: bool, expected: str, result: Any) -> None:
        """Checks the function's ``result``: ``fine`` is False if it is not as ``expected``.

        Raises:
            UserCodeFailed: ``fine`` is False; the message has the expected and the actual result.
        """
        if not fine:
            seen = f" of shape {list(result.shape)}" if isinstance(result, torch.Tensor) else f" {result!r}"
            raise UserCodeFailed(f"{self.name} must return {expected}; it returned a {type(result).__name__}{seen[:200]}")


def choose(registry: Registry[Any], component: Component, key: str, filled: Mapping[str, Any] | None = None) -> Choice:
    """Resolves the function that a component names: registered, or ``my_file.py:function``.

    ``key``: configuration key of the component, for messages, such as ``algorithm.policy_loss``. ``filled``: values for
    knobs that are not set and have no default.

    Raises:
        ConfigError: the name or a knob is unknown, a required knob is not set, or the function takes an unknown tensor.
    """
    try:
        function = load_object(component.name) if is_file_spec(component.name) else registry.get(component.name)
        if not callable(function):
            raise ConfigError(f"must be a function, got a value of type {type(function).__name__}")
        part = registry.part_of(function)
    except (TypeError, ValueError) as error:  # an unknown name, or a wrong signature
        raise ConfigError(f"{key}={component.name}: {error}") from error
    if is_file_spec(component.name):
        keep_part(registry.key, component.name, part)
    asked, knobs = part.asks, knobs_of(function)
    for name in component.knobs:
        if name not in knobs:
            raise ConfigError(f"{key}.{name} is not a knob of {component.name}; {nearest_names(name, knobs)}")
    required = {name for name, default in knobs.items() if default is REQUIRED}
    values = {name: value for name, value in (filled or {}).items() if name in required and value is not None}
    values |= component.knobs
    missing = sorted(required - set(values))
    if missing:
        raise ConfigError(f"{key}.{missing[0]} must be set for {component.name}; it has no default here")
    settings, before = knobs | values, preparation_of(function)
    preparation = None
    if before is not None:
        of_preparation = {name: settings[name] for name in own_knobs(before)}
        preparation = Choice(component.name, before, PREPARATIONS.inputs_of(before), of_preparation, part)
    elif "prepared" in asked:
        raise ConfigError(
            f"{key}={component.name} asks for `prepared`, and has no preparation; decorate the function with prepared_by"
        )
    return Choice(component.name, function, asked, {name: settings[name] for name in own_knobs(function)}, part, preparation)
