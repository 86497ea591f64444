"""Arguments of a call as the tool's schema wants them: what is cast, and what is refused by its path."""

import time

import pytest

from tandem.protocol.arguments import Unfit, check_schema, fit

WHOLE, TEXT, NUMBER = {"type": "integer"}, {"type": "string"}, {"type": "number"}


@pytest.mark.parametrize(
    ("schema", "value", "fitted"),
    [
        (WHOLE, 3.0, 3),
        (WHOLE, "3", 3),
        (WHOLE, "3.0", 3),
        (NUMBER, "2.5", 2.5),
        (TEXT, 3, "3"),
        ({"type": "boolean"}, " True", True),
        ({"type": "array", "items": WHOLE}, ["1", 2.0], [1, 2]),
        ({"type": "array"}, "[1]", [1]),
        ({"type": "object", "properties": {"b": WHOLE}}, {"b": "1", "c": "1"}, {"b": 1, "c": "1"}),
        ({"type": "object", "additionalProperties": WHOLE}, {"c": "1"}, {"c": 1}),
        ({"anyOf": [WHOLE, TEXT]}, "3", "3"),
        ({"oneOf": [TEXT, WHOLE]}, 3, 3),
        ({"anyOf": [WHOLE, {"type": "null"}]}, "3", 3),
        ({"allOf": [WHOLE, {"minimum": 2}]}, "2", 2),
        ({"$ref": "#/$defs/whole"}, "3", 3),
        ({"type": "integer", "nullable": True}, None, None),
        ({"type": ["integer", "null"]}, "null", None),
        ({"enum": ["a", 1]}, 1, 1),
        ({"const": "a"}, "a", "a"),
        ({"minimum": 1, "maximum": 1, "exclusiveMinimum": 0, "exclusiveMaximum": 2}, 1, 1),
        ({"type": "string", "minLength": 1, "maxLength": 1}, "a", "a"),
        ({"type": "array", "minItems": 1, "maxItems": 1}, [0], [0]),
        ({}, "3", "3"),
    ],
)
def test_a_value_is_what_the_schema_takes_it_for(schema, value, fitted):
    found = fit({"a": value}, {"properties": {"a": schema}, "$defs": {"whole": WHOLE}})["a"]
    assert found == fitted and type(found) is type(fitted)


@pytest.mark.parametrize(
    ("schema", "value", "words"),
    [
        (WHOLE, 2.5, "'a' must be of type integer, not 2.5"),
        (WHOLE, "2.5", "of type integer"),
        (WHOLE, True, "of type integer"),
        (NUMBER, "1e999", "of type number"),
        (NUMBER, "NaN", "of type number"),
        ({"type": "array", "items": WHOLE}, [1, "x"], r"'a\[1\]' must be of type integer"),
        ({"type": "object", "required": ["b"]}, {}, r"'a\.b' is missing"),
        (
            {"type": "object", "properties": {"b": {}}, "additionalProperties": False},
            {"c": 1},
            r"argument 'a\.c' is not known; there are: b",
        ),
        ({"enum": ["a"]}, "b", "must be one of"),
        ({"const": "a"}, "b", 'must be "a", not "b"'),
        ({"minimum": 1}, 0, "at least 1"),
        ({"maximum": 1}, 2, "at most 1"),
        ({"exclusiveMinimum": 1}, 1, "out of bounds"),
        ({"exclusiveMaximum": 1}, 1, "out of bounds"),
        ({"minLength": 2}, "a", "at least 2 in length"),
        ({"maxItems": 1}, [1, 2], "at most 1 in length"),
        ({"anyOf": [WHOLE, {"type": "boolean"}]}, "x", "must be of type"),
        ({"allOf": [WHOLE, {"minimum": 2}]}, 1, "at least 2"),
        ({"type": "string", "pattern": "^a"}, "b", '\'a\' must match "\\^a", not "b"'),
        ({"type": "array", "items": {"$ref": "#/$defs/edit"}}, [{"line": "x"}], r"'a\[0\]\.line' must be of type integer"),
        ({"not": {"const": {"{": 1}}}, {"{": 1}, "'a' is not allowed"),
        ({"multipleOf": 2}, 3, "'a' is wrong: 3 is not a multiple of 2"),
    ],
)
def test_what_it_does_not_allow_is_refused_by_its_path(schema, value, words):
    edit = {"type": "object", "properties": {"line": WHOLE}}
    with pytest.raises(Unfit, match=words):
        fit({"a": value}, {"properties": {"a": schema}, "$defs": {"edit": edit}})


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (TEXT, "3", "3"),
        (WHOLE, " 3\n", 3),
        ({"type": "boolean"}, "False", False),
        ({"type": ["string", "null"]}, "None", None),
        ({"anyOf": [{"type": "array"}, TEXT]}, "[1]", "[1]"),
        ({"type": "array"}, "[1]", [1]),
        ({}, "[1]", [1]),
    ],
)
def test_a_bare_text_is_itself_where_the_schema_takes_a_text(schema, text, value):
    assert fit({"a": text}, {"properties": {"a": schema}}, bare=True) == {"a": value}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/nothing"},
        {"$ref": "http://127.0.0.1:9/schema.json"},
        {"type": "string", "pattern": "("},
        {"type": "string", "pattern": "^(a|aa)+$"},
        {"minLength": "three"},
        {"type": "text"},
        {"properties": 5, "type": "string"},
    ],
)
def test_a_schema_of_somebody_elses_that_is_none_lets_calls_through_at_once(schema):
    begun = time.monotonic()
    value = "a" * 40 + "b"
    assert fit({"a": value}, {"properties": {"a": schema}}) == {"a": value} and time.monotonic() - begun < 5


def test_a_tools_schema_that_refers_to_nothing_is_told_once_and_checks_nothing(caplog):
    schema = {"properties": {"a": {"$ref": "#/$defs/told_once_and_not_there"}}}
    for _ in range(3):
        assert fit({"a": "3"}, schema) == {"a": "3"}
    (line,) = [
        record.getMessage() for record in caplog.records if "arguments of its calls are not checked" in record.getMessage()
    ]
    assert "told_once_and_not_there" in line


def test_schemas_inside_of_schemas_are_checked_in_the_time_of_their_length():
    schema = {"type": "integer"}
    for _ in range(12):
        schema = {"type": "object", "properties": {"a": {"type": "array", "items": schema}}, "required": ["a"]}
    check_schema(schema)
    with pytest.raises(Unfit, match=r"'anyOf\[0\]' is wrong: .*'minimun' was unexpected"):
        check_schema({"anyOf": [{"minimun": 1}]})
