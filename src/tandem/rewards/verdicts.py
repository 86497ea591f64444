"""Verdicts of judges that write: how they are told to write them, and how these are read."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tandem.config.errors import ConfigError
from tandem.protocol.arguments import Unfit, check, check_schema
from tandem.protocol.parsing import STRICT
from tandem.protocol.schema import Schema
from tandem.rewards.asking import finite_knobs, read_knob_file

Parse = Callable[[str], float]
"""A function from a judge's words to the verdict. Raises `Unreadable` if there is none."""


class Unreadable(ValueError):
    """A text without a verdict; ``reason`` is the failure that it counts as."""

    def __init__(self, message: str, reason: str = "judge_unreadable"):
        super().__init__(message)
        self.reason = reason


_NUMBER = r"-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"


def read_number(text: str, low: float, high: float) -> float:
    """The last ``Score: NUMBER``, which must lie between ``low`` and ``high``, as a share of the way between them."""
    numbers = re.findall(rf"score\W{{0,4}}[:=][^\w.-]{{0,4}}({_NUMBER})", text, re.IGNORECASE)
    if not numbers:
        raise Unreadable("there is no line `Score: NUMBER`")
    return _share(float(numbers[-1]), low, high)


def _share(value: float, low: float, high: float) -> float:
    if not low <= value <= high:
        raise Unreadable(f"the score {str(value)[:20]} is not between {low:g} and {high:g}")
    return (value - low) / (high - low)


def read_choice(text: str, choices: Mapping[str, float]) -> float:
    """The value of the word behind the last ``Verdict:``; nothing else may stand in its line."""
    words = "|".join(re.escape(word) for word in sorted(choices, key=len, reverse=True))
    pattern = rf"verdict\W{{0,4}}[:=][\s*_`\"']*({words})[\s*_`\"'.!]*$"
    named = re.findall(pattern, text, re.IGNORECASE | re.MULTILINE)
    if not named:
        raise Unreadable(f"there is no line `Verdict: WORD` with one of {', '.join(choices)}")
    return next(value for word, value in choices.items() if word.lower() == named[-1].lower())


def read_order(text: str, count: int) -> list[int]:
    """The places 0 to ``count`` - 1 in the order of the last ``Order: 2 > 1 > 3``, which counts from 1, the best first.

    Raises:
        Unreadable: there is no such line; or it omits a reply (``judge_omits_reply``), names one twice
            (``judge_repeats_reply``), or one that was not shown (``judge_unknown_reply``).
    """
    number = r"(?:reply\s*)?\d{1,9}"
    lines = re.findall(rf"order\W{{0,4}}[:=][\s*_`\"']*({number}(?:\s*[>,]\s*{number})*)[\s*_`\"'.!]*$", text, re.I | re.M)
    if not lines:
        raise Unreadable("there is no line `Order: NUMBER > NUMBER`")
    named = [int(found) for found in re.findall(r"\d+", lines[-1])]
    for reply in named:
        if not 1 <= reply <= count:
            raise Unreadable(f"the order names reply {reply}, and {count} were shown", "judge_unknown_reply")
        if named.count(reply) > 1:
            raise Unreadable(f"the order names reply {reply} twice", "judge_repeats_reply")
    missing = sorted(set(range(1, count + 1)) - set(named))
    if missing:
        raise Unreadable(f"the order omits reply {missing[0]} of {count}", "judge_omits_reply")
    return [reply - 1 for reply in named]


