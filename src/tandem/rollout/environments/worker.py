"""The worker process of one environment. Imports no large packages, unless the environment imports them.

The environment is created when the worker starts, reset for each episode, and closed before the worker ends.
"""

import asyncio
import contextlib
import inspect
import json
import math
import os
import threading
from collections.abc import Mapping
from typing import Any

from tandem.api.environment import InvalidAction, StepResult, as_float
from tandem.api.media import written
from tandem.workers.child import Answering, failure_message, load_function, serve

MAX_CHARACTERS = 100_000
"""Maximum length of an observation, in characters. A longer observation is an error of the environment, because no model
could read it."""


class WrongType(TypeError):
    """The environment returned a value of the wrong type."""


def main(spec: str, knobs: str) -> None:
    """Serves the environment class ``spec`` until the run closes its end of the socket. ``knobs``: its keyword arguments as
    JSON."""
    serve(lambda: _answering(Player(spec, json.loads(knobs))), reason="environment_raised", tidy=False)


def _answering(player: "Player") -> Answering:
    def answer(call: dict[str, Any]) -> dict[str, Any]:
        try:
            return player.do(**call) | {"memory_mib": memory_mib()}
        except InvalidAction as error:
            return {"invalid": str(error) or "That is no action.", "memory_mib": memory_mib()}
        except WrongType as error:
            return failure_message("environment_wrong_type", error, str(error))
        except FloatingPointError as error:
            return failure_message("environment_not_finite", error, str(error))
        except BaseException as error:  # the worker boundary: sys.exit() in an environment is its failure
            return failure_message("environment_raised", error)

    return answer


def memory_mib() -> float:
    """Returns the resident memory of this process in MiB, or 0 on systems without /proc."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return 0.0


class Player:
    """Calls the methods of one environment and converts their results to messages."""

    def __init__(self, spec: str, knobs: Mapping[str, Any]):
        self._loop: asyncio.AbstractEventLoop | None = None
        self._world = load_function(spec)(**knobs)
        self._reset_takes = inspect.signature(self._world.reset).parameters

    def do(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Performs one operation, ``reset``, ``step`` or ``close``, and returns its result as a message."""
        if operation == "reset":
            return self._reset(**arguments)
        if operation == "step":
            return self._step(**arguments)
        if hasattr(self._world, "close"):
            self._call(self._world.close)
        return {}

    def _call(self, method: Any, *arguments: Any, **named: Any) -> Any:
        """Calls a method and returns its result. Waits for the result of an ``async def``; its event loop runs in a thread,
        also between two calls."""

        async def waited(coroutine: Any) -> Any:
            return await coroutine

        result = method(*arguments, **named)
        if not inspect.isawaitable(result):
            return result
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
        return asyncio.run_coroutine_threadsafe(waited(result), self._loop).result()

    def _reset(self, data: dict[str, Any], seed: int) -> dict[str, Any]:
        given = {"data": data, "seed": seed, "options": data}
        takes_all = any(p.kind is p.VAR_KEYWORD for p in self._reset_takes.values())
        named = {name: value for name, value in given.items() if name in self._reset_takes or takes_all}
        result = self._call(self._world.reset, **named)
        observation = result[0] if isinstance(result, tuple) and len(result) == 2 else result
        return {"observation": _observation(observation, "reset")}

    def _step(self, action: Any) -> dict[str, Any]:
        result = self._call(self._world.step, action)
        if not isinstance(result, tuple) or len(result) not in (3, 5):
            size = f" of {len(result)}" if isinstance(result, tuple) else ""
            raise WrongType(
                "step must return (observation, reward, terminated, truncated, info) or (observation, reward, is_over); it "
                f"returned a {type(result).__name__}{size}"
            )
        step = StepResult(*result)
        info = step.info if isinstance(step.info, Mapping) else {}
        accuracy = info.get("accuracy")
        return {
            "observation": _observation(step.observation, "step"),
            "reward": _number(step.reward, "the reward"),
            "terminated": _flag(step.terminated, "terminated"),
            "truncated": _flag(step.truncated, "truncated"),
            "accuracy": None if accuracy is None else min(max(_number(accuracy, "info['accuracy']"), 0.0), 1.0),
        }


def _observation(value: Any, where: str) -> str | list[dict[str, Any]]:
    """Returns an observation as text, or as content parts if it has images or sounds."""
    if isinstance(value, str):
        return _text(value, where)
    from tandem.media.parts import shown_parts  # noqa: PLC0415 — a large import, and most observations are texts

    parts = shown_parts(value, lambda text: _text(text, where))
    return _text(value, where) if parts is None else written([{"content": parts}])[0]["content"]


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise WrongType(f"the observation of {where} must be a text that the model can read, got a {type(value).__name__}")
    if len(value) > MAX_CHARACTERS:
        raise WrongType(f"the observation of {where} has {len(value)} characters; at most {MAX_CHARACTERS} can be read")
    return value


def _number(value: Any, what: str) -> float:
    number = as_float(value)
    if number is None:
        raise WrongType(f"{what} must be a number, got a {type(value).__name__}: {value!r:.80}")
    if not math.isfinite(number):
        raise FloatingPointError(f"{what} is {number}")
    return number


def _flag(value: Any, what: str) -> bool:
    if type(value).__name__ not in ("bool", "bool_"):  # numpy's bool_ is not a Python bool
        raise WrongType(f"{what} must be True or False, got a {type(value).__name__}: {value!r:.80}")
    return bool(value)
