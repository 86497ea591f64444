"""`runner=ray`: the roles of each pool live in actors of Ray, and the step calls them from here.

A call returns at once with a reference for each field that the stage declares. What travels to a worker are the fields that
its stage reads, by Ray's object store; the controller holds the batch that it collected, and reads of the rest only what is
asked for. Order is that of `tandem.flow.order`, and a pool's calls run one at a time.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from tandem.api.activity import waiting
from tandem.api.engines import InferenceEngine
from tandem.api.failures import RankFailed, TandemError, WaitTimeout
from tandem.api.portable import survives_pickling
from tandem.api.team import Team
from tandem.api.weights import WeightVersion
from tandem.config.cores import usable_cores
from tandem.config.errors import ConfigError, kind_and_text
from tandem.config.experiment import TrainConfig
from tandem.config.extras import install_extra
from tandem.flow.conductor import Around, LocalConductor
from tandem.flow.critic import FOLDER, Models
from tandem.flow.order import Order, memory_of
from tandem.flow.plan import RunPlan
from tandem.flow.pool import Part, PoolMember, Spent, homes_of, is_stateless, pools_by_role, ranks_of
from tandem.flow.process import Process
from tandem.flow.promised import Promised, added_by
from tandem.flow.residency import Residency
from tandem.flow.stages import Stage
from tandem.launch.local import LAUNCHER
from tandem.launch.place import Place, free_port
from tandem.models.tokenizer import save_classifier_tokenizer

log = logging.getLogger(__name__)

READY_S = 600.0
"""Seconds that the cluster may take to give the cores."""

CLOSE_S = 10.0

REPLACED = 3
"""Times that Ray starts the process of a model that never changes again."""

ALONE = Place(0, 1, 1, 0, 1, "", 0)
MIB = 2**20


def _ray() -> Any:
    try:
        import ray  # noqa: PLC0415 an extra
        import ray.util.scheduling_strategies  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"runner=ray needs Ray, which is not installed here ({error}): {install_extra('ray')}") from error
    return ray


class Member(PoolMember):
    """The actor."""

    def machine(self, folder: str) -> tuple[str, str, int, int]:
        """The node's name in Ray, its address, a free port, and the number of this process. ``folder``: to work in."""
        with contextlib.suppress(OSError):
            os.chdir(folder)
        ray = _ray()
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), free_port(), os.getpid()

    def enter(self, environment: Mapping[str, str]) -> None:
        """``environment``: says which rank of its pool this is."""
        os.environ.pop(LAUNCHER, None)  # the controller's, whom nobody here follows
        os.environ.update(environment)
        self.open()

    def run(self, *how: Any) -> Any:
        if not self.is_open:  # a process that takes the place of one that died
            self.enter(ALONE.environment(0))
        return super().run(*how)


@dataclass(frozen=True)
class RemoteStage:
    """A method of a role that lives elsewhere."""

    role: str
    call: str


@dataclass(frozen=True)
class RemoteRole:
    """Stands for a role that lives elsewhere."""

    name: str
    calls: frozenset[str]

    def __getattr__(self, name: str) -> RemoteStage:
        if name in self.calls:
            return RemoteStage(self.name, name)
        raise AttributeError(
            f"{self.name} is in a worker of its pool, and only its stages can be called: {sorted(self.calls)}"
        )


@dataclass
class Pool:
    """The actors of a pool, rank 0 first."""

    name: str
    group: Any
    members: list[Any] = field(default_factory=list)
    machines: list[tuple[str, str, int, int]] = field(default_factory=list)
    last: list[Any] = field(default_factory=list)
    """The newest call of each member."""

    def all(self, method: str, *arguments: Any) -> list[Any]:
        """Has every member do it; references."""
        return [getattr(member, method).remote(*arguments) for member in self.members]


