"""Chats in which the model calls tools: the chat, whose tokens are only appended, and the workflow
`workflow=tools workflow_args.tools=calculator`.
"""

import asyncio
import inspect
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cached_property, partial
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from tandem.api.chat_template import text_of
from tandem.api.failures import DataFailure, InfrastructureFailure
from tandem.api.media import reader_of
from tandem.api.plugins import ends_the_task
from tandem.api.requests import LLMResponse, StopReason
from tandem.api.services import Services, factory_of
from tandem.api.workflow import GeneratesTokens, RewardFn, Sample
from tandem.config.errors import ConfigError, kind_and_text
from tandem.config.rollout import GenerationConfig
from tandem.config.terms import Term, read_term, spelled
from tandem.media.parts import shown_parts
from tandem.protocol.tool_calls import CallReader
from tandem.protocol.turns import Call, CallStatus, Reply
from tandem.rollout.episode_engine import TOOL, left_for_play
from tandem.rollout.tools.tool import FunctionBox, Tool, Toolbox, ToolFailure, UnwritableResult, as_text
from tandem.rollout.workflows import Chat, ChatWorkflow

Result = str | Sequence[Mapping[str, Any]]
"""The result of a call: a string or content parts."""


class ToolChat(Chat):
    """A `Chat` whose prompt contains tools and whose replies are parsed for tool calls.

    The model's tokens stay as they were sampled, even if the template would write the parsed call differently. Only the text
    that the template writes behind them is appended.
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
        """The model's last turn, parsed."""

    def add(self, response: LLMResponse) -> None:
        super().add(response)
        self.reply = self.reader.read(response.output_ids, self.tools, prompt=self._text, stop_reason=response.stop_reason)
        named = [call for call in self.reply.calls if call.name]
        if named:
            reasoning = {"reasoning_content": self.reply.reasoning} if self.reply.reasoning else {}
            message = {"role": "assistant", "content": self.reply.content, **reasoning}
            self.messages[-1] = message | {"tool_calls": [call.message() for call in named]}

    def observe(self, results: Mapping[str, Result]) -> None:
        """Appends the results of the last reply's calls, by call id, as context outside the loss. Content parts may contain
        images or sounds (`tandem.media.parts.read_media`)."""
        calls = self.reply.calls
        # no tokenizer reads an unpaired surrogate, which a server that cuts UTF-16 may send
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
        self._append(turns, rendered, self._after_calls(rendered, len(named)))

    def _after_calls(self, rendered: str, count: int) -> str | None:
        """Returns the text that the template writes behind the reply's calls; None if the template changes earlier text."""
        if not rendered.startswith(self._text):
            return None
        tail, end = rendered[len(self._text) :], 0
        for block in self.reader.find(tail, ended=True):
            count -= len(block.written)
            end = block.end
            if count <= 0:
                break
        complete = all(words.strip() in tail[:end] for words in (self.reply.reasoning, self.reply.content))
        return tail[end:] if count <= 0 and complete else None

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return self.reader.render(messages, self.tools, **self._kwargs)


def _with_text(content: Result, text: str) -> Result:
    return content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]


class ToolChatWorkflow(ChatWorkflow):
    """Base class of workflows with tools, for a loop of your own: you decide what a call does."""

    @cached_property
    def reader(self) -> CallReader:
        """Renders tools by the model's chat template, and parses its calls."""
        return CallReader(self.tokenizer)

    def start_with(self, tools: Sequence[Mapping[str, Any]], data: Mapping[str, Any]) -> ToolChat:
        """Returns a chat that begins with the row's messages and these tools, in the format of `tandem.tool_schema`.

        After each `reply` its calls are in ``chat.reply.calls``; pass the results to the model with ``chat.observe``.
        """
        return ToolChat(
            self.reader,
            tools,
            data["messages"],
            system_prompt=self.system_prompt,
            chat_template_kwargs=self.chat_template_kwargs,
        )


Stop = Literal["answer", "length", "turns", "calls", "tokens", "seconds"]
STOPS: tuple[Stop, ...] = ("answer", "length", "turns", "calls", "tokens", "seconds")
"""Reasons why a chat ended. `answer`: a reply without a call. `length`: a reply was cut off. The other names: the limit that
was reached."""

