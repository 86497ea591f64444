"""Bodies of requests: JSON that is parsed with limits, and checked by a schema; and the refusal of a request.

Parsing is strict, with limits on nesting and on the number of values, which are counted before any value is created. Imports
little, because a separate process that parses a long body imports only this module.

One schema both validates a body and documents it, so the two cannot differ. Supports the keywords of JSON Schema 2020-12
that the routes use: type, properties, required, additionalProperties, items, minItems, maxItems, minimum, maximum,
exclusiveMinimum, minLength, maxLength, enum and anyOf; a test fails for any other keyword. `jsonschema`, which checks the
schemas of users, takes seven times as long.
"""

import json
import marshal
import math
import sys
from collections.abc import Mapping, Sequence
from operator import ge, gt, itemgetter, le
from typing import Any, NoReturn

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
    """A value that its schema does not allow. ``where`` is the value's path, such as ``messages[2].role``."""

    def __init__(self, where: str, rule: str):
        super().__init__(f"{where or 'the body'} {rule}")
        self.where = where


def optional(schema: Schema) -> dict[str, Any]:
    """Returns a schema that also allows null, which means the same as omitting the field."""
    return {"anyOf": [schema, {"type": "null"}]}


def array(items: Schema, minimum: int, maximum: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": minimum, "maxItems": maximum}


def integer(minimum: int, maximum: int, description: str = "") -> dict[str, Any]:
    return {"type": "integer", "minimum": minimum, "maximum": maximum, **_described(description)}


def text(maximum: int, minimum: int = 0, description: str = "") -> dict[str, Any]:
    return {"type": "string", "minLength": minimum, "maxLength": maximum, **_described(description)}


def record(properties: Mapping[str, Schema], required: Sequence[str] = (), description: str = "") -> dict[str, Any]:
    """Returns the schema of an object that has these properties and no others."""
    shape = {"type": "object", "properties": dict(properties), "required": list(required), "additionalProperties": False}
    return shape | _described(description)


def _described(description: str) -> dict[str, str]:
    return {"description": description} if description else {}


def check_value(value: Any, schema: Schema, where: str = "") -> Any:
    """Checks a value and returns it; integers written as ``2.0`` become ``int``.

    Raises:
        SchemaError: the schema does not allow the value. Names the path and the rule.
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


def _check_size(value: Any, schema: Schema, where: str, word: str, unit: str) -> None:
    least, most = schema.get(f"min{word}", 0), schema.get(f"max{word}", len(value))
    if not least <= len(value) <= most:
        raise SchemaError(where, f"must have {least} to {most} {unit}, got {len(value)}")


def _check_bounds(value: Any, schema: Schema, where: str) -> None:
    for word, rule, holds in _BOUNDS:
        if word in schema and not holds(value, schema[word]):
            raise SchemaError(where, f"must be {rule} {schema[word]}, got {_short(value)}")


def _any(value: Any, choices: Sequence[Schema], where: str) -> Any:
    types = [choice.get("properties", {}).get("type", {}).get("enum") for choice in choices]
    # checked first, because a failure of a choice would list the types of this choice only
    if isinstance(value, Mapping) and "type" in value and all(types):
        check_value(value["type"], {"enum": [entry for values in types for entry in values]}, f"{where}.type")
    failures = []
    for choice in choices:
        try:
            return check_value(value, choice, where)
        except SchemaError as failure:
            kind = _KINDS.get(choice.get("type", ""))
            failures.append((len(failure.where), kind is not None and isinstance(value, kind[0]), failure))
    # the deepest failure; of equally deep ones, one of the value's own type; of these the first, because null is last
    raise max(failures, key=itemgetter(0, 1))[2]


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
        for extreme in (min(value), max(value)):  # checks the extremes only: token lists are long
            check_value(extreme, items, f"{where}[…]")
        return value
    return [check_value(entry, items, f"{where}[{number}]") for number, entry in enumerate(value)]


KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "invalid_request_error",
    503: "unavailable_error",
    504: "timeout_error",
}


_STRING = {"type": "string"}
ERROR = record(
    {"error": record({"message": _STRING, "type": _STRING, "param": optional(_STRING), "code": optional(_STRING)})},
    ("error",),
)
"""JSON schema of a refusal's body."""


class Refusal(Exception):
    """Ends a request with an HTTP status and a message. The message says what was wrong, the rule, and the value."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


MAX_VALUES = 1 << 20
"""Maximum number of values in a JSON text, see `count_values`."""

MAX_DEPTH = 64
"""Maximum nesting depth of a JSON text that is embedded as a string in another, such as a call's arguments."""


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{text:.40} is too large a number")
    return value


STRICT = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)
"""Strict JSON decoder: rejects NaN and numbers too large for a float. Raises `ValueError`."""


def parse(raw: bytes | bytearray, schema: Schema, max_depth: int) -> dict[str, Any]:
    """Parses a body and checks it against the schema. Raises `Refusal`."""
    try:
        return check_value(load(raw, max_depth), schema)
    except SchemaError as failure:
        raise Refusal(400, str(failure), param=failure.where or None) from None
    except ValueError as error:
        raise Refusal(400, f"the body {error}") from None


def load(raw: bytes | bytearray, max_depth: int = MAX_DEPTH) -> Any:
    """Parses a JSON text. Raises `ValueError`; its message lacks a subject, such as "is not JSON: …", so that the caller can
    put one before it."""
    if count_values(raw) > MAX_VALUES:
        raise ValueError(f"must have at most {MAX_VALUES} values, where an array or object counts as 16")
    try:
        value = STRICT.decode(raw.decode())
        check_depth(value, max_depth)
    except RecursionError:
        raise ValueError(f"must be nested at most {max_depth} deep") from None
    except UnicodeEncodeError:
        raise ValueError("has half a character (an unpaired surrogate)") from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    return value


def count_values(raw: bytes | bytearray) -> int:
    """Counts the values of a JSON text in one pass, before any of them is created.

    An array or an object counts as 16, because it takes about that much more memory and time than a number.
    """
    outside = b"".join(raw.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])  # the text outside strings
    return outside.count(b",") + 16 * (outside.count(b"[") + outside.count(b"{"))


def check_depth(value: Any, max_depth: int = MAX_DEPTH) -> None:
    """Raises `RecursionError` if objects and arrays are nested deeper than ``max_depth``, and `UnicodeEncodeError` if a
    string has an unpaired surrogate."""
    level = [value]
    for _ in range(max_depth + 1):
        inner: list[Any] = []
        for entry in level:
            if isinstance(entry, dict):
                inner += entry.values()
                inner += entry.keys()
            elif isinstance(entry, list):
                inner += entry
            elif isinstance(entry, str) and not entry.isascii():
                entry.encode()
        if not inner:
            return
        level = inner
    raise RecursionError


def main() -> None:
    """Parses one body from standard input. This is the main function of a process that is started for one body, so that the
    memory is freed at its end."""
    options = marshal.load(sys.stdin.buffer)
    try:
        parsed: tuple[Any, ...] = (parse(sys.stdin.buffer.read(), *options), 0, "", None)
    except Refusal as refusal:
        parsed = ({}, refusal.status, refusal.message, refusal.param)
    marshal.dump(parsed, sys.stdout.buffer)
