"""The objects of a run that its loop uses, with the models that a checkpoint saves, whatever the kind of training.

`weights.jsonl` of a run has a digest of each weight tensor after each step, so that two runs can be compared.
"""

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from tandem.api.engines import InferenceEngine, TrainEngine
from tandem.api.shared_files import append_line
from tandem.api.state import Stateful
from tandem.api.team import Team
from tandem.api.weights import WeightVersion, tensor_digest
from tandem.api.workflow import Dropped, Group, RolloutWorkflow
from tandem.data.loader import Curriculum, Loader
from tandem.flow.conductor import Conductor, EngineMeter, of_all_ranks
from tandem.flow.plan import RunPlan
from tandem.flow.residency import Residency
from tandem.flow.scoring import ModelGroupScorer
from tandem.flow.services import EpisodeParts
from tandem.flow.stages import handles
from tandem.models.tokenizer import save_classifier_tokenizer, save_tokenizer
from tandem.proof.verification import Verifier
from tandem.roles.critic import Critic, SharedCritic
from tandem.roles.reference import Reference
from tandem.rollout.executor import Rollout
from tandem.rollout.gate import Ledger
from tandem.state.run_folder import RunFolder
from tandem.tracking.statistics import PhaseTimer
from tandem.weights.publisher import WeightPublisher

if TYPE_CHECKING:
    from tandem.flow.on_ray import Pools

CRITIC_FOLDER = "critic"
"""The critic's folder in a checkpoint, beside the actor's files."""


@dataclass(frozen=True)
class Models:
    """The models of a checkpoint: the actor, and a separate critic, which is saved in a subfolder as a reward model."""

    actor: TrainEngine | None
    """The actor's engine; None if the actor is in another process."""

    critic: Critic | SharedCritic | None
    tokenizer: PreTrainedTokenizerBase
    is_classifier: bool = False
    """True if the actor scores texts and is saved as a sequence classifier."""

    prepare: Callable[[], None] = lambda: None
    """Wakes the models that are saved. Collective."""

    def save(self, folder: Path) -> None:
        self.prepare()
        if self.actor is not None:
            self.actor.save(folder)
        if isinstance(self.critic, Critic):
            self.critic.engine.save(folder / CRITIC_FOLDER)

    def moved(self) -> dict[str, float]:
        """Implements `TrainEngine.moved` for the actor."""
        return {} if self.actor is None else self.actor.moved()

    def late_writer(self, states: Mapping[str, Any]) -> Callable[[Path], None] | None:
        """Returns a function that writes the models later (`TrainEngine.late_writer`); None if a model cannot do this.
        ``states``: state of all parts of the run, by name (`recovery.parts_of`)."""
        actor = None if self.actor is None else self.actor.late_writer(states["trainer"])
        if not isinstance(self.critic, Critic):
            return actor
        critic = self.critic.engine.late_writer(states["critic"]["engine"])
        if actor is None or critic is None:
            return None

        def write(folder: Path) -> None:
            actor(folder)
            critic(folder / CRITIC_FOLDER)

        return write

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the name and float32 tensor of every weight; names of the critic's weights begin with `critic/`.
        Collective."""
        yield from () if self.actor is None else self.actor.weights()
        if isinstance(self.critic, Critic):
            yield from ((f"{CRITIC_FOLDER}/{name}", tensor) for name, tensor in self.critic.engine.weights())

    def digests(self, team: Team) -> dict[str, str]:
        """Returns the digest of every weight by name, on the first rank of the team; {} on the others. Collective."""
        with team.together(), team.whole(self.named_weights()) as stream:
            if team.main:
                return digests_of(stream)
            for _ in stream:
                pass
        return {}

    def save_tokenizer(self, folder: Path) -> None:
        """Saves the tokenizer into the folder of each model. For a classifier, the saved tokenizer has a padding token."""
        if self.is_classifier:
            save_classifier_tokenizer(self.tokenizer, folder)
        else:
            save_tokenizer(self.tokenizer, folder)
        if isinstance(self.critic, Critic):
            save_classifier_tokenizer(self.tokenizer, folder / CRITIC_FOLDER)


DIGESTS_FILE = "weights.jsonl"

DIGITS = 16
"""Number of hexadecimal digits stored of each SHA-256, which suffice to tell two tensors apart."""


def digests_of(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Returns the digest of each tensor's bytes, by name, for a stream of whole tensors. Takes about one second per 2 GB."""
    return {name: tensor_digest(tensor)[:DIGITS] for name, tensor in weights}


def append_digests(folder: Path, step: int, digests: Mapping[str, str]) -> None:
    """Adds a line for a step. If a step is repeated after a resume, its last line is valid. Raises `NotWritten`."""
    append_line(folder / DIGESTS_FILE, json.dumps({"step": step, "tensors": digests}))


