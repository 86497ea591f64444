"""The roles of one pool, in a process of their own: it opens their models, and runs their stages when it is told to.

A pool is the models that share a memory. The run's controller decides what is called; the process of a rank knows its part
of the plan, and has no rows, no rewards and no inference engine.
"""

import contextlib
import os
import pickle
import queue
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

from tandem.api.state import Stateful
from tandem.api.weights import WeightVersion
from tandem.config.experiment import BaseConfig, TrainConfig
from tandem.config.state import RecoverConfig
from tandem.flow.critic import Models
from tandem.flow.episode_worker import AskedEngine, EpisodeWorker
from tandem.flow.order import CONTROLLER, memory_of, pools_of
from tandem.flow.plan import RunPlan, plan_run
from tandem.flow.process import start_process
from tandem.flow.residency import Residency
from tandem.flow.residents import open_model, open_roles
from tandem.flow.services import make_parts
from tandem.flow.session import SAVED
from tandem.models.catalog import resolve
from tandem.models.tokenizer import load_tokenizer
from tandem.roles.critic import Critic
from tandem.state.random_state import RandomStates
from tandem.state.tree import load_part, read_parts, write_tree
from tandem.tracking.statistics import PhaseTimer


def homes_of(plan: RunPlan) -> dict[str, str]:
    """The pool of each model in a training engine: the one in whose memory it is; a reference that takes over the actor's
    weights is with it. What generates is with the controller."""
    memory = memory_of(plan.residents)
    residents = (resident for resident in plan.residents if resident.engine is not None and resident.head != "text")
    return {resident.name: "actor" if resident.refresh_every_steps else memory[resident.name] for resident in residents}


def pools_by_role(plan: RunPlan) -> dict[str, str]:
    """The pool of each role that has one, and of each reward's model."""
    homes = homes_of(plan)
    scores = {score.name: homes[score.resident] for score in plan.scores if score.resident in homes}
    return {role: homes.get(pool, pool) for role, pool in pools_of(plan).items() if pool != CONTROLLER} | scores


def part_of(plan: RunPlan, pool: str) -> RunPlan:
    """The plan with the models of a pool alone, whose ranks are counted from 0 in it."""
    homes = homes_of(plan)
    residents = tuple(
        replace(resident, engine=replace(resident.engine, backend=resident.engine.backend.partition("@")[0]))
        for resident in plan.residents
        if resident.engine is not None and homes.get(resident.name) == pool
    )
    return replace(
        plan, residents=residents, scores=tuple(score for score in plan.scores if homes.get(score.resident) == pool)
    )


@dataclass(frozen=True)
class PoolPart:
    """All that a process of a pool is told."""

    config: TrainConfig
    planned: BaseConfig
    """The configuration that the plan is of: another one where it distils."""

    pool: str
    ranks: int
    threads: int
    steps: int
    run: str
    capabilities: frozenset[str]
    """The inference engine's, which the controller has."""

    version: WeightVersion
    """The one that it serves."""


class Spent(NamedTuple):
    """The cost of a call."""

    process: int
    """The number of the process that did it."""

    began: float
    """Seconds since 1970."""

    seconds: float
    read_bytes: int
    """Fields that came to this process for it."""

    added_bytes: int


