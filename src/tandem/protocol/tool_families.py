"""The formats in which models write tool calls, as data: one row for each family of chat templates.

A family is recognised by marks in its template. One scanner reads all families. transformers' `response_template` is not
used: few tokenizers have one, it raises for malformed JSON, and it accepts a call that was cut off as complete.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from tandem.protocol.bodies import STRICT


class CallText(NamedTuple):
    """A tool call as parsed from the model's text."""

    name: str
    arguments: dict[str, Any]
    call_id: str = ""
    """The model's own id of the call, to which the result refers; empty if the family has no ids."""


class Body(NamedTuple):
    """The result of parsing the text behind an opening mark."""

    calls: list[CallText]
    end: int
    """Position in the text behind the body."""


ReadBody = Callable[[str, int], Body]
"""(text, position) → body. Raises ValueError with a message for the model."""


def decode_json(text: str, start: int) -> tuple[Any, int]:
    """Parses the JSON value at ``start`` (after white space). Returns the value and its end position."""
    start = _skip_space(text, start)
    try:
        value, end = STRICT.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos - start} of the JSON") from None
    if "\\ud" in text[start:end].lower():
        json.dumps(value, ensure_ascii=False).encode()  # raises for an unpaired surrogate, which cannot be encoded
    return value, end


def _skip_space(text: str, start: int) -> int:
    while start < len(text) and text[start].isspace():
        start += 1
    return start


