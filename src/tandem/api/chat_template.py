"""A model's chat template: the one place that turns messages into the text that a model reads.

Templates differ in what they take: a message's content as a text or as parts, the arguments of a call as an object or as
JSON text. What a template does is tried once with small conversations, and messages are put into the shape that it takes.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from jinja2 import Environment, TemplateError
from jinja2.meta import find_undeclared_variables

from tandem.api.failures import DataFailure

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

_TEXT_PARTS = (None, "text", "input_text", "output_text")
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

_BEFORE: dict[str, list[dict[str, Any]]] = {"assistant": [ASKS], "tool": [ASKS, CALLS]}
_AFTER: dict[str, list[dict[str, Any]]] = {"system": [ASKS]}


class ChatTemplate:
    """What a tokenizer's template takes and writes, tried when it is first asked."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self._tokenizer = tokenizer
        self._takes: dict[tuple[str, bool], bool] = {}

    def takes(self, role: str, *, parts: bool) -> bool:
        """True if the content of such a message arrives as what it says, given as a text or as ``parts``."""
        if (role, parts) not in self._takes:
            content = [{"type": "text", "text": PROBE}] if parts else PROBE
            messages = [*_BEFORE.get(role, ()), {"role": role, "content": content}, *_AFTER.get(role, ())]
            text = self._tried([with_arguments(message, as_text=self.text_arguments) for message in messages])
            self._takes[role, parts] = PROBE in text and not re.search("""['"]text['"]""", text)
        return self._takes[role, parts]

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
        text = self._tried([ASKS, {"role": "assistant", "content": self.content("assistant", PROBE)}])
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

    def content(self, role: str, content: Any) -> Any:
        """A message's content in the shape that it takes.

        Raises:
            DataFailure: ``template_refuses``: it is neither text nor made of text parts.
        """
        if content is None:
            return None
        if self.takes(role, parts=True) and (isinstance(content, list | tuple) or not self.takes(role, parts=False)):
            parts = content if isinstance(content, list | tuple) else [content]
            return [{"type": "text", "text": text_of(part)} for part in parts]
        return text_of(content)

    def shaped(self, messages: Messages) -> list[dict[str, Any]]:
        """The messages in the shape that it takes. Raises `DataFailure` where there is none, naming the message."""
        shaped = []
        for number, message in enumerate(messages, 1):
            try:
                content = self.content(message.get("role", ""), message.get("content"))
            except DataFailure as failure:
                said = str(failure).removeprefix(f"{failure.reason}: ")
                raise DataFailure(failure.reason, f"message {number} ({message.get('role')}) {said}") from None
            own = {**message, "content": content} if "content" in message else dict(message)
            shaped.append(with_arguments(own, as_text=self.text_arguments) if own.get("tool_calls") else own)
        return shaped

    def _tried(self, messages: Messages) -> str:
        """The text of a probe; empty where it is refused."""
        try:
            return str(self._tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False))
        except TEMPLATE_ERRORS:
            return ""


_KNOWN: WeakKeyDictionary[Any, tuple[Any, ChatTemplate]] = WeakKeyDictionary()


def template_of(tokenizer: "PreTrainedTokenizerBase") -> ChatTemplate:
    """What is known of the template that a tokenizer has now."""
    text, known = _KNOWN.get(tokenizer, (None, None))
    if known is None or text != tokenizer.chat_template:
        known = ChatTemplate(tokenizer)
        _KNOWN[tokenizer] = (tokenizer.chat_template, known)
    return known


def render(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Messages,
    *,
    add_generation_prompt: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> str:
    """The messages as the text that the model reads, special tokens included. ``options``: `chat_template_kwargs`.

    Raises:
        DataFailure: ``template_refuses``: the template does not take them; says what it said.
    """
    given = options | ({} if tools is None else {"tools": [dict(tool) for tool in tools]})
    return str(_apply(tokenizer, messages, tokenize=False, add_generation_prompt=add_generation_prompt, **given))


def render_marked(tokenizer: "PreTrainedTokenizerBase", messages: Messages, **options: Any) -> tuple[list[int], list[bool]]:
    """Tokens ``[S]`` of a whole conversation, and which of them the template marks as the assistant's ``[S]``. Raises as
    `render`."""
    asked = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    found = _apply(tokenizer, messages, **asked, **options)
    return list(found["input_ids"]), [bool(value) for value in found["assistant_masks"]]


def _apply(tokenizer: "PreTrainedTokenizerBase", messages: Messages, **options: Any) -> Any:
    shaped = template_of(tokenizer).shaped(messages)
    try:
        return tokenizer.apply_chat_template(shaped, **options)
    except TEMPLATE_ERRORS as error:  # roles that do not alternate, a system message that it does not know …
        raise DataFailure("template_refuses", str(error)) from error


def special_ids(tokenizer: "PreTrainedTokenizerBase") -> Collection[int]:
    """All special tokens, also those that have no name of their own such as ``eos_token``."""
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(token for token, told in added if told.special)}


def text_of(content: Any) -> str:
    """A message's content as one text: a text, a part with text, or several of them joined; None is no text.

    Raises:
        DataFailure: ``template_refuses``: something else, an image for example.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Mapping) and content.get("type") in _TEXT_PARTS and isinstance(content.get("text"), str):
        return str(content["text"])
    if isinstance(content, list | tuple):
        return "".join(map(text_of, content))
    what = f"a part of type {content['type']!r}" if isinstance(content, Mapping) and "type" in content else repr(content)
    raise DataFailure("template_refuses", f"has {what:.80}, and this model reads text alone: leave it out")


def with_arguments(message: Mapping[str, Any], *, as_text: bool) -> dict[str, Any]:
    """A message whose calls have their arguments as JSON text, or as objects; text that is no JSON stays as it is."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_call(call, as_text) for call in calls]} if calls else dict(message)


def _call(call: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call(call["function"], as_text)}
    arguments = call.get("arguments")
    if as_text and arguments is not None and not isinstance(arguments, str):
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
    if not as_text and isinstance(arguments, str):
        try:
            return {**call, "arguments": json.loads(arguments)}
        except (ValueError, RecursionError):
            pass
    return dict(call)
