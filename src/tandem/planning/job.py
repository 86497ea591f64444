"""The load that a configuration puts on a machine: models, engine, sequences, checkpoints. The rest of the plan is
arithmetic on it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from tandem.config.arithmetic import generating_ranks, max_head_offpolicyness, placement, samples_together, total_steps
from tandem.config.backend import parse_layout
from tandem.config.devices import DeviceMap, Seat, devices_of, share_of
from tandem.config.engine_memory import cache_gib, chunk_tokens, places
from tandem.config.experiment import BaseConfig, TrainConfig
from tandem.config.fleet import parse_backend
from tandem.config.preference import DistillConfig, training_config
from tandem.config.terms import read_term
from tandem.engines.inference.check import check_tensor_parallel
from tandem.flow.plan import Resident, RunPlan, Stage, plan_run
from tandem.flow.sleep_plan import GIB, Part, SleepPlan
from tandem.flow.state_parts import sleep_plan
from tandem.models.footprint import FLOAT32, engine_bytes
from tandem.models.shape import BYTES, Dtype, Shape
from tandem.planning.machine import Machine
from tandem.planning.planned_model import PlannedModel, planned_model, resolved, where_of
from tandem.rewards.engine_judge import WritingReward
from tandem.rollout.partner import MAX_NEW_TOKENS
from tandem.weights.cuda_ipc import staged_bytes


@dataclass(frozen=True)
class Saves:
    """The checkpoints of a run.

    Example: one every 10 of 100 steps, of which the last 2 stay: 3 at a time, for the next one is whole before an older one
    is removed.
    """

    resumable: bool = True
    most: int | None = None
    """Most checkpoints at one time; None if their number grows with the run, whose end is unknown."""


def saves_of(config: BaseConfig, rows: int | None) -> Saves:
    """The checkpoints of a configuration with ``rows`` rows of data."""
    wish = config.checkpoint
    known = rows is not None or (config.total_train_epochs is None and config.total_train_steps is not None)
    steps = total_steps(config, rows or 0) if known else None
    made: float = float("inf")
    if steps is not None or not wish.every_steps:
        often, rest = divmod(steps or 0, wish.every_steps) if wish.every_steps else (0, 1)
        made = often + (wish.at_end and (rest > 0 or not often))
    stay = float("inf")
    if wish.keep_last is not None and not (wish.keep_every and steps is None):
        ever = (steps or 0) // wish.keep_every if wish.keep_every else 0
        stay = max(1, wish.keep_last) + ever + (wish.keep_best is not None) + 1
    most = min(made, stay)
    return Saves(wish.resumable, None if most == float("inf") else int(most))


@dataclass(frozen=True)
class Checkpoint:
    """Bytes of one checkpoint, without its tokenizer and configuration."""

    models: float
    """Bytes of the Hugging Face folders, in the dtype of the computation; adapters are merged into them."""

    adapters: float = 0.0
    """Bytes of the adapters' folders, float32."""

    state: float = 0.0
    """Bytes of masters and both moments of all trained weights."""

    @property
    def total(self) -> float:
        """Bytes of the whole checkpoint."""
        return self.models + self.adapters + self.state


