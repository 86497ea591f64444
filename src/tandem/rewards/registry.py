"""Rewards by name."""

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, TypeVar

from tandem.api.sandbox import Sandbox
from tandem.api.scoring import Score
from tandem.api.workflow import RewardFn
from tandem.config.errors import ConfigError

Builder = Callable[..., RewardFn]
B = TypeVar("B", bound=Builder)

REWARDS: dict[str, Builder] = {}
"""Each builder takes ``timeout_s`` and its own knobs, all keyword-only, and returns a `RewardFn`."""


SCORES: dict[str, type[Score]] = {}
"""Rewards that need a model; each class takes its knobs, and opens nothing."""

S = TypeVar("S", bound=type[Score])


def register_score(name: str) -> Callable[[S], S]:
    """Registers a `Score` under a name."""

    def put(score: S) -> S:
        SCORES[name] = score
        return score

    return put


def register(name: str) -> Callable[[B], B]:
    """Registers a builder (a function or a `RewardFn` class) under a name."""

    def put(builder: B) -> B:
        REWARDS[name] = builder
        return builder

    return put


def make(
    name: str,
    timeout_s: float,
    knobs: dict[str, Any],
    workers: int | None = None,
    sandbox: Callable[[], Sandbox] | None = None,
) -> RewardFn:
    """The reward of that name; with so many ``workers`` if it has any and its knobs say nothing else. ``sandbox``: opens one
    for a reward that asks for it.

    Raises:
        ConfigError: unknown name or knob, names the nearest one; or a knob that is no whole number where it must be one.
    """
    if name not in REWARDS:
        near = get_close_matches(name, [*REWARDS, *SCORES], n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"no reward is called {name!r}; {hint}registered: {', '.join(sorted([*REWARDS, *SCORES]))}; "
            "a reward of your own is given as my_file.py:function"
        )
    builder = REWARDS[name]
    asked = inspect.signature(builder).parameters
    allowed = [p for p in asked if p not in ("timeout_s", "sandbox")]
    for knob in knobs:
        if knob not in allowed:
            raise ConfigError(f"reward {name!r} has no knob {knob!r}; it has: {', '.join(allowed) or 'none'}")
        kind = asked[knob].annotation
        if kind in (int, int | None, "int") and (
            not isinstance(knobs[knob], int) or isinstance(knobs[knob], bool) or knobs[knob] < 1
        ):
            raise ConfigError(f"reward {name!r}: {knob} must be a whole number, at least 1, got {knobs[knob]!r}")
    if "workers" in allowed:
        knobs = {"workers": workers} | knobs
    if "sandbox" not in asked:
        return builder(timeout_s=timeout_s, **knobs)
    if sandbox is None:
        raise ConfigError(
            f"reward {name!r} runs programs, and it was given no sandbox: build_reward(…, sandbox=open_sandbox)"
        )
    opened = sandbox()
    try:
        return builder(timeout_s=timeout_s, sandbox=opened, **knobs)
    except BaseException:
        opened.close()
        raise
