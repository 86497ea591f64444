"""Checks and casts values against JSON schemas of users and tools: the arguments of tool calls and the verdicts of judges.

Uses `jsonschema`, which reports the rule and the path of a fault. The bodies of Tandem's own routes are checked by
`tandem.protocol.bodies` instead.
"""

import contextlib
import copy
import functools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from operator import getitem
from typing import Any
from urllib.parse import urljoin

import regex
from jsonschema import Draft4Validator, Draft202012Validator, ValidationError
from jsonschema.validators import extend
from jsonschema_specifications import REGISTRY

from tandem.config.errors import kind_and_text
from tandem.protocol.bodies import STRICT

log = logging.getLogger(__name__)

_KNOWN = Draft202012Validator.VALIDATORS
_TYPES = Draft4Validator.TYPE_CHECKER
"""JSON's types by draft 4, in which 3.0 is not an integer. So 3.0 in place of an integer is reported, and cast to 3."""

_NAMES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
_WORDS: Mapping[str, Mapping[str, Any]] = {"null": {"null": None, "none": None}, "boolean": {"true": True, "false": False}}
_NO_CAST = object()
_MAX_CASTS = 8
"""Maximum depth of nested casts, such as a string that holds a list of strings that hold numbers."""

_MATCH_S = 0.1
"""Time limit in seconds of one pattern match: some patterns never end, and a match blocks all episodes."""

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
_PARTS = (_STANDARD, *(urljoin(_STANDARD, part["$ref"]) for part in REGISTRY.contents(_STANDARD)["allOf"]))
_KNOWN_WORDS: dict[str, Any] = {word: {} for part in _PARTS for word in REGISTRY.contents(part)["properties"]}
_REFUSED: dict[str, Any] = {word: {"not": {}} for word in ("$ref", "$dynamicRef", "pattern", "patternProperties", "format")}
_STRICT_SCHEMA = Draft202012Validator(
    {
        "$id": "urn:tandem:schema",
        "$dynamicAnchor": "meta",  # the standard's schema refers back here for each nested schema
        # separate: in one schema with the first, the second would check everything nested again at each level
        "allOf": [{"$ref": _STANDARD}, {"unevaluatedProperties": False, "properties": _KNOWN_WORDS | _REFUSED}],
        "dependentSchemas": {
            word: {"required": ["type"], "properties": {"type": {"enum": [kind, "integer"] if kind == "number" else [kind]}}}
            for kind, words in _OF_TYPE.items()
            for word in words
        },
    },
    registry=REGISTRY,
)


class Unfit(ValueError):
    """A value that its schema does not allow. The message is written for the model; ``where`` is a path like
    ``edits[2].line``."""

    def __init__(self, error: ValidationError):
        while error.context:  # reports the failed choice of `anyOf` that got deepest into the value
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
    """Returns the arguments cast to the schema: ``"3"`` becomes 3 if the schema asks for an integer. ``bare``: all values
    are strings as the reply wrote them, and the schema decides how each is parsed.

    Supports JSON Schema 2020-12 and OpenAPI's ``nullable``.

    Raises:
        Unfit: an argument is missing, has a type that cannot be cast, or is not allowed.
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
    except Exception as error:  # boundary: an invalid schema of a tool, or one with a dangling $ref, checks nothing
        _warn_once(kind_and_text(error)[:300])
        return fitted


@functools.lru_cache(maxsize=64)
def _warn_once(reason: str) -> None:
    log.warning("the schema of a tool cannot be read, so the arguments of its calls are not checked: %s", reason)


def check(value: Any, schema: Mapping[str, Any]) -> None:
    """Raises `Unfit` if the schema does not allow the value. Casts nothing."""
    for error in Draft202012Validator(schema, registry=REGISTRY).iter_errors(value):
        raise Unfit(error)


def check_schema(schema: Any) -> None:
    """Checks that a schema uses only keywords that `check` enforces.

    Raises:
        Unfit: not a schema, an unknown keyword, or a bound without the type it applies to. Names the place.
    """
    for error in _STRICT_SCHEMA.iter_errors(schema):
        raise Unfit(error)


def _fitted(value: Any, checker: Any) -> Any:
    holder = [value]
    for _ in range(_MAX_CASTS):
        errors = list(checker.iter_errors(holder[0]))
        if not errors:
            return holder[0]
        casts = [([0, *error.path], cast) for error in errors if (cast := _repaired(error, checker)) is not _NO_CAST]
        if not casts:
            break
        for (*path, last), cast in casts:
            functools.reduce(getitem, path, holder)[last] = cast
    raise Unfit(min(errors, key=lambda error: len(error.path)))  # the outermost fault first


def _repaired(error: ValidationError, checker: Any) -> Any:
    """Returns the faulty value in a form that its schema allows, or `_NO_CAST` if there is none."""
    if error.validator == "type":
        casts = (_cast(error.instance, name) for name in _names(error.validator_value))
        return next((cast for cast in casts if cast is not _NO_CAST), _NO_CAST)
    for choice in error.validator_value if error.context else ():
        with contextlib.suppress(Unfit):
            return _fitted(copy.deepcopy(error.instance), checker.evolve(schema=choice))
    return _NO_CAST


def _read(text: Any, checker: Any) -> Any:
    """Returns the value of an argument that the model wrote as text: the text itself if the schema allows a string, else the
    JSON value in it."""
    if not isinstance(text, str):
        return text
    types = set(_types(checker.iter_errors(_NO_CAST)))
    for name in types.intersection(_WORDS):
        if (cast := _cast(text, name)) is not _NO_CAST:
            return cast
    if types:
        return text  # `_fitted` casts it to another type
    try:
        return STRICT.decode(text)
    except (ValueError, RecursionError):
        return text


def _types(errors: Any) -> Iterator[str]:
    """Yields the types that a schema allows. ``errors``: the schema's errors for a value that has none of JSON's types."""
    for error in errors:
        yield from _names(error.validator_value) if error.validator == "type" else _types(error.context)
        yield from ("null",) if error.schema.get("nullable") else ()


def _cast(value: Any, name: str) -> Any:
    """Returns the value converted to the type ``name``, or `_NO_CAST` if that is impossible."""
    if name == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    if name == "string" and isinstance(value, int | float):
        return json.dumps(value)
    if not isinstance(value, str) or name == "string":
        return _NO_CAST
    if name in _WORDS:
        return _WORDS[name].get(value.strip().lower(), _NO_CAST)
    try:
        parsed = STRICT.decode(value)
    except (ValueError, RecursionError):
        return _NO_CAST
    return parsed if _TYPES.is_type(parsed, name) else _cast(parsed, name) if isinstance(parsed, float) else _NO_CAST


def _type(checker: Any, types: str | Sequence[str], value: Any, schema: Mapping[str, Any]) -> Iterator[ValidationError]:
    """Checks the keyword ``type``: a type name that JSON does not have allows everything; ``nullable`` allows null."""
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
