"""JSON schemas: one description of a body that both checks it and documents it, so that the two cannot differ.

Of JSON Schema 2020-12 this knows what the routes use: type, properties, required, additionalProperties, items, minItems,
maxItems, minimum, maximum, exclusiveMinimum, minLength, maxLength, enum and anyOf; a test finds any other.
`jsonschema`, which checks what users write, takes seven times as long.
"""

from collections.abc import Mapping, Sequence
from operator import ge, gt, itemgetter, le
from typing import Any

Schema = Mapping[str, Any]

_KINDS: Mapping[str, tuple[Any, str]] = {
    "object": (dict, "an object"),
    "array": (list, "an array"),
    "number": (int | float, "a number"),
    "integer": (int, "a whole number"),
    "string": (str, "a string"),
    "boolean": (bool, "true or false"),
    "null": (type(None), "null"),
}
_BOUNDS = (("minimum", "at least", ge), ("maximum", "at most", le), ("exclusiveMinimum", "above", gt))
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
    if "anyOf" in schema:
        return _any(value, schema["anyOf"], where)
    if "enum" in schema:
        if not any(_same(value, entry) for entry in schema["enum"]):
            allowed = ", ".join(map(repr, schema["enum"]))
            raise SchemaError(where, f"must be {'one of ' if len(schema['enum']) > 1 else ''}{allowed}, got {_short(value)}")
        return value
    kind = schema.get("type")
    if kind is None:
        return value
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        value = int(value)
    allowed, name = _KINDS[kind]
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind != "boolean"):
        raise SchemaError(where, f"must be {name}, got {_short(value)}")
    if kind == "object":
        return _object(value, schema, where)
    if kind == "array":
        return _array(value, schema, where)
    if kind == "string":
        _check_size(value, schema, where, "Length", "characters")
    elif kind != "boolean" and kind != "null":
        _check_bounds(value, schema, where)
    return value


def _check_size(value: Any, schema: Schema, where: str, word: str, of: str) -> None:
    least, most = schema.get(f"min{word}", 0), schema.get(f"max{word}", len(value))
    if not least <= len(value) <= most:
        raise SchemaError(where, f"must have {least} to {most} {of}, got {len(value)}")


def _check_bounds(value: Any, schema: Schema, where: str) -> None:
    for word, rule, holds in _BOUNDS:
        if word in schema and not holds(value, schema[word]):
            raise SchemaError(where, f"must be {rule} {schema[word]}, got {_short(value)}")


def _any(value: Any, choices: Sequence[Schema], where: str) -> Any:
    types = [choice.get("properties", {}).get("type", {}).get("enum") for choice in choices]
    if isinstance(value, Mapping) and "type" in value and all(types):  # else the types of one choice alone would be told
        check_value(value["type"], {"enum": [entry for some in types for entry in some]}, f"{where}.type")
    failures = []
    for choice in choices:
        try:
            return check_value(value, choice, where)
        except SchemaError as failure:
            kind = _KINDS.get(choice.get("type", ""))
            failures.append((len(failure.where), kind is not None and isinstance(value, kind[0]), failure))
    raise max(failures, key=itemgetter(0, 1))[2]  # the deepest, then of a value's own kind; of equals the first: not null


def _same(value: Any, entry: Any) -> bool:
    return value == entry and isinstance(value, bool) == isinstance(entry, bool)


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "…"


def _object(value: Any, schema: Schema, where: str) -> Any:
    properties, other = schema.get("properties", {}), schema.get("additionalProperties", True)
    inside = where + "." if where else ""
    result = {}
    for name, entry in value.items():
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
    _check_size(value, schema, where, "Items", "items")
    items = schema.get("items", {})
    if items.get("type") == "integer" and value and all(type(entry) is int for entry in value):
        for extreme in (min(value), max(value)):  # token lists are long: one pass instead of a call for each
            check_value(extreme, items, f"{where}[…]")
        return value
    return [check_value(entry, items, f"{where}[{number}]") for number, entry in enumerate(value)]