def record_weights(team: Team, run: RunFolder | None, digests: Callable[[], Mapping[str, str]], step: int) -> None:
    """Adds a line of digests to `weights.jsonl`. Collective. ``run``: the run folder, on rank 0. ``digests``: collective
    function that returns the digests of all weights on rank 0.

    Raises:
        NotWritten: writing failed.
    """
    computed = digests()
    with team.together():
        if run is not None:
            append_digests(run.path, step, computed)


class Made(NamedTuple):
    """The data of a step that is recorded besides its metrics (`Tracker.log`)."""

    groups: Sequence[Group] = ()
    history: Mapping[int, WeightVersion] | None = None
    batch: TensorDict | None = None
    dropped: Sequence[Dropped] = ()


@dataclass
class Lasting(contextlib.AbstractContextManager["Lasting"]):
    """The inference engine and the workers, which outlive a session and are reused by the next session of the same run.
    Leaving the block closes them."""

    engine: InferenceEngine | None = None
    pools: Any = None
    """`tandem.flow.on_ray.Pools`; None before they start, and if this process has the models."""

    def close(self) -> None:
        """Closes the inference engine and the workers; the next session makes new ones."""
        with contextlib.ExitStack() as stack:
            for resource in (self.engine, self.pools):  # closed in reverse: a publisher in the pools may call the engine
                if resource is not None:
                    stack.callback(resource.close)
            self.engine = self.pools = None

    def __exit__(self, *_: object) -> None:
        self.close()


