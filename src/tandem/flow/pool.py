"""The roles of one pool, in a process of their own: it opens their models, and runs their stages when it is told to.

A pool is the models that share a memory. The run's controller decides what is called; the process of a rank knows its part
of the plan, and has no rows, no rewards and no inference engine.
"""

import contextlib
import logging
import os
import queue
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from tensordict import TensorDict

from tandem.api.engines import InferenceEngine, InferencePart
from tandem.api.failures import RankFailed, TandemError
from tandem.api.portable import survives_pickling
from tandem.api.requests import LLMRequest, LLMResponse
from tandem.api.state import Stateful
from tandem.api.weights import WeightUpdate, WeightVersion
from tandem.config.errors import kind_and_text
from tandem.config.experiment import BaseConfig, TrainConfig
from tandem.config.state import RecoverConfig
from tandem.flow.critic import Models
from tandem.flow.order import CONTROLLER, memory_of, pools_of
from tandem.flow.plan import Resident, RunPlan, plan_run
from tandem.flow.process import Process, start_process
from tandem.flow.residency import Residency
from tandem.flow.residents import open_model
from tandem.flow.roles import open_roles
from tandem.flow.session import SAVED
from tandem.models.catalog import resolve
from tandem.models.tokenizer import load_tokenizer
from tandem.roles.critic import Critic
from tandem.state.random_state import RandomStates
from tandem.state.tree import load_part, read_parts, write_tree
from tandem.tracking.statistics import PhaseTimer

log = logging.getLogger(__name__)


def homes_of(plan: RunPlan) -> dict[str, str]:
    """The pool of each model in a training engine: the one in whose memory it is; a reference that takes over the actor's
    weights is with it. What generates is with the controller."""
    memory = memory_of(plan.residents)
    there = (one for one in plan.residents if one.engine is not None and one.head != "text")
    return {one.name: "actor" if one.refresh_every_steps else memory[one.name] for one in there}


def pools_by_role(plan: RunPlan) -> dict[str, str]:
    """The pool of each role that has one, and of each reward's model."""
    homes = homes_of(plan)
    scores = {one.name: homes[one.resident] for one in plan.scores if one.resident in homes}
    return {role: homes.get(pool, pool) for role, pool in pools_of(plan).items() if pool != CONTROLLER} | scores


def is_stateless(plan: RunPlan, pool: str) -> bool:
    """True if nothing in a pool ever changes, so that another process can take its place."""
    return not any(one.changes for one in plan.residents if homes_of(plan).get(one.name) == pool)


def ranks_of(plan: RunPlan, pool: str) -> int:
    """Processes of a pool: as many as the largest layout of its models has."""
    return max(len(one.ranks) for one in plan.residents if homes_of(plan).get(one.name) == pool)


@dataclass(frozen=True)
class Part:
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

    def alone(self, resident: Resident) -> Resident:
        """A model of the pool, whose ranks are counted from 0 in it."""
        engine = resident.engine
        assert engine is not None, "a pool has no engine that generates"
        return replace(resident, engine=replace(engine, backend=engine.backend.partition("@")[0]))


class Spent(NamedTuple):
    """The cost of a call."""

    process: int
    """The number of the process that did it."""

    began_s: float
    ended_s: float
    read_bytes: int
    """Fields that came to this process for it."""

    added_bytes: int


class EngineElsewhere(InferenceEngine):
    """The controller's inference engine, as the publisher of a pool sees it: what is asked of it, the controller does."""

    def __init__(self, capabilities: frozenset[str], version: WeightVersion):
        self._capabilities, self._version = capabilities, version
        self.asked: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def _ask(self, name: str, *arguments: Any) -> Any:
        self.asked.put((name, arguments))
        done, result = self.answers.get()
        if not done:
            raise result
        return result

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        raise NotImplementedError("episodes run where the engine is")

    @property
    def version(self) -> WeightVersion:
        return self._version

    @property
    def capabilities(self) -> frozenset[str]:
        return self._capabilities

    def prepare_weights(self, update: WeightUpdate) -> None:
        self._ask("prepare_weights", update)

    def commit_weights(self, version: WeightVersion) -> dict[str, float]:
        report: dict[str, float] = self._ask("commit_weights", version)
        self._version = version
        return report

    def discard_weights(self) -> None:
        self._ask("discard_weights")

    def pause(self) -> None:
        self._ask("pause")

    def resume(self) -> None:
        self._ask("resume")

    def sleep(self, parts: tuple[InferencePart, ...]) -> None:
        self._ask("sleep", parts)

    def wake(self, parts: tuple[InferencePart, ...]) -> None:
        self._ask("wake", parts)

    def statistics(self) -> dict[str, float]:
        found: dict[str, float] = self._ask("statistics")
        return found

    def close(self) -> None:
        self._ask("close")


