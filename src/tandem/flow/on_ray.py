"""`runner=ray`: the roles of each pool live in Ray actors, and the controller (this process) calls them.

A call returns immediately with a reference for each field that its stage declares. A worker receives the fields that its
stage reads through Ray's object store. The controller holds the batch that it collected and reads other fields only on
demand. `tandem.flow.draw` decides which calls wait for which; the calls of one pool run one at a time.
"""

import contextlib
import logging
import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tandem.api.activity import waiting
from tandem.api.engines import InferenceEngine
from tandem.api.failures import RankFailed, WaitTimeout, WorkerDied
from tandem.api.team import Team
from tandem.config.devices import usable_cores
from tandem.config.errors import ConfigError, TandemError, install_extra, kind_and_text
from tandem.config.experiment import TrainConfig
from tandem.flow.plan import RunPlan
from tandem.flow.pool import PoolMember, PoolPart, RolloutMember, homes_of, part_of, pools_by_role
from tandem.flow.process import Process
from tandem.flow.ray_head import Head
from tandem.flow.session import CRITIC_FOLDER, Models
from tandem.launch.launchers.ray import join_cluster
from tandem.launch.place import LAUNCHER, Place, free_port
from tandem.models.tokenizer import save_classifier_tokenizer
from tandem.rollout.remote_episodes import RolloutWorkers

log = logging.getLogger(__name__)

READY_S = 600.0
"""Longest wait for the cluster to provide the cores, in seconds."""

CLOSE_S = 10.0
BLAME_S = 4.0
"""Seconds to wait, after a rank failed, for the news that another rank died: its death may be the cause."""

PING_S = 1.0
"""Seconds between two pings of each worker."""

REPLACED = 3
"""Largest number of times that Ray restarts a worker process whose models never change."""

ALONE = Place(0, 1, 1, 0, 1, "", 0)
ROLLOUT = "rollout"
"""Name of the rollout workers' pool."""

MIB = 2**20


def _ray() -> Any:
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # only the first of several failures is reported
    try:
        import ray  # noqa: PLC0415 an extra
        import ray.util.scheduling_strategies  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"runner=ray needs Ray, which is not installed here ({error}): {install_extra('ray')}") from error
    return ray


def check_pools(config: TrainConfig, plan: RunPlan, device: str) -> None:
    """Checks that the roles of this run can be in Ray workers.

    Raises:
        ConfigError: a role cannot be in a Ray worker; the message says why.
    """
    _ray()
    obstacles = {
        "memory_limit_gib, under which models of one process take turns": config.memory_limit_gib is not None,
        "rollout.balance, which moves threads of one process": config.rollout.balance is not None,
        f"rollout.weights.channel={config.rollout.weights.channel}": not config.rollout.weights.terms.folder,
        f"rewards of models in the middle of an episode ({', '.join(plan.awaited)})": bool(plan.awaited),
        "rollout.workers and a model that the workflow talks to": bool(
            config.rollout.workers and plan.resident("partner") is not None
        ),
        "GPUs (device=cpu computes without them)": device != "cpu",
    }
    if obstacle := next((name for name, applies in obstacles.items() if applies), None):
        raise ConfigError(f"runner=ray does not go with {obstacle}; leave one of them out, or use runner=local")


class _Actor:
    """The methods that all actors have."""

    open: Callable[[], None]

    def _go_on(self) -> None:
        """Opens the models immediately if this process replaces one that died."""
        with warnings.catch_warnings(action="ignore"):  # Ray warns about its own API
            again = _ray().get_runtime_context().was_current_actor_reconstructed
        if again:
            self.enter(ALONE)

    def machine(self, folder: str) -> tuple[str, str, int]:
        """Returns the Ray node's name, its address and a free port; changes to the working directory ``folder``."""
        with contextlib.suppress(OSError):
            os.chdir(folder)
        ray = _ray()
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), free_port()

    def enter(self, place: Place) -> int:
        """Opens the models as the rank that ``place`` describes; returns the process id."""
        os.environ.pop(LAUNCHER, None)  # inherited from the controller; workers have no launcher
        os.environ.update(place.environment(0))
        self.open()
        return os.getpid()

    def alive(self) -> int:
        """Returns the process id. Ray runs this in a separate thread, so the answer comes also while a stage runs."""
        return os.getpid()

    def idle(self) -> None:
        """Does nothing. Ray runs this call after all earlier calls, so its result shows that they have ended."""


