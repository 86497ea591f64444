"""The processes of a pool: each opens the pool's models and runs their stages when the controller calls them.

A pool is a set of models that share memory. The controller decides what is called. The process of a rank knows its part of
the plan, and has no rows, no rewards and no inference engine. `EpisodeWorker` is for another kind of process, which runs
episodes and has no model (its counterpart in the controller is `tandem.rollout.remote_episodes`).
"""

import contextlib
import copy
import itertools
import os
import pickle
import queue
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

from tandem.api.failures import WaitTimeout
from tandem.api.requests import LLMRequest, LLMResponse
from tandem.api.state import Stateful
from tandem.api.weights import WeightUpdate, WeightVersion
from tandem.api.workflow import RolloutWorkflow
from tandem.config.experiment import BaseConfig, RecoverConfig, TrainConfig
from tandem.config.rollout import RolloutConfig
from tandem.engines.inference.engine_calls import Callers, Controlled
from tandem.flow.draw import CONTROLLER, memory_of, pools_of
from tandem.flow.plan import RunPlan, plan_run
from tandem.flow.process import start_process
from tandem.flow.residency import Residency
from tandem.flow.residents import open_model, open_roles
from tandem.flow.services import make_parts
from tandem.flow.session import SAVED, Models
from tandem.models.catalog import resolve
from tandem.models.tokenizer import load_tokenizer
from tandem.roles.critic import Critic
from tandem.rollout.episodes import EpisodeRunner
from tandem.rollout.event_loop import BackgroundLoop
from tandem.rollout.remote_episodes import Helper, portable
from tandem.state.tree import RandomStates, load_part, read_parts, write_tree
from tandem.tracking.statistics import PhaseTimer


