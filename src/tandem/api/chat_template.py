"""Renders messages with a model's chat template; nothing else turns messages into a model's text.

Templates differ in the input they accept: a message's content as text or as parts, the arguments of a tool call as an object
or as JSON text. Each template is tried once with small conversations, and messages are then converted to the form that it
accepts.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, TemplateError
from jinja2.meta import find_undeclared_variables

from tandem.api.failures import DataFailure
from tandem.api.media import PARTS, Medium, ReadsMedia, reader_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]

TEMPLATE_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TemplateError,
    TypeError,
    ValueError,
)
"""Errors that a template may raise on messages it does not accept: a template is an arbitrary program."""

_MARKS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
_NO_OPTIONS = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}

PROBE = "probe_of_tandem"
"""A word that no template writes by itself."""

ASKS: dict[str, Any] = {"role": "user", "content": "?"}
CALLS: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "000000000", "type": "function", "function": {"name": PROBE, "arguments": {PROBE: PROBE}}}],
}
"""Messages to try a template with."""


class ChatTemplate:
    """A tokenizer's template. The first use of a property tries the template on small conversations to find its value."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self._tokenizer, self._wants_parts = tokenizer, dict[str, bool]()

    def wants_parts(self, role: str) -> bool:
        """True if the template writes a message of this role only if its content is a list of parts, and drops text."""
        if role not in self._wants_parts:
            parts = [{"type": "text", "text": PROBE}]
            text, several = ({"role": role, "content": content} for content in (PROBE, parts))
            before, after = [ASKS] * (role == "assistant"), [ASKS] * (role == "system")
            written = [PROBE in self._tried([*before, message, *after]) for message in (text, several)]
            self._wants_parts[role] = written == [False, True]
        return self._wants_parts[role]

    @cached_property
    def text_arguments(self) -> bool:
        """True if the template accepts the arguments of a tool call only as JSON text."""
        text = self._tried([ASKS, CALLS])
        if text and f"{{'{PROBE}" not in text:
            return False
        return PROBE in self._tried([ASKS, with_arguments(CALLS, as_text=True)])

    @cached_property
    def end(self) -> int | None:
        """The special token that the template writes after a reply to end the turn; None if other text comes first."""
        text = self._tried(self.shaped([ASKS, {"role": "assistant", "content": PROBE}]))
        special, tail = special_ids(self._tokenizer), text.rpartition(PROBE)[2]
        for token in self._tokenizer(tail, add_special_tokens=False)["input_ids"]:
            if token in special:
                return int(token)
            if str(self._tokenizer.decode([token])).strip():
                break
        return None

    @cached_property
    def variables(self) -> set[str]:
        """Names of the template's own variables, which `chat_template_kwargs` can set."""
        template, env = self._tokenizer.chat_template, Environment(extensions=["jinja2.ext.loopcontrols"])
        texts = template.values() if isinstance(template, Mapping) else [template or ""]
        names: set[str] = set().union(*(find_undeclared_variables(env.parse(_MARKS.sub("", text))) for text in texts))
        return names - env.globals.keys() - _NO_OPTIONS

    def shaped(self, messages: Messages) -> list[dict[str, Any]]:
        """Converts messages to the form that the template accepts. Images and sounds stay parts that have only a type.

        Raises:
            DataFailure: ``template_refuses``: the model cannot read a message's content; ``media_unread``: an image or sound
                was not read by `tandem.media.parts.read_media`. The error names the index of the chat message.
        """
        shaped = [with_arguments(message, as_text=self.text_arguments) for message in messages]
        for number, message in enumerate(shaped, 1):
            role = message.get("role", "")
            if message.get("content") is not None:
                parts = _joined(message["content"], f"message {number} ({role})", reader_of(self._tokenizer))
                is_text = all("text" in part for part in parts) and not self.wants_parts(role)
                message["content"] = "".join(part["text"] for part in parts) if is_text else parts
        return shaped

    def _tried(self, messages: Messages) -> str:
        """Renders a trial conversation; returns an empty text if the template refuses the conversation."""
        try:
            return str(self._tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False))
        except TEMPLATE_ERRORS:
            return ""


