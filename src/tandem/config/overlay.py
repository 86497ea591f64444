"""The one rule behind "null takes the actor's": a role's own value if it has one, otherwise the actor's."""

import dataclasses
from typing import Any, TypeVar

T = TypeVar("T")


def either(own: object, base: object, name: str) -> Any:
    """The field of ``own``, or that of ``base`` if ``own`` has no such field or leaves it null."""
    value = getattr(own, name, None)
    return getattr(base, name) if value is None else value


def overlay(kind: type[T], own: object, base: object, **fixed: Any) -> T:
    """A ``kind`` whose fields are `either`; those in ``fixed`` follow neither.

    Example: ``overlay(TrainEngineConfig, config.reference, config.actor, lora=LoRAConfig())``
    """
    names = [field.name for field in dataclasses.fields(kind) if field.name not in fixed]  # type: ignore[arg-type]
    return kind(**{name: either(own, base, name) for name in names}, **fixed)


def key_of(config: object, role: str, name: str) -> str:
    """The configuration key at which the value of a role was written: the role's own, or the actor's if it follows that."""
    return f"{role if getattr(getattr(config, role), name, None) is not None else 'actor'}.{name}"
