"""Turns what YAML holds into the type of a field."""

import math
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from tandem.config.errors import ConfigError
from tandem.config.recipes import reward_text
from tandem.config.terms import Spec
from tandem.config.yaml_file import Scalar, number, plain

MOST = 1e38


def without_none(kind: Any) -> tuple[Any, bool]:
    """``int | None`` → (int, True); other types → (type, False). Unions of several types stay."""
    if get_origin(kind) not in (Union, types.UnionType):
        return kind, False
    kinds = tuple(k for k in get_args(kind) if k is not type(None))
    return (kinds[0] if len(kinds) == 1 else Union[kinds]), len(kinds) < len(get_args(kind))  # noqa: UP007


def coerce(kind: Any, value: Any) -> Any:
    """The value as ``kind``: int, float, bool, str, a `Literal`, an optional or a union of these, tuples, mappings.

    Raises:
        ConfigError: says what was expected and what was got, without the key.
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
            found = number(raw) if isinstance(raw, str) else raw
            return found if isinstance(found, str) else _finite(found)
    else:
        found = _simple(kind, value, raw)
        if found is not None:
            return found
    raise ConfigError(f"must be {expected(kind)}, got {plain(value)!r}")


def _simple(kind: Any, value: Any, raw: Any) -> Any:
    """int, float, bool or str; None if it does not fit."""
    if kind is str:
        if isinstance(value, Scalar):
            return value.text  # as written: 007 stays 007
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
    """The number, if it is one that arithmetic can bear."""
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ConfigError(f"must lie between -2^63 and 2^63, got {value}")
    if not math.isfinite(value):
        raise ConfigError(f"must be finite, got {value}")
    if abs(value) > MOST:
        raise ConfigError(f"must lie within ±{MOST:g}, which is all that 32-bit numbers can hold, got {value}")
    return value


def _storable(text: str) -> None:
    """Refuses what no file name and no file of text can hold."""
    if "\0" in text:
        raise ConfigError(f"must not hold a null character, got {text!r}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"must be text that UTF-8 can hold, got {text!r}") from None


def expected(kind: Any) -> str:
    """The type in words."""
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