def checkpoint_of(models: Iterable[PlannedModel], saves: Saves) -> Checkpoint:
    """One checkpoint of the trained models; its size does not depend on the layout."""
    folders = adapters = state = 0.0
    for model in models:
        if not model.trained:
            continue
        head = model.shape.hidden if model.head == "both" else 0  # a file of its own, float32
        folders += BYTES[model.dtype] * (model.parameters - head) + FLOAT32 * head
        whole = model.parameters
        if model.adapters is not None:
            whole = model.masters
            adapters += FLOAT32 * (model.masters - head)  # a classifier's head lies beside its adapter, too
        state += 3 * FLOAT32 * whole if saves.resumable else 0
    return Checkpoint(folders, adapters, state)


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens of a sequence."""

    prompt: int
    longest: int
    """Tokens of the longest completion."""


@dataclass(frozen=True)
class Generator:
    """Embedded engines, which generate."""

    shape: Shape
    delivered: Dtype
    """Dtype of the weights that are published to it."""

    dtype: Dtype
    """Dtype that it computes in."""

    engines: int
    own_process: bool
    kv_cache_gib: float
    max_running: int
    prefill_chunk: int
    max_len: int
    sequences: int
    """Most samples at once, over all engines."""

    adapter: int = 0
    """Parameters of an adapter that is delivered alone; 0: whole weights are delivered."""

    apart: bool = False
    """True: each engine has GPUs of its own; False: all share one memory."""

    foreign: str | None = None
    """Kind of the servers, if they are vLLM or SGLang: they take their share of memory, and their speed is unknown here."""

    seats: tuple[Seat, ...] = ()
    """The servers with their GPUs; empty on a CPU, and if the engines are inside the ranks."""

    opened: int = 0
    """Bytes of a version that stay on the trainer's GPU until the next one, for a server that maps this memory."""

    role: str = "engine"
    """Owner of weights and cache: the policy (`engine`), or a judge or partner by its role."""

    lengths: Lengths | None = None
    """Lengths of a judge's or partner's requests, each with a prompt of its own; None: the policy's, whose samples share
    prompts."""

    in_episodes: bool = False
    """True for a partner, which generates at the same time as the policy."""


QUESTION_TOKENS = 160
"""Tokens of a judge's prompt around the conversation: the built-in prompt in SmolLM2's tokens, and a question."""


@dataclass(frozen=True)
class Job:
    """The load of a run."""

    models: tuple[PlannedModel, ...]
    """All models, trained and frozen; the actor comes first."""

    lengths: Lengths
    groups: int
    """Prompts, or rows, in one step."""

    generated: int
    """Samples that are generated for each prompt; 0: nothing is generated."""

    trained: int
    """Sequences of each prompt that are trained on."""

    together: bool = False
    """True if all sequences of a row must be in one micro-batch."""

    generator: Generator | None = None
    passes: tuple[tuple[str, str], ...] = ()
    """(name, model) of each pass without gradients before the update."""

    asked: tuple[str, ...] = ()
    """Models that episodes call, which compute beside generation; the plan counts one call per sample."""

    kept_versions: int = 0
    """Number of old versions that are kept to verify deliveries."""

    verifies: bool = False
    saves: Saves = field(default_factory=Saves)
    """Checkpoints of the run."""

    saves_beside: bool = False
    """True if training continues while a copy of its state is written."""

    workers: int = 0
    """Reward worker processes."""

    sleeping: SleepPlan | None = None
    """The plan of sleeping parts under a memory limit; None without a limit."""

    awake: Mapping[str, tuple[frozenset[Part], ...]] = field(default_factory=dict)
    """Phase of memory → the awake parts of each of its stages; empty: all parts are awake in all phases."""

    writers: Mapping[str, Generator] = field(default_factory=dict)
    """Role → engine of a judge that writes, or of the partner; each is on the first rank."""

    @property
    def actor(self) -> PlannedModel:
        """The model that is trained."""
        return self.models[0]