class PoolMember:
    """One rank of a pool."""

    def __init__(self, part: PoolPart):
        self.part, self._stack, self.roles = part, contextlib.ExitStack(), dict[str, Any]()
        self.questions: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        """Calls of the controller's engine: number, name and arguments."""

        facts = (part.capabilities, part.version, part.config.rollout.wait_timeout_s)
        self.engine = AskedEngine(lambda _, number, call: self.questions.put((number, *call)), *facts)

    def open(self) -> None:
        """Opens the models; the environment says which rank this is. Collective over the pool."""
        part, plan = self.part, plan_run(self.part.planned)
        actor = replace(part.config.actor, backend=f"fsdp:d{part.ranks}")
        process = start_process(replace(part.config, actor=actor, **_as_ranks(part)))
        folder = resolve(part.config.actor.path)
        common = (part.steps, part.run, folder, load_tokenizer(folder), self.engine if process.is_main else None)
        residency = Residency(None, Path(), PhaseTimer(), open_model, process.team)
        opened = open_roles(part.config, plan, process, *common, residency, self._stack, part_of(plan, part.pool))
        self.roles, self.team = opened.objects | opened.scores, process.team
        trainer, critic = getattr(self.roles.get("actor"), "engine", None), self.roles.get("critic")
        self.models = Models(trainer, critic if isinstance(critic, Critic) else None, common[3])
        parts = {"trainer": trainer, **self.roles, f"random of {part.pool}": RandomStates(process.device, process.team)}
        self._saved = {name: parts[name] for name in (*SAVED, *parts) if isinstance(parts.get(name), Stateful)}

    def run(
        self, role: str, call: str, added: Sequence[str], names: Sequence[str] | None, plain: Any, named: Any, *values: Any
    ) -> Any:
        """Runs a stage: gives its metrics and its cost, and then the fields of ``added``, None where there is none.

        ``names``: the fields of its batch, of which ``values`` has the tensors, and of several of one name the first counts
        that is there; None: it takes no batch. Further ``values`` were only waited for.
        """
        batch: dict[str, torch.Tensor] = {}
        for name, value in zip(names or (), values, strict=False):
            batch |= {} if value is None or name in batch else {name: value}
        at, began = time.time(), time.monotonic()
        inputs = () if names is None else (TensorDict(batch, batch_size=[]),)
        result = getattr(self.roles[role], call)(*inputs, *plain, **named)
        if isinstance(result, torch.Tensor):  # the scores of a reward's model
            result = dict(zip(added, (result,), strict=True))
        fields = [result[name] if name in result.keys() else None for name in added]
        cost = Spent(os.getpid(), at, time.monotonic() - began, _bytes(batch.values()), _bytes(fields))
        output = ({} if added else result, cost)
        return (output, *fields) if added and self.team.main else output

    def save(self, folder: Path) -> None:
        """Writes the models of this pool that are trained. Collective."""
        self.models.save(folder)

    def moved(self) -> dict[str, float]:
        """Implements `Models.moved` in its own process."""
        return self.models.moved()

    def digests(self) -> dict[str, str]:
        """The digests of the weights of this pool's trained models. Collective."""
        return self.models.digests(self.team)

    def write(self, folder: Path) -> None:
        """Writes the state of this pool into an empty folder. Collective."""
        states = {name: part.state_dict() for name, part in self._saved.items()}
        write_tree(self.team, folder / f"pool-{self.part.pool}", states, writes=self.team.main)

    def load(self, folder: Path, unsaved: Mapping[str, Any]) -> None:
        """Goes on from the state of a checkpoint, whoever wrote it. Collective. ``unsaved``: of parts that it may not
        have."""
        tree = {**unsaved, **read_parts(folder)}
        for name, part in self._saved.items():
            if name in tree or not name.startswith("random"):
                load_part(name, part, tree, folder)

    def history(self) -> dict[int, WeightVersion]:
        """The versions published so far."""
        versions: dict[int, WeightVersion] = self.roles["publisher"].history
        return versions

    def close(self) -> None:
        """Gives back what others would miss."""
        self._stack.close()


class RolloutMember:
    """A rollout worker: it plays the run's episodes, and has neither models nor an engine."""

    def __init__(self, part: PoolPart):
        self.part, config = part, part.config
        facts = (part.capabilities, part.version)
        self.worker = EpisodeWorker(config.rollout, *facts, seed=config.seed, deterministic=config.deterministic)

    def open(self) -> None:
        """Makes the workflow, with its rewards, tools and environments."""
        config = self.part.config
        start_process(replace(config, actor=replace(config.actor, backend="fsdp:d1"), **_as_ranks(self.part)))
        self.episodes = make_parts(config, plan_run(self.part.planned), load_tokenizer(resolve(config.actor.path)))
        self.episodes.services.get("engine").start(self.worker.engine)

    def take(self, message: bytes) -> None:
        """An order of the controller's."""
        try:
            self.worker.take(pickle.loads(message), self.episodes.workflow)
        except Exception as error:  # the worker boundary: nobody waits for the answer of this call
            self.worker.fail(error)

    def answer(self, message: bytes) -> None:
        """The answer of its engine."""
        try:
            self.worker.engine.answer(*pickle.loads(message))
        except Exception as error:  # the worker boundary: as in `take`
            self.worker.fail(error)

    def said(self) -> list[bytes]:
        """Waits until there is something for the controller, and gives all that there is."""
        messages = [self.worker.said.get()]
        with contextlib.suppress(queue.Empty):
            while True:
                messages.append(self.worker.said.get_nowait())
        return messages

    def judged(self) -> tuple[int, dict[str, float]]:
        """The number of samples judged since the last call, and the metrics of the rewards."""
        reward = self.episodes.reward
        return reward.samples, reward.metrics()

    def close(self) -> None:
        """Cancels what runs, and closes what episodes need."""
        self.worker.close()
        self.episodes.close()


def _as_ranks(part: PoolPart) -> dict[str, Any]:
    """The keys that a process of a pool has otherwise than the controller."""
    return {"threads": part.threads, "recover": RecoverConfig(), "runner": "local"}


def _bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
