"""Both sides of the split judge of functions (`tandem.rewards.code`), and Python literals as JSON, in which they talk.

The text of this file runs as a program in each of the two sandboxes, so it imports only the standard library.

The candidate's side, `run_candidate`, runs the model's code and answers calls of its functions. Nothing in that process is
trusted, because the candidate may change all of it. Its output is only parsed as return values. Decoded values have exactly
the types below, so nothing that a candidate sends can have behaviour of its own.

The tests' side, `run_tests`, runs the test code of the data set, in which every function of the answer is a proxy. From the
candidate it receives only literals.
"""

import builtins
import json
import math
import os
import random
import sys
import types
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO

MAX_DEPTH = 100
"""Maximum nesting depth of a value."""

LONG_INT = 1 << 63
"""Larger integers are sent in base 16, because Python refuses to parse thousands of decimal digits."""

FACTORIES: dict[str, partial[defaultdict[Any, Any]]] = {
    f"d{kind.__name__}": partial(defaultdict, kind) for kind in (int, float, str, list, dict, set)
}
MAPPINGS: dict[str, Callable[[], dict[Any, Any]]] = {"o": OrderedDict, "n": Counter, "d": dict, **FACTORIES}
"""Maps the mark of a dict type to the function that creates an empty one."""


class NotLiteral(ValueError):
    """A value that is not a literal; the message names its type."""


def encode(value: Any, depth: int = 0) -> Any:
    """Converts a value to what `json` can write. A subclass, such as a named tuple, is sent as its base type, except
    ``OrderedDict``, ``Counter`` and ``defaultdict`` of a plain type, because code relies on their behaviour.

    Raises:
        NotLiteral: another type, or nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise NotLiteral(f"nested deeper than {MAX_DEPTH}")
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        whole = int.__int__(value)
        return whole if -LONG_INT < whole < LONG_INT else {"i": hex(whole)}
    if isinstance(value, float):
        number = float.__float__(value)
        return number if math.isfinite(number) else {"f": repr(number)}
    if isinstance(value, complex):
        return {"c": [encode(value.real), encode(value.imag)]}
    if isinstance(value, bytes):
        return {"b": bytes.hex(value)}
    if isinstance(value, dict):
        kind: Any
        kind, mark = next(
            (kind, mark) for mark, kind in MAPPINGS.items() if isinstance(kind, type) and isinstance(value, kind)
        )
        if isinstance(value, defaultdict):
            mark = next((mark for mark, made in FACTORIES.items() if made.args[0] is value.default_factory), mark)
        return {mark: [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in kind.items(value)]}
    for kind, mark in ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "z")):
        if isinstance(value, kind):
            items = [encode(item, depth + 1) for item in kind.__iter__(value)]
            return items if mark == "l" else {mark: items}
    raise NotLiteral(type(value).__name__)


def decode(value: Any, depth: int = 0) -> Any:
    """Returns the value that `encode` converted.

    Raises:
        ValueError, TypeError: the input does not have the format of `encode`.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [decode(item, depth + 1) for item in value]
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError("not a literal")
    ((mark, inner),) = value.items()
    if mark == "i":
        return int(inner, 16)
    if mark == "f":
        return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[inner]
    if mark == "c":
        real, imaginary = (decode(part) for part in inner)
        return complex(real, imaginary)
    if mark == "b":
        return bytes.fromhex(inner)
    if mark in MAPPINGS:
        made = MAPPINGS[mark]()
        made.update({decode(key, depth + 1): decode(item, depth + 1) for key, item in inner})
        return made
    return {"t": tuple, "s": set, "z": frozenset}[mark](decode(item, depth + 1) for item in inner)


def write(message: dict[str, Any]) -> bytes:
    """Returns a message as one line of JSON."""
    return json.dumps(message).encode() + b"\n"


