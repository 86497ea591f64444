"""JSON schemas: one description of a body that both checks it and documents it, so that the two cannot differ.

Of JSON Schema 2020-12 this knows what the routes use: type, properties, required, additionalProperties, items, minItems,
maxItems, minimum, maximum, exclusiveMinimum, minLength, maxLength, enum and anyOf. A word that it does not know is an error.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]

_TYPES_OF: dict[str, tuple[str, ...]] = dict.fromkeys(("properties", "required", "additionalProperties"), ("object",))
_TYPES_OF |= dict.fromkeys(("items", "minItems", "maxItems"), ("array",))
_TYPES_OF |= dict.fromkeys(("minimum", "maximum", "exclusiveMinimum"), ("number", "integer"))
_TYPES_OF |= dict.fromkeys(("minLength", "maxLength"), ("string",))
_KNOWN = {*_TYPES_OF, "type", "enum", "anyOf", "description"}
_SHOWN = 80


class SchemaError(ValueError):
    """A value that its schema does not allow; ``where`` is its path, such as ``messages[2].role``."""

    def __init__(self, where: str, rule: str):
        super().__init__(f"{where or 'the body'} {rule}")
        self.where = where


def optional(schema: Schema) -> dict[str, Any]:
    """The schema, or null, which means the same as leaving it out."""
    return {"anyOf": [schema, {"type": "null"}]}


def array(items: Schema, minimum: int, maximum: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": minimum, "maxItems": maximum}


def integer(minimum: int, maximum: int, description: str = "") -> dict[str, Any]:
    return {"type": "integer", "minimum": minimum, "maximum": maximum, **_described(description)}


def text(maximum: int, minimum: int = 0, description: str = "") -> dict[str, Any]:
    return {"type": "string", "minLength": minimum, "maxLength": maximum, **_described(description)}


def record(properties: Mapping[str, Schema], required: Sequence[str] = (), description: str = "") -> dict[str, Any]:
    """An object with these properties and no others."""
    shape = {"type": "object", "properties": dict(properties), "required": list(required), "additionalProperties": False}
    return shape | _described(description)


def _described(description: str) -> dict[str, str]:
    return {"description": description} if description else {}


def check_value(value: Any, schema: Schema, where: str = "") -> Any:
    """The value, whole numbers written as ``2.0`` made integers.

    Raises:
        SchemaError: the schema does not allow it; names the place and the rule.
    """
    unknown = set(schema) - _KNOWN
    if unknown:
        raise TypeError(f"a schema uses {', '.join(sorted(unknown))}, which is not checked here")
    if "anyOf" in schema:
        return _any(value, schema["anyOf"], where)
    if "enum" in schema:
        if not any(_same(value, entry) for entry in schema["enum"]):
            allowed = ", ".join(map(repr, schema["enum"]))
            raise SchemaError(where, f"must be {'one of ' if len(schema['enum']) > 1 else ''}{allowed}, got {_short(value)}")
        return value
    kind = schema.get("type")
    return value if kind is None else _CHECKS[kind](value, schema, where)


def check_schema(schema: Any, where: str = "") -> None:
    """Passes if `check_value` checks all that a schema of the user's says.

    Raises:
        ValueError: it does not know a word, or one would not count where it stands; names the place.
    """
    at = f"at {where} it" if where else "it"
    if not isinstance(schema, Mapping):
        raise ValueError(f"{at} must be an object, got {_short(schema)}")
    unknown = sorted(set(schema) - _KNOWN)
    if unknown:
        raise ValueError(f"{at} has {', '.join(map(repr, unknown))}, and only {', '.join(sorted(_KNOWN))} are checked")
    kind = schema.get("type")
    if kind is not None and not (isinstance(kind, str) and kind in _CHECKS):
        raise ValueError(f"{at} has the type {_short(kind)}, which is none of {', '.join(_CHECKS)}")
    properties, choices = schema.get("properties", {}), schema.get("anyOf", [])
    shapes = {"properties": (properties, Mapping), "anyOf": (choices, list)}
    shapes |= {word: (schema.get(word, []), list) for word in ("required", "enum")}
    for word, (value, shape) in shapes.items():
        if not isinstance(value, shape):
            raise ValueError(f"{at} has {word}={_short(value)}, which must be {'a list' if shape is list else 'an object'}")
    for word in ("minimum", "maximum", "exclusiveMinimum", "minItems", "maxItems", "minLength", "maxLength"):
        bound = schema.get(word, 0)
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not math.isfinite(bound):
            raise ValueError(f"{at} has {word}={_short(bound)}, which must be a finite number")
    _refuse_unused(schema, at)
    inside = {f"properties.{name}": part for name, part in properties.items()}
    inside |= {f"anyOf[{number}]": part for number, part in enumerate(choices)}
    inside |= {"items": schema["items"]} if "items" in schema else {}
    if not isinstance(schema.get("additionalProperties", True), bool):
        inside["additionalProperties"] = schema["additionalProperties"]
    for name, part in inside.items():
        check_schema(part, f"{where}.{name}" if where else name)


def _refuse_unused(schema: Schema, at: str) -> None:
    """Passes if each word of a schema counts: `check_value` reads a bound only under its type, and beside ``anyOf`` or
    ``enum`` nothing else."""
    alone = next((word for word in ("anyOf", "enum") if word in schema), None)
    for word in schema:
        types = _TYPES_OF.get(word, ())
        if types and "type" not in schema and alone is None:
            raise ValueError(f"{at} has {word!r} and no type; add 'type': {types[0]!r}")
        if types and alone is None and schema["type"] not in types:
            raise ValueError(f"{at} has {word!r}, which is for the type {' or '.join(types)}, not {schema['type']}")
        if alone is not None and (types or (word == "type" and alone == "anyOf") or (word == "enum" != alone)):
            raise ValueError(f"{at} has {word!r} beside {alone!r}, which alone would count; leave one of them out")


def _any(value: Any, choices: Sequence[Schema], where: str) -> Any:
    failures = []
    for choice in choices:
        try:
            return check_value(value, choice, where)
        except SchemaError as failure:
            failures.append(failure)
    raise max(failures, key=lambda failure: len(failure.where))  # of equals the first: that which is not null


def _same(value: Any, entry: Any) -> bool:
    return value == entry and isinstance(value, bool) == isinstance(entry, bool)


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "…"


def _object(value: Any, schema: Schema, where: str) -> Any:
    if not isinstance(value, dict):
        raise SchemaError(where, f"must be an object, got {_short(value)}")
    properties, other = schema.get("properties", {}), schema.get("additionalProperties", True)
    inside = where + "." if where else ""
    result = {}
    for name, entry in value.items():
        check_text(name, inside + _short(name))
        if name in properties:
            result[name] = check_value(entry, properties[name], inside + name)
        elif other is False:
            raise SchemaError(
                inside + name[:_SHOWN], f"is not known here; known are {', '.join(sorted(properties)) or 'none'}"
            )
        else:
            result[name] = check_value(entry, {} if other is True else other, inside + name[:_SHOWN])
    for name in schema.get("required", ()):
        if name not in value:
            raise SchemaError(inside + name, "is required")
    return result


def _array(value: Any, schema: Schema, where: str) -> Any:
    if not isinstance(value, list):
        raise SchemaError(where, f"must be an array, got {_short(value)}")
    least, most = schema.get("minItems", 0), schema.get("maxItems", len(value))
    if not least <= len(value) <= most:
        raise SchemaError(where, f"must have {least} to {most} items, got {len(value)}")
    items = schema.get("items", {})
    if items.get("type") == "integer" and value and all(type(entry) is int for entry in value):
        for extreme in (min(value), max(value)):  # token lists are long: one pass instead of a call for each
            check_value(extreme, items, f"{where}[…]")
        return value
    return [check_value(entry, items, f"{where}[{number}]") for number, entry in enumerate(value)]


def _number(value: Any, schema: Schema, where: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SchemaError(where, f"must be a number, got {_short(value)}")
    for word, rule, right in (
        ("minimum", "at least", lambda bound: value >= bound),
        ("maximum", "at most", lambda bound: value <= bound),
        ("exclusiveMinimum", "above", lambda bound: value > bound),
    ):
        if word in schema and not right(schema[word]):
            raise SchemaError(where, f"must be {rule} {schema[word]}, got {_short(value)}")
    return value


def _integer(value: Any, schema: Schema, where: str) -> Any:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise SchemaError(where, f"must be a whole number, got {_short(value)}")
    return _number(value, schema, where)


def _string(value: Any, schema: Schema, where: str) -> Any:
    if not isinstance(value, str):
        raise SchemaError(where, f"must be a string, got {_short(value)}")
    least, most = schema.get("minLength", 0), schema.get("maxLength", len(value))
    if not least <= len(value) <= most:
        raise SchemaError(where, f"must have {least} to {most} characters, got {len(value)}")
    check_text(value, where)
    return value


def check_text(value: str, where: str) -> None:
    """Raises `SchemaError` for half a character (an unpaired surrogate), which no tokenizer can read."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise SchemaError(where, "has half a character (an unpaired surrogate)") from None


def _boolean(value: Any, schema: Schema, where: str) -> Any:
    if not isinstance(value, bool):
        raise SchemaError(where, f"must be true or false, got {_short(value)}")
    return value


def _null(value: Any, schema: Schema, where: str) -> Any:
    if value is not None:
        raise SchemaError(where, f"must be null, got {_short(value)}")
    return value


_CHECKS = {
    "object": _object,
    "array": _array,
    "number": _number,
    "integer": _integer,
    "string": _string,
    "boolean": _boolean,
    "null": _null,
}
