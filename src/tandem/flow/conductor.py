"""Calls the stages of a step where their models are."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from tandem.api.activity import span
from tandem.flow.plan import RunPlan
from tandem.flow.residency import Residency
from tandem.flow.stages import Role, Stage

Around = Callable[[Stage], AbstractContextManager[Any]]
"""A block for the time of a stage, which measures it."""


class Conductor(ABC):
    """Calls stages, and wakes what they need."""

    @abstractmethod
    def call(self, stage: Stage, work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Runs a stage, which is ``work``, on the arguments. Collective."""

    @abstractmethod
    def prepare(self, name: str) -> None:
        """Wakes what the stage of this name needs, for work that is not called through `call`. Collective."""

    def value(self, promised: Any) -> Any:
        """The result of a stage. A script calls it to look at one, for a conductor may only promise results."""
        return promised

    def settle(self, batch: Any, metrics: Mapping[Any, Any]) -> tuple[Any, dict[str, float]]:
        """Ends a step, which has returned these; what is only promised is waited for. Collective."""
        return batch, dict(metrics)

    def of(self, objects: Mapping[str, Any]) -> Callable[..., Any]:
        """The function that handles call, where roles are these objects."""

        def called(role: Role, call: str, *arguments: Any, **named: Any) -> Any:
            return self.run(role.stage(call), objects[role.name], *arguments, **named)

        return called

    def run(self, stage: Stage, of: Any, *arguments: Any, **named: Any) -> Any:
        """Calls the method that a stage is, of its role."""
        return self.call(stage, getattr(of, stage.call), *arguments, **named)


class LocalConductor(Conductor):
    """Everything in this process, at once. The time of a stage counts towards `Stage.time`."""

    def __init__(self, around: Around, residency: Residency, plan: RunPlan):
        """``residency``: wakes what a stage needs. ``plan``: of the run, for those whose calls wait for each other."""
        self._around, self._residency = around, residency

    def prepare(self, name: str) -> None:
        """Wakes what sleeps of it."""
        self._residency.enter(name)

    def call(self, stage: Stage, work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Calls it here and now, and measures it."""
        self._residency.enter(stage.name)
        with span(f"stage: {stage.name}"), self._around(stage), self._residency.making(stage.name):
            return work(*arguments, **named)