def take_pipes() -> tuple[BinaryIO, Callable[[dict[str, Any]], None]]:
    """Returns a stream with the judge's messages, one a line, and the function that sends an answer. After this call the
    program's own standard input is empty, and its output is discarded."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    silence = os.open(os.devnull, os.O_RDWR)
    os.dup2(silence, 0)
    os.dup2(silence, 1)

    def send(message: dict[str, Any]) -> None:
        line = write(message)
        while line:
            line = line[os.write(answers, line) :]

    return requests, send


def function_of(module: types.ModuleType, name: str) -> Any:
    """Returns the function with this name; without one, the method of the class ``Solution`` with this name, as in
    LeetCode."""
    if hasattr(module, name) or not hasattr(module, "Solution"):
        return getattr(module, name)
    return getattr(module.Solution(), name)


def answer(module: types.ModuleType, call: dict[str, Any]) -> dict[str, Any]:
    """Calls a function. Returns its value, its error, or ``not_comparable``; and the arguments that it changed in place."""
    arguments: dict[Any, Any] = dict(enumerate(decode(call["args"]))) | decode(call["kwargs"])
    before = {key: write({"": encode(value)}) for key, value in arguments.items() if isinstance(value, list | dict | set)}
    reply: dict[str, Any] = {"id": call["id"]}
    try:
        positional = [value for key, value in arguments.items() if isinstance(key, int)]
        named = {key: value for key, value in arguments.items() if isinstance(key, str)}
        value = function_of(module, call["name"])(*positional, **named)
    except Exception as error:  # the boundary of a call: tests may catch these errors; any other ends the process
        kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
        reply["error"] = [kinds[0], str(error)[:500]]
    else:
        try:
            reply["value"] = encode(value)
        except NotLiteral as error:
            return reply | {"not_comparable": f"{call['name']} returned a value that is not a literal: {error}"}
    try:
        after = {key: encode(arguments[key]) for key in before}
    except NotLiteral as error:
        return reply | {"not_comparable": f"{call['name']} put a value that is not a literal into its argument: {error}"}
    reply["changed"] = [[key, value] for key, value in after.items() if write({"": value}) != before[key]]
    return reply


def run_candidate() -> None:
    """Runs the code in the first line of input, then answers each further line, which is a call, with one line."""
    requests, send = take_pipes()
    first = json.loads(requests.readline())
    module = types.ModuleType("candidate")
    sys.modules["candidate"] = module
    try:
        for part in first["parts"]:
            exec(compile(part, "candidate.py", "exec"), module.__dict__)
    except Exception as error:  # the boundary of the reward
        send({"id": first["id"], "error": [type(error).__name__, str(error)[:500]]})
        return
    send({"id": first["id"], "value": None})
    for line in requests:
        send(answer(module, json.loads(line)))


Ask = Callable[[dict[str, Any]], dict[str, Any]]


NOT_PASSED_ON = (UnicodeError, StopIteration, StopAsyncIteration)
"""Errors of the candidate that reach the tests as ``RuntimeError``. A UnicodeError cannot be created from a text alone, and
the others would silently end a loop of the tests."""


class NotComparable(BaseException):
    """The tests gave the candidate an argument that is not a literal. A BaseException, so that no ``except Exception`` of a
    test catches it."""


def proxy(name: str, ask: Ask) -> Callable[..., Any]:
    """Returns a function that calls the candidate's function of this name. If that changes lists, dicts or sets among its
    arguments, the arguments of the caller change too."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            request = {"call": name, "args": encode(list(args)), "kwargs": encode(kwargs)}
        except NotLiteral as error:
            raise NotComparable(f"the tests give {name} a value that is not a literal: {error}") from None
        reply = ask(request)
        for key, new in reply.get("changed", ()):
            change(args[key] if isinstance(key, int) else kwargs[key], decode(new))
        if "error" in reply:
            kind = getattr(builtins, reply["error"][0], None)
            if not (isinstance(kind, type) and issubclass(kind, Exception)) or issubclass(kind, NOT_PASSED_ON):
                kind = RuntimeError
            raise kind(reply["error"][1])
        return decode(reply["value"])

    call.__name__ = name
    return call


def change(old: Any, new: Any) -> None:
    """Replaces the contents of ``old``, a list, dict or set. ``new``: its new contents, of the type with which ``old`` was
    sent."""
    if not isinstance(old, type(new)):
        raise TypeError("an argument cannot become another type")
    old.clear()
    old.extend(new) if isinstance(old, list) else old.update(new)


def run_tests() -> None:
    """Runs the tests in the first line of input. Writes one line for each call and each case."""
    replies, send = take_pipes()

    called = False

    def ask(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal called
        called = True
        send(request)
        return dict(json.loads(replies.readline()))

    tests = json.loads(replies.readline())
    module = types.ModuleType("tests")
    sys.modules["tests"] = module
    proxies = {name: proxy(name, ask) for name in tests["names"]}
    try:
        exec(compile(tests["preamble"], "preamble.py", "exec"), module.__dict__)
        module.__dict__.update(proxies)
        setup = compile(tests["setup"], "setup.py", "exec")
        problem = run_case(setup, module)
        if not problem["passed"]:  # the answer's fault if the setup has called it
            num_failed = len(tests["cases"]) if called else 0
            for number in range(num_failed):
                send({"case": number} | problem)
            if not called:
                send({"broken": problem["error"]})
            return
        for number, source in enumerate(tests["cases"]):
            random.seed(number)  # makes the verdict reproducible
            module.__dict__.update(proxies)
            code = compile(source, "tests.py", "exec")
            send({"case": number} | run_case(code, module))
        send({"end": True})
    except NotComparable as error:
        send({"not_comparable": str(error)})
    except Exception as error:  # the boundary of the reward: the data set's own code is broken
        send({"broken": f"{type(error).__name__}: {error}".removesuffix(": ")[:500]})


def run_case(code: types.CodeType, module: types.ModuleType) -> dict[str, Any]:
    """Runs one case. It passes if it ends without an exception."""
    try:
        exec(code, module.__dict__)
    except Exception as error:  # the boundary of a test
        return {"passed": False, "error": f"{type(error).__name__}: {error}".removesuffix(": ")[:500]}
    return {"passed": True}
