"""Arguments of a call, checked and cast by the tool's JSON schema."""

import json
import math
from collections.abc import Mapping
from typing import Any

from tandem.protocol.parsing import STRICT

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


class Unfit(ValueError):
    """An argument that the schema does not allow; says which, in words for the model."""


def fit(arguments: Mapping[str, Any], schema: Mapping[str, Any], *, bare: bool = False) -> dict[str, Any]:
    """The arguments as the schema wants them: ``"3"`` becomes 3 where an integer is wanted. ``bare``: all are text as it
    stood in the reply, to be read by the schema.

    Knows type, enum, const, anyOf, oneOf, allOf, $ref, nullable, properties, required, additionalProperties, items, and
    the bounds of numbers, texts and lists. Other keywords are not checked.

    Raises:
        Unfit: one is missing, of another type, or not allowed.
    """
    properties, root = schema.get("properties") or {}, schema
    if bare:
        arguments = {name: _read(text, _resolve(properties.get(name), root), root) for name, text in arguments.items()}
    fitted = _fit(dict(arguments), {"type": "object", **schema}, root, "")
    return dict(fitted)


def _resolve(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follows ``$ref: #/$defs/…``."""
    for _ in range(10):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            break
        target: Any = root
        for part in schema["$ref"].removeprefix("#").strip("/").split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        schema = target
    return schema if isinstance(schema, Mapping) else {}


def _types(schema: Mapping[str, Any], root: Mapping[str, Any]) -> set[str]:
    """Names of all types that the schema allows; empty if it says nothing."""
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set(declared or ())
    for choice in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ()), *(schema.get("allOf") or ())):
        types |= _types(_resolve(choice, root), root)
    return types | ({"null"} if schema.get("nullable") else set())


def _read(text: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """The value of a bare text: itself where a text is allowed, else what it says."""
    types = _types(schema, root)
    if not isinstance(text, str):
        return text
    plain = text.strip()
    if "null" in types and plain in ("null", "None"):
        return None
    if "boolean" in types and plain.lower() in ("true", "false"):
        return plain.lower() == "true"
    if "string" in types or not plain:
        return text
    try:
        return STRICT.decode(plain)
    except (ValueError, RecursionError):
        return text


def _fit(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], path: str) -> Any:
    schema = _resolve(schema, root)
    if value is None and schema.get("nullable"):
        return None
    for keyword in ("anyOf", "oneOf"):
        if schema.get(keyword):
            value = _first_that_fits(value, schema[keyword], root, path)
    for part in schema.get("allOf") or ():
        value = _fit(value, part, root, path)
    value = _typed(value, schema, path)
    if "enum" in schema and value not in schema["enum"]:
        raise Unfit(f"{_named(path)} must be one of {_short(schema['enum'])}, not {_short(value)}")
    if "const" in schema and value != schema["const"]:
        raise Unfit(f"{_named(path)} must be {_short(schema['const'])}, not {_short(value)}")
    _check_bounds(value, schema, path)
    if isinstance(value, dict):
        return _fit_object(value, schema, root, path)
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        return [_fit(one, schema["items"], root, f"{path}[{i}]") for i, one in enumerate(value)]
    return value


def _first_that_fits(value: Any, choices: list[Any], root: Mapping[str, Any], path: str) -> Any:
    """Choices that take the value as it is come before those that cast it."""
    casts, why = [], None
    for choice in choices:
        try:
            fitted = _fit(value, choice, root, path)
        except Unfit as error:
            why = error
            continue
        if type(fitted) is type(value) and fitted == value:
            return fitted
        casts.append(fitted)
    if not casts and why is not None:
        raise why
    return casts[0] if casts else value


def _typed(value: Any, schema: Mapping[str, Any], path: str) -> Any:
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else list(declared or ())
    if schema.get("nullable") and names:
        names.append("null")
    if not names or any(_is(value, name) for name in names):
        return value
    for name in names:
        cast = _cast(value, name)
        if cast is not None or (name == "null" and value in ("null", "None")):
            return cast
    raise Unfit(f"{_named(path)} must be of type {' or '.join(names)}, not {_short(value)}")


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _TYPES.get(name, (object,)))


def _cast(value: Any, name: str) -> Any:
    """The same thing as another type; None if it cannot be."""
    if name == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    if name == "string" and isinstance(value, int | float):
        return json.dumps(value)
    if not isinstance(value, str) or name == "string":
        return None
    if name == "boolean":
        return {"true": True, "false": False}.get(value.strip().lower())
    try:
        read = STRICT.decode(value)
    except (ValueError, RecursionError):
        return None
    return read if _is(read, name) else (_cast(read, name) if isinstance(read, float) else None)


def _check_bounds(value: Any, schema: Mapping[str, Any], path: str) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        size, low, high, words = value, schema.get("minimum"), schema.get("maximum"), ""
        if not schema.get("exclusiveMinimum", -math.inf) < value < schema.get("exclusiveMaximum", math.inf):
            raise Unfit(f"{_named(path)} is out of bounds: {_short(value)}")
    elif isinstance(value, str | list):
        what = ("minLength", "maxLength") if isinstance(value, str) else ("minItems", "maxItems")
        size, low, high, words = len(value), schema.get(what[0]), schema.get(what[1]), " in length"
    else:
        return
    if low is not None and size < low:
        raise Unfit(f"{_named(path)} must be at least {low}{words}, not {size}")
    if high is not None and size > high:
        raise Unfit(f"{_named(path)} must be at most {high}{words}, not {size}")


def _fit_object(value: dict[str, Any], schema: Mapping[str, Any], root: Mapping[str, Any], path: str) -> dict[str, Any]:
    properties = schema.get("properties") or {}
    for name in schema.get("required") or ():
        if name not in value:
            raise Unfit(f"{_named(_join(path, name))} is missing")
    others = schema.get("additionalProperties", True)
    unknown = sorted(set(value) - set(properties))
    if unknown and others is False:
        raise Unfit(f"there is no argument {_join(path, unknown[0])!r}; there are: {', '.join(properties) or 'none'}")
    parts = {name: properties.get(name, others if isinstance(others, Mapping) else {}) for name in value}
    return {name: _fit(one, parts[name], root, _join(path, name)) for name, one in value.items()}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _named(path: str) -> str:
    return f"argument {path!r}" if path else "the arguments"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