class PoolActor(_Actor, PoolMember):
    """A rank of a pool."""

    def __init__(self, part: PoolPart):
        super().__init__(part)
        self._go_on()

    def asked(self) -> tuple[Any, ...]:
        """Waits for the next call to the controller's inference engine; returns its number, name and arguments."""
        return self.questions.get()

    def answer(self, number: int, answer: Any) -> None:
        """Delivers the result of call ``number``, or its failure."""
        self.engine.answer(number, answer)


class RolloutActor(_Actor, RolloutMember):
    """A rollout worker."""

    def __init__(self, part: PoolPart):
        super().__init__(part)
        self._go_on()


@dataclass(frozen=True)
class Away:
    """A stand-in for a role whose object is in a worker."""

    name: str
    calls: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """Name → function that runs a stage, for a script that calls stages itself."""

    facts: dict[str, Callable[[], Any]] = field(default_factory=dict)
    """Name → function that computes the value of an attribute when a script reads the attribute."""

    def __getattr__(self, name: str) -> Any:
        if name in self.calls:
            return self.calls[name]
        if name in self.facts:
            return self.facts[name]()
        known = ", ".join(sorted([*self.calls, *self.facts]))
        raise AttributeError(f"{self.name} is in a Ray worker, where a script can use only: {known}; not {name!r}")


@dataclass(eq=False)
class Pool:
    """The actors of a pool, rank 0 first."""

    group: Any
    again: bool
    """True if Ray may restart dead processes and repeat their calls, because the pool's models never change."""

    members: list[Any] = field(default_factory=list)
    processes: list[int] = field(default_factory=list)
    """Process id of each member; empty until the models are opened."""

    nodes: list[str] = field(default_factory=list)
    last: list[Any] = field(default_factory=list)
    """Reference of the newest call of each member."""

    lost: WorkerDied | None = None
    """The error for a worker that died; None if all are alive."""


