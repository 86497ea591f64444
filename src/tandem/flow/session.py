"""A run's objects, made in order and closed in reverse, whatever happens."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from tandem.api.engines import InferenceEngine, TrainEngine
from tandem.api.state import Stateful
from tandem.api.team import Team
from tandem.api.weights import WeightVersion
from tandem.api.workflow import RolloutWorkflow
from tandem.config.arithmetic import generating_ranks, placement, rollout_here, servers_sleep
from tandem.config.experiment import BaseConfig, TrainConfig
from tandem.config.machines import machines
from tandem.data.loader import Curriculum, Loader
from tandem.engines.inference.build import build_inference_engine, engine_threads
from tandem.engines.inference.remote.keeping import Keeping
from tandem.flow.balance import Balance, make_balance
from tandem.flow.conductor import Conductor, LocalConductor
from tandem.flow.critic import Models
from tandem.flow.delivery import weights_folder
from tandem.flow.extensions import own_inference_engine
from tandem.flow.parts import Rows, make_loader, make_rollout, with_room
from tandem.flow.plan import RunPlan, plan_run
from tandem.flow.process import Process
from tandem.flow.residency import Residency
from tandem.flow.residents import Roles, Scores, open_model, open_partner, open_roles, open_scores
from tandem.flow.scoring import ModelGroupScorer
from tandem.flow.services import EpisodeParts, make_parts
from tandem.flow.sleep_plan import AGAIN
from tandem.flow.stages import Stage
from tandem.flow.state_parts import sleep_plan_here
from tandem.flow.team import form_generators
from tandem.flow.training import Lasting, Made, TrainingSession
from tandem.flow.writing import WritingModel
from tandem.launch.rank import kept_servers
from tandem.models.catalog import resolve
from tandem.models.precision import resolve_dtype
from tandem.models.tokenizer import load_tokenizer
from tandem.proof.verification import Verifier
from tandem.rewards.reward import Reward
from tandem.roles.critic import Critic, SharedCritic
from tandem.roles.reference import Reference
from tandem.rollout.executor import Rollout
from tandem.rollout.ledger import Ledger
from tandem.state.run_folder import run_path
from tandem.tracking.statistics import PhaseTimer
from tandem.weights.publisher import WeightPublisher

_kept = False
"""True while a run keeps its objects from the garbage collector; global, because a process has one collector."""


def keep_from_collector(stack: contextlib.ExitStack) -> None:
    """Exempts all present objects from garbage collection until ``stack`` closes.

    Models and libraries are hundreds of thousands of objects. A full collection walks over all of them, up to 0.2 s each
    time, and meanwhile no request of an agent is answered and no token is drawn (benchmarks/recorder.py --no-freeze). If the
    process has called `gc.freeze` before the run, nothing is changed.
    """
    global _kept
    if gc.get_freeze_count():
        return
    _kept = True
    stack.callback(_let_go)
    collect_and_keep()


def collect_and_keep() -> None:
    """Collects all garbage, including models that are gone, and exempts the remaining objects from collection."""
    if _kept:
        gc.unfreeze()
    gc.collect()
    if _kept:
        gc.freeze()


def _let_go() -> None:
    global _kept
    _kept = False
    gc.unfreeze()


class EngineMeter:
    """Measures how much of the training time the engine generates, and who waits for whom. Call `begins` at every stage, or
    use it as a ``with`` block around training.

    Without an engine (ranks other than 0) all figures are 0. ``balance`` receives the waiting times after each step.
    """

    def __init__(self, engine: InferenceEngine | None, balance: Balance | None = None):
        self.engine, self._balance = engine, balance
        self._began: float | None = None  # None: the trainer is not training
        self._busy_s = 0.0
        self._overlap = 0.0
        self._counted = (0.0, 0.0)
        self._preempted = 0.0
        self._wait_began: float | None = None  # None: the trainer is not waiting for a batch
        self._waited_s = 0.0
        self._last = time.perf_counter()

    def _statistics(self, name: str) -> float:
        return self.engine.statistics().get(name, 0.0) if self.engine is not None else 0.0

    def begins(self, phase: str) -> None:
        """Notes that a stage of ``phase`` begins. Training lasts from the first stage of `train` to the next stage of
        another phase."""
        if self._wait_began is not None:
            self._waited_s += time.perf_counter() - self._wait_began
        self._wait_began = time.perf_counter() if phase == "generate" else None
        if phase == "train" and self._began is None:
            self._began, self._busy_s = time.perf_counter(), self._statistics("busy_s")
        elif phase != "train" and self._began is not None:
            trained_s = max(time.perf_counter() - self._began, 1e-9)
            self._overlap = min(1.0, (self._statistics("busy_s") - self._busy_s) / trained_s)
            self._began = None

    def __enter__(self) -> None:
        self.begins("train")

    def __exit__(self, *_: object) -> None:
        self.begins("after training")

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call.

        ``time/overlap``: share of the last training time during which the engine generated, 0 to 1. ``time/trainer_wait``
        and ``time/engine_idle``: shares of the time in which the trainer waited for a batch, and in which the engine did not
        generate. ``tokens_per_s/generate``: generated tokens per second of the engine's busy time. A fleet adds ``fleet/…``;
        the embedded engine adds ``rollout/preempted``, the number of times that a request gave up its place in the cache.
        """
        statistics = self.engine.statistics() if self.engine is not None else {}
        (tokens, busy_s), self._counted = (
            self._counted,
            (statistics.get("generated_tokens", 0.0), statistics.get("busy_s", 0.0)),
        )
        rate = (self._counted[0] - tokens) / max(self._counted[1] - busy_s, 1e-9)
        now = time.perf_counter()
        passed_s, self._last = max(now - self._last, 1e-9), now
        waits = {
            "time/trainer_wait": min(1.0, self._waited_s / passed_s),
            "time/engine_idle": min(1.0, max(0.0, 1.0 - (self._counted[1] - busy_s) / passed_s)) if self.engine else 0.0,
        }
        self._waited_s = 0.0
        # those of a fleet, and of an engine of the user's
        more = {name: value for name, value in statistics.items() if "/" in name}
        if "preempted" in statistics:
            before, self._preempted = self._preempted, statistics["preempted"]
            more["rollout/preempted"] = self._preempted - before
        threads = self._balance.after_step(waits) if self._balance is not None else {}
        return {"time/overlap": self._overlap, **waits, **threads, "tokens_per_s/generate": rate, **more}