class Pools:
    """The workers of a run."""

    def __init__(self, config: TrainConfig, plan: RunPlan, engine: InferenceEngine | None):
        self._ray, self._config, self._plan, self._engine = _ray(), config, plan, engine
        self._homes, self.of_role = homes_of(plan), pools_by_role(plan)
        self.pools: dict[str, Pool] = {}
        self.roles: dict[str, Any] = {
            role.name: RemoteRole(role.name, frozenset(declared.name for declared in role.calls.values()))
            for role in plan.roles
            if role.name in self.of_role
        }
        self.models_there: Any = dict.fromkeys(self._homes)
        """The models that are elsewhere, by their names in the plan."""

        self._started = False
        self._closing = False

    def start(self, process: Process, steps: int, run: str) -> None:
        """Starts an actor for each rank of each pool; they open their models at the same time.

        Raises:
            WaitTimeout: the cluster does not give the cores.
            TandemError: a model cannot be opened, or a worker died.
        """
        assert self._engine is not None, "the controller generates"
        sizes = {name: ranks_of(self._plan, name) for name in dict.fromkeys(self.of_role.values())}
        self._connect(process.threads * sum(sizes.values()))
        capabilities = self._engine.capabilities
        if not capabilities & {"shared_memory", "disk", "ipc"}:
            capabilities |= {"shared_memory"}  # an engine of this process, which is another one than the publisher's
        for name, ranks in sizes.items():
            part = Part(
                self._config,
                self._plan.config or self._config,
                name,
                ranks,
                process.threads,
                steps,
                run,
                capabilities,
                self._engine.version,
            )
            self.pools[name] = self._actors(part)
        self._all([one for pool in self.pools.values() for one in self._enter(pool)], "the workers to open their models")
        threading.Thread(target=self._serve, args=(self.pools["actor"].members[0],), name="engine-desk", daemon=True).start()

    def _connect(self, cores: int) -> None:
        ray = self._ray
        if ray.is_initialized():
            return
        paths = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        address = os.environ.get("RAY_ADDRESS")
        own: dict[str, Any] = {} if address else {"num_cpus": max(cores, usable_cores())}
        before = signal.getsignal(signal.SIGTERM)
        ray.init(address=address, runtime_env={"env_vars": paths}, include_dashboard=False, logging_level="warning", **own)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray's would end this process, which saves first
        self._started = True

    def _actors(self, part: Part) -> Pool:
        ray, cores = self._ray, {"CPU": float(part.threads)}
        pool = Pool(part.pool, ray.util.placement_group([cores] * part.ranks, strategy="PACK"))
        self.pools[part.pool] = pool
        with waiting("cores of the Ray cluster"):
            if not pool.group.wait(READY_S):
                raise WaitTimeout(
                    f"Ray has not given {part.ranks} × {part.threads} core(s) for the pool {part.pool} within "
                    f"{READY_S:.0f} s; the cluster has {ray.cluster_resources()}"
                )
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        actor = ray.remote(concurrency_groups={"desk": 2})(Member)
        again = {"max_restarts": REPLACED, "max_task_retries": -1} if self._replaceable(part) else {}
        for rank in range(part.ranks):
            options = {"num_cpus": part.threads, "scheduling_strategy": strategy(pool.group, rank)}
            pool.members.append(actor.options(**options, **again).remote(part))
        pool.machines = self._all(pool.all("machine", os.getcwd()), f"the workers of {part.pool} to start")
        return pool

    def _replaceable(self, part: Part) -> bool:
        """True if Ray may start its process again: it is the only one, and its model never changes."""
        return part.ranks == 1 and is_stateless(self._plan, part.pool)

    def noticed(self, pool: Pool, process: int) -> bool:
        """True if a stage was run by another process than before, which has taken the place of one that died."""
        node, address, port, before = pool.machines[0]
        if process == before:
            return False
        pool.machines[0] = (node, address, port, process)
        log.warning("the worker of the %s (process %d) died; process %d has taken its place", pool.name, before, process)
        return True

    def _enter(self, pool: Pool) -> list[Any]:
        nodes = [node for node, *_ in pool.machines]
        _, address, port, _ = pool.machines[0]
        places = [
            Place(rank, 1, len(nodes), nodes[:rank].count(node), nodes.count(node), address, port).environment(0)
            for rank, node in enumerate(nodes)
        ]
        return [member.enter.remote(place) for member, place in zip(pool.members, places, strict=True)]

    def _serve(self, member: Any) -> None:
        """In a thread: does what the publisher asks of the engine, which is here."""
        ray = self._ray
        while not self._closing:
            try:
                name, arguments = ray.get(member.asked.options(concurrency_group="desk").remote())
                try:
                    answer = True, getattr(self._engine, name)(*arguments)
                except Exception as error:  # boundary: the publisher decides what becomes of it
                    fine = isinstance(error, TandemError) and survives_pickling(error)
                    answer = False, error if fine else RankFailed(f"the inference engine failed: {kind_and_text(error)}")
                ray.get(member.answer.options(concurrency_group="desk").remote(*answer))
            except ray.exceptions.RayError:  # the worker is gone, which whoever waits for it says
                return

    # ------------------------------------------------------------------ waiting

    def _all(self, references: Sequence[Any], what: str) -> list[Any]:
        """Waits for all of them; the first failure counts, also of one that others wait for."""
        pending = list(references)
        with waiting(what):
            while pending:
                done, pending = self._ray.wait(pending, num_returns=1)
                self.get(done[0])
        return [self.get(one) for one in references]

    def get(self, reference: Any) -> Any:
        """The result behind a reference.

        Raises:
            TandemError: the worker's.
            RankFailed: a worker died, or its machine; says whose.
        """
        ray = self._ray
        try:
            return ray.get(reference)
        except ray.exceptions.RayError as error:
            self._raise(error)

    def _raise(self, error: Any) -> NoReturn:
        ray = self._ray
        cause = error
        while isinstance(cause, ray.exceptions.RayTaskError) and cause.cause is not None:
            cause = cause.cause
        if isinstance(cause, TandemError):
            log.info("cause", exc_info=error)
            raise cause from None
        if isinstance(cause, ray.exceptions.RayActorError):
            who = self._who(getattr(cause, "actor_id", None))
            raise RankFailed(
                f"the worker of {who} died, and the run with it; the same command goes on from its newest checkpoint"
            ) from error
        raise RankFailed(f"Ray failed: {kind_and_text(cause)}") from error

    def _who(self, actor: str | None) -> str:
        for pool in self.pools.values():
            for rank, member in enumerate(pool.members):
                if member._actor_id.hex() == actor:
                    roles = ", ".join(role for role, home in self.of_role.items() if home == pool.name)
                    where = f" (process {pool.machines[rank][3]} on {pool.machines[rank][1]})" if pool.machines else ""
                    return f"the {pool.name}, rank {rank} of {len(pool.members)}, which has {roles},{where}".rstrip(",")
        return "a pool"

    # ------------------------------------------------------------------ a checkpoint

    def save(self, folder: Path) -> None:
        """Every pool writes its models."""
        self._everywhere("save", lambda pool: (folder,))

    def write(self, folder: Path) -> None:
        """Implements `Elsewhere.write`."""
        self._everywhere("write", lambda pool: (folder / f"pool-{pool}",))

    def load(self, folder: Path, unsaved: Mapping[str, Any]) -> None:
        """Implements `Elsewhere.load`."""
        self._everywhere("load", lambda pool: (folder, unsaved))

    def digests(self) -> dict[str, str]:
        """The digests of all trained weights, the actor's first."""
        found: dict[str, str] = {}
        for one in self._everywhere("digests", lambda pool: ()):
            found |= one
        return found

    def history(self) -> dict[int, WeightVersion]:
        """The versions published so far."""
        found: dict[int, WeightVersion] = self.get(self.pools["actor"].members[0].history.remote())
        return found

    def _everywhere(self, method: str, arguments: Callable[[str], tuple[Any, ...]]) -> list[Any]:
        calls = [one for name, pool in self.pools.items() for one in pool.all(method, *arguments(name))]
        return self._all(calls, f"the workers, {method}")

    def models(self, tokenizer: PreTrainedTokenizerBase) -> "RemoteModels":
        """Those that are saved."""
        return RemoteModels(None, None, tokenizer, pools=self)

    def conductor(self, around: Around, residency: Residency, plan: RunPlan) -> "RayConductor":
        """The one that calls them."""
        return RayConductor(self, around, residency, plan)

    def close(self) -> None:
        """Ends all workers, and the cluster if it was started here. Idempotent."""
        ray, self._closing = self._ray, True
        members = [member for pool in self.pools.values() for member in pool.members]
        with contextlib.suppress(ray.exceptions.RayError):
            ray.wait([member.close.remote() for member in members], num_returns=len(members), timeout=CLOSE_S)
        for member in members:
            ray.kill(member)
        for pool in self.pools.values():
            ray.util.remove_placement_group(pool.group)
        self.pools = {}
        if self._started:
            ray.shutdown()
            self._started = False