class Elsewhere(Protocol):
    """Other processes that have the models of a run: each writes and loads its own part of a checkpoint."""

    def write(self, folder: Path) -> None: ...

    def load(self, folder: Path, unsaved: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class TrainingSession(ABC):
    """The objects of a run that the training loop uses."""

    plan: RunPlan
    timer: PhaseTimer
    residency: Residency
    conductor: Conductor
    """Calls the stages of the plan."""

    team: Team
    """All ranks."""

    roles: dict[str, Any]
    """The objects whose methods are the plan's stages, by `Role.name`. The stages of rewards belong to the scorer
    instead."""

    def step(self) -> tuple[TensorDict, dict[str, float]]:
        """Trains one step; returns the batch with all its fields, and metrics. Collective."""
        assert self.plan.step is not None, "a plan that trains has a step"
        run = handles(self.plan.roles, self.conductor.of(self.roles), value=self.conductor.value, **self.given)
        return self.conductor.settle(*self.plan.step(run))

    @property
    def given(self) -> Mapping[str, Any]:
        """Attributes of the ``run`` besides its roles. The step does not read them, it only passes them to stages."""
        return {}

    def keep(self, name: str, *arguments: Any) -> Any:
        """Calls the stage ``name``, which follows a step, and returns its result; None if the plan lacks it. Collective."""
        stage = self.plan.stage(name)
        return None if stage is None else self.conductor.run(stage, self.roles[stage.role], *arguments)

    @property
    @abstractmethod
    def models(self) -> Models:
        """The models that are saved."""

    @property
    @abstractmethod
    def parts(self) -> Mapping[str, Stateful]:
        """The parts whose state is needed to resume a run, in the order of loading."""

    @abstractmethod
    def end_step(self) -> dict[str, float]:
        """Ends the step for the source of its batch; returns the source's metrics. Collective."""

    @property
    def elsewhere(self) -> Elsewhere | None:
        """The other processes that have the models; None if the ranks of this run have them."""
        return None

    @property
    def ledger(self) -> Ledger | None:
        """The ledger of prompts; None if training only reads rows."""
        return None

    def made(self, batch: TensorDict | None) -> Made:
        """Returns the data of the step that is recorded. ``batch``: with all its fields; None if the step had no batch."""
        return Made()

    def standing_still(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context manager in which no saved state changes."""
        return contextlib.nullcontext()


SAVED = (
    *("loader", "actor", "trainer", "reference", "critic", "constraint"),
    *("rollout", "publisher", "combination", "verifier"),
)
"""Names of the parts of a session whose state is saved, if the run has them."""

STATELESS = {
    "episodes": "are read only, or judge and run each sample independently; the state of a user's reward is not saved, and "
    "changes of the reward are in control.jsonl and are made again",
    "engine": "has only the weights that the publisher delivers, and requests that are made again",
    "plan": "follows from the configuration",
    "teacher": "is frozen",
    "meter": "measures time",
    "timer": "measures time",
    "conductor": "calls stages, and has no state",
    "residency": "moves parts of models, whose state is saved with the models",
    "scorer": "its models are frozen; models added by a later change are opened again when the change is repeated",
    "team": "is the set of ranks",
    "pools": "are processes, each of which saves its own parts",
}
"""All other fields and roles, each with the reason why it need not be saved. A test compares both tables with a session."""


@dataclass(frozen=True)
class Session(TrainingSession):
    """All objects that the loop of reinforcement learning uses. ``engine`` is None on ranks that do not generate."""

    episodes: EpisodeParts
    loader: Loader | Curriculum
    engine: InferenceEngine | None
    meter: EngineMeter
    scorer: ModelGroupScorer
    pools: "Pools | None" = None
    """The workers that hold the models; None: this process and its ranks hold them."""

    @property
    def trainer(self) -> TrainEngine:
        """The actor's engine."""
        return self.actor.engine

    @property
    def actor(self) -> Any:
        """The `Actor`, or a `Student` if there is a teacher."""
        return self.roles["actor"]

    @property
    def critic(self) -> Critic | SharedCritic | None:
        """The critic; None if no stage needs values."""
        return self.roles.get("critic")

    @property
    def reference(self) -> Reference | None:
        """The reference; None if nothing is compared with a reference."""
        return self.roles.get("reference")

    @property
    def rollout(self) -> Rollout:
        """The executor."""
        return self.roles["rollout"]

    @property
    def publisher(self) -> WeightPublisher:
        """The publisher, which delivers new weights to the inference engine."""
        return self.roles["publisher"]

    @property
    def verifier(self) -> Verifier:
        """The verifier, which proves which weights generated the tokens."""
        return self.roles["verifier"]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The actor's tokenizer."""
        return self.episodes.tokenizer

    @property
    def workflow(self) -> RolloutWorkflow:
        """The workflow that runs the episodes of training."""
        return self.episodes.workflow

    def measured(self) -> dict[str, float]:
        """Returns the metrics of engines and rewards since the last call, over all ranks that generate. Collective."""
        reward = self.episodes.reward
        per_rank = self.team.gather((reward.samples, {**self.meter.metrics(), **reward.metrics()}))
        return of_all_ranks(per_rank + ([] if self.pools is None else self.pools.judged()))

    @property
    def given(self) -> Mapping[str, Any]:
        """The loader and the workflow, by the names of the stage arguments that take them."""
        return {"loader": self.loader, "workflow": self.workflow}

    @property
    def models(self) -> Models:
        """The models that are saved: the actor and a separate critic, with the tokenizer."""
        if self.pools is not None:
            return self.pools
        return Models(self.trainer, self.critic, self.tokenizer, prepare=partial(self.conductor.prepare, "save"))

    def wake_by_method(self) -> None:
        """Wraps the method of every stage so that, under a memory limit, it first wakes the models that it needs. For
        scripts, which call these methods themselves."""
        stages = (stage for stage in self.plan.stages if stage.kind not in ("score", "keep"))
        for stage in stages if self.residency.plan is not None else ():
            role = self.roles[stage.role]
            setattr(role, stage.call, self.residency.awake_for(stage.name, getattr(role, stage.call)))

    @property
    def parts(self) -> dict[str, Stateful]:
        """The parts of `SAVED` that the run has, by name. The state of a shared critic is in the actor's state."""
        engine = {} if self.pools is not None else {"trainer": self.trainer}
        named = {"loader": self.loader, "combination": self.episodes.reward, **engine, **self.roles}
        return {name: named[name] for name in SAVED if isinstance(named.get(name), Stateful)}

    @property
    def elsewhere(self) -> "Pools | None":
        """The pools, whose workers write their own parts of a checkpoint."""
        return self.pools

    @property
    def ledger(self) -> Ledger:
        """The executor's ledger."""
        return self.rollout.ledger

    def standing_still(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context manager in which nothing is generated or judged."""
        return self.rollout.standing_still()

    def end_step(self) -> dict[str, float]:
        """Allows further episodes to begin; returns the metrics of executor, loader, engines and rewards."""
        self.rollout.end_step()
        rows = self.loader.metrics() if isinstance(self.loader, Curriculum) else {}
        return self.rollout.metrics() | rows | self.measured()

    def made(self, batch: TensorDict | None) -> Made:
        """Returns the step's groups, the weight versions that generated them, the batch and the dropped prompts."""
        if batch is None:
            return Made(dropped=self.rollout.take_dropped())
        if self.pools is None:
            return Made(self.rollout.last_groups, self.publisher.history, batch, self.rollout.take_dropped())
        read = self.conductor.value(batch) if self.pools.records else None
        return Made(self.rollout.last_groups, self.pools.history(), read, self.rollout.take_dropped())
