"""The contract of an environment, the other speaker of a chat, and the reading of numbers that a user's code returns.

Imports only light modules, neither torch nor numpy, because worker processes import this file.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from decimal import Decimal
from numbers import Real
from types import MappingProxyType
from typing import Any, NamedTuple

Observation = Any
"""The text that the model reads next, a PIL image, a content part, or a list of these."""


class StepResult(NamedTuple):
    """The result of a step, with gymnasium's fields."""

    observation: Observation

    reward: float
    """Reward of this turn; finite."""

    terminated: bool
    """True: the episode has ended."""

    truncated: bool = False
    """True: the episode has ended because a limit was reached."""

    info: Mapping[str, Any] = MappingProxyType({})
    """``accuracy`` (0 to 1), if present, becomes the sample's accuracy; other entries are ignored."""


class InvalidAction(ValueError):
    """Raised by `step` if the text is not a valid action. The state does not change, and the model reads the message of the
    error."""


class Environment(ABC):
    """An environment that runs one episode after another. The methods may be ``async def``, and may block.

    A class of your own need not derive from this one. `reset` is called with those of the arguments ``data``, ``seed`` and
    gymnasium's ``options`` (also the row) that it names.
    """

    @abstractmethod
    def reset(self, data: Mapping[str, Any], seed: int) -> Any:
        """Begins an episode for a row; returns the first observation, or (observation, info)."""

    @abstractmethod
    def step(self, action: Any) -> Any:
        """Performs an action; returns a `StepResult`, its fields as a tuple, or (observation, reward, is_over).

        Raises:
            InvalidAction: the action is not valid.
        """

    def close(self) -> None:
        """Frees resources; called once, after the last episode."""


def as_float(value: Any) -> float | None:
    """Converts a bool, int, float, Fraction or Decimal, or an array or tensor with a single number, to a float.

    Returns None if the value is not a number: text, None, several values, a complex number. A number too large for a float
    becomes infinity.
    """
    if math.prod(getattr(value, "shape", (0,))) == 1:
        value = value.item()
    if not isinstance(value, Real | Decimal):
        return None
    try:
        return float(value)
    except (OverflowError, ValueError):  # 10**400; a signaling NaN of Decimal
        return math.inf
