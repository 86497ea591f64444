"""The keys of a configuration class, and its values by key."""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, get_type_hints

from tandem.config.algorithm import Component
from tandem.config.coerce import without_none


@cache
def field_types(cls: type) -> Mapping[str, Any]:
    """Field name → type, in the order of declaration."""
    hints = get_type_hints(cls, include_extras=True)
    return MappingProxyType({f.name: hints[f.name] for f in dataclasses.fields(cls)})


def section(kind: Any) -> type | None:
    """The dataclass that a field holds; None for a single value. A `Component` is a single value."""
    kind, _ = without_none(kind)
    return kind if dataclasses.is_dataclass(kind) and kind is not Component and isinstance(kind, type) else None


def all_keys(cls: type, prefix: str = "") -> Iterator[str]:
    """Every dotted key, those of sections before those inside them."""
    for name, kind in field_types(cls).items():
        yield prefix + name
        inner = section(kind)
        if inner is not None:
            yield from all_keys(inner, f"{prefix}{name}.")


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every single value, in order of declaration."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, Component):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of nested mappings; an empty one is a value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