def template_of(tokenizer: "PreTrainedTokenizerBase") -> ChatTemplate:
    """Returns the tokenizer's current template. It is cached, so that each template is tried once."""
    return _template_of(tokenizer, str(tokenizer.chat_template))


@lru_cache(maxsize=16)
def _template_of(tokenizer: "PreTrainedTokenizerBase", text: str) -> ChatTemplate:
    return ChatTemplate(tokenizer)


def render(tokenizer: "PreTrainedTokenizerBase", messages: Messages, **options: Any) -> str:
    """Renders messages as the text that the model reads, with special tokens. ``options``: ``tools``,
    ``add_generation_prompt`` and `chat_template_kwargs`. Raises as `apply_template`."""
    return str(apply_template(tokenizer, messages, tokenize=False, **options))


def with_tools(options: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `chat_template_kwargs` with the tools of the row's column ``tools`` added, if it has any."""
    return {**options, "tools": row["tools"]} if row.get("tools") else dict(options)


def apply_template(tokenizer: "PreTrainedTokenizerBase", messages: Messages, **options: Any) -> Any:
    """Calls ``tokenizer.apply_chat_template`` with messages in the form that the template accepts (`ChatTemplate.shaped`).

    Raises:
        DataFailure: ``template_refuses``: the template refuses the messages; the error has the template's own text.
    """
    try:
        return tokenizer.apply_chat_template(template_of(tokenizer).shaped(messages), **options)
    except TEMPLATE_ERRORS as error:  # roles that do not alternate, an unsupported system message …
        raise DataFailure("template_refuses", str(error)) from error


def special_ids(tokenizer: "PreTrainedTokenizerBase") -> Collection[int]:
    """Returns all special tokens: those with a role such as ``eos_token``, and added tokens marked as special."""
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(token for token, details in added if details.special)}


def _joined(content: Any, where: str, reader: ReadsMedia | None) -> list[dict[str, str]]:
    """Returns a content as a list of parts, with neighbouring texts joined and each image or sound reduced to its type."""
    parts: list[dict[str, str]] = []
    for part in content if isinstance(content, list | tuple) else (content,):
        kind = PARTS.get(str(part.get("type"))) if isinstance(part, Mapping) and reader is not None else None
        if reader is None or kind is None:
            text = text_of(part, where)
            if parts and "text" in parts[-1]:
                parts[-1]["text"] += text
            else:
                parts.append({"type": "text", "text": text})
            continue
        if kind not in reader.kinds:
            takes = " and ".join(reader.kinds)
            raise DataFailure("template_refuses", f"{where} has a part of type {kind!r}; this model takes {takes}")
        if not isinstance(part.get("medium"), Medium):
            raise DataFailure("media_unread", f"{where} has an {kind} that was not read: use tandem.media.parts.read_media")
        parts.append({"type": kind})
    return parts


def text_of(content: Any, where: str = "a message") -> str:
    """Returns a message's content as one text. The content may be text, a text part, a list of both (joined), or None
    (empty). ``where``: name of the message, for errors.

    Raises:
        DataFailure: ``template_refuses``: the content has something else, such as an image.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list | tuple):
        return "".join(text_of(part, where) for part in content)
    kind = content.get("type") if isinstance(content, Mapping) else type(content).__name__
    if kind in (None, "text", "input_text", "output_text") and isinstance(content.get("text"), str):
        return str(content["text"])
    raise DataFailure("template_refuses", f"{where} has a part of type {kind!r}, and this model reads text alone")


def with_arguments(message: Mapping[str, Any], *, as_text: bool) -> dict[str, Any]:
    """Returns the message with the arguments of its tool calls as JSON text, or as objects; invalid JSON stays text."""
    calls = [
        {**call, "function": _written(call["function"], as_text)} if "function" in call else _written(call, as_text)
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def _written(call: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
    return {**call, "arguments": _spelled(call.get("arguments", {}), as_text)}


def _spelled(arguments: Any, as_text: bool) -> Any:
    with suppress(ValueError, RecursionError):
        if as_text != isinstance(arguments, str):
            return json.dumps(arguments, ensure_ascii=False) if as_text else json.loads(arguments)
    return arguments