def _as_call(value: Any) -> CallText:
    """Parses a call ``{"name": …, "arguments" or "parameters": {…}}``, which may be nested below the key "function"."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        raise ValueError(f"a call is a JSON object, not {_kind(value)}")
    name = value.get("name") or value.get("function")
    if not isinstance(name, str):
        raise ValueError('the key "name" is missing or not a string')
    own_id = value.get("id")
    return CallText(
        name, _as_arguments(value.get("arguments", value.get("parameters"))), own_id if isinstance(own_id, str) else ""
    )


def _as_arguments(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        value, _ = decode_json(value, 0)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"the arguments are a JSON object, not {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def read_json(text: str, start: int) -> Body:
    """Parses one call: ``{"name": "f", "arguments": {…}}``."""
    value, end = decode_json(text, start)
    return Body([_as_call(value)], end)


def read_json_list(text: str, start: int) -> Body:
    """Parses a list of calls: ``[{"name": "f", "arguments": {…}}, …]``."""
    value, end = decode_json(text, start)
    return Body([_as_call(entry) for entry in (value if isinstance(value, list) else [value])], end)


def named_json(name: str) -> ReadBody:
    """Returns a reader of a name and a JSON object of arguments. ``name``: a pattern with the group ``name``, and optionally
    ``id``."""
    head = re.compile(name)

    def read(text: str, start: int) -> Body:
        match = head.match(text, start)
        if match is None:
            raise ValueError("the name of the tool is missing")
        value, end = decode_json(text, match.end())
        own_id = match.groupdict().get("id") or ""
        return Body([CallText(match["name"].strip(), _as_arguments(value), own_id)], end)

    return read


def tagged(head: str, argument: str, end: str) -> ReadBody:
    """Returns a reader of calls with arguments in tags: a name (pattern ``head``), then arguments as bare text (pattern
    ``argument`` with groups ``key`` and ``value``), then ``end``."""
    begins, pair, ends = re.compile(head), re.compile(argument, re.DOTALL), re.compile(end)

    def read(text: str, start: int) -> Body:
        match = begins.match(text, start)
        if match is None:
            raise ValueError("the name of the tool is missing")
        name, arguments = match["name"].strip(), {}
        while part := pair.match(text, match.end()):
            arguments[part["key"].strip()] = part["value"]
            match = part
        if (last := ends.match(text, match.end())) is None:
            raise ValueError("the arguments are not in the required format")
        return Body([CallText(name, arguments)], last.end())

    return read


_PYTHON = {"None": None, "True": True, "False": False}


def bare_keys(quote: str) -> ReadBody:
    """Returns a reader of ``call:f{key:value,…}``: JSON with unquoted keys, and strings between two ``quote`` marks."""
    head, key = re.compile(r"\s*call:\s*(?P<name>[^\s{]+)\s*(?=\{)"), re.compile(r"\s*([^:,{}\[\]]+):")

    def read(text: str, start: int) -> Body:
        match = head.match(text, start)
        if match is None:
            raise ValueError("a call begins with call:NAME{")
        value, end = _value(text, match.end())
        return Body([CallText(match["name"], value)], end)

    def _value(text: str, at: int) -> tuple[Any, int]:
        at = _skip_space(text, at)
        if text.startswith(quote, at):
            end = text.find(quote, at + len(quote))
            if end < 0:
                raise ValueError(f"a text has no closing {quote}")
            return text[at + len(quote) : end], end + len(quote)
        if text[at : at + 1] not in ("{", "["):
            # some templates write Python's constants
            word = next((word for word in _PYTHON if text.startswith(word, at)), None)
            return (_PYTHON[word], at + len(word)) if word else decode_json(text, at)
        return _several(text, at)

    def _several(text: str, at: int) -> tuple[Any, int]:
        is_object, close = text[at] == "{", "}" if text[at] == "{" else "]"
        made: list[tuple[str, Any]] = []
        at = _skip_space(text, at + 1)
        while text[at : at + 1] != close:
            name = ""
            if is_object:
                named = key.match(text, at)
                quoted = text.startswith(quote, at)
                if quoted:
                    name, at = _value(text, at)
                    at = _skip_space(text, at) + 1  # the colon
                elif named is None:
                    raise ValueError("an argument has no name")
                else:
                    name, at = named[1].strip(), named.end()
            value, at = _value(text, at)
            made.append((name, value))
            at = _skip_space(text, at)
            if text[at : at + 1] == ",":
                at = _skip_space(text, at + 1)
            elif text[at : at + 1] != close:
                raise ValueError(f"a comma or {close} is missing")
        return (dict(made) if is_object else [value for _, value in made]), at + 1

    return read


@dataclass(frozen=True)
class Family:
    """The format in which one family of models writes tool calls."""

    name: str
    marks: tuple[str, ...]
    """Texts that must all occur in the family's chat template."""

    example: str
    """Completes the sentence "For each function call, …", for templates that do not explain the format to the model."""

    opening: str
    """Pattern of the mark that opens a call."""

    read: ReadBody
    closing: str = ""
    """Pattern of the mark that closes a call. Empty: the end of the turn closes a call, or `read` finds the end of the
    call."""

    closing_text: str = ""
    """The closing mark as named in error messages to the model."""

    end_closes: bool = False
    """True if the end of the turn may also close a call."""

    bare_values: bool = False
    """True if arguments are bare text, and the tool's schema decides how each is parsed."""

    forced: tuple[str, str, str] | None = None
    """(text before the JSON of a call, key of its arguments, text behind it), used to force a call; None: calls cannot be
    forced."""

    thinking: tuple[str, str] = ("<think>", "</think>")
    noise: str = ""
    """Pattern of marks that belong neither to a call nor to the content."""


_HARMONY_CALL = r"(?:<\|channel\|>(?:commentary|analysis))?\s*to=functions\.(?=[^\s<]+\s*(?:<\||json))"