FAULTS = ("malformed", "unknown_tool", "wrong_arguments", "tool_raised", "tool_timeout", "wrong_result")
"""Reasons why a call gave no result."""


class ToolWorkflow(ToolChatWorkflow):
    """A chat in which the model may call tools. It ends with a reply without a call or at a limit, and is then judged.

    Calls of one reply run concurrently. After a malformed call, an unknown tool, wrong arguments, or a tool that raises or
    hangs, the model reads an error as the result, and the chat continues.
    """

    def __init__(
        self,
        reward: RewardFn,
        gconfig: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase,
        tools: Any,
        services: Services,
        *,
        system_prompt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        call_format: str | None = None,
        max_turns: int = 8,
        max_calls: int = 16,
        max_tokens: int | None = None,
        max_result_characters: int = 4000,
        max_seconds: float | None = None,
        tool_seconds: float = 60.0,
    ):
        super().__init__(reward, gconfig, tokenizer, system_prompt=system_prompt, chat_template_kwargs=chat_template_kwargs)
        limits = {
            "max_turns": max_turns,
            "max_calls": max_calls,
            "max_tokens": max_tokens,
            "max_result_characters": max_result_characters,
            "max_seconds": max_seconds,
            "tool_seconds": tool_seconds,
        }
        for name, value in limits.items():
            if value is not None and value <= 0:
                raise ConfigError(f"workflow_args.{name} must be above 0, got {value}")
        self.max_turns, self.max_calls, self.max_tokens = max_turns, max_calls, max_tokens
        self.max_result_characters = max_result_characters
        self.max_seconds, self.tool_seconds = max_seconds, tool_seconds
        self.reader = CallReader(tokenizer, call_format)
        self.boxes = make_toolboxes(tools, services)

    async def arun_episode(self, engine: GeneratesTokens, data: Mapping[str, Any]) -> Sample:
        deadline = time.monotonic() + min(left_for_play(engine), self.max_seconds or float("inf"))
        async with AsyncExitStack() as stack:
            opened = [await stack.enter_async_context(box.open(data)) for box in self.boxes]
            tools = by_name(tool for box in opened for tool in box)
            chat = self.start_with([tool.schema for tool in tools.values()], data)
            talk = Talk(self, chat, tools, deadline)
            stop = await talk.run(engine)
        result = await self.judge(chat, data)
        details = result.details()
        details["words"] = {**details["words"], "stop": stop}
        return chat.sample(result.value, metrics=talk.metrics(stop), **details)


