"""A model's chat template: the one place that turns messages into the text that a model reads.

Templates differ in what they take: a message's content as a text or as parts, the arguments of a call as an object or as
JSON text. What a template does is tried once with small conversations, and messages are put into the shape that it takes.
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
"""Errors of a template that cannot take its messages: it is a program of whoever made the model."""

_MARKS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
_NO_OPTIONS = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}

PROBE = "probe_of_tandem"
"""A word that stands nowhere else."""

ASKS: dict[str, Any] = {"role": "user", "content": "?"}
CALLS: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "000000000", "type": "function", "function": {"name": PROBE, "arguments": {PROBE: PROBE}}}],
}
"""Messages with which a template is tried."""


class ChatTemplate:
    """A tokenizer's template: what it takes and writes is tried when it is first asked."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self._tokenizer, self._wants_parts = tokenizer, dict[str, bool]()

    def wants_parts(self, role: str) -> bool:
        """True if the content of such a message is written where it is given as parts, and lost where it is a text."""
        if role not in self._wants_parts:
            parts = [{"type": "text", "text": PROBE}]
            text, several = ({"role": role, "content": content} for content in (PROBE, parts))
            before, after = [ASKS] * (role == "assistant"), [ASKS] * (role == "system")
            tried = [PROBE in self._tried([*before, message, *after]) for message in (text, several)]
            self._wants_parts[role] = tried == [False, True]
        return self._wants_parts[role]

    @cached_property
    def text_arguments(self) -> bool:
        """True if it takes the arguments of a call as JSON text alone."""
        text = self._tried([ASKS, CALLS])
        if text and f"{{'{PROBE}" not in text:
            return False
        return PROBE in self._tried([ASKS, with_arguments(CALLS, as_text=True)])

    @cached_property
    def end(self) -> int | None:
        """The special token that it writes behind a reply, which ends the turn; None where it writes none, or other text."""
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
        """Names that it reads, beside the messages: those that `chat_template_kwargs` can set."""
        template, env = self._tokenizer.chat_template, Environment(extensions=["jinja2.ext.loopcontrols"])
        texts = template.values() if isinstance(template, Mapping) else [template or ""]
        found: set[str] = set().union(*(find_undeclared_variables(env.parse(_MARKS.sub("", text))) for text in texts))
        return found - env.globals.keys() - _NO_OPTIONS

    def shaped(self, messages: Messages) -> list[dict[str, Any]]:
        """The messages in the shape that it takes. Images and sounds stay parts, of which the template sees the type alone.

        Raises:
            DataFailure: ``template_refuses``: a content that this model does not read; names the message.
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
        """The text of a probe; empty where it is refused."""
        try:
            return str(self._tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False))
        except TEMPLATE_ERRORS:
            return ""


def template_of(tokenizer: "PreTrainedTokenizerBase") -> ChatTemplate:
    """The template that a tokenizer has now, and all that was tried of it."""
    return _template_of(tokenizer, str(tokenizer.chat_template))


@lru_cache(maxsize=16)
def _template_of(tokenizer: "PreTrainedTokenizerBase", text: str) -> ChatTemplate:
    return ChatTemplate(tokenizer)


def render(tokenizer: "PreTrainedTokenizerBase", messages: Messages, **options: Any) -> str:
    """The messages as the text that the model reads, special tokens included. ``options``: ``tools``,
    ``add_generation_prompt`` and `chat_template_kwargs`. Raises as `apply_template`."""
    return str(apply_template(tokenizer, messages, tokenize=False, **options))


def with_tools(options: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """`chat_template_kwargs` with the tools that a row offers in its column ``tools``."""
    return {**options, "tools": row["tools"]} if row.get("tools") else dict(options)


def apply_template(tokenizer: "PreTrainedTokenizerBase", messages: Messages, **options: Any) -> Any:
    """The result of ``tokenizer.apply_chat_template`` for messages in the shape that the template takes.

    Raises:
        DataFailure: ``template_refuses``: the template does not take them; says what it said.
    """
    try:
        return tokenizer.apply_chat_template(template_of(tokenizer).shaped(messages), **options)
    except TEMPLATE_ERRORS as error:  # roles that do not alternate, a system message that it does not know …
        raise DataFailure("template_refuses", str(error)) from error


def special_ids(tokenizer: "PreTrainedTokenizerBase") -> Collection[int]:
    """All special tokens, also those that have no name of their own such as ``eos_token``."""
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(token for token, told in added if told.special)}


def _joined(content: Any, where: str, reader: ReadsMedia | None) -> list[dict[str, str]]:
    """A content as parts: neighbouring texts as one, and each image or sound by its type, where the model takes it."""
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
            raise DataFailure("template_refuses", f"{where} has a part of type {kind!r}; this model takes {reader.kinds}")
        if not isinstance(part.get("medium"), Medium):
            raise DataFailure("media_unread", f"{where} has an {kind} that was not read: use tandem.media.parts.read_media")
        parts.append({"type": kind})
    return parts


def text_of(content: Any, where: str = "a message") -> str:
    """A message's content as one text: a text, a part with text, or several of them joined; None is no text. ``where``: the
    message, for errors.

    Raises:
        DataFailure: ``template_refuses``: something else, an image for example.
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
    """A message whose calls have their arguments as JSON text, or as objects; text that is no JSON stays as it is."""
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
