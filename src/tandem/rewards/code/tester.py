"""The tests' side of the split judge: runs the test code, in which every name of the answer is a proxy.

The text of this file, behind that of `literals`, is the program of a sandbox of its own. The test code comes from the data
set; of the candidate only literals come here.
"""

import builtins
import json
import random
import sys
import types
from collections.abc import Callable
from typing import Any

from tandem.rewards.code.literals import NotLiteral, decode, encode, take_pipes

Ask = Callable[[dict[str, Any]], dict[str, Any]]


NOT_PASSED_ON = (UnicodeError, StopIteration, StopAsyncIteration)
"""Errors that reach the tests as ``RuntimeError``: the first needs more than a text, and the others would end a loop of the
tests over calls as if it were done."""


class NotComparable(BaseException):
    """An argument of the tests that is no literal; no ``except Exception`` of a test may take it for something else."""


def proxy(name: str, ask: Ask) -> Callable[..., Any]:
    """A function that is called over there. Lists, dicts and sets that it changed are changed here too."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            request = {"call": name, "args": encode(list(args)), "kwargs": encode(kwargs)}
        except NotLiteral as error:
            raise NotComparable(f"the tests give {name} a value that is no literal: {error}") from None
        reply = ask(request)
        for key, new in reply.get("changed", ()):
            change(args[key] if isinstance(key, int) else kwargs[key], decode(new))
        if "error" in reply:
            kind = getattr(builtins, reply["error"][0], None)
            fine = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, NOT_PASSED_ON)
            raise (kind if fine else RuntimeError)(reply["error"][1])
        return decode(reply["value"])

    call.__name__ = name
    return call


def change(old: Any, new: Any) -> None:
    """Gives a list, dict or set other contents; ``new`` has the type as which ``old`` travelled."""
    if not isinstance(old, type(new)):
        raise TypeError("an argument cannot become another type")
    old.clear()
    old.extend(new) if isinstance(old, list) else old.update(new)


def run_tests() -> None:
    """The first line has the tests; a line for each call and each case goes out."""
    replies, send = take_pipes()

    asked = False

    def ask(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal asked
        asked = True
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
        if not problem["passed"]:  # the answer's doing if it was called before
            many = len(tests["cases"]) if asked else 0
            for number in range(many):
                send({"case": number} | problem)
            if not asked:
                send({"broken": problem["error"]})
            return
        for number, source in enumerate(tests["cases"]):
            random.seed(number)  # the same verdict whenever it is asked for
            module.__dict__.update(proxies)
            code = compile(source, "tests.py", "exec")
            send({"case": number} | run_case(code, module))
        send({"end": True})
    except NotComparable as error:
        send({"not_comparable": str(error)})
    except Exception as error:  # the boundary of the reward: the data set's own code is broken
        send({"broken": f"{type(error).__name__}: {error}".removesuffix(": ")[:500]})


def run_case(code: types.CodeType, module: types.ModuleType) -> dict[str, Any]:
    """Passed if it ends without raising."""
    try:
        exec(code, module.__dict__)
    except Exception as error:  # the boundary of a test
        return {"passed": False, "error": f"{type(error).__name__}: {error}".removesuffix(": ")[:500]}
    return {"passed": True}