class PoolMember:
    """One rank of a pool."""

    def __init__(self, part: Part):
        self._part = part
        self._stack = contextlib.ExitStack()
        self._engine: EngineElsewhere | None = None
        self._process: Process
        self._roles: dict[str, Any] = {}
        self._models: Models
        self._saved: dict[str, Stateful] = {}

    @property
    def is_open(self) -> bool:
        """True once its models are."""
        return bool(self._roles)

    def open(self) -> None:
        """Opens the models. `start_process` says which rank this is. Collective over the pool.

        Raises:
            TandemError: a model cannot be opened.
        """
        with self._telling():
            part = self._part
            actor = replace(part.config.actor, backend=f"fsdp:d{part.ranks}")
            process = self._process = start_process(
                replace(part.config, actor=actor, threads=part.threads, recover=RecoverConfig(), runner="local")
            )
            plan = plan_run(part.planned)
            homes = homes_of(plan)
            mine = tuple(part.alone(one) for one in plan.residents if homes.get(one.name) == part.pool)
            others = tuple(one for one in plan.residents if homes.get(one.name) != part.pool)
            plan = replace(plan, residents=(*mine, *others))
            folder = resolve(part.config.actor.path)
            tokenizer = load_tokenizer(folder)
            if process.is_main and part.pool == "actor":
                self._engine = EngineElsewhere(part.capabilities, part.version)
            residency = Residency(None, Path(), PhaseTimer(), open_model, process.team)
            here = frozenset(one.name for one in mine)
            opened = open_roles(
                part.config,
                plan,
                process,
                part.steps,
                part.run,
                folder,
                tokenizer,
                self._engine,
                residency,
                self._stack,
                here,
            )
            self._roles = opened.objects | opened.scores
            actor_role, critic = self._roles.get("actor"), self._roles.get("critic")
            trainer = None if actor_role is None else actor_role.engine
            self._models = Models(trainer, critic if isinstance(critic, Critic) else None, tokenizer)
            named = {"trainer": trainer, **self._roles, f"random of {part.pool}": RandomStates(process.device, process.team)}
            self._saved = {name: named[name] for name in (*SAVED, *named) if isinstance(named.get(name), Stateful)}

    def run(
        self,
        role: str,
        call: str,
        added: Sequence[str],
        has_batch: bool,
        names: Sequence[str],
        arguments: Sequence[Any],
        named: Mapping[str, Any],
        *values: Any,
    ) -> Any:
        """Runs a stage: gives its metrics and its cost, and then the fields of ``added``, None where there is none.

        ``names``: the fields of its batch, of which ``values`` has the tensors; of several of one name the first counts that
        is there. Further ``values`` were only waited for.
        """
        with self._telling(f"{role}.{call}"):
            batch: dict[str, torch.Tensor] = {}
            for name, value in zip(names, values, strict=False):
                batch |= {} if value is None or name in batch else {name: value}
            began_s, given = time.monotonic(), [TensorDict(batch, batch_size=[])] if has_batch else []
            found = getattr(self._roles[role], call)(*given, *arguments, **named)
            ended_s = time.monotonic()
            found = {"score": found} if isinstance(found, torch.Tensor) else found
            fields = [found[name] if name in found.keys() else None for name in added]
            cost = Spent(os.getpid(), began_s, ended_s, _bytes(batch.values()), _bytes(fields))
            output = ({} if added else found, cost)
            return (output, *fields) if added and self._process.is_main else output

    def asked(self) -> tuple[str, tuple[Any, ...]]:
        """Waits until something is asked of the inference engine."""
        assert self._engine is not None, "the publisher is on rank 0 of the actor's pool"
        return self._engine.asked.get()

    def answer(self, done: bool, result: Any) -> None:
        """The answer to what was asked last; not ``done``: the failure."""
        assert self._engine is not None, "as above"
        self._engine.answers.put((done, result))

    def save(self, folder: Path) -> None:
        """Writes the models of this pool that are trained. Collective."""
        with self._telling("saving"):
            self._models.save(folder)

    def digests(self) -> dict[str, str]:
        """The digests of the weights of this pool's trained models. Collective."""
        with self._telling("reading the weights"):
            return self._models.digests(self._process.team)

    def write(self, folder: Path) -> None:
        """Writes the state of this pool into an empty folder. Collective."""
        with self._telling("saving"):
            states = {name: part.state_dict() for name, part in self._saved.items()}
            write_tree(self._process.team, folder, states, writes=self._process.is_main)

    def load(self, folder: Path, unsaved: Mapping[str, Any]) -> None:
        """Goes on from the state of a checkpoint, whoever wrote it. Collective. ``unsaved``: of parts that it may not
        have."""
        with self._telling("resuming"):
            tree = {**unsaved, **read_parts(folder)}
            for name, part in self._saved.items():
                if name in tree or not name.startswith("random"):
                    load_part(name, part, tree, folder)

    def close(self) -> None:
        """Gives back what others would miss."""
        self._stack.close()

    def history(self) -> dict[int, WeightVersion]:
        """The versions published so far."""
        found: dict[int, WeightVersion] = self._roles["publisher"].history
        return found

    @contextlib.contextmanager
    def _telling(self, what: str = "opening its models") -> Any:
        try:
            yield
        except Exception as error:  # boundary: the controller hears of it
            self._tell(what, error)

    def _tell(self, what: str, error: Exception) -> NoReturn:
        log.info("cause", exc_info=error)
        if isinstance(error, TandemError) and survives_pickling(error):
            raise error
        raise RankFailed(f"the worker of the {self._part.pool}, at {what}: {kind_and_text(error)}") from error


def _bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
