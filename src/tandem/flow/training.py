"""The base of every run that trains, whatever it learns from."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tensordict import TensorDict

from tandem.api.engines import InferenceEngine
from tandem.api.samples import Dropped, Group
from tandem.api.state import Stateful
from tandem.api.team import Team
from tandem.api.weights import WeightVersion
from tandem.flow.conductor import Conductor
from tandem.flow.critic import Models
from tandem.flow.plan import RunPlan
from tandem.flow.residency import Residency
from tandem.flow.stages import handles
from tandem.rollout.ledger import Ledger
from tandem.tracking.statistics import PhaseTimer


class Made(NamedTuple):
    """The record of a step besides its metrics (`Tracker.log`)."""

    groups: Sequence[Group] = ()
    history: Mapping[int, WeightVersion] | None = None
    batch: TensorDict | None = None
    dropped: Sequence[Dropped] = ()


@dataclass
class Lasting(contextlib.AbstractContextManager["Lasting"]):
    """The engine and the workers, which outlive a session: the next of the same run takes them over. Leaving the block
    closes them."""

    engine: InferenceEngine | None = None
    pools: Any = None
    """`tandem.flow.on_ray.Pools`; None before they start, and where this process has the models."""

    def close(self) -> None:
        """Closes both; the next session makes others."""
        with contextlib.ExitStack() as stack:
            for one in (self.engine, self.pools):  # the pools first: a publisher of theirs may ask the engine
                if one is not None:
                    stack.callback(one.close)
            self.engine = self.pools = None

    def __exit__(self, *_: object) -> None:
        self.close()


class Elsewhere(Protocol):
    """Other processes, which have the models of a run: each writes and loads its own part of a checkpoint."""

    def write(self, folder: Path) -> None: ...

    def load(self, folder: Path, unsaved: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class TrainingSession(ABC):
    """The objects of a run, as the loop sees them."""

    plan: RunPlan
    timer: PhaseTimer
    residency: Residency
    conductor: Conductor
    """Calls the stages of the plan."""

    team: Team
    """All ranks."""

    roles: dict[str, Any]
    """The objects whose methods are the stages of the plan, by `Role.name`; those of rewards are the scorer's."""

    def step(self) -> tuple[TensorDict, dict[str, float]]:
        """Trains one step; returns the batch with all its fields, and metrics. Collective."""
        assert self.plan.step is not None, "a plan that trains has a step"
        run = handles(self.plan.roles, self.conductor.of(self.roles), value=self.conductor.value, **self.given)
        return self.conductor.settle(*self.plan.step(run))

    @property
    def given(self) -> Mapping[str, Any]:
        """The objects that a step passes on: it reads nothing of them."""
        return {}

    def keep(self, name: str, *arguments: Any) -> Any:
        """Calls the stage of this name, which follows a step; None if the plan has none. Collective."""
        stage = self.plan.stage(name)
        return None if stage is None else self.conductor.run(stage, self.roles[stage.role], *arguments)

    @property
    @abstractmethod
    def models(self) -> Models:
        """The models that are saved."""

    @property
    @abstractmethod
    def parts(self) -> Mapping[str, Stateful]:
        """The parts whose state a run needs to go on, in the order of loading."""

    @abstractmethod
    def end_step(self) -> dict[str, float]:
        """Ends the step where its batch came from; returns what is known there. Collective."""

    @property
    def elsewhere(self) -> Elsewhere | None:
        """The processes that have the models; None: this one and its ranks have them."""
        return None

    @property
    def ledger(self) -> Ledger | None:
        """The ledger of prompts; None if rows are only read."""
        return None

    def made(self, batch: TensorDict | None) -> Made:
        """The record of the step. ``batch``: with all its fields; None: there was none."""
        return Made()

    def standing_still(self) -> contextlib.AbstractContextManager[Any]:
        """A block in which nothing that is saved changes."""
        return contextlib.nullcontext()
