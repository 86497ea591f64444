"""An agent's verdict on itself: a number, or a mapping with ``reward`` and what else a sample has."""

from collections.abc import Mapping
from numbers import Real
from typing import Any

NUMBERS = ("reward", "accuracy")
MAPPINGS = ("rewards", "metrics")


def read_verdict(given: Any) -> dict[str, Any] | None:
    """The arguments of `RecordingSession.sample`, whose reward is then its own; None for no verdict.

    Raises:
        ValueError: it is something else; says what.
    """
    if given is None:
        return None
    if _is_number(given):
        return {"reward": float(given), "own_reward": True}
    if not isinstance(given, Mapping):
        raise ValueError(f"got a {type(given).__name__}")
    unknown = set(given) - {*NUMBERS, *MAPPINGS}
    if unknown or "reward" not in given:
        names = ", ".join((*NUMBERS, *MAPPINGS))
        raise ValueError(f"a dict has 'reward', and may have {names}; got {', '.join(map(str, given)) or 'an empty one'}")
    for name in NUMBERS:
        if name in given and not _is_number(given[name]):
            raise ValueError(f"{name} must be a number up to 9e307, got {given[name]!r:.80}")
    for name in MAPPINGS:
        values = given.get(name, {})
        if not isinstance(values, Mapping) or not all(_is_number(value) for value in values.values()):
            raise ValueError(f"{name} must map names to such numbers, got {values!r:.80}")
    made: dict[str, Any] = {"own_reward": True} | {name: float(given[name]) for name in NUMBERS if name in given}
    return made | {name: {str(k): float(v) for k, v in given[name].items()} for name in MAPPINGS if name in given}


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not (isinstance(value, int) and abs(value) >> 1023)