def job_of(
    config: BaseConfig, machine: Machine, lengths: Lengths, read: Callable[[str], Shape], *, rows: int | None = None
) -> Job:
    """The job of a configuration. ``read``: maps a model's path to its shape. ``rows``: number of rows of data, if known.

    Raises:
        ConfigError: a setting that the engines themselves would refuse.
    """
    plan, training = plan_run(config), training_config(config) if isinstance(config, DistillConfig) else config
    models: list[PlannedModel] = []
    for resident in plan.residents:
        if resident.engine is not None:
            models.append(_held(resident, models, machine, read))
    job = Job(
        models=tuple(models),
        lengths=lengths,
        groups=0,
        generated=0,
        trained=2 if plan.paired else 1,
        together=plan.paired,
        passes=(
            *((one.stage, one.resident) for one in plan.scores if one.in_episodes),
            *((stage.name, stage.awake[0]) for stage in plan.forwards),
        ),
        asked=tuple(resident.name for resident in plan.residents if resident.in_episodes),
        verifies=plan.stage("verify") is not None,
        saves=saves_of(config, rows),
        saves_beside=_saves_beside(config),
    )
    sleeping = sleep_plan(config, plan, where_of(machine), read)
    job = replace(job, sleeping=sleeping, awake={} if sleeping is None else _awake(plan, sleeping))
    if not isinstance(training, TrainConfig):
        return replace(job, groups=training.batch_size)  # type: ignore[attr-defined]
    samples = training.gconfig.n_samples + plan.greedy_baseline
    return replace(
        job,
        groups=training.rollout.batch_size,
        generated=samples,
        trained=training.algorithm.update_samples or training.gconfig.n_samples,
        generator=_generator(training, models[0], machine, samples),
        writers=_writers(training, plan, {model.role: model for model in models}, lengths, machine, samples),
        kept_versions=max(1, max_head_offpolicyness(training)) if job.verifies else 0,
        workers=training.reward_workers or min(machine.threads, samples_together(training)),  # of one that computes
    )


def _held(resident: Resident, before: list[PlannedModel], machine: Machine, read: Callable[[str], Shape]) -> PlannedModel:
    """A resident with a train engine. A base that it shares with a model in ``before`` is not counted again."""
    owner = next((model for model in before if model.role == resident.base_of), None)
    if owner is not None:
        return replace(owner, role=resident.name, head="lm", trained=False, adapters=None, own=False)
    assert resident.engine is not None
    return planned_model(resident, machine, read(resident.engine.path))


def _awake(plan: RunPlan, sleeping: SleepPlan) -> dict[str, tuple[frozenset[Part], ...]]:
    """The parts that are awake in each phase of memory, as `memory.instants` names them."""
    awake: dict[str, tuple[frozenset[Part], ...]] = {}
    done = {one.stage.name: one.awake for one in sleeping.steady()}
    for stage in plan.stages:
        for name in _phases(stage):
            awake[name] = (*awake.get(name, ()), done[stage.name])
    return awake


def _phases(stage: Stage) -> list[str]:
    """The phases of memory that a stage has."""
    if stage.kind in ("score", "pass"):
        return [f"score: {name}" for name in stage.awake]
    if stage.kind == "update":
        return [f"{what}: {name}" for name in stage.awake for what in ("update", "optimizer")]
    return [stage.name]


def _saves_beside(config: BaseConfig) -> bool:
    wish = config.checkpoint
    return wish.every_steps is not None and wish.asynchronous and wish.resumable


def _generator(config: TrainConfig, actor: PlannedModel, machine: Machine, samples: int) -> Generator:
    rollout, shape = config.rollout, actor.shape
    servers = parse_backend(rollout.backend)
    for one in servers or ():
        check_tensor_parallel(one.tensor, shape.heads, shape.kv_heads, rollout.backend)
    kinds = {one.kind for one in servers or ()}
    foreign = sorted(kinds - {"embedded", "tandem"}) or (["attached"] if servers is not None and not kinds else [])
    delivered = resolved(rollout.dtype, machine)
    ranks = len(generating_ranks(config))
    episodes = (max_head_offpolicyness(config) + 1) * rollout.batch_size
    if not config.async_training:
        episodes = int(rollout.batch_size * rollout.oversample)
    memory = config.memory_limit_gib or machine.memory_gib
    dtype: Dtype = "float32" if delivered == "bfloat16" and not machine.fast_bfloat16 else delivered
    share, own, seats = 0.0, engine_bytes(shape, dtype, cpu=False) / GIB, seats_of(config, machine)
    if machine.kind == "gpu":
        share = share_of(_devices(config, machine), seats[0].name if seats else None)
    return Generator(
        shape=shape,
        delivered=delivered,
        dtype=dtype,
        engines=max(ranks, sum(one.count for one in servers or () if one.kind in ("embedded", "tandem"))),
        apart=(ranks > 1 and machine.kind == "gpu") or bool(seats),
        own_process=servers is not None or placement(config) == "decoupled",
        kv_cache_gib=cache_gib(rollout.engine, machine.kind, memory_gib=memory, share=share, weights_gib=own),
        max_running=places(rollout.engine),
        prefill_chunk=chunk_tokens(rollout.engine, machine.kind),
        max_len=rollout.engine.max_model_len or shape.context,
        sequences=min(episodes, rollout.max_concurrent or episodes) * samples,
        adapter=_delivered_adapter(config, actor, kinds),
        foreign=" and ".join(foreign) if foreign else None,
        seats=seats,
        opened=staged_bytes(shape.tensors(), getattr(torch, delivered)) if rollout.weights.terms.on_gpu else 0,
    )