class Talk:
    """One episode's chat with tools, and the counts of its turns and calls."""

    def __init__(self, workflow: ToolWorkflow, chat: ToolChat, tools: Mapping[str, Tool], deadline: float):
        self.workflow, self.chat, self.tools, self.deadline = workflow, chat, tools, deadline
        self.turns, self.calls, self.faults = 0, 0, Counter[str]()
        self.seconds = 0.0
        """Time in tools in seconds: the sum over turns of the turn's slowest call."""

    async def run(self, engine: GeneratesTokens) -> Stop:
        """Alternates between replies and calls until the chat ends. Returns the reason for its end."""
        workflow = self.workflow
        while True:
            try:
                cut = await workflow.reply(engine, self.chat) == StopReason.LENGTH
            except DataFailure as failure:
                if failure.reason == "prompt_too_long" and self.turns:
                    return "tokens"
                raise
            self.turns += 1
            calls = self.chat.reply.calls
            if not calls or cut:
                return "length" if cut else "answer"
            if self.turns >= workflow.max_turns:
                return "turns"
            if self.calls >= workflow.max_calls:
                return "calls"
            self.chat.observe(await self._results(calls))
            if workflow.max_tokens is not None and len(self.chat.input_ids) >= workflow.max_tokens:
                return "tokens"
            if time.monotonic() >= self.deadline:
                return "seconds"

    def metrics(self, stop: Stop) -> dict[str, float]:
        """Metrics of the finished chat."""
        counts = {f"tools/{name}": float(self.faults[name]) for name in FAULTS}
        stops = {f"tools/stop/{name}": float(stop == name) for name in STOPS}
        return {
            "turns": float(self.turns),
            "tools/calls": float(self.calls),
            "time/tools_s": self.seconds,
            **counts,
            **stops,
        }

    async def _results(self, calls: Sequence[Call]) -> dict[str, Result]:
        """Returns the result of each call by its id, as the model reads it."""
        began = time.monotonic()
        allowed = self.workflow.max_calls - self.calls
        texts = await asyncio.gather(
            *(
                self._result(call)
                if i < allowed
                else asyncio.sleep(0, f"Not done: no more than {self.workflow.max_calls} calls are allowed.")
                for i, call in enumerate(calls)
            )
        )
        self.calls += min(len(calls), allowed)
        self.seconds += time.monotonic() - began
        return {call.call_id: text for call, text in zip(calls, texts, strict=True)}

    async def _result(self, call: Call) -> Result:
        if call.status != CallStatus.OK:
            known = call.status in (CallStatus.UNKNOWN_TOOL, CallStatus.WRONG_ARGUMENTS)
            return self._fault(str(call.status) if known else "malformed", call.why)
        seconds = min(self.workflow.tool_seconds, max(0.0, self.deadline - time.monotonic()) * TOOL)
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await self._as_content(await self.tools[call.name].run(call.arguments))
        except InfrastructureFailure:
            raise  # the sandbox or a server: not the model's fault, so the episode is retried
        except UnwritableResult as failure:
            why = f"returned a value that cannot be written as JSON: {failure}. Return text, numbers, lists or dicts"
            return self._fault("wrong_result", f"Error: {call.name} {why}")
        except ToolFailure as failure:
            return self._fault("tool_raised", f"Error: {failure}")
        except BaseException as error:  # the boundary of a user's code
            if ends_the_task(error):
                raise
            if limit.expired():
                return self._fault("tool_timeout", f"Error: {call.name} was not done after {seconds:.3g} s.")
            return self._fault("tool_raised", f"Error: {kind_and_text(error)}")

    async def _as_content(self, result: Any) -> Result:
        """Returns a result as the model reads it: a string, or content parts if it contains images or sounds."""
        most = self.workflow.max_result_characters
        reader = reader_of(self.workflow.tokenizer)
        parts = None if reader is None else await asyncio.to_thread(shown_parts, result, partial(as_text, most=most))
        return as_text(result, most) if parts is None else parts

    def _fault(self, name: str, words: str) -> str:
        self.faults[name] += 1
        return as_text(words, self.workflow.max_result_characters)


def by_name(tools: Any) -> dict[str, Tool]:
    """Returns the tools of an episode by name.

    Raises:
        ConfigError: two tools have the same name.
    """
    made: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in made:
            raise ConfigError(f"workflow_args.tools has two tools called {tool.name!r}; leave one out, or rename it")
        made[tool.name] = tool
    return made


def make_toolboxes(specs: Any, services: Services) -> list[Toolbox]:
    """Creates the toolboxes for ``calculator``, ``search(folder=docs)``, ``my_file.py:weather``, or a list of these. Each is
    created once for a run, and closed with the services.

    Raises:
        ConfigError: a toolbox cannot be created, or ``specs`` is empty.
    """
    terms = [_term(spec) for spec in (specs if isinstance(specs, list | tuple) else [specs])]
    if not terms:
        raise ConfigError("workflow_args.tools is empty; name a tool, as in workflow_args.tools=calculator")
    return [services.once(f"tool {term.spelling}", partial(_make, term, services)) for term in terms]


def _term(spec: Any) -> Term:
    if isinstance(spec, Mapping) and isinstance(spec.get("name"), str):
        spec = spelled(spec["name"], {key: value for key, value in spec.items() if key != "name"}, "workflow_args.tools")
    if not isinstance(spec, str):
        raise ConfigError(f"workflow_args.tools must be names, as in [calculator, my_file.py:weather], got {spec!r}")
    return read_term(spec, "workflow_args.tools")


def _make(term: Term, services: Services) -> Toolbox:
    key = f"tool={term.name}"
    factory = factory_of("tool", term.name, "workflow_args.tools")
    if isinstance(factory, Toolbox):
        return factory
    if not inspect.isclass(factory):
        if term.arguments:
            raise ConfigError(f"{key} is a function, whose arguments come from the model: it has no knobs; make it a class")
        return FunctionBox(factory)
    box = services.make(key, factory, term.arguments)
    if not isinstance(box, Toolbox):
        raise ConfigError(f"{key} made a {type(box).__name__}; derive the class from tandem.Toolbox, or name a function")
    return box
