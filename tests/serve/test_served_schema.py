"""What the schema of `/openapi.json` allows is answered, what it does not is refused, and nothing makes the server fail."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.engines.inference.serve.questions import CHAT_WITHOUT_EFFECT, LEGACY_WITHOUT_EFFECT, WITHOUT_EFFECT
from tandem.protocol.arguments import Unfit, check_schema
from tandem.protocol.bodies import SchemaError, array, check_value, integer, optional, record, text
from tandem.protocol.reward_layouts import REWARDS_BODY, SCORE_BODY
from tests.serve.served import TOKEN

COMPLETIONS = [
    "/v1/completions",
    "/v1/chat/completions",
    "/generate",
    "/inference/v1/generate",
    "/v1/messages",
    "/v1/responses",
]
LOCAL = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
PLAIN = st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3)
FREE = st.recursive(
    PLAIN | st.floats(allow_nan=False, allow_infinity=False, width=16),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def values(schema):
    """Values that a schema allows; short ones, so that they are quick to answer."""
    if "anyOf" in schema:
        return st.one_of([values(choice) for choice in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema.get("type")
    if kind == "object":
        names = schema.get("properties", {})
        needed = {name: values(entry) for name, entry in names.items() if name in schema.get("required", ())}
        return st.fixed_dictionaries(needed, optional={n: values(e) for n, e in names.items() if n not in needed})
    if kind == "array":
        most = min(schema.get("maxItems", 3), schema.get("minItems", 0) + 2)
        return st.lists(values(schema.get("items", {})), min_size=schema.get("minItems", 0), max_size=most)
    if kind == "string":
        least = schema.get("minLength", 0)
        return st.text(st.characters(codec="utf-8"), min_size=least, max_size=min(schema.get("maxLength", 5), least + 5))
    if kind == "integer":
        least = schema.get("minimum", -5)
        return st.integers(least, min(schema.get("maximum", 5), least + 12))
    if kind == "number":
        least = schema.get("minimum", schema.get("exclusiveMinimum", 0))
        bounds = {"min_value": least, "max_value": schema.get("maximum", 10), "exclude_min": "exclusiveMinimum" in schema}
        return st.floats(**bounds)
    return {"boolean": st.booleans(), "null": st.none()}.get(kind, FREE)


def refused_at(body, schema):
    """The place that the check names; None where it names none."""
    try:
        check_value(body, schema)
    except SchemaError as failure:
        return failure.where
    return None


@pytest.fixture(scope="module")
def operations(guarded):
    paths = guarded.json("GET", "/openapi.json")["paths"]
    return {
        path: operation["post"]["requestBody"]["content"]["application/json"]["schema"]
        for path, operation in paths.items()
        if "post" in operation and "control" not in path
    }


def test_the_document_is_json_schema_that_the_check_knows(guarded, operations):
    document = guarded.json("GET", "/openapi.json")
    assert document["openapi"] == "3.1.0" and len(operations) == 8
    for path, schema in operations.items():
        with pytest.raises(SchemaError):
            check_value(None, schema, path)


@pytest.mark.parametrize("path", COMPLETIONS)
def test_what_the_schema_allows_is_answered(guarded, operations, path):
    @LOCAL
    @given(values(operations[path]))
    def ask(body):
        status, said = guarded.request("POST", path, json.dumps(body).encode(), token=TOKEN)
        # 400: rules that a schema cannot say (n times prompts, text without tokens, two names for one length); 409: runs
        assert status in (200, 400, 409), said
        if status == 400:
            assert json.loads(said)["error"]["message"]

    ask()


@pytest.mark.parametrize("path", [path for path in COMPLETIONS if path != "/v1/messages"])  # whose refusals have no param
def test_what_the_schema_does_not_allow_is_refused(guarded, operations, path):
    @LOCAL
    @given(values(operations[path]), st.data())
    def ask(body, data):
        name = data.draw(st.sampled_from([*body, "another"]))
        broken = {**body, name: data.draw(FREE)}
        where = refused_at(broken, operations[path])
        if where is not None:
            status, said = guarded.request("POST", path, json.dumps(broken).encode(), token=TOKEN)
            assert status == 400 and json.loads(said)["error"]["param"] == (where or None), said

    ask()


@pytest.mark.parametrize("path", ["/control/sleep", "/control/prepare", "/control/attach", "/control/commit"])
def test_nothing_makes_a_control_route_fail(guarded, path):
    operation = guarded.json("GET", "/openapi.json")["paths"][path]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]

    @LOCAL
    @given(values(schema) | FREE)
    def ask(body):
        from_nobody = body | {"run": "another"} if isinstance(body, dict) and "run" in body else body
        status, said = guarded.request("POST", path, json.dumps(from_nobody).encode(), token="the-admin-token-of-tests")
        assert status in (400, 403, 409), said

    ask()


def test_the_page_lists_every_route_and_no_other(guarded):
    page = (Path(__file__).parents[2] / "docs/serve.md").read_text()
    listed = re.findall(r"^\| (GET|POST) \| `([^`]+)` \| (data|control) \|", page, re.M)
    assert listed == [(route.method, route.path, route.audience) for route in guarded.server.routes]


def test_the_page_says_which_parameters_have_no_effect():
    page = (Path(__file__).parents[2] / "docs/serve.md").read_text()
    assert all(f"`{name}`" in page for name in (*WITHOUT_EFFECT, *CHAT_WITHOUT_EFFECT, *LEGACY_WITHOUT_EFFECT))


SHAPE = record({"a": integer(0, 9), "b": optional(array(text(2, 1), 1, 2)), "c": {"enum": [0, None]}}, ("a",))


@pytest.mark.parametrize(
    ("value", "where", "rule"),
    [
        (None, "", "must be an object"),
        ({}, "a", "is required"),
        ({"a": 10}, "a", "at most 9"),
        ({"a": True}, "a", "whole number"),
        ({"a": 1.5}, "a", "whole number"),
        ({"a": float("inf")}, "a", "whole number"),
        ({"a": 1, "d": 2}, "d", "known are a, b, c"),
        ({"a": 1, "b": []}, "b", "1 to 2 items"),
        ({"a": 1, "b": ["ok", "long"]}, "b[1]", "1 to 2 characters"),
        ({"a": 1, "c": False}, "c", "one of 0, None"),
    ],
)
def test_a_refusal_names_the_place_and_the_rule(value, where, rule):
    with pytest.raises(SchemaError, match=rule) as failure:
        check_value(value, SHAPE)
    assert failure.value.where == where


def test_whole_numbers_written_as_fractions_are_integers():
    assert check_value({"a": 2.0}, SHAPE) == {"a": 2} and isinstance(check_value({"a": 2.0}, SHAPE)["a"], int)


def words(schema):
    """All words of a schema and of those in it."""
    inside = [*schema.get("properties", {}).values(), *schema.get("anyOf", ())]
    inside += [schema[word] for word in ("items", "additionalProperties") if isinstance(schema.get(word), dict)]
    return {*schema}.union(*map(words, inside))


def test_the_bodies_of_all_servers_say_only_what_is_checked(guarded):
    known = "type properties required additionalProperties items minItems maxItems minLength maxLength"
    known = {*known.split(), "minimum", "maximum", "exclusiveMinimum", "enum", "anyOf", "description"}
    schemas = [route.body for route in guarded.server.routes if route.body] + [SCORE_BODY, REWARDS_BODY]
    for schema in schemas:
        assert words(schema) <= known
        check_schema(schema)
    with pytest.raises(Unfit, match="patern"):
        check_schema({"patern": "a"})
