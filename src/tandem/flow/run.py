"""Runs the stages of a plan: `call`, `get` and `free`, the three verbs of every runner."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from tandem.flow.plan import Stage
from tandem.flow.residency import Residency

Work = Callable[..., Any]


class Runner(ABC):
    """Calls stages where their models are. What a stage returns stays there; the caller holds a handle."""

    @abstractmethod
    def call(self, stage: Stage, *handles: Any) -> Any:
        """Runs the stage on what the handles stand for; returns the handle of its result. Collective."""

    @abstractmethod
    def prepare(self, name: str) -> None:
        """Wakes what the stage of this name needs, for work that is not called through `call`. Collective."""

    @abstractmethod
    def learn(self, work: Mapping[str, Work], forget: Iterable[str] = ()) -> None:
        """Adds the work of stages, by their names. ``forget``: stages that there are no more."""

    @abstractmethod
    def get(self, handle: Any) -> Any:
        """The object that a handle stands for."""

    @abstractmethod
    def free(self, handle: Any) -> None:
        """The object is not needed any more."""


class LocalRunner(Runner):
    """Everything in this process: a handle is the object itself.

    The time of a stage counts towards `Stage.time`.
    """

    def __init__(
        self,
        around: Callable[[Stage], AbstractContextManager[Any]],
        residency: Residency,
    ):
        """``around``: a block for the time of a stage, which measures it. ``residency``: wakes what a stage needs."""
        self._work: dict[str, Work] = {}
        self._around, self._residency = around, residency

    def learn(self, work: Mapping[str, Work], forget: Iterable[str] = ()) -> None:
        """Keeps them, and nothing of those that are forgotten."""
        for name in forget:
            del self._work[name]
        self._work |= work

    def prepare(self, name: str) -> None:
        """Wakes what sleeps of it."""
        self._residency.enter(name)

    def call(self, stage: Stage, *handles: Any) -> Any:
        """Calls what the stage stands for, here and now, and measures it."""
        self._residency.enter(stage.name)
        with self._around(stage), self._residency.making(stage.name):
            return self._work[stage.name](*handles)

    def get(self, handle: Any) -> Any:
        """Gives the handle back, which is the object itself."""
        return handle

    def free(self, handle: Any) -> None:
        """Python's own counting frees it when the last name is gone."""