def read_json(text: str, low: float, high: float, field: str = "score", schema: Schema | None = None) -> float:
    """The number ``field`` of the last JSON object that has one, as a share of the way from ``low`` to ``high``.

    With a ``schema`` it is the last object, and one that the schema does not allow is ``judge_off_schema``."""
    for value in reversed(list(_objects(text))):
        if schema is not None:
            try:
                check(value, schema)
            except Unfit as error:
                raise Unreadable(f"its JSON object: {error.where} {error.rule}", "judge_off_schema") from error
        score = _at(value, field)
        if isinstance(score, int | float) and not isinstance(score, bool):
            return _share(score, low, high)
    raise Unreadable("there is no JSON object" + (f' with a number "{field}"' if schema is None else ""))


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects in a text, but for those inside of another."""
    end, left = 0, 16 * len(text)  # what is read in vain, so that `{"a":{"a":…` does not cost its square
    for begin in (found.start() for found in re.finditer(r"\{", text)):
        if begin < end:
            continue
        try:
            value, end = json.JSONDecoder().raw_decode(text, begin)
        except (ValueError, RecursionError) as error:
            left -= getattr(error, "pos", len(text)) - begin
            if left < 0:
                return
            continue
        yield value


def _at(value: Any, field: str) -> Any:
    for name in field.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def form_of(
    name: str,
    form: str,
    low: float,
    high: float,
    choices: Mapping[str, float] | None,
    schema: Mapping[str, Any] | str | None,
    field: str,
) -> tuple[Parse, str]:
    """The parser of verdicts, and the words that tell the judge how to write them. The arguments are those of `judge`."""
    if (form == "choice") != (choices is not None):
        raise ConfigError(f"reward {name!r}: answer_form=choice and choices={{'good': 1, 'bad': 0}} go together")
    if form != "json" and (schema is not None or field != "score"):
        raise ConfigError(f"reward {name!r}: schema and field are for answer_form=json, got answer_form={form}")
    if form == "score":
        return lambda text: read_number(text, low, high), f"Score: a number from {low:g} to {high:g}"
    if form == "json":
        if not all(field.split(".")):
            raise ConfigError(f"reward {name!r}: field must be a path of names such as scores.style, got {field!r}")
        return _json_form(name, low, high, field, schema)
    if choices is not None:
        if not isinstance(choices, Mapping) or len(choices) < 2:
            raise ConfigError(f"reward {name!r}: choices must give at least two words their values, got {choices!r}")
        finite_knobs(name, **{f"choices[{word}]": value for word, value in choices.items()})
        words = {str(word): float(value) for word, value in choices.items()}
        return lambda text: read_choice(text, words), f"Verdict: {' or '.join(words)}"
    raise ConfigError(f"reward {name!r}: answer_form must be score, json or choice, got {form!r}")


def _json_form(name: str, low: float, high: float, field: str, given: Mapping[str, Any] | str | None) -> tuple[Parse, str]:
    if given is None:
        shape = f"a number from {low:g} to {high:g}"
        for part in reversed(field.split(".")):
            shape = f'{{"{part}": {shape}}}'
        return lambda text: read_json(text, low, high, field), shape
    schema = _schema_of(name, given)
    place: Any = schema
    for part in field.split("."):
        if not isinstance(place, Mapping) or part not in place.get("required", ()):
            raise ConfigError(
                f"reward {name!r}: the schema must require {part!r} of field={field}, or a verdict has no score"
            )
        place = place.get("properties", {}).get(part)
    if not isinstance(place, Mapping) or place.get("type") not in ("number", "integer"):
        raise ConfigError(f"reward {name!r}: in the schema field={field} must be a number or an integer, got {place!r}")
    least, most = float(place.get("minimum", low)), float(place.get("maximum", high))
    if not least < most:
        raise ConfigError(f"reward {name!r}: field={field} must have room between {least:g} and {most:g}")
    told = f"a JSON object in one line that fits this schema: {json.dumps(schema, ensure_ascii=False)}"
    return lambda text: read_json(text, least, most, field, schema), told


def _schema_of(name: str, given: Mapping[str, Any] | str) -> dict[str, Any]:
    """The schema that a knob gives, as a mapping or a file.

    Raises:
        ConfigError: it is none, or uses words that are not checked here.
    """
    text = read_knob_file(name, "schema", given) if isinstance(given, str) else ""
    try:
        schema = STRICT.decode(text) if isinstance(given, str) else given
        check_schema(schema)
    except ValueError as error:
        shown = given if isinstance(given, str) else "in the configuration"
        why = f"{error.where or 'it'} {error.rule}" if isinstance(error, Unfit) else error
        raise ConfigError(f"reward {name!r}: the schema {shown} cannot be used: {why}") from error
    return dict(schema)
