"""The candidate's side of the split judge: runs what a model wrote, and answers calls of its functions.

The text of this file, behind that of `literals`, is the program of a sandbox. Nothing here is trusted: the candidate
shares the process and may change all of it. What comes out is read as return values and as nothing else.
"""

import json
import sys
import types
from typing import Any

from tandem.rewards.code.literals import NotLiteral, decode, encode, take_pipes, write


def function_of(module: types.ModuleType, name: str) -> Any:
    """The function of that name; else the method of a class ``Solution``, as LeetCode has it."""
    if hasattr(module, name) or not hasattr(module, "Solution"):
        return getattr(module, name)
    return getattr(module.Solution(), name)


def answer(module: types.ModuleType, call: dict[str, Any]) -> dict[str, Any]:
    """Calls a function; its value, its error, or what of it is no literal, and the arguments that it changed in place."""
    arguments: dict[Any, Any] = dict(enumerate(decode(call["args"]))) | decode(call["kwargs"])
    before = {key: write({"": encode(value)}) for key, value in arguments.items() if isinstance(value, list | dict | set)}
    reply: dict[str, Any] = {"id": call["id"]}
    try:
        positional = [value for key, value in arguments.items() if isinstance(key, int)]
        named = {key: value for key, value in arguments.items() if isinstance(key, str)}
        value = function_of(module, call["name"])(*positional, **named)
    except Exception as error:  # the boundary of a call: what the tests may catch; anything else ends the process
        kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
        reply["error"] = [kinds[0], str(error)[:500]]
    else:
        try:
            reply["value"] = encode(value)
        except NotLiteral as error:
            return reply | {"not_comparable": f"{call['name']} returned a value that is no literal: {error}"}
    try:
        after = {key: encode(arguments[key]) for key in before}
    except NotLiteral as error:
        return reply | {"not_comparable": f"{call['name']} put into its argument what is no literal: {error}"}
    reply["changed"] = [[key, value] for key, value in after.items() if write({"": value}) != before[key]]
    return reply


def run_candidate() -> None:
    """The first line has the code; every further line is a call, answered by a line."""
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
