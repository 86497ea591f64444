"""A chat in which the model calls tools: tokens only append, over calls and results too."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tandem.api.chat_template import text_of
from tandem.api.requests import LLMResponse
from tandem.protocol.tool_calls import CallReader
from tandem.protocol.turns import Reply
from tandem.rollout.chat import Chat
from tandem.rollout.workflows import ChatWorkflow

Result = str | Sequence[Mapping[str, Any]]
"""The result of a call: a text, or content parts."""


class ToolChat(Chat):
    """A `Chat` whose prompt has the tools, and whose replies are read for calls.

    What the model wrote stays as it was sampled, whatever the template would make of the call that was read in it; only what
    the template writes after it is appended.
    """

    def __init__(
        self,
        reader: CallReader,
        tools: Sequence[Mapping[str, Any]],
        messages: Sequence[Mapping[str, Any]],
        *,
        system_prompt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ):
        self.reader, self.tools = reader, tuple(tools)
        super().__init__(reader.tokenizer, messages, system_prompt=system_prompt, chat_template_kwargs=chat_template_kwargs)
        self.reply = Reply("")
        """The model's last turn, as it reads."""

    def add(self, response: LLMResponse) -> None:
        super().add(response)
        self.reply = self.reader.read(response.output_ids, self.tools, prompt=self._text, stop_reason=response.stop_reason)
        named = [call for call in self.reply.calls if call.name]
        if named:
            reasoning = {"reasoning_content": self.reply.reasoning} if self.reply.reasoning else {}
            message = {"role": "assistant", "content": self.reply.content, **reasoning}
            self.messages[-1] = message | {"tool_calls": [call.message() for call in named]}

    def observe(self, results: Mapping[str, Result]) -> None:
        """Adds what became of the calls of the last reply, by their ids: context, masked out of the loss. Content parts may
        be images or sounds (`tandem.media.parts.read_media`)."""
        calls = self.reply.calls
        # half a surrogate pair, as a server that cuts UTF-16 sends, can be read by no tokenizer
        results = {
            name: result.encode(errors="replace").decode() if isinstance(result, str) else result
            for name, result in results.items()
        }
        unread = "\n".join(text_of(results[call.call_id]) for call in calls if not call.name)
        named = [call for call in calls if call.name]
        if not named:
            self.say(unread)
            return
        turns: list[dict[str, Any]] = [
            {"role": "tool", "tool_call_id": call.call_id, "name": call.name, "content": results[call.call_id]}
            for call in named
        ]
        if unread:
            turns[-1]["content"] = _with_text(turns[-1]["content"], f"\n{unread}")
        rendered = self._render([*self.messages, *turns])
        addition = self._after_calls(rendered, len(named))
        if addition is not None:
            self._append(self._without_end(addition), turns)
        else:
            self._begin_anew(rendered, [*self.messages, *turns])
        self.messages += turns
        self._text = rendered

    def _after_calls(self, rendered: str, count: int) -> str | None:
        """Finds what the template writes after the reply's calls; None if it changed what stood before."""
        if not rendered.startswith(self._text):
            return None
        tail, end = rendered[len(self._text) :], 0
        for found in self.reader.find(tail, ended=True):
            count -= len(found.written)
            end = found.end
            if count <= 0:
                break
        whole = all(words.strip() in tail[:end] for words in (self.reply.reasoning, self.reply.content))
        return tail[end:] if count <= 0 and whole else None

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return self.reader.render(messages, self.tools, **self._kwargs)


def _with_text(content: Result, text: str) -> Result:
    return content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]


class ToolChatWorkflow(ChatWorkflow):
    """The common part of workflows whose chats have tools: the loop is yours, and so is what a call does."""

    @cached_property
    def reader(self) -> CallReader:
        """Writes tools as the model's chat template does, and reads its calls."""
        return CallReader(self.tokenizer)

    def start_with(self, tools: Sequence[Mapping[str, Any]], data: Mapping[str, Any]) -> ToolChat:
        """A chat that begins with the row's messages, and whose model reads these tools, as `tandem.tool_schema` makes them.

        After each `reply` its calls are in ``chat.reply.calls``; ``chat.observe`` tells the model what became of them.
        """
        return ToolChat(
            self.reader,
            tools,
            data["messages"],
            system_prompt=self.system_prompt,
            chat_template_kwargs=self.chat_template_kwargs,
        )
