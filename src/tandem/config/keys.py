"""Lists the keys and values of a configuration class, and converts values from YAML to the types of its fields."""

import dataclasses
import math
import types
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from tandem.config.algorithm import Component
from tandem.config.errors import ConfigError
from tandem.config.parts import KnobRule
from tandem.config.recipes import reward_text
from tandem.config.terms import Spec
from tandem.config.yaml_file import Scalar, number, plain

MOST = 1e38


def without_none(kind: Any) -> tuple[Any, bool]:
    """Removes None and bounds from a type, and tells if None was there: ``Count | None`` → (int, True)."""
    optional = False
    if get_origin(kind) in (Union, types.UnionType):
        kinds = tuple(k for k in get_args(kind) if k is not type(None))
        optional = len(kinds) < len(get_args(kind))
        kind = kinds[0] if len(kinds) == 1 else Union[kinds]  # noqa: UP007
    return (get_args(kind)[0] if bound(kind) else kind), optional


def bound(kind: Any) -> KnobRule | None:
    """Returns the bounds in the type of a field, such as ``Count`` or ``Count | None``."""
    extras = (extra for part in (kind, *get_args(kind)) for extra in getattr(part, "__metadata__", ()))
    return next((extra for extra in extras if isinstance(extra, KnobRule)), None)


def coerce(kind: Any, value: Any) -> Any:
    """Converts a value to the type ``kind``: int, float, bool, str, a `Literal`, an optional or a union of these, tuples,
    mappings.

    Raises:
        ConfigError: the value does not fit; the message has the expected type and the value, but not the key.
    """
    kind, optional = without_none(kind)
    raw = value.value if isinstance(value, Scalar) else value
    if isinstance(raw, str):
        _storable(raw)
    if raw is None or (optional and kind is not str and raw in ("None", "none")):
        if optional or kind is Any:
            return None
        raise ConfigError(f"must be {expected(kind)}, got null")
    origin = get_origin(kind)
    if kind is Any:
        return plain(value)
    if kind == Spec:
        return reward_text(plain(raw)) if isinstance(raw, (Mapping, list, tuple)) else coerce(str, value)
    if origin is Literal:
        text = value.text if isinstance(value, Scalar) else value
        if text in get_args(kind):
            return text
    elif origin is tuple:
        items = list(raw) if isinstance(raw, (list, tuple)) else [value]
        return tuple(coerce(get_args(kind)[0], item) for item in items)
    elif origin is Mapping or kind is dict:
        if isinstance(raw, Mapping):
            inner = get_args(kind)[1] if get_args(kind) else Any
            return {key: coerce(inner, item) for key, item in raw.items()}
    elif origin in (Union, types.UnionType):
        if isinstance(raw, (bool, int, float, str)):
            scalar = number(raw) if isinstance(raw, str) else raw
            return scalar if isinstance(scalar, str) else _finite(scalar)
    else:
        converted = _simple(kind, value, raw)
        if converted is not None:
            return converted
    raise ConfigError(f"must be {expected(kind)}, got {plain(value)!r}")


def _simple(kind: Any, value: Any, raw: Any) -> Any:
    """Converts a value to int, float, bool or str; returns None if it does not fit."""
    if kind is str:
        if isinstance(value, Scalar):
            return value.text  # as written, so that 007 stays 007
        return raw if isinstance(raw, str) else None
    if kind is bool or isinstance(raw, bool):
        return raw if kind is bool and isinstance(raw, bool) else None
    if isinstance(raw, str):
        raw = number(raw)
    if not isinstance(raw, (int, float)):
        return None
    raw = _finite(raw)
    if kind is float:
        return float(raw)
    return _finite(int(raw)) if kind is int and raw == int(raw) else None


def _finite(value: float) -> float:
    """Returns the number if it is finite and fits 64-bit integers or 32-bit floats; raises `ConfigError` otherwise."""
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ConfigError(f"must lie between -2^63 and 2^63, got {value}")
    if not math.isfinite(value):
        raise ConfigError(f"must be finite, got {value}")
    if abs(value) > MOST:
        raise ConfigError(f"must lie within ±{MOST:g}, which is all that 32-bit numbers can hold, got {value}")
    return value


def _storable(text: str) -> None:
    """Raises `ConfigError` if the text has a null character or cannot be encoded as UTF-8."""
    if "\0" in text:
        raise ConfigError(f"must not hold a null character, got {text!r}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"must be text that UTF-8 can hold, got {text!r}") from None


def expected(kind: Any) -> str:
    """Describes a type in words."""
    kind, optional = without_none(kind)
    origin = get_origin(kind)
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if origin is Annotated:
        return expected(get_args(kind)[0]) + (" or null" if optional else "")
    if origin is Literal:
        text = "one of " + ", ".join(str(choice) for choice in get_args(kind))
    elif origin is tuple:
        text = f"a list, each {expected(get_args(kind)[0])}"
    elif origin is Mapping:
        text = "keys and values"
    elif origin in (Union, types.UnionType):
        text = " or ".join(expected(k) for k in get_args(kind))
    else:
        text = words.get(kind, getattr(kind, "__name__", str(kind)))
    return text + (" or null" if optional else "")


@cache
def field_types(cls: type) -> Mapping[str, Any]:
    """Returns field name → type of a dataclass, in the order of declaration."""
    hints = get_type_hints(cls, include_extras=True)
    return MappingProxyType({f.name: hints[f.name] for f in dataclasses.fields(cls)})


def section(kind: Any) -> type | None:
    """Returns the dataclass of a field that is a section; None for a single value. A `Component` is a single value."""
    kind, _ = without_none(kind)
    return kind if dataclasses.is_dataclass(kind) and kind is not Component and isinstance(kind, type) else None


def all_keys(cls: type, prefix: str = "") -> Iterator[str]:
    """Yields every dotted key; a section comes before the keys inside it."""
    for name, kind in field_types(cls).items():
        yield prefix + name
        inner = section(kind)
        if inner is not None:
            yield from all_keys(inner, f"{prefix}{name}.")


def bounds(cls: type) -> Mapping[str, KnobRule]:
    """Returns dotted key → allowed values of every key whose type has bounds."""
    return _bounds(cls)


@cache  # which mypy refuses to call with a `type[BaseConfig]`
def _bounds(cls: type) -> Mapping[str, KnobRule]:
    rules: dict[str, KnobRule] = {}
    for name, kind in field_types(cls).items():
        if rule := bound(kind):
            rules[name] = rule
        elif inner := section(kind):
            rules |= {f"{name}.{key}": rule for key, rule in _bounds(inner).items()}
    return MappingProxyType(rules)


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of every single value, in the order of declaration."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, Component):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of nested mappings; an empty mapping is a value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
