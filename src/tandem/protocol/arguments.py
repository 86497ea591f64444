"""Values against the JSON schemas of users and tools: arguments of a call, which are cast as well, and verdicts of judges.

`jsonschema` says what is wrong, and where; what a request of our own routes may be says `tandem.protocol.schema`.
"""

import contextlib
import copy
import functools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from operator import getitem
from typing import Any

import regex
from jsonschema import Draft4Validator, Draft202012Validator, ValidationError
from jsonschema.validators import extend
from jsonschema_specifications import REGISTRY

from tandem.config.errors import kind_and_text
from tandem.protocol.parsing import STRICT

log = logging.getLogger(__name__)

_KNOWN = Draft202012Validator.VALIDATORS
_TYPES = Draft4Validator.TYPE_CHECKER
"""The types of JSON, 3.0 no integer: it is made one."""

_NAMES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
_WORDS: Mapping[str, Mapping[str, Any]] = {"null": {"null": None, "none": None}, "boolean": {"true": True, "false": False}}
_NO_CAST = object()
_MAX_CASTS = 8
"""Most casts one inside of another, such as a text that holds a list of texts that hold numbers."""

_MATCH_S = 0.1
"""Seconds for a pattern to match: some take for ever, and all episodes would wait."""

_SHOWN = 80
_RULES = {
    "type": "must be of type {limit}, not {value}",
    "enum": "must be one of {limit}, not {value}",
    "const": "must be {limit}, not {value}",
    "minimum": "must be at least {limit}, not {value}",
    "maximum": "must be at most {limit}, not {value}",
    "exclusiveMinimum": "is out of bounds: it must be above {limit}, not {value}",
    "exclusiveMaximum": "is out of bounds: it must be below {limit}, not {value}",
    "minLength": "must be at least {limit} in length, not {size}",
    "maxLength": "must be at most {limit} in length, not {size}",
    "minItems": "must be at least {limit} in length, not {size}",
    "maxItems": "must be at most {limit} in length, not {size}",
    "pattern": "must match {limit}, not {value}",
    "required": "is missing",
    "additionalProperties": "is not known; there are: {names}",
    "not": "is not allowed: {value}",
}
_OF_TYPE = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "minItems", "maxItems"),
    "string": ("minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
}
_STANDARD = "https://json-schema.org/draft/2020-12/schema"
_STRICT_SCHEMA = Draft202012Validator(
    {
        "$id": "urn:tandem:schema",
        "$ref": _STANDARD,
        "$dynamicAnchor": "meta",  # the standard's own schema comes back here for each schema inside of another
        "unevaluatedProperties": False,
        "properties": {word: {"not": {}} for word in ("$ref", "$dynamicRef", "pattern", "patternProperties", "format")},
        "dependentSchemas": {
            word: {"required": ["type"], "properties": {"type": {"enum": [kind, "integer"] if kind == "number" else [kind]}}}
            for kind, words in _OF_TYPE.items()
            for word in words
        },
    },
    registry=REGISTRY,
)


class Unfit(ValueError):
    """A value that its schema does not allow, in words for the model; ``where`` is its path, such as ``edits[2].line``."""

    def __init__(self, error: ValidationError):
        while error.context:  # of the choices that failed, the one which went deepest
            error = max(error.context, key=lambda inner: len(inner.path))
        path, limit, value = [*error.absolute_path], error.validator_value, error.instance
        names = list(error.schema.get("properties", ())) if isinstance(error.schema, Mapping) else []
        if error.validator == "required":
            path.append(next(name for name in limit if name not in value))
        elif error.validator == "additionalProperties":
            path += sorted(set(value) - set(names))[:1]
        self.where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
        self.rule = _RULES.get(str(error.validator), "is wrong: {message}").format(
            message=error.message[:_SHOWN],
            limit=" or ".join(_names(limit)) if error.validator == "type" else _short(limit),
            value=_short(value),
            size=len(value) if isinstance(value, str | list) else None,
            names=", ".join(names) or "none",
        )
        super().__init__(f"{f'argument {self.where!r}' if self.where else 'the arguments'} {self.rule}")


def fit(arguments: Mapping[str, Any], schema: Mapping[str, Any], *, bare: bool = False) -> dict[str, Any]:
    """The arguments as the schema wants them: ``"3"`` becomes 3 where an integer is wanted. ``bare``: all are text as it
    stood in the reply, to be read by the schema.

    Knows JSON Schema 2020-12 and OpenAPI's ``nullable``.

    Raises:
        Unfit: one is missing, of another type, or not allowed.
    """
    checker = _Lenient({"type": "object", **schema}, registry=REGISTRY)
    fitted = copy.deepcopy(dict(arguments))
    try:
        if bare:
            properties = schema.get("properties") or {}
            fitted = {name: _read(text, checker.evolve(schema=properties.get(name, {}))) for name, text in fitted.items()}
        return dict(_fitted(fitted, checker))
    except (Unfit, RecursionError):
        raise
    except Exception as error:  # boundary: a tool's schema that is none, or refers to nothing, checks nothing
        _tell_once(kind_and_text(error)[:300])
        return fitted