def seats_of(config: TrainConfig, machine: Machine) -> tuple[Seat, ...]:
    """The servers of a run and their GPUs on this machine.

    Raises:
        ConfigError: the machine has too few GPUs.
    """
    return () if machine.kind == "cpu" else _devices(config, machine).servers


def _devices(config: TrainConfig, machine: Machine) -> DeviceMap:
    ranks = parse_layout(config.actor.backend).ranks
    return devices_of(config.rollout, placement(config), ranks=ranks, devices=max(machine.count, ranks))


def _writers(
    config: TrainConfig, plan: RunPlan, models: Mapping[str, PlannedModel], lengths: Lengths, machine: Machine, samples: int
) -> dict[str, Generator]:
    """The engines of judges and partner. Two judges with one model share an engine, counted as the larger one. A partner
    counts as one call per sample that reads the question and the longest answer."""
    writers: dict[str, Generator] = {}
    samples_of_a_step, ranks = config.rollout.batch_size * samples, len(generating_ranks(config))
    settings = config.rollout.engine

    def writer(model: PlannedModel, requests: int, reads: int, writes: int, **more: bool) -> Generator:
        return Generator(
            shape=model.shape,
            delivered=model.dtype,
            dtype="float32" if model.dtype == "bfloat16" and not machine.fast_bfloat16 else model.dtype,
            engines=ranks,  # each judges its share
            apart=ranks > 1 and machine.kind == "gpu",
            own_process=False,
            max_len=model.shape.context,
            sequences=requests,
            kv_cache_gib=cache_gib(settings, "cpu"),  # it has no share of its own
            max_running=places(settings),
            prefill_chunk=chunk_tokens(settings, machine.kind),
            role=model.role,
            lengths=Lengths(reads, writes),
            **more,
        )

    if config.partner is not None and "partner" in models:
        writes = int(read_term(config.partner, "partner").arguments.get("max_new_tokens", MAX_NEW_TOKENS))
        reads = lengths.prompt + lengths.longest
        writers["partner"] = writer(models["partner"], samples_of_a_step, reads, writes, in_episodes=True)
    for planned in plan.scores:
        written = planned.score
        if not isinstance(written, WritingReward):
            continue
        reads = QUESTION_TOKENS + lengths.prompt + lengths.longest * min(written.shown, config.gconfig.n_samples)
        requests = samples_of_a_step * written.requests
        made = writer(models[planned.resident], requests, reads, written.client.max_tokens)
        writers[made.role] = max(made, writers.get(made.role, made), key=_tokens)
    return writers


def _tokens(writer: Generator) -> int:
    """Tokens of all requests of a step together."""
    assert writer.lengths is not None
    return writer.sequences * (writer.lengths.prompt + writer.lengths.longest)


def _delivered_adapter(config: TrainConfig, actor: PlannedModel, kinds: set[str]) -> int:
    """Parameters of the adapter that is delivered without its base; only Tandem's engines take one, and not from a folder or
    a group."""
    alone = kinds <= {"embedded"} and not config.rollout.fleet.servers and config.rollout.weights.channel == "auto"
    return actor.adapters.parameters(actor.shape) if actor.adapters is not None and alone else 0
