"""The workflow of a chat with tools: `workflow=tools workflow_args.tools=calculator`."""

import asyncio
import inspect
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from tandem.api.failures import DataFailure, InfrastructureFailure
from tandem.api.media import reader_of
from tandem.api.plugins import ends_the_task
from tandem.api.requests import StopReason
from tandem.api.samples import Sample
from tandem.api.services import Services, factory_of
from tandem.api.workflow import GeneratesTokens, RewardFn
from tandem.config.errors import ConfigError, kind_and_text
from tandem.config.generation import GenerationConfig
from tandem.config.terms import Term, read_term, spelled
from tandem.media.parts import shown_parts
from tandem.protocol.tool_calls import CallReader
from tandem.protocol.turns import Call, CallStatus
from tandem.rollout.deadlines import TOOL, left_for_play
from tandem.rollout.tools.chat import Result, ToolChat, ToolChatWorkflow
from tandem.rollout.tools.tool import FunctionBox, Tool, Toolbox, ToolFailure, UnwritableResult, as_text

Stop = Literal["answer", "length", "turns", "calls", "tokens", "seconds"]
STOPS: tuple[Stop, ...] = ("answer", "length", "turns", "calls", "tokens", "seconds")
"""Why a chat ended. answer: a reply without a call. length: a reply was cut off. The others: a limit."""

FAULTS = ("malformed", "unknown_tool", "wrong_arguments", "tool_raised", "tool_timeout", "wrong_result")
"""Why a call gave no result."""


class ToolWorkflow(ToolChatWorkflow):
    """A chat in which the model may call tools. It ends with a reply without a call, or at a limit; then it is judged.

    Calls of one reply are carried out at the same time. A call that cannot be read, that names no tool or has wrong
    arguments, a tool that raises or hangs: the model is told, and the chat goes on.
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
    """One episode's chat with tools: what was called, and how much of the limits is used."""

    def __init__(self, workflow: ToolWorkflow, chat: ToolChat, tools: Mapping[str, Tool], deadline: float):
        self.workflow, self.chat, self.tools, self.deadline = workflow, chat, tools, deadline
        self.turns, self.calls, self.faults = 0, 0, Counter[str]()
        self.seconds = 0.0
        """In tools, the slowest of each turn."""

    async def run(self, engine: GeneratesTokens) -> Stop:
        """Speaks and carries out calls until the chat ends; says why it did."""
        limits = self.workflow
        while True:
            try:
                cut = await limits.reply(engine, self.chat) == StopReason.LENGTH
            except DataFailure as failure:
                if failure.reason == "prompt_too_long" and self.turns:
                    return "tokens"
                raise
            self.turns += 1
            calls = self.chat.reply.calls
            if not calls or cut:
                return "length" if cut else "answer"
            if self.turns >= limits.max_turns:
                return "turns"
            if self.calls >= limits.max_calls:
                return "calls"
            self.chat.observe(await self._results(calls))
            if limits.max_tokens is not None and len(self.chat.input_ids) >= limits.max_tokens:
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
        """Returns what the model is told of each call, by its id."""
        began = time.monotonic()
        left = self.workflow.max_calls - self.calls
        texts = await asyncio.gather(
            *(
                self._result(call)
                if i < left
                else asyncio.sleep(0, f"Not done: no more than {self.workflow.max_calls} calls are allowed.")
                for i, call in enumerate(calls)
            )
        )
        self.calls += min(len(calls), left)
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
                return await self._told(await self.tools[call.name].run(call.arguments))
        except InfrastructureFailure:
            raise  # the sandbox or a server: no fault of the model's, so the episode is run again
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

    async def _told(self, result: Any) -> Result:
        """A result as the model reads it: a text, or parts where there are images or sounds in it."""
        most = self.workflow.max_result_characters
        reader = reader_of(self.workflow.tokenizer)
        parts = None if reader is None else await asyncio.to_thread(shown_parts, result, partial(as_text, most=most))
        return as_text(result, most) if parts is None else parts

    def _fault(self, name: str, words: str) -> str:
        self.faults[name] += 1
        return as_text(words, self.workflow.max_result_characters)


def by_name(tools: Any) -> dict[str, Tool]:
    """The tools of an episode.

    Raises:
        ConfigError: two have the same name.
    """
    made: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in made:
            raise ConfigError(f"workflow_args.tools has two tools called {tool.name!r}; leave one out, or rename it")
        made[tool.name] = tool
    return made


def make_toolboxes(specs: Any, services: Services) -> list[Toolbox]:
    """The toolboxes behind ``calculator``, ``search(folder=docs)``, ``my_file.py:weather``, or a list of such. Each is made
    once for a run, and closed with its services.

    Raises:
        ConfigError: one cannot be made; or there is none.
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
    who = f"tool={term.name}"
    factory = factory_of("tool", term.name, "workflow_args.tools")
    if isinstance(factory, Toolbox):
        return factory
    if not inspect.isclass(factory):
        if term.arguments:
            raise ConfigError(f"{who} is a function, so its arguments are the model's: it has no knobs; make it a class")
        return FunctionBox(factory)
    box = services.make(who, factory, term.arguments)
    if not isinstance(box, Toolbox):
        raise ConfigError(f"{who} made a {type(box).__name__}; derive the class from tandem.Toolbox, or name a function")
    return box