@functools.lru_cache(maxsize=64)
def _tell_once(why: str) -> None:
    log.warning("the schema of a tool cannot be read, so the arguments of its calls are not checked: %s", why)


def check(value: Any, schema: Mapping[str, Any]) -> None:
    """Raises `Unfit` for a value that the schema does not allow; nothing is cast."""
    for error in Draft202012Validator(schema, registry=REGISTRY).iter_errors(value):
        raise Unfit(error)


def check_schema(schema: Any) -> None:
    """Passes if `check` checks all that a schema says.

    Raises:
        Unfit: it is no schema, has a word that is not known, or a bound without the type that it is for; names the place.
    """
    for error in _STRICT_SCHEMA.iter_errors(schema):
        raise Unfit(error)


def _fitted(value: Any, checker: Any) -> Any:
    holder = [value]
    for _ in range(_MAX_CASTS):
        errors = list(checker.iter_errors(holder[0]))
        if not errors:
            return holder[0]
        casts = [([0, *error.path], cast) for error in errors if (cast := _mended(error, checker)) is not _NO_CAST]
        if not casts:
            break
        for (*way, last), cast in casts:
            functools.reduce(getitem, way, holder)[last] = cast
    raise Unfit(min(errors, key=lambda error: len(error.path)))  # what is missing before what is wrong inside


def _mended(error: ValidationError, checker: Any) -> Any:
    """The value at fault as the schema wants it; `_NO_CAST` if it cannot be."""
    if error.validator == "type":
        casts = (_cast(error.instance, name) for name in _names(error.validator_value))
        return next((cast for cast in casts if cast is not _NO_CAST), _NO_CAST)
    for choice in error.validator_value if error.context else ():
        with contextlib.suppress(Unfit):
            return _fitted(copy.deepcopy(error.instance), checker.evolve(schema=choice))
    return _NO_CAST


def _read(text: Any, checker: Any) -> Any:
    """The value of a bare text: itself where a text is allowed, else what it says."""
    if not isinstance(text, str):
        return text
    types = set(_types(checker.iter_errors(_NO_CAST)))
    for name in types.intersection(_WORDS):
        if (cast := _cast(text, name)) is not _NO_CAST:
            return cast
    if types:
        return text  # another type is cast
    try:
        return STRICT.decode(text)
    except (ValueError, RecursionError):
        return text


def _types(errors: Any) -> Iterator[str]:
    """The types that a schema allows, by its faults with a value of none of them."""
    for error in errors:
        yield from _names(error.validator_value) if error.validator == "type" else _types(error.context)
        yield from ("null",) if error.schema.get("nullable") else ()


def _cast(value: Any, name: str) -> Any:
    """The same thing as another type; `_NO_CAST` if it cannot be."""
    if name == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    if name == "string" and isinstance(value, int | float):
        return json.dumps(value)
    if not isinstance(value, str) or name == "string":
        return _NO_CAST
    if name in _WORDS:
        return _WORDS[name].get(value.strip().lower(), _NO_CAST)
    try:
        read = STRICT.decode(value)
    except (ValueError, RecursionError):
        return _NO_CAST
    return read if _TYPES.is_type(read, name) else _cast(read, name) if isinstance(read, float) else _NO_CAST


def _type(checker: Any, types: str | Sequence[str], value: Any, schema: Mapping[str, Any]) -> Iterator[ValidationError]:
    """A type that JSON does not have allows everything, and ``nullable`` allows null."""
    if _NAMES.issuperset(_names(types)) and not (value is None and schema.get("nullable")):
        yield from _KNOWN["type"](checker, types, value, schema)


def _pattern(checker: Any, pattern: str, value: Any, schema: Mapping[str, Any]) -> Iterator[ValidationError]:
    if isinstance(value, str) and not regex.search(pattern, value, timeout=_MATCH_S):
        yield ValidationError("")


_Lenient = extend(Draft202012Validator, {"type": _type, "oneOf": _KNOWN["anyOf"], "pattern": _pattern}, type_checker=_TYPES)


def _names(types: str | Sequence[str]) -> Sequence[str]:
    return [types] if isinstance(types, str) else types


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
