"""Writes chats with tools as text, and reads a reply's tokens as content, thinking and tool calls."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import regex
from transformers import PreTrainedTokenizerBase

from tandem.api.chat_template import ASKS, CALLS, PROBE, render, special_ids, text_of, with_arguments
from tandem.api.failures import DataFailure
from tandem.api.media import kinds_of
from tandem.api.requests import StopReason
from tandem.config.errors import ConfigError, nearest_names
from tandem.protocol.arguments import Unfit, fit
from tandem.protocol.bodies import check_depth
from tandem.protocol.tool_families import FAMILIES, SYSTEM_BLOCK, CallText, Family, family_of
from tandem.protocol.turns import Call, CallStatus, Message, Reply


class CallBlock(NamedTuple):
    """One block of tool calls in a reply's text, from ``start`` to ``end``."""

    start: int
    end: int
    written: tuple[CallText, ...]
    """The calls in the block; empty if the block cannot be read."""

    status: CallStatus
    why: str


class CallReader:
    """Writes chats with tools by the model's own template, and reads the tool calls in its replies.

    Example::

        reader = CallReader(tokenizer)
        prompt = reader.render(messages, tools)
        reply = reader.read(response.output_ids, tools, prompt=prompt, stop_reason=response.stop_reason)

    If the template does not support tools, they go into the system prompt, and calls have Qwen 2.5's format (``hermes``).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, family: str | None = None):
        """``family``: a name of `FAMILIES`; None: the family of the chat template.

        Raises:
            ConfigError: the family is unknown, or the chat template cannot write calls of this family.
        """
        if family is not None and family not in FAMILIES:
            raise ConfigError(f"no family of tool calls has the name {family!r}; {nearest_names(family, FAMILIES)}")
        self.tokenizer = tokenizer
        known = FAMILIES[family] if family is not None else family_of(_template_of(tokenizer))
        self.writes_calls = known is not None and _writes(tokenizer, [ASKS, CALLS])
        """True if the template itself writes calls and results."""

        if not self.writes_calls and family not in (None, "hermes"):
            raise ConfigError(f"the chat template of this model writes no tool calls, so not {family!r}; use 'hermes'")
        self.family: Family = known if known is not None and self.writes_calls else FAMILIES["hermes"]
        self.writes_tools = self.writes_calls and _writes_tools(tokenizer)
        """True if the template itself writes the tools' schemas."""

        self._opening, self._closing = re.compile(self.family.opening), re.compile(self.family.closing)
        self._noise = re.compile(self.family.noise) if self.family.noise else None
        self._special = sorted(tokenizer.convert_ids_to_tokens(sorted(special_ids(tokenizer))), key=len, reverse=True)
        self.special_marks = [re.escape(token) for token in self._special]
        """Patterns of the special tokens."""

        self._marks = re.compile("|".join(self.special_marks))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """Renders a chat as the text that the model reads. Raises `DataFailure` if the template rejects the chat."""
        options: dict[str, Any] = {**template_kwargs, "add_generation_prompt": add_generation_prompt}
        if tools and self.writes_tools:
            options["tools"] = [dict(tool) for tool in tools]
        return render(self.tokenizer, self._spelled(messages, tools), **options)

    def _spelled(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns the messages in a form that the template accepts. Parts that the template cannot write become text."""
        if not self.writes_calls:
            return plain_chat(messages, tools)
        written = [dict(message) for message in messages]
        return _with_system_block(written, tools, self.family) if tools and not self.writes_tools else written

    def read(
        self, ids: Sequence[int], tools: Sequence[Mapping[str, Any]] = (), *, prompt: str = "", stop_reason: StopReason
    ) -> Reply:
        """Reads a reply. ``prompt``: the text before it, because a template may write the beginning of a reply. Never
        raises."""
        return self.read_text(self._decode(ids), tools, prompt=prompt, stop_reason=stop_reason)

    def read_text(
        self,
        text: str,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        prompt: str = "",
        stop_reason: StopReason,
        must_open: bool = False,
    ) -> Reply:
        """Reads a reply from its text, special tokens included; see `read`. ``must_open``: text before a closing thinking
        mark counts as thinking only if an opening mark precedes it."""
        ended = stop_reason == StopReason.STOP
        text = text[: len(text) - len(self._turn_end(text))]
        reasoning, start = self._split_thinking(text, prompt, must_open)
        if not tools and start == 0 and not self.family.noise:
            return Reply(self.words(text), stop_reason=stop_reason)
        calls: list[Call] = []
        beside, position = [], start
        for block in self.find(text, start, ended=ended) if tools else ():
            beside.append(text[position : block.start])
            position = block.end
            calls += self._judged(block, text[block.start : block.end], tools)
        beside.append(text[position:])
        content = self.words("".join(beside))
        salt = f"{prompt}\0{text}"
        return Reply(
            content.strip() if calls or reasoning else content,
            reasoning=reasoning,
            calls=_with_ids(calls, salt),
            stop_reason=stop_reason,
        )

    def find(self, text: str, start: int = 0, *, ended: bool) -> Iterator[CallBlock]:
        """Yields the blocks of calls in a text. ``ended``: the model ended its turn here; False: the text may be cut off."""
        opening = self._opening.search(text, start)
        while opening is not None:
            block = self._block(text, opening, ended)
            yield block
            opening = self._opening.search(text, block.end)

    def _block(self, text: str, opening: re.Match[str], ended: bool) -> CallBlock:
        begin, family = opening.start(), self.family
        try:
            body = family.read(text, opening.end())
            check_depth([dict(call.arguments) for call in body.calls])
        except (ValueError, RecursionError) as error:
            why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        else:
            end = self._end_of(text, body.end, ended)
            if end is not None:
                return CallBlock(begin, end, tuple(body.calls), CallStatus.OK, "")
            why = f"the call does not end with {family.closing_text}"
        following = self._opening.search(text, opening.end())
        limit = following.start() if following else len(text)
        if family.closing and not family.end_closes:
            close = self._closing.search(text, opening.end(), limit)
            if close is not None:
                return CallBlock(begin, close.end(), (), CallStatus.INVALID_JSON, why)
        elif ended or following:
            return CallBlock(begin, limit, (), CallStatus.INVALID_JSON, why)
        return CallBlock(begin, limit, (), CallStatus.UNCLOSED, f"the call has no closing {family.closing_text}")

    def _end_of(self, text: str, position: int, ended: bool) -> int | None:
        """Returns the end of a call whose body ends at ``position``; None if its closing mark is missing."""
        if not self.family.closing:
            return position
        if self.family.end_closes:
            return position if ended or self._closing.match(text, position) else None
        close = self._closing.match(text, position)
        return close.end() if close else None

    def _judged(self, block: CallBlock, text: str, tools: Sequence[Mapping[str, Any]]) -> Iterator[Call]:
        if not block.written:
            yield Call("", status=block.status, text=text, why=f"This call cannot be read: {block.why}.")
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        for name, arguments, own_id in block.written:
            if name not in schemas:
                names = ", ".join(sorted(schemas)) or "none"
                why = f"There is no tool {name!r}. The tools are: {names}."
                yield Call(name, arguments, CallStatus.UNKNOWN_TOOL, text, why, own_id)
                continue
            try:
                fitted = fit(arguments, schemas[name], bare=self.family.bare_values)
            except (Unfit, RecursionError) as error:
                why = f"Wrong arguments for {name}: {error}."
                yield Call(name, arguments, CallStatus.WRONG_ARGUMENTS, text, why, own_id)
            else:
                yield Call(name, fitted, CallStatus.OK, text, call_id=own_id)

    def _split_thinking(self, text: str, prompt: str, must_open: bool) -> tuple[str, int]:
        """Splits the thinking from the beginning of a reply. Returns the thinking and the position of the content."""
        opening, closing = self.family.thinking
        begins = re.compile(r"\s*" + re.escape(opening.strip())).match(text)
        end = text.find(closing)
        if begins is None and not prompt.rstrip().endswith(opening.strip()):
            call = self._opening.search(text)
            if must_open or end < 0 or opening.startswith("<|") or (call is not None and call.start() < end):
                return "", 0  # no thinking, or a closing mark that belongs to something else
        start = begins.end() if begins else 0
        return (text[start:], len(text)) if end < 0 else (text[start:end].strip(), end + len(closing))

    def _turn_end(self, text: str) -> str:
        """Returns the special token that ended the turn; empty if it is a mark of the family (such as ``<|call|>``)."""
        last = next((token for token in self._special if text.endswith(token)), "")
        patterns = (self._closing, self._opening, *([self._noise] if self._noise else ()))
        is_mark = last.strip() in self.family.thinking or any(pattern.fullmatch(last) for pattern in patterns)
        return "" if is_mark else last

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def words(self, text: str) -> str:
        """Removes marks and special tokens from a text."""
        if self._noise is not None:
            text = self._noise.sub("", text)
        return self._marks.sub("", text) if self._special else text


class ReplyStream:
    """Reads a reply while it is generated. Text is returned at once; calls are returned when the reply has ended.

    With tools, white space around the content is removed. Text counts as thinking only after an opening mark in the prompt
    or the reply, because text that was sent as content cannot be taken back.
    """

    def __init__(self, reader: CallReader, tools: Sequence[Mapping[str, Any]], prompt: str):
        self._reader, self._tools, self._prompt = reader, tools, prompt
        self._text = self._waiting = ""
        self._sent = {"reasoning": "", "content": ""}
        self._thinks: bool | None = None
        self._called = False
        family = reader.family
        no_words = [family.noise] * bool(family.noise) + reader.special_marks
        self._marks = regex.compile("|".join([f"(?P<stop>{family.opening})"] * bool(tools) + no_words) or "(?!)")
        self._thinking_marks = regex.compile("|".join([f"(?P<stop>{re.escape(family.thinking[1])})", *no_words]))

    def add(self, text: str) -> Reply:
        """Adds more text, special tokens included. Returns the words that later text cannot change."""
        self._text += text
        self._waiting += text
        reasoning = self._reasoning()
        return Reply(self._content() if self._thinks is False else "", reasoning=reasoning)

    def finish(self, text: str, stop_reason: StopReason) -> Reply:
        """Adds the last text. Returns the rest of the reply."""
        text = self._text + text
        read = self._reader.read_text(text, self._tools, prompt=self._prompt, stop_reason=stop_reason, must_open=True)
        reply = read.shown()
        content = reply.content.strip() if self._tools else reply.content
        reasoning = self._reader.words(reply.reasoning).strip()
        sent = self._sent
        return replace(
            reply, content=content.removeprefix(sent["content"]), reasoning=reasoning.removeprefix(sent["reasoning"])
        )

    def _reasoning(self) -> str:
        opening, closing = self._reader.family.thinking
        if self._thinks is None:
            begun = self._waiting.lstrip()
            if opening.strip().startswith(begun):
                return ""  # the text so far may be the beginning of the opening mark
            written = begun.startswith(opening.strip())
            self._thinks = written or self._prompt.rstrip().endswith(opening.strip())
            self._waiting = begun.removeprefix(opening.strip()) if written else self._waiting
        if not self._thinks:
            return ""
        at, ended = self._next_mark(self._thinking_marks)
        words = self._take("reasoning", at, bare=True)
        if ended:
            self._waiting = self._waiting.lstrip()[len(closing) :]
            self._thinks = False
        return words

    def _content(self) -> str:
        if self._called:
            return ""
        at, self._called = self._next_mark(self._marks)
        return self._take("content", at, bare=bool(self._tools or self._sent["reasoning"]))

    def _next_mark(self, marks: "regex.Pattern[str]") -> tuple[int, bool]:
        """Finds the first mark in the waiting text that ends the present kind of text. Returns its start (or the start of a
        partial mark at the end of the text), and True if the mark is complete. Removes marks that end nothing."""
        mark = marks.search(self._waiting, partial=True)
        while mark is not None and not mark.partial and not mark.groupdict().get("stop"):
            self._waiting = self._waiting[: mark.start()] + self._waiting[mark.end() :]
            mark = marks.search(self._waiting, mark.start(), partial=True)
        return (len(self._waiting), False) if mark is None else (mark.start(), not mark.partial)

    def _take(self, kind: str, end: int, *, bare: bool) -> str:
        """Removes and returns the waiting text up to ``end``. ``bare``: strips white space at both ends of all text of this
        kind."""
        words = self._waiting[:end]
        if bare:
            words = words.rstrip()
        self._waiting = self._waiting[len(words) :]
        if bare and not self._sent[kind]:
            words = words.lstrip()
        self._sent[kind] += words
        return words


def plain_chat(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rewrites a chat with tools for a template without tool support: tools become text of the system, calls (``hermes``)
    text of the assistant, results text of the user. The model of such a template knows this format only if it is trained on
    it."""
    written = [dict(message) for message in messages]
    return list(_as_plain_text(_with_system_block(written, tools, FAMILIES["hermes"]) if tools else written))


def _with_ids(calls: Sequence[Call], salt: str) -> tuple[Call, ...]:
    """Gives each call an id: the model's own, or nine hexadecimal digits, as Mistral's templates require. The same reply to
    the same prompt gets the same ids."""
    made: dict[str, Call] = {}
    for i, call in enumerate(calls):
        digest = hashlib.blake2s(f"{salt}\0{i}".encode(errors="replace")).hexdigest()[:9]
        call_id = call.call_id if call.call_id and call.call_id not in made else digest
        made[call_id] = replace(call, call_id=call_id)
    return tuple(made.values())


def _template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the chat template that is used with tools; empty if there is none."""
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = template.get("tool_use", template.get("default"))
    return template or ""


def _writes_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if the template writes the tools. An example is rendered to find out, because many templates mention tools and
    omit them."""
    function = {"name": PROBE, "description": "?", "parameters": {"type": "object", "properties": {}}}
    return _writes(tokenizer, [ASKS], tools=[{"type": "function", "function": function}])


def _writes(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **options: Any) -> bool:
    try:
        return PROBE in render(tokenizer, messages, **options)
    except DataFailure:
        return False


def _with_system_block(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], family: Family
) -> list[dict[str, Any]]:
    block = SYSTEM_BLOCK.format(
        example=family.example, tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    )
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{text_of(messages[0]['content'])}\n\n{block}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": block}, *messages]


def _as_plain_text(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rewrites calls and results as text of the assistant and the user, for a template that supports neither. Consecutive
    results become one turn."""
    results: list[Any] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(message["content"])
            continue
        if results:
            yield {"role": "user", "content": _results(results)}
            results = []
        if message.get("tool_calls"):
            yield {"role": message["role"], "content": _content_with_calls(message)}
        else:
            yield message
    if results:
        yield {"role": "user", "content": _results(results)}


def _results(contents: Sequence[Any]) -> Any:
    """Joins several results into one content: a string, or parts if they contain images or sounds."""
    parts: list[Any] = []
    for content in contents:
        shown = content if kinds_of(content) else [{"type": "text", "text": text_of(content)}]
        before = "\n<tool_response>\n" if parts else "<tool_response>\n"
        parts += [{"type": "text", "text": before}, *shown, {"type": "text", "text": "\n</tool_response>"}]
    return parts if any(map(kinds_of, contents)) else text_of(parts)


def _content_with_calls(message: Mapping[str, Any]) -> str:
    parts = [text_of(message["content"])] if message.get("content") else []
    for call in with_arguments(message, as_text=False)["tool_calls"]:
        body = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        parts.append(f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>")
    return "\n".join(parts)