class AskedEngine(Controlled):
    """A proxy for an inference engine in another process: it sends every call there and returns the answer."""

    def __init__(
        self,
        put: Callable[[str, int, Any], None],
        capabilities: frozenset[str],
        version: WeightVersion,
        patience_s: float,
    ):
        """``put(kind, number, content)`` sends a call. Kind ``ask``: content is a request, or None to cancel it. Kind
        ``control``: a method's name and arguments. The result arrives at `answer`. ``patience_s``: longest wait for a
        control call, in seconds."""
        self._put, self._capabilities, self._version, self._patience_s = put, capabilities, version, patience_s
        self._callers, self._calls, self._numbers = Callers(), dict[int, Future[Any]](), itertools.count(-1, -1)

    def saying(self, put: Callable[[str, int, Any], None]) -> "AskedEngine":
        """Returns a proxy that sends its calls by ``put`` and shares call numbers and answers with this one."""
        proxy = copy.copy(self)
        proxy._put = put
        return proxy

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        return await self._callers.wait(request, partial(self._put, "ask"), lambda number: self._put("ask", number, None))

    def control(self, name: str, *arguments: Any) -> dict[str, float]:
        number, call = next(self._numbers), Future[Any]()
        self._calls[number] = call
        self._put("control", number, (name, *arguments))
        try:
            answer = call.result(self._patience_s)
        except TimeoutError:
            raise WaitTimeout(
                f"the controller's engine has not answered {name} within {self._patience_s:g} s (rollout.wait_timeout_s)"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return dict(answer or {})

    def answer(self, number: int, answer: Any) -> None:
        """Delivers the answer to the call ``number``; numbers of control calls are below 0."""
        if number < 0:
            if call := self._calls.pop(number, None):
                call.set_result(answer)
        else:
            self._callers.resolve([(number, answer)])

    @property
    def version(self) -> WeightVersion:
        return self._version

    @property
    def capabilities(self) -> frozenset[str]:
        return self._capabilities

    def prepare_weights(self, update: WeightUpdate) -> None:
        self.control("prepare_weights", update)

    def commit_weights(self, version: WeightVersion) -> dict[str, float]:
        report = self.control("commit_weights", version)
        self._version = version
        return report

    def close(self) -> None:
        self.control("close")


class _Outbox:
    """Sends the outcomes of episodes to the controller, each with the number of the term in which the episode began."""

    def __init__(self, messages: "queue.SimpleQueue[bytes]", term: int):
        self._messages, self._term = messages, term

    def put(self, message: tuple[int, Any]) -> None:
        self._messages.put(pickle.dumps((self._term, "outcome", *message)))


class EpisodeWorker:
    """Runs episodes in a worker process. Only one thread may call `take`; other threads call `engine.answer` and read
    `said`."""

    def __init__(self, config: RolloutConfig, capabilities: frozenset[str], version: WeightVersion, **how: Any):
        """``how``: see `EpisodeRunner`."""
        self._config, self._how, self._term = config, how, 0
        self.said: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        """Pickled messages for `RolloutWorkers.heard`."""

        self.engine = AskedEngine(lambda *what: self._put(self._term, *what), capabilities, version, config.wait_timeout_s)
        self.loop = BackgroundLoop(on_blocked=lambda error: self._put(self._term, "blocked", 0, error))
        self._helper: Helper | None = None

    def _put(self, term: int, kind: str, number: int, content: Any) -> None:
        self.said.put(pickle.dumps((term, kind, number, content)))

    def take(self, message: tuple[int, Any], workflow: RolloutWorkflow) -> None:
        """Carries out a message of `RolloutWorkers`: the number of the term, and an order.

        The order None starts a new term: all episodes end, and answers of the former term no longer count.
        """
        term, order = message
        if order is None:
            self._term = term  # set first, so that an error in this order belongs to the new term
            if self._helper is not None:
                self._helper.stop()
            runner = EpisodeRunner(self.engine.saying(partial(self._put, term)), self._config, self.loop, **self._how)
            outbox = _Outbox(self.said, term)
            self._helper = Helper(outbox, self.loop, runner, self._config.wait_timeout_s, "a rollout worker")
        elif term == self._term and self._helper is not None:
            self._helper.take(order, workflow)

    def fail(self, error: Exception) -> None:
        """Reports an error that belongs to no episode; it ends the run."""
        self._put(self._term, "blocked", 0, portable(error, "a rollout worker"))

    def close(self) -> None:
        """Cancels all running episodes."""
        self.loop.close()


def homes_of(plan: RunPlan) -> dict[str, str]:
    """Maps each model in a train engine to its pool: the resident whose memory holds it. A reference that copies the actor's
    weights is in the actor's pool. Models that generate are not included: they are in the controller."""
    memory = memory_of(plan.residents)
    residents = (resident for resident in plan.residents if resident.engine is not None and resident.head != "text")
    return {resident.name: "actor" if resident.refresh_every_steps else memory[resident.name] for resident in residents}


def pools_by_role(plan: RunPlan) -> dict[str, str]:
    """Maps each role that runs in a pool, and each reward with a model in a pool, to the name of this pool."""
    homes = homes_of(plan)
    scores = {score.name: homes[score.resident] for score in plan.scores if score.resident in homes}
    return {role: homes.get(pool, pool) for role, pool in pools_of(plan).items() if pool != CONTROLLER} | scores


def part_of(plan: RunPlan, pool: str) -> RunPlan:
    """Returns the plan with only the models of ``pool``; their ranks are counted from 0 within the pool."""
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
    """Everything that a worker process receives from the controller when it is made."""

    config: TrainConfig
    planned: BaseConfig
    """The configuration from which the plan was made; in distillation this is not `config`."""

    pool: str
    ranks: int
    threads: int
    steps: int
    run: str
    capabilities: frozenset[str]
    """The capabilities of the controller's inference engine."""

    version: WeightVersion
    """The weight version that this engine serves."""


class Spent(NamedTuple):
    """The cost of one call to one worker process."""

    process: int
    """Process id of the worker."""

    began: float
    """Seconds since 1970."""

    seconds: float
    read_bytes: int
    """Bytes of the fields that were sent to this process for the call."""

    added_bytes: int


class PoolMember:
    """One rank of a pool."""

    def __init__(self, part: PoolPart):
        self.part, self._stack, self.roles = part, contextlib.ExitStack(), dict[str, Any]()
        self.questions: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        """Calls to the controller's engine that are to be sent: number, name and arguments."""

        facts = (part.capabilities, part.version, part.config.rollout.wait_timeout_s)
        self.engine = AskedEngine(lambda _, number, call: self.questions.put((number, *call)), *facts)

    def open(self) -> None:
        """Opens the models; environment variables say which rank this is. Collective over the pool."""
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
        """Runs a stage; returns its metrics, its cost and the fields of ``added`` (None for a field that it did not add).

        ``names``: names of the batch's fields; None: the stage takes no batch. ``values``: their tensors. If a name occurs
        several times, its first tensor that is not None is used. Values beyond the last name are ignored: they only made Ray
        wait for earlier calls.
        """
        batch: dict[str, torch.Tensor] = {}
        for name, value in zip(names or (), values, strict=False):
            batch |= {} if value is None or name in batch else {name: value}
        at, began = time.time(), time.monotonic()
        inputs = () if names is None else (TensorDict(batch, batch_size=[]),)
        result = getattr(self.roles[role], call)(*inputs, *plain, **named)
        if isinstance(result, torch.Tensor):  # scores of a reward model
            result = dict(zip(added, (result,), strict=True))
        fields = [result[name] if name in result.keys() else None for name in added]
        cost = Spent(os.getpid(), at, time.monotonic() - began, _bytes(batch.values()), _bytes(fields))
        output = ({} if added else result, cost)
        return (output, *fields) if added and self.team.main else output

    def save(self, folder: Path) -> None:
        """Saves the trained models of this pool into ``folder``. Collective."""
        self.models.save(folder)

    def moved(self) -> dict[str, float]:
        """Implements `Models.moved` for the actor's pool."""
        return self.models.moved()

    def digests(self) -> dict[str, str]:
        """Returns the digests of the weights of this pool's trained models, by name. Collective."""
        return self.models.digests(self.team)

    def write(self, folder: Path) -> None:
        """Writes the state of this pool into an empty folder. Collective."""
        states = {name: part.state_dict() for name, part in self._saved.items()}
        write_tree(self.team, folder / f"pool-{self.part.pool}", states)

    def load(self, folder: Path, unsaved: Mapping[str, Any]) -> None:
        """Loads the state of a checkpoint, also of one written without workers. Collective. ``unsaved``: default states of
        parts that a checkpoint may lack."""
        tree = {**unsaved, **read_parts(folder)}
        for name, part in self._saved.items():
            if name in tree or not name.startswith("random"):
                load_part(name, part, tree, folder)

    def history(self) -> dict[int, WeightVersion]:
        """Returns the versions published so far, by number."""
        versions: dict[int, WeightVersion] = self.roles["publisher"].history
        return versions

    def close(self) -> None:
        """Releases the resources of the roles, such as shared memory of the publisher."""
        self._stack.close()


class RolloutMember:
    """A rollout worker: it runs episodes, and has neither models nor an engine."""

    def __init__(self, part: PoolPart):
        self.part, config = part, part.config
        facts = (part.capabilities, part.version)
        self.worker = EpisodeWorker(config.rollout, *facts, seed=config.seed, deterministic=config.deterministic)

    def open(self) -> None:
        """Makes the workflow with its rewards, tools and environments."""
        config = self.part.config
        start_process(replace(config, actor=replace(config.actor, backend="fsdp:d1"), **_as_ranks(self.part)))
        self.episodes = make_parts(config, plan_run(self.part.planned), load_tokenizer(resolve(config.actor.path)))
        self.episodes.services.get("engine").start(self.worker.engine)

    def take(self, message: bytes) -> None:
        """Receives a pickled order of the controller."""
        try:
            self.worker.take(pickle.loads(message), self.episodes.workflow)
        except Exception as error:  # the worker boundary: the controller does not wait for this call
            self.worker.fail(error)

    def answer(self, message: bytes) -> None:
        """Receives a pickled answer of the controller's engine: number and answer."""
        try:
            self.worker.engine.answer(*pickle.loads(message))
        except Exception as error:  # the worker boundary: as in `take`
            self.worker.fail(error)

    def said(self) -> list[bytes]:
        """Waits for messages to the controller, and returns all that are ready."""
        messages = [self.worker.said.get()]
        with contextlib.suppress(queue.Empty):
            while True:
                messages.append(self.worker.said.get_nowait())
        return messages

    def judged(self) -> tuple[int, dict[str, float]]:
        """Returns the number of samples judged since the last call, and the metrics of the rewards."""
        reward = self.episodes.reward
        return reward.samples, reward.metrics()

    def close(self) -> None:
        """Cancels running episodes, and closes the objects that they use."""
        self.worker.close()
        self.episodes.close()


def _as_ranks(part: PoolPart) -> dict[str, Any]:
    """Returns the configuration keys in which a worker process differs from the controller."""
    return {"threads": part.threads, "recover": RecoverConfig(), "runner": "local"}


def _bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