def of_all_ranks(per_rank: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Combines engine and reward metrics of all ranks. ``per_rank``: (number of judged samples, metrics) of each rank.

    Rates, preemptions and counts of fleets are added; of overlaps and longest times the maximum counts; all others are means
    over the samples.
    """
    metrics = dict(per_rank[0][1])
    for name in {name for _, rank_metrics in per_rank for name in rank_metrics}:
        weighted = [(samples, rank_metrics[name]) for samples, rank_metrics in per_rank if name in rank_metrics]
        count = sum(samples for samples, _ in weighted)
        if "_per_s" in name or name == "rollout/preempted" or (name.startswith("fleet/") and name != "fleet/work_spread"):
            metrics[name] = sum(value for _, value in weighted)
        elif name in ("time/overlap", "time/trainer_wait", "time/engine_idle", "fleet/work_spread") or "_max" in name:
            metrics[name] = max(value for _, value in weighted)
        else:
            metrics[name] = sum(samples * value for samples, value in weighted) / count if count else weighted[0][1]
    return metrics


if TYPE_CHECKING:
    from tandem.flow.on_ray import Pools

SAVED = (
    *("loader", "actor", "trainer", "reference", "critic", "constraint"),
    *("rollout", "publisher", "combination", "verifier"),
)
"""Names of the parts of a session that have a state, if the run has them."""

STATELESS = {
    "episodes": "are read only, or judge and run each sample by itself; what a user's reward remembers is his own, and what "
    "it was changed by is in control.jsonl, from which the changes are made again",
    "engine": "has no more than the weights that the publisher delivers, and requests that are made again",
    "plan": "follows from the configuration",
    "teacher": "is frozen",
    "meter": "measures time",
    "timer": "likewise",
    "conductor": "calls stages, and remembers nothing",
    "residency": "moves what others have; what slept in a file is in the checkpoint, and the file is gone with the process",
    "scorer": "its models are frozen; those that came later are opened again with the change that brought them",
    "team": "is the ranks that there are",
    "pools": "are processes, each of which saves its own parts",
}
"""The other fields and roles, each with the reason why it need not be saved. A test compares both tables with a session."""


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
        engine: TrainEngine = self.actor.engine
        return engine

    @property
    def actor(self) -> Any:
        """The `Actor`; a `Student` if there is a teacher."""
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
        rollout: Rollout = self.roles["rollout"]
        return rollout

    @property
    def publisher(self) -> WeightPublisher:
        """The publisher, which delivers new weights to the inference engine."""
        publisher: WeightPublisher = self.roles["publisher"]
        return publisher

    @property
    def verifier(self) -> Verifier:
        """The verifier, which proves which weights generated the tokens."""
        verifier: Verifier = self.roles["verifier"]
        return verifier

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The actor's tokenizer."""
        return self.episodes.tokenizer

    @property
    def workflow(self) -> RolloutWorkflow:
        """The workflow that plays episodes of training."""
        return self.episodes.workflow

    def measured(self) -> dict[str, float]:
        """Metrics of engines and rewards since the last call, over all ranks that generate. Collective."""
        reward = self.episodes.reward
        per_rank = self.team.gather((reward.samples, {**self.meter.metrics(), **reward.metrics()}))
        return of_all_ranks(per_rank + ([] if self.pools is None else self.pools.judged()))

    @property
    def given(self) -> Mapping[str, Any]:
        """The loader and the workflow, by the names of the stage arguments that take them."""
        return {"loader": self.loader, "workflow": self.workflow}

    @property
    def models(self) -> Models:
        """The actor, a critic with a model of its own, and the tokenizer."""
        if self.pools is not None:
            return self.pools
        return Models(self.trainer, self.critic, self.tokenizer, prepare=partial(self.conductor.prepare, "save"))

    def wake_by_method(self) -> None:
        """Makes the method of every stage first wake the models that it needs, under a memory limit. For scripts, which call
        these methods themselves."""
        stages = (stage for stage in self.plan.stages if stage.kind not in ("score", "keep"))
        for stage in stages if self.residency.plan is not None else ():
            role = self.roles[stage.role]
            setattr(role, stage.call, self.residency.awake_for(stage.name, getattr(role, stage.call)))

    @property
    def parts(self) -> dict[str, Stateful]:
        """The parts of `SAVED` that the run has, by name. The state of a shared critic is in the actor's model."""
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
        """A block in which nothing is generated or judged."""
        return self.rollout.standing_still()

    def end_step(self) -> dict[str, float]:
        """Lets further episodes begin; returns the metrics of executor, loader, engines and rewards."""
        self.rollout.end_step()
        rows = self.loader.metrics() if isinstance(self.loader, Curriculum) else {}
        return self.rollout.metrics() | rows | self.measured()

    def made(self, batch: TensorDict | None) -> Made:
        """The step's groups, the weight versions that wrote them, and the dropped prompts."""
        if batch is None:
            return Made(dropped=self.rollout.take_dropped())
        if self.pools is None:
            return Made(self.rollout.last_groups, self.publisher.history, batch, self.rollout.take_dropped())
        read = self.conductor.value(batch) if self.pools.records else None
        return Made(self.rollout.last_groups, self.pools.history(), read, self.rollout.take_dropped())


@contextlib.contextmanager
def open_session(
    config: TrainConfig,
    process: Process,
    rows: Rows,
    steps: int,
    run: str,
    plan: RunPlan | None = None,
    parts: EpisodeParts | None = None,
    lasting: Lasting | None = None,
) -> Iterator[Session]:
    """Makes the objects of a run. On leaving, engine, workers and shared memory are gone, also after an error.

    Args:
        run: the run's name for servers that several runs may reach; unique among runs, equal on all ranks.
        plan: the models of the run; None plans them from ``config``.
        parts: objects of the episodes, which are closed with the session; None makes them.
        lasting: owner of the engine and the workers, which may come from an earlier session; None makes one for this
            session.
    """
    plan = plan or plan_run(config)
    folder = resolve(config.actor.path)
    assert plan.algorithm is not None, "every plan of such a run has an algorithm"
    timer = PhaseTimer()
    residency = make_residency(config, plan, timer, process.team)
    generators = form_generators(generating_ranks(config), process.team, config.rollout.wait_timeout_s)
    with contextlib.ExitStack() as stack:
        lasting = lasting or stack.enter_context(Lasting())
        with process.team.together(), residency.making(AGAIN):
            parts = parts or make_parts(config, plan, load_tokenizer(folder))
            stack.callback(parts.close)
            if lasting.engine is None:
                roomy = with_room(config, process.device, rows, parts.tokenizer, folder, parts.services.asked)
                lasting.engine = make_engine(roomy, process, folder, run)
            engine = lasting.engine
            parts.services.get("engine").start(engine)
        residency.add_engine(engine)
        pools = None
        if config.runner == "ray":
            from tandem.flow.on_ray import Pools  # noqa: PLC0415 Ray is an extra
            from tandem.flow.ray_conductor import RayConductor  # noqa: PLC0415

            pools = lasting.pools
            if pools is None:
                pools = lasting.pools = Pools(config, plan, engine, parts.tokenizer)
                pools.start(process, steps, run)
            opened = Roles(pools.roles, open_scores(config, plan, process, parts.tokenizer, residency, pools.residents))
        else:
            opened = open_roles(config, plan, process, steps, run, folder, parts.tokenizer, engine, residency, stack)
        parts.models.start(opened.scores, process.device)
        with process.team.together():
            start_partner(open_partner(config, plan, process, residency), parts, stack)
            stack.callback(parts.close)  # once nothing rolls out any more, and before the engine
            loader, meter = make_loader(config, rows), EngineMeter(engine, make_balance(config.rollout, process, engine))
            conduct = LocalConductor if pools is None else partial(RayConductor, pools)
            conductor = conduct(lambda stage: _measured(stage, timer, meter), residency, plan)
            scorer = stack.enter_context(
                contextlib.closing(make_scorer(config, plan, opened.scores, parts.reward, conductor, process.team))
            )
            workers = None if pools is None else pools.workers
            if workers is not None:
                workers.workflow = parts.workflow
            rollout = make_rollout(config, plan.algorithm.filter, engine, loader, scorer, process.team, generators, workers)
            stack.callback(rollout.close)
            if pools is not None:
                pools.when_lost = rollout.fail
        keep_from_collector(stack)
        roles = {**opened.objects, "rollout": rollout}
        objects = (roles, parts, loader, engine, meter, scorer)
        yield Session(plan, timer, residency, conductor, process.team, *objects, pools)


def start_partner(model: WritingModel | None, parts: EpisodeParts, stack: contextlib.ExitStack) -> None:
    """Gives the workflow's partner the engine and tokenizer of ``model``, which closes with the stack; None: there is
    none."""
    if model is not None:
        stack.callback(model.close)
        parts.services.get("partner").start(model.engine, model.tokenizer)


@contextlib.contextmanager
def _measured(stage: Stage, timer: PhaseTimer, meter: EngineMeter) -> Iterator[None]:
    """A block whose time counts as the stage's."""
    meter.begins(stage.time)
    with timer(stage.time, stage.role, stage.name):
        yield


def make_scorer(
    config: TrainConfig, plan: RunPlan, roles: Scores, reward: Reward, conductor: Conductor, team: Team
) -> ModelGroupScorer:
    """The scorer, which asks the models of the reward and has it add up what needs the whole batch."""
    return ModelGroupScorer(plan, roles, reward, conductor, team, config.rollout.min_group_size)


def make_residency(config: BaseConfig, plan: RunPlan, timer: PhaseTimer, team: Team) -> Residency:
    """The residency, which puts models to sleep under `memory_limit_gib`; parts that sleep on disk are in the run folder."""
    scratch = run_path(config.run.root, config.experiment_name, config.trial_name) / "asleep"
    return Residency(sleep_plan_here(config, plan), scratch, timer, open_model, team)


def make_engine(config: TrainConfig, process: Process, folder: Path, run: str) -> InferenceEngine | None:
    """The inference engine of this rank; None if it does not generate."""
    ranks = generating_ranks(config)
    if process.rank not in ranks:
        return None
    servers, threads = kept_servers(), process.generation_threads(placement(config), len(ranks))
    build = partial(
        build_inference_engine,
        rollout_here(config),
        folder=folder,
        placement=placement(config),
        threads=threads,
        device=process.device,
        deterministic=config.deterministic,
        ranks=process.ranks_here,
        run_folder=run_path(config.run.root, config.experiment_name, config.trial_name) / machines().folder,
        run=run,
        weights_folder=weights_folder(config),
        gconfig=config.gconfig,
        keeping=None if servers is None else Keeping(*servers),
        memory_limit_gib=config.memory_limit_gib,
        sleeps=process.device != "cpu" and servers_sleep(config),
    )
    if config.extend.inference_engine is None:
        return build()
    return _own_engine(config, build, folder, process.device, threads)


def _own_engine(
    config: TrainConfig, build: Callable[[], InferenceEngine], folder: Path, device: str, threads: int
) -> InferenceEngine:
    """Makes the engine of the user's class. ``build``: makes the engine of `rollout.backend` for a class that asks for it;
    that engine is closed if the user's constructor fails."""
    factory = own_inference_engine(str(config.extend.inference_engine), config.rollout.backend)
    engine = build() if "engine" in factory.asked else None
    try:
        user_engine: InferenceEngine = factory(
            engine=engine,
            folder=folder,
            settings=config.rollout.engine,
            dtype=resolve_dtype(config.rollout.dtype, device),
            device=device,
            version=WeightVersion(0),
            threads=engine_threads(config.rollout, placement=placement(config), threads=threads),
            deterministic=config.deterministic,
        )
    except BaseException:
        if engine is not None:
            engine.close()
        raise
    return user_engine