@contextlib.contextmanager
def open_pools(
    config: TrainConfig, plan: RunPlan, process: Process, steps: int, run: str, engine: InferenceEngine | None
) -> Iterator[Pools]:
    """The workers of a run, for a block."""
    pools = Pools(config, plan, engine)
    try:
        pools.start(process, steps, run)
        yield pools
    finally:
        pools.close()


@dataclass(frozen=True)
class RemoteModels(Models):
    """The models of a checkpoint: each pool writes its own."""

    pools: Pools | None = None

    def save(self, folder: Path) -> None:
        if self.pools is not None:
            self.pools.save(folder)

    def digests(self, team: Team) -> dict[str, str]:
        return {} if self.pools is None else self.pools.digests()

    def save_tokenizer(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)
        if (folder / FOLDER).is_dir():
            save_classifier_tokenizer(self.tokenizer, folder / FOLDER)


class RayConductor(LocalConductor):
    """Calls stages in the workers of their pools. What makes a batch, judges or keeps runs here."""

    def __init__(self, pools: Pools, around: Around, residency: Residency, plan: RunPlan):
        super().__init__(around, residency, plan)
        self._pools, self._ray, self._memory = pools, _ray(), memory_of(plan.residents)
        self._order: Order[Any] = Order(self._memory)
        self._begun: list[tuple[Stage, Pool, list[Any]]] = []
        self._costs: list[tuple[Stage, Spent, float]] = []
        self._replaced = 0

    def run(self, stage: Stage, of: Any, *arguments: Any, **named: Any) -> Any:
        """Calls the method that a stage is. The model of a reward is asked at once: what is chosen depends on it."""
        if stage.kind != "score" or stage.role not in self._pools.of_role:
            return super().run(stage, of, *arguments, **named)
        (batch,) = arguments
        _, scores = self._begin(stage, RemoteStage(stage.role, stage.call), ("score",), list(batch.items()), (), {})
        self._finish()
        return self._pools.get(scores)

    def call(self, stage: Stage, work: Any, *arguments: Any, **named: Any) -> Any:
        """Begins it in the pool of its role, and returns references."""
        if not isinstance(work, RemoteStage):
            self._finish()
            given = {name: self.value(one) for name, one in named.items()}
            found = super().call(stage, work, *map(self.value, arguments), **given)
            return self._kept(found) if stage.kind == "collect" else found
        batch = next((one for one in (*arguments, *named.values()) if isinstance(one, Promised)), None)
        plain = [one for one in arguments if one is not batch]
        plain_named = {name: one for name, one in named.items() if one is not batch}
        fields = None if batch is None else list(batch.read_by(stage.declared))
        metrics, *outputs = self._begin(stage, work, added_by(stage.declared), fields, plain, plain_named)
        if stage.kind == "pass" and batch is not None:
            return batch.with_output(stage.declared, dict(zip(added_by(stage.declared), outputs, strict=True)))
        return {metrics: stage.name}

    def _begin(
        self,
        stage: Stage,
        work: RemoteStage,
        added: Sequence[str],
        fields: Sequence[tuple[str, Any]] | None,
        arguments: Sequence[Any],
        named: Mapping[str, Any],
    ) -> list[Any]:
        """References of a call's metrics and of the fields that it adds. It waits for its fields, for earlier calls that it
        is to follow, and for the one before it in its pool."""
        pool = self._pools.pools[self._pools.of_role[stage.role]]
        how = (work.role, work.call, added, fields is not None, [name for name, _ in fields or ()], arguments, named)
        values, earlier = [one for _, one in fields or ()], self._order.before(stage)
        outputs = []
        for rank, member in enumerate(pool.members):
            returns = 1 + len(added) if rank == 0 else 1
            waits = [*earlier, *pool.last[rank : rank + 1]]
            found = member.run.options(num_returns=returns).remote(*how, *values, *waits)
            outputs.append(found if returns > 1 else [found])
        pool.last = [one[0] for one in outputs]
        self._order.add(stage, pool.last[0])
        self._begun.append((stage, pool, list(pool.last)))
        return list(outputs[0])

    def _kept(self, batch: TensorDict) -> Promised:
        """A batch that was collected: from now on the object store has it."""
        return Promised({str(name): (self._ray.put(column),) for name, column in batch.items()}, self._pools.get)

    def value(self, promised: Any) -> Any:
        """Reads a whole batch, or the metrics of a stage."""
        if isinstance(promised, Promised):
            return promised.batch()
        return self._metrics(promised) if isinstance(promised, dict) else promised

    def _metrics(self, promised: Mapping[Any, Any]) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, value in promised.items():
            found |= {name: value} if isinstance(name, str) else self._pools.get(name)[0]
        return found

    def _finish(self) -> None:
        """Waits for all calls that were begun; the first failure counts, also of one that others wait for."""
        begun, self._begun, self._order = self._begun, [], Order(self._memory)
        pending = [one for _, _, outputs in begun for one in outputs]
        for stage, pool, outputs in begun:
            began = time.monotonic()
            with self._around(stage), waiting(f"{stage.name}, in a worker of the pool {pool.name}"):
                while any(one in pending for one in outputs):
                    done, pending = self._ray.wait(pending, num_returns=1)
                    self._pools.get(done[0])
            cost = [self._pools.get(one)[1] for one in outputs]
            self._replaced += self._pools.noticed(pool, cost[0].process)
            spent = Spent(*cost[0][:3], sum(one.read_bytes for one in cost), cost[0].added_bytes)
            self._costs.append((stage, spent, time.monotonic() - began))

    def settle(self, batch: Any, metrics: Mapping[Any, Any]) -> tuple[Any, dict[str, float]]:
        """Waits for all calls of the step. The batch stays where it is, and can be asked for its fields.

        Raises:
            TandemError: of the first call that failed.
        """
        self._finish()
        calls, self._costs = self._costs, []
        found = self._metrics(metrics)
        found["remote/read_mib"] = sum(spent.read_bytes for _, spent, _ in calls) / MIB
        found["remote/added_mib"] = sum(spent.added_bytes for _, spent, _ in calls) / MIB
        found["remote/wait_s"] = sum(waited for *_, waited in calls)
        found["remote/replaced"] = float(self._replaced)
        for stage, spent, _ in calls:
            name = "remote/busy_s/" + stage.name.replace(": ", "_").replace(" ", "_")
            found[name] = found.get(name, 0.0) + spent.ended_s - spent.began_s
        return batch, found
