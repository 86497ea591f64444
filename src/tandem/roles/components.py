"""From a named choice of the configuration to a function that is called with whatever tensors there are."""

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
    """A function with its knobs."""

    name: str
    function: Callable[..., Any]
    asked: tuple[str, ...]
    """Tensors that it is called with."""

    knobs: Mapping[str, Any]
    """Those that were set, and the defaults of the others."""

    part: PartRecord
    """Its record."""

    preparation: Choice | None = None
    """The function that is called once for the whole batch before it; its result is the tensor ``prepared``."""

    def __call__(self, **tensors: Any) -> Any:
        """Calls it with those of the tensors that it asks for.

        Raises:
            UserCodeFailed: it is a function of the user's, ``my_file.py:function``, and raised.
        """
        given = {name: tensors[name] for name in self.asked} | dict(self.knobs)
        return run_user_code(self.name, self.function, **given) if is_file_spec(self.name) else self.function(**given)

    def require(self, fine: bool, expected: str, result: Any) -> None:
        """Passes if what it returned is ``fine``.

        Raises:
            UserCodeFailed: it is not; says what was expected.
        """
        if not fine:
            seen = f" of shape {list(result.shape)}" if isinstance(result, torch.Tensor) else f" {result!r}"
            raise UserCodeFailed(f"{self.name} must return {expected}; it returned a {type(result).__name__}{seen[:200]}")


def choose(registry: Registry[Any], component: Component, key: str, filled: Mapping[str, Any] | None = None) -> Choice:
    """The function that a component names, registered or ``my_file.py:function``.

    ``key``: where it stands in the configuration, for messages, such as ``algorithm.policy_loss``. ``filled``: values for
    knobs that are not set and have no default of their own.

    Raises:
        ConfigError: unknown name or knob, a knob that must be set and is not, or a function that asks for something else.
    """
    try:
        function = load_object(component.name) if is_file_spec(component.name) else registry.get(component.name)
        if not callable(function):
            raise ConfigError(f"it is a {type(function).__name__}, and must be a function")
        part = registry.part_of(function)
    except (TypeError, ValueError) as error:  # unknown, or nothing that can be called with these tensors
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
        mine = {name: settings[name] for name in own_knobs(before)}
        preparation = Choice(component.name, before, PREPARATIONS.asked(before), mine, part)
    elif "prepared" in asked:
        raise ConfigError(
            f"{key}={component.name} asks for `prepared`, and nothing prepares it; decorate it with prepared_by"
        )
    return Choice(component.name, function, asked, {name: settings[name] for name in own_knobs(function)}, part, preparation)