class Pools(Models):
    """The workers of a run, which hold its models; each pool saves its own models."""

    def __init__(
        self, config: TrainConfig, plan: RunPlan, engine: InferenceEngine | None, tokenizer: PreTrainedTokenizerBase
    ):
        super().__init__(None, None, tokenizer)
        self.ray, self._config, self._plan, self._engine = _ray(), config, plan, engine
        self.of_role = pools_by_role(plan)
        self.roles = {role.name: Away(role.name) for role in plan.roles if role.name in self.of_role}
        """Stand-ins for the roles that are in workers, by name."""

        self.roles["publisher"].facts["history"] = self.history
        self.pools: dict[str, Pool] = {}
        self._parts: dict[str, PoolPart] = {}
        self._names: dict[str, str] = {}
        self._head: Head | None = None
        self._started, self._closing = False, threading.Event()
        self._dead: set[int] = set()
        """Ids of processes that were already dead when they were to be killed."""

        self._watcher: threading.Thread | None = None
        self._lock = threading.Lock()
        """Protects `pools`: the death of a worker of a pool that was removed must be ignored."""

        self.when_lost: Callable[[Exception], None] = lambda error: None
        """Called in a thread with the error for a dead worker, so that waiting for results of episodes can end."""

        self.workers: RolloutWorkers | None = None
        """The rollout workers; None if episodes run in this process."""

        self.replaced = 0
        """Number of processes that have replaced dead ones."""
        self.records = config.tracking.trajectories_per_step != 0
        """True if each step's batch is fetched from the workers, because samples are recorded."""

    @property
    def residents(self) -> dict[str, Any]:
        """The names of the models that are in workers, each with None as a stand-in for the model."""
        return dict.fromkeys(homes_of(self._plan))

    def start(self, process: Process, steps: int, run: str) -> None:
        """Starts an actor for each rank of each pool; all open their models at the same time.

        Raises:
            WaitTimeout: the cluster does not provide the cores.
            TandemError: a model cannot be opened, or a worker died.
        """
        assert self._engine is not None, "the controller generates"
        parts = {name: part_of(self._plan, name) for name in dict.fromkeys(self.of_role.values())}
        sizes = {name: max(len(resident.ranks) for resident in part.residents) for name, part in parts.items()}
        players = self._config.rollout.workers
        self._connect(process.threads * sum(sizes.values()) + players)
        reads = self._engine.capabilities
        if not reads & {"shared_memory", "disk"}:
            reads |= {"shared_memory"}  # an engine inside this process, while the publisher is in another process
        for name, ranks in sizes.items():
            common = (process.threads, steps, run, reads, self._engine.version)
            self._parts[name] = PoolPart(self._config, self._plan.config or self._config, name, ranks, *common)
        if players:
            common = (1, *common[1:])
            self._parts[ROLLOUT] = PoolPart(self._config, self._plan.config or self._config, ROLLOUT, players, *common)
        # the watcher starts first: if a worker dies while models are opened, `mend` opens them again
        self._watcher = threading.Thread(target=self._watch, name="ray-watch", daemon=True)
        self._watcher.start()
        self._open(self._parts)

    def _open(self, names: Iterable[str]) -> None:
        """Starts the workers of these pools; all open their models at the same time."""
        for name in names:
            self._start(self._parts[name])
        entering = {name: self._enter(self.pools[name]) for name in names}
        self.all([reference for begun in entering.values() for reference in begun], "the workers to open their models")
        for name, begun in entering.items():
            self.pools[name].processes = [self.get(reference) for reference in begun]
            log.info("pool %s: process(es) %s", name, ", ".join(map(str, self.pools[name].processes)))
        if "actor" in entering:
            desk = (self.pools["actor"].members[0],)
            threading.Thread(target=self._serve, args=desk, name="engine-desk", daemon=True).start()
        if ROLLOUT in entering:
            self.workers = self._play(self.pools[ROLLOUT])

    def mend(self) -> None:
        """Repairs the pools after a worker's death. Intact pools finish their calls and stay. A pool that lost a worker gets
        new workers, whose models are as at the start until a checkpoint is loaded.

        Raises:
            WorkerDied: another worker died meanwhile.
        """
        assert self._engine is not None, "the controller generates"
        ending = {name: [member.idle.remote() for member in pool.members] for name, pool in self.pools.items()}
        with waiting("the remaining workers to finish their calls"):
            stays = {name for name, pool in self.pools.items() if pool.processes and not self._fails(ending[name])}
        with self._lock:
            gone = [name for name in self._parts if name not in stays or self.pools[name].lost is not None]
            old = [self.pools.pop(name) for name in gone if name in self.pools]
        for pool in old:
            self._drop(pool)
        for pool in self.pools.values():
            pool.last = []  # calls that waited for the dead worker have failed; new calls must not wait for them
        with contextlib.suppress(Exception):  # the worker boundary: an engine that fails here fails at the next delivery
            self._engine.discard_weights()
        for name in gone:
            self._parts[name] = replace(self._parts[name], version=self._engine.version)
        self._open(gone)
        self.replaced += sum(self._parts[name].ranks for name in gone)

    def _fails(self, references: Sequence[Any]) -> bool:
        """Waits for all references or for the first failure; returns True if a call failed."""
        pending = list(references)
        while pending:
            done, pending = self.ray.wait(pending, num_returns=1)
            try:
                self.ray.get(done[0])
            except self.ray.exceptions.RayError:
                return True
        return False

    def _drop(self, pool: Pool) -> None:
        for member in pool.members:
            self.ray.kill(member)
        self.ray.util.remove_placement_group(pool.group)

    def _watch(self) -> None:
        """Pings each worker, in a thread, so that a death is noticed whatever the controller waits for. A worker that does
        not answer for ``recover.silent_after_s`` seconds is killed and then counts as dead."""
        patience = self._config.recover.silent_after_s or float("inf")
        pings: dict[str, tuple[Any, float]] = {}
        while not self._closing.wait(PING_S):
            watched = {
                member._actor_id.hex(): (pool, rank, member)
                for pool in list(self.pools.values())
                if pool.processes and not pool.lost
                for rank, member in enumerate(pool.members)
            }
            pings = {key: pings.get(key) or (None, time.monotonic() + patience) for key in watched}
            for key, (pool, rank, member) in watched.items():
                reference, until = pings[key]
                if reference is None:
                    ask = member.alive.options(concurrency_group="watch", max_task_retries=0)
                    pings[key] = ask.remote(), until
                elif self.ray.wait([reference], timeout=0)[0]:
                    try:
                        self.noticed(pool, self.ray.get(reference), rank)
                        until = time.monotonic() + patience
                    except self.ray.exceptions.RayError as error:
                        if pool.again:
                            until = time.monotonic() + READY_S  # Ray restarts the process, which opens its model
                        elif not isinstance(error, self.ray.exceptions.ActorUnavailableError):  # it may still answer
                            self._lost(pool, key, "died", error)
                    pings[key] = None, until
                elif time.monotonic() > until:
                    self._kill(pool, rank)
                    pings[key] = None, time.monotonic() + READY_S
                    if not pool.again:
                        self._lost(pool, key, f"did not answer for {patience:g} s (recover.silent_after_s)", None)

    def _kill(self, pool: Pool, rank: int) -> None:
        """Kills a worker: on this machine by a signal, because a stopped process does not react to Ray; elsewhere by Ray."""
        process = pool.processes[rank]
        here = pool.nodes[rank] == self.ray.get_runtime_context().get_node_id()
        try:
            if here:
                os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            if process not in self._dead:  # Ray is still starting a replacement, which gets as much time again
                self._dead.add(process)
                return
            here = False  # the replacement never came up
        except PermissionError:  # Ray's processes are another user's
            here = False
        if not here:
            self.ray.kill(pool.members[rank], no_restart=not pool.again)
        log.warning("the Ray worker with process id %d did not answer and was killed", process)

    def _lost(self, pool: Pool, key: str, how: str, cause: Exception | None) -> None:
        with self._lock:
            if pool not in self.pools.values():
                return
            pool.lost = WorkerDied(f"the worker of {self._names[key]} {how}")
            log.info("cause: %s", pool.lost, exc_info=cause)
            self.when_lost(pool.lost)

    def check(self) -> None:
        """Raises `WorkerDied` if a worker died that held state which no other process has."""
        for pool in self.pools.values():
            if pool.lost is not None:
                raise pool.lost

    def _connect(self, cores: int) -> None:
        """Connects to the cluster at `RAY_ADDRESS`; if that is not set, starts a cluster that ends with the run."""
        if self.ray.is_initialized():
            return
        address, before = os.environ.get("RAY_ADDRESS"), signal.getsignal(signal.SIGTERM)
        paths = {name: os.environ[name] for name in ("PYTHONPATH", "TANDEM_MEDIA") if name in os.environ}
        if not address:
            # Ray would start workers in advance and with a lower CPU priority than the engine's process.
            settings = {"worker_niceness": 0, "prestart_worker_first_driver": False}
            cpus = max(cores, usable_cores())
            self._head = Head(num_cpus=cpus, include_dashboard=False, _system_config=settings)
            address = self._head.join(self.ray)
        self._started = True
        join_cluster(self.ray, address, runtime_env={"env_vars": paths}, logging_level="warning")
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray's handler would end this process before it saves

    def _start(self, part: PoolPart) -> None:
        """Starts the actors of a pool."""
        group = self.ray.util.placement_group([{"CPU": part.threads}] * part.ranks, strategy="PACK")
        changes = any(resident.changes for resident in part_of(self._plan, part.pool).residents)
        again = part.pool == ROLLOUT or (part.ranks == 1 and not changes)
        pool = self.pools[part.pool] = Pool(group, again=again)
        with waiting("cores of the Ray cluster"):
            if not group.wait(READY_S):
                raise WaitTimeout(
                    f"Ray has not given {part.ranks} × {part.threads} core(s) for the pool {part.pool} within "
                    f"{READY_S:.0f} s; the cluster has {self.ray.cluster_resources()}"
                )
        kind = RolloutActor if part.pool == ROLLOUT else PoolActor
        actor = self.ray.remote(concurrency_groups={"desk": 2, "watch": 1, "orders": 1, "answers": 1})(kind)
        place = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        how: dict[str, Any] = {"max_restarts": REPLACED, "max_task_retries": -1} if pool.again else {}
        for rank in range(part.ranks):
            member = actor.options(num_cpus=part.threads, scheduling_strategy=place(group, rank), **how).remote(part)
            pool.members.append(member)
            self._names[member._actor_id.hex()] = f"{part.pool} (rank {rank} of {part.ranks})"

    def _enter(self, pool: Pool) -> list[Any]:
        machines = self.all([actor.machine.remote(os.getcwd()) for actor in pool.members], "the workers to start")
        nodes = pool.nodes = [node for node, *_ in machines]
        places = [
            Place(rank, 1, len(nodes), nodes[:rank].count(node), nodes.count(node), *machines[0][1:])
            for rank, node in enumerate(nodes)
        ]
        if pool is self.pools.get(ROLLOUT):
            places = [ALONE] * len(nodes)
        return [member.enter.remote(place) for member, place in zip(pool.members, places, strict=True)]

    def _play(self, pool: Pool) -> RolloutWorkers:
        """Starts listening to the rollout workers."""

        def sends(member: Any, method: str, group: str) -> Callable[[Any], None]:
            send = getattr(member, method).options(concurrency_group=group, max_task_retries=0)
            return lambda message: send.remote(pickle.dumps(message))

        workers = RolloutWorkers(
            [sends(player, "take", "orders") for player in pool.members],
            [sends(player, "answer", "answers") for player in pool.members],
        )
        for place, member in enumerate(pool.members, 1):
            listening = (workers, pool, place, member)
            threading.Thread(target=self._listen, args=listening, name="rollout-worker", daemon=True).start()
        return workers

    def _listen(self, workers: RolloutWorkers, pool: Pool, place: int, member: Any) -> None:
        """Receives the messages of rollout worker ``place``, in a thread, and notices its death."""
        messages = member.said.options(concurrency_group="desk", max_task_retries=0)
        while not self._closing.is_set():
            try:
                for message in self.ray.get(messages.remote()):
                    workers.heard(place, message)
            except self.ray.exceptions.RayError as error:
                if self._closing.is_set() or pool not in self.pools.values():
                    return
                workers.gone(place)
                log.warning("rollout worker %d died; its episodes begin again in another one", place)
                log.info("cause", exc_info=error)
                try:
                    self.noticed(pool, self.ray.get(member.alive.remote()), place - 1)  # after Ray has restarted it
                except self.ray.exceptions.RayError as error:
                    if not workers.left:
                        self._lost(pool, member._actor_id.hex(), "died", error)
                    return
                workers.back(place)
            except Exception as error:  # the worker boundary: from here on the worker's messages are not received
                if not self._closing.is_set():
                    self.when_lost(error)
                return

    def judged(self) -> list[tuple[int, Mapping[str, float]]]:
        """Returns, for each rollout worker, the number of judged samples and the reward metrics. A worker that has died is
        left out, and its numbers are lost."""
        metrics = []
        for member in self.pools[ROLLOUT].members if ROLLOUT in self.pools else ():
            with contextlib.suppress(self.ray.exceptions.RayError):
                metrics.append(self.ray.get(member.judged.options(max_task_retries=0).remote()))
        return metrics

    def _serve(self, member: Any) -> None:
        """Receives calls that the publisher (in worker ``member``) makes to this process's engine, and runs them; in a
        thread."""
        next_call, answer = (getattr(member, name).options(concurrency_group="desk") for name in ("asked", "answer"))
        with contextlib.suppress(self.ray.exceptions.RayError):  # the worker died; `check` reports it
            while not self._closing.is_set():
                number, name, *arguments = self.ray.get(next_call.remote())
                try:
                    result = getattr(self._engine, name)(*arguments)
                except Exception as error:  # boundary: the publisher receives the error
                    result = Team().portable(error)
                self.ray.get(answer.remote(number, result))

    def all(self, references: Sequence[Any], what: str) -> list[Any]:
        """Waits for all references and returns their values. ``what``: their name in logs. The first failure is raised
        immediately, even if other ranks still wait for the failed one."""
        pending = list(references)
        with waiting(what):
            while pending:
                self.check()
                done, pending = self.ray.wait(pending, num_returns=1, timeout=PING_S)
                for reference in done:
                    self.get(reference)
        return [self.get(reference) for reference in references]

    def get(self, reference: Any) -> Any:
        """Waits for a reference and returns its value.

        Raises:
            TandemError: the worker raised this error.
            WorkerDied: a worker or its machine died; the message says which.
        """
        failures = self.ray.exceptions
        try:
            return self.ray.get(reference)
        except failures.RayError as error:
            log.info("cause", exc_info=error)
            cause: Any = error
            while isinstance(cause, failures.RayTaskError) and cause.cause is not None:
                cause = cause.cause
            if not isinstance(cause, failures.RayActorError):
                self._blame()
            if isinstance(cause, TandemError):
                raise cause from None
            if not isinstance(cause, failures.RayActorError):
                raise RankFailed(f"a worker on Ray failed: {kind_and_text(cause)}") from error
            who, words = self._names.get(getattr(cause, "actor_id", None) or "", "a pool"), str(cause)
            if "creation task" in words:
                raise RankFailed(f"the worker of {who} cannot start: {words.splitlines()[-1]}") from error
            raise WorkerDied(f"the worker of {who} died") from error

    def _blame(self) -> None:
        """Raises `WorkerDied` if a rank's failure was caused by the death of another rank, for which it waited in vain."""
        several = any(len(pool.members) > 1 for name, pool in self.pools.items() if name != ROLLOUT)
        until = time.monotonic() + (BLAME_S if several else 0.0)
        self.check()
        while time.monotonic() < until:
            time.sleep(0.1)
            self.check()

    def noticed(self, pool: Pool, process: int, rank: int = 0) -> None:
        """Records the process id of a rank, and counts a replacement if the id has changed."""
        with self._lock:
            before, pool.processes[rank] = pool.processes[rank], process
            self.replaced += before != process
        if before != process:
            log.warning("process %d of a model on Ray died; process %d has taken its place", before, process)

    def everywhere(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method on every worker that has models; returns the results."""
        members = [member for name, pool in self.pools.items() if name != ROLLOUT for member in pool.members]
        return self.all([getattr(actor, method).remote(*arguments) for actor in members], f"the workers: {method}")

    def save(self, folder: Path) -> None:
        self.everywhere("save", folder)

    def moved(self) -> dict[str, float]:
        first, *_ = self.all([member.moved.remote() for member in self.pools["actor"].members], "the actor's workers: moved")
        return dict(first)

    def digests(self, team: Team) -> dict[str, str]:
        return {name: digest for of_worker in self.everywhere("digests") for name, digest in of_worker.items()}

    def save_tokenizer(self, folder: Path) -> None:
        super().save_tokenizer(folder)
        if (folder / CRITIC_FOLDER).is_dir():
            save_classifier_tokenizer(self.tokenizer, folder / CRITIC_FOLDER)

    def late_writer(self, states: Mapping[str, Any]) -> None:
        """Returns None: with workers, training waits for each save."""

    def write(self, folder: Path) -> None:
        """Implements `Elsewhere.write`."""
        self.everywhere("write", folder)

    def load(self, folder: Path, unsaved: Mapping[str, Any]) -> None:
        """Implements `Elsewhere.load`."""
        self.everywhere("load", folder, unsaved)

    def history(self) -> Any:
        """The versions published so far."""
        return self.get(self.pools["actor"].members[0].history.remote())

    def close(self) -> None:
        """Ends all workers, and the cluster if this run started it. Idempotent."""
        self._closing.set()
        if self._watcher is not None:
            self._watcher.join(CLOSE_S)
        members = [member for pool in self.pools.values() for member in pool.members]
        if members:
            self.ray.wait([actor.close.remote() for actor in members], num_returns=len(members), timeout=CLOSE_S)
        for pool in self.pools.values():
            self._drop(pool)
        self.pools = {}
        if self._started:
            self.ray.shutdown()
            self._started = False
        if self._head is not None:
            self._head.close()
            self._head = None