_FAMILIES = (
    Family(
        "harmony",
        ("<|channel|>", "<|call|>"),
        'write to=functions.NAME<|channel|>commentary json<|message|>{"argument": value}<|call|>',
        _HARMONY_CALL,
        named_json(r"(?P<name>[^\s<]+)\s*(?:<\|channel\|>commentary)?\s*(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>"),
        r"<\|call\|>",
        "<|call|>",
        thinking=("<|channel|>analysis<|message|>", "<|end|>"),
        noise=r"<\|start\|>assistant|<\|channel\|>(?:final|commentary)(?:<\|message\|>)?|<\|message\|>|<\|end\|>|<\|return\|>",
    ),
    Family(
        "qwen_coder",
        ("<tool_call>", "<function="),
        "write <tool_call>\n<function=NAME>\n<parameter=ARGUMENT>\nvalue\n</parameter>\n</function>\n</tool_call>",
        r"<tool_call>",
        tagged(
            r"\s*<function=(?P<name>[^>\n]+)>",
            r"\s*<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
            r"\s*</function>",
        ),
        r"\s*</tool_call>",
        "</tool_call>",
        bare_values=True,
    ),
    Family(
        "glm",
        ("<tool_call>", "<arg_key>"),
        "write <tool_call>NAME\n<arg_key>argument</arg_key>\n<arg_value>value</arg_value>\n</tool_call>",
        r"<tool_call>",
        tagged(
            r"\s*(?P<name>[^\s<]+)",
            r"\s*<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
            r"\s*(?=</tool_call>)",
        ),
        r"\s*</tool_call>",
        "</tool_call>",
        bare_values=True,
    ),
    Family(
        "deepseek",
        ("<｜tool▁call▁begin｜>",),
        "write <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n"
        '{"argument": value}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        r"<｜tool▁call▁begin｜>",
        named_json(r"(?:function<｜tool▁sep｜>)?(?P<name>[^\n<]+?)\s*(?:<｜tool▁sep｜>|\n```json\n)"),
        r"\s*(?:```)?\s*<｜tool▁call▁end｜>",
        "<｜tool▁call▁end｜>",
        noise=r"<｜tool▁calls▁(?:begin|end)｜>",
    ),
    Family(
        "kimi",
        ("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        'write <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{"argument": value}<|tool_call_end|>',
        r"<\|tool_call_begin\|>",
        named_json(r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<:]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>"),
        r"\s*<\|tool_call_end\|>",
        "<|tool_call_end|>",
        noise=r"<\|tool_calls_section_(?:begin|end)\|>",
    ),
    Family(
        "gemma4",
        ("<|tool_call>call:",),
        "write <|tool_call>call:NAME{argument:value}<tool_call|>",
        r"<\|tool_call>",
        bare_keys('<|"|>'),
        r"\s*<tool_call\|>",
        "<tool_call|>",
        thinking=("<|channel>thought\n", "<channel|>"),
    ),
    Family(
        "functiongemma",
        ("<start_function_call>",),
        "write <start_function_call>call:NAME{argument:value}<end_function_call>",
        r"<start_function_call>",
        bare_keys("<escape>"),
        r"\s*<end_function_call>",
        "<end_function_call>",
    ),
    Family(
        "mistral_args",
        ("[TOOL_CALLS]", "[ARGS]"),
        'write [TOOL_CALLS]NAME[ARGS]{"argument": value}',
        r"\[TOOL_CALLS\]",
        named_json(r"\s*(?P<name>[^\s\[]+)\s*(?:\[CALL_ID\](?P<id>[^\[]*))?\[ARGS\]"),
        r"\s*(?=\[TOOL_CALLS\])",
        "end of the turn",
        end_closes=True,
        thinking=("[THINK]", "[/THINK]"),
    ),
    Family(
        "mistral",
        ("[TOOL_CALLS]",),
        'write [TOOL_CALLS] [{"name": NAME, "arguments": {"argument": value}}]',
        r"\[TOOL_CALLS\]",
        read_json_list,
        closing_text="]",
    ),
    Family(
        "llama",
        ('"parameters": ', "<|eot_id|>"),
        'write {"name": NAME, "parameters": {"argument": value}}',
        r'(?:<\|python_tag\|>\s*)?\{(?=\s*"(?:name|type|function)"\s*:)',
        lambda text, start: read_json(text, start - 1),  # its opening mark is the brace
        r"\s*;?\s*(?:<\|python_tag\|>\s*)?(?=\{)",
        "end of the turn",
        end_closes=True,
        forced=("", "parameters", ""),
    ),
    Family(
        "hermes",
        ("<tool_call>",),
        "return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
        r"<tool_call>",
        read_json,
        r"\s*</tool_call>",
        "</tool_call>",
        forced=("<tool_call>\n", "arguments", "\n</tool_call>"),
    ),
)

FAMILIES = {family.name: family for family in _FAMILIES}
"""Families by name. A template belongs to the first family whose marks it contains. Qwen 2.5, Qwen 3 and Hermes:
`hermes`."""

SYSTEM_BLOCK = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, {example}"""
"""System text about the tools, for a template that does not write them: the text of Qwen 2.5, which asks for calls in the
`hermes` format."""


def family_of(template: str) -> Family | None:
    """Returns the family of a chat template; None if the template writes no known format."""
    return next((family for family in _FAMILIES if all(mark in template for mark in family.marks)), None)
