"""A tool: its description for the model, and the function that a call runs. Functions become tools by signature and
docstring."""

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
"""Maximum number of calls of one tool that were cut off but still run in threads, which cannot be killed."""


class ToolFailure(Exception):
    """A call that failed. The model reads the message as the call's result."""


class UnwritableResult(ToolFailure):
    """A tool returned a value that cannot be written as text or JSON."""


@dataclass(frozen=True)
class Tool:
    """One tool in one episode."""

    schema: Mapping[str, Any]
    """``{"type": "function", "function": {"name", "description", "parameters": JSON schema}}``"""

    run: Callable[[Mapping[str, Any]], Awaitable[Any]]
    """Runs a call whose arguments fit the schema. The model reads the result, converted by `as_text`, or the error."""

    @property
    def name(self) -> str:
        """The name by which the model calls the tool."""
        return str(self.schema["function"]["name"])


class Toolbox(ABC):
    """A set of tools, created once for a run.

    A user's class gets objects of the run if its ``__init__`` has arguments with their names, as a workflow does.
    """

    @abstractmethod
    def open(self, data: Mapping[str, Any]) -> AbstractAsyncContextManager[Sequence[Tool]]:
        """Opens the tools for one episode on this row. On exit their resources are released."""

    def close(self) -> None:
        """Releases the resources of the run. Idempotent."""


class FunctionBox(Toolbox):
    """A function as a tool. It needs typed arguments, and a docstring that describes the function and each argument.

    A sync function runs in a thread of its own, so it may block.
    """

    def __init__(self, function: Callable[..., Any], max_stuck: int = MAX_STUCK):
        """``max_stuck``: maximum number of cut-off calls whose threads still run; further calls are then refused.

        Raises:
            ConfigError: the function cannot be described to a model.
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
            if not future.done():  # the thread continues, and no caller waits for it
                self._stuck += 1
                future.add_done_callback(self._ended)
            raise

    def _ended(self, future: "asyncio.Future[Any]") -> None:
        self._stuck -= 1
        future.exception()  # retrieves the error, so that asyncio does not report it


def tool_schema(function: Callable[..., Any] | str) -> dict[str, Any]:
    """Describes a function to a model: name, docstring, and each argument's type and line in ``Args:``. ``function``: the
    function, or its name such as ``calculator`` or ``my_file.py:weather``.

    Raises:
        ConfigError: the docstring or a type is missing; the message says what to write.
    """
    if isinstance(function, str):
        function = factory_of("tool", function)
    name = getattr(function, "__name__", "the function")
    try:
        made: dict[str, Any] = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, ValueError, TypeError) as error:
        raise ConfigError(
            f"tool {name} cannot be described to a model: {str(error).strip()}. A tool is a function with a type for each "
            'argument, and a docstring with a line for each below "Args:"'
        ) from error
    made["function"].pop("return", None)  # templates do not read it
    return made


def as_text(result: Any, most: int) -> str:
    """Returns a tool's result as the model reads it: a string unchanged, other values as JSON. The text is cut after
    ``most`` characters, with a note about the cut.

    In JSON, values with their own ``__str__`` (dates, paths, decimals) are strings, dataclasses are objects, arrays and
    tensors are lists, and bytes are UTF-8 text.

    Raises:
        UnwritableResult: any other value, such as a coroutine or a plain object, whose ``repr`` would be an address.
    """
    try:
        result = _in_json(result) if isinstance(result, bytes | bytearray) else result
        if isinstance(result, str):
            return result if len(result) <= most else f"{result[:most]}\n… {len(result) - most} more characters"
        text = ""
        for piece in _JSON.iterencode(result):  # lazy, so that it stops at the limit
            text += piece
            if len(text) > most:
                return f"{text[:most]}\n… and more"
    except (TypeError, ValueError, RecursionError) as error:
        raise UnwritableResult(str(error)) from None
    return text


def _in_json(value: Any) -> Any:
    """Converts a value that JSON does not support."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, bytes | bytearray):
        return value.decode()
    if isinstance(value, np.ndarray | torch.Tensor) and value.ndim:
        return _Rows(value)
    if hasattr(value, "tolist"):  # scalars of numpy or torch, and arrays of other libraries
        return value.tolist()
    if type(value).__str__ is object.__str__:
        raise UnwritableResult(f"it contains a {type(value).__name__}")
    return str(value)


class _Rows(list[Any]):
    """An array as a list whose rows are created when they are read."""

    def __init__(self, array: "np.ndarray[Any, Any] | torch.Tensor"):
        super().__init__()
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def __iter__(self) -> Iterator[Any]:
        return (self._array[i] for i in range(len(self)))


_JSON = json.JSONEncoder(ensure_ascii=False, default=_in_json)


def _in_thread(work: Callable[[], Any]) -> "asyncio.Future[Any]":
    """Runs ``work`` in a new daemon thread. A thread pool would fill up with calls that hang."""
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
            failure = RuntimeError(repr(error)) if of_python else error  # asyncio would exit itself on sys.exit()
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="tool", daemon=True).start()
    return future
