"""The contract of an environment, the other speaker of a chat. Imports nothing heavy: worker processes load it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

Observation = Any
"""The text that the model reads next; or a PIL image, a content part, or a list of such and of texts."""


class StepResult(NamedTuple):
    """The answer of an environment, in gymnasium's shape."""

    observation: Observation

    reward: float
    """Finite: what this turn earned."""

    terminated: bool
    """The episode is over."""

    truncated: bool = False
    """It is over because a limit was reached."""

    info: Mapping[str, Any] = MappingProxyType({})
    """``accuracy`` (0 to 1), where right and wrong are defined, becomes the sample's; the rest is not read."""


class InvalidAction(ValueError):
    """Raise it in `step` if a text is no action: nothing has happened, and the model reads the message."""


class Environment(ABC):
    """One world; episodes in it follow each other. The methods may be ``async def``, and may block.

    A class of your own need not derive from this one. `reset` is given those of ``data``, ``seed`` and gymnasium's
    ``options`` (the row, too) that it names.
    """

    @abstractmethod
    def reset(self, data: Mapping[str, Any], seed: int) -> Any:
        """Begins an episode for a row; returns the first observation, or (observation, info)."""

    @abstractmethod
    def step(self, action: Any) -> Any:
        """Acts; returns a `StepResult` or its fields, or (observation, reward, is_over).

        Raises:
            InvalidAction: that is no action.
        """

    def close(self) -> None:
        """Frees what it holds; called once, after the last episode."""
