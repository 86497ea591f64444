"""A tool: what the model is told of it, and what a call does. Functions become tools by their signature and docstring."""

import asyncio
import inspect
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

import numpy as np
import torch
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from tandem.api.services import factory_of
from tandem.config.errors import ConfigError

MAX_STUCK = 64
"""Calls of one tool that were cut off and still run in threads, which nobody can end."""


class ToolFailure(Exception):
    """A call that did not work. Its words are for the model, which reads them as the result."""


class UnwritableResult(ToolFailure):
    """A tool returned something that has no words of its own."""


@dataclass(frozen=True)
class Tool:
    """One tool of one episode."""

    schema: Mapping[str, Any]
    """``{"type": "function", "function": {"name", "description", "parameters": JSON schema}}``"""

    run: Callable[[Mapping[str, Any]], Awaitable[Any]]
    """Carries out a call with arguments that fit the schema. The model reads the result `as_text`, and whatever is raised
    as well."""

    @property
    def name(self) -> str:
        """The name by which the model calls it."""
        return str(self.schema["function"]["name"])


class Toolbox(ABC):
    """Tools that belong together, made once for a run.

    A class of your own in a file is given what its ``__init__`` asks for by argument name, as a workflow is.
    """

    @abstractmethod
    def open(self, data: Mapping[str, Any]) -> AbstractAsyncContextManager[Sequence[Tool]]:
        """The tools of one episode on this row; on leaving, what they hold is let go of."""

    def close(self) -> None:
        """The run has ended; idempotent."""


class FunctionBox(Toolbox):
    """A function as a tool: typed arguments, and a docstring that says what it does and what each argument is.

    An ordinary function runs in a thread of its own, so it may block.
    """

    def __init__(self, function: Callable[..., Any], max_stuck: int = MAX_STUCK):
        """``max_stuck``: calls that were cut off and whose threads still run; with more the tool is closed.

        Raises:
            ConfigError: a model could not be told how to call it.
        """
        self.tool = Tool(tool_schema(function), self._run)
        self._function, self._max_stuck, self._stuck = function, max_stuck, 0

    @asynccontextmanager
    async def open(self, data: Mapping[str, Any]) -> Any:
        """Implements `Toolbox.open`."""
        yield (self.tool,)

    async def _run(self, arguments: Mapping[str, Any]) -> Any:
        try:
            inspect.signature(self._function).bind(**arguments)
        except TypeError as error:
            raise ToolFailure(f"wrong arguments: {error}") from None
        if inspect.iscoroutinefunction(self._function):
            return await self._function(**arguments)
        if self._stuck >= self._max_stuck:
            raise ToolFailure(f"{self.tool.name} is closed: {self._stuck} calls of it have not ended")
        future = _in_thread(lambda: self._function(**arguments))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not future.done():  # the thread goes on, and nobody waits for it
                self._stuck += 1
                future.add_done_callback(self._ended)
            raise

    def _ended(self, future: "asyncio.Future[Any]") -> None:
        self._stuck -= 1
        future.exception()  # taken, for nobody else will


def tool_schema(function: Callable[..., Any] | str) -> dict[str, Any]:
    """Describes a function to a model: name, docstring, and each argument's type and line in ``Args:``.
    ``function``: it, or how it is named: ``calculator``, ``my_file.py:weather``.

    Raises:
        ConfigError: the docstring or a type is missing; says what to write.
    """
    if isinstance(function, str):
        function = factory_of("tool", function)
    who = getattr(function, "__name__", "the function")
    try:
        made: dict[str, Any] = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, ValueError, TypeError) as error:
        raise ConfigError(
            f"tool {who} cannot be described to a model: {str(error).strip()}. A tool is a function with a type for each "
            'argument, and a docstring with a line for each below "Args:"'
        ) from error
    made["function"].pop("return", None)  # templates do not read it
    return made


def as_text(result: Any, most: int) -> str:
    """A tool's result as the model reads it: text as it is, everything else as JSON; at most so many characters, and a line
    that says if there are more.

    Dates, paths, decimals and whatever else says in ``__str__`` what it is are texts in it, dataclasses are mappings, arrays
    and tensors are lists, and bytes are text in UTF-8.

    Raises:
        UnwritableResult: for all others, such as a coroutine or a plain object, whose ``repr`` would be an address.
    """
    try:
        result = _in_json(result) if isinstance(result, bytes | bytearray) else result
        if isinstance(result, str):
            return result if len(result) <= most else f"{result[:most]}\n… {len(result) - most} more characters"
        text = ""
        for piece in _JSON.iterencode(result):  # which stops where nobody reads on
            text += piece
            if len(text) > most:
                return f"{text[:most]}\n… and more"
    except (TypeError, ValueError, RecursionError) as error:
        raise UnwritableResult(str(error)) from None
    return text


def _in_json(value: Any) -> Any:
    """Stands for what JSON does not know."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, bytes | bytearray):
        return value.decode()
    if isinstance(value, np.ndarray | torch.Tensor) and value.ndim:
        return _Rows(value)
    if hasattr(value, "tolist"):  # a number of numpy or torch, and other libraries' lists
        return value.tolist()
    if type(value).__str__ is object.__str__:
        raise UnwritableResult(f"it contains a {type(value).__name__}")
    return str(value)


class _Rows(list[Any]):
    """An array as a list of rows, each of which is made when it is read."""

    def __init__(self, array: "np.ndarray[Any, Any] | torch.Tensor"):
        super().__init__()
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def __iter__(self) -> Iterator[Any]:
        return (self._array[i] for i in range(len(self)))


_JSON = json.JSONEncoder(ensure_ascii=False, default=_in_json)


def _in_thread(work: Callable[[], Any]) -> "asyncio.Future[Any]":
    """Runs it in a thread of its own, which does not keep the process alive: a pool would fill up with hanging calls."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if not future.done():
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:  # the boundary of a user's code
            of_python = isinstance(error, StopIteration) or not isinstance(error, Exception)
            failure = RuntimeError(repr(error)) if of_python else error  # asyncio would take sys.exit() as meant for itself
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="tool", daemon=True).start()
    return future
