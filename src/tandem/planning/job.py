"""The load that a configuration puts on a machine: models, engine, sequences, checkpoints. All other figures of a plan are
computed from it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tandem.config.arithmetic import generating_ranks, max_head_offpolicyness, placement, samples_together, total_steps
from tandem.config.devices import DeviceMap, Seat, devices_of, share_of
from tandem.config.experiment import BaseConfig, TrainConfig
from tandem.config.fleet import parse_backend
from tandem.config.preference import DistillConfig, training_config
from tandem.config.rollout import EmbeddedEngineConfig, cache_gib, chunk_tokens, places
from tandem.config.terms import read_term
from tandem.config.train_engine import parse_layout
from tandem.engines.inference.check import check_tensor_parallel
from tandem.flow.plan import RunPlan, Stage, plan_run
from tandem.flow.sleep_plan import GIB, Part, SleepPlan, sleep_plan
from tandem.models.shape import BYTES, FLOAT32, Dtype, Shape, engine_bytes
from tandem.planning.machine import Machine
from tandem.planning.planned_model import PlannedModel, planned_model
from tandem.rewards.engine_judge import WritingReward
from tandem.rollout.episode_engine import MAX_NEW_TOKENS
from tandem.weights.cuda_ipc import staged_bytes


@dataclass(frozen=True)
class Saves:
    """The checkpoints of a run.

    Example: if a checkpoint is saved every 10 of 100 steps and the last 2 are kept, at most 3 exist at a time, because a new
    one is complete before an older one is removed.
    """

    resumable: bool = True
    most: int | None = None
    """Largest number of checkpoints at one time; None if it grows with the steps, whose number is unknown."""

    beside: bool = False
    """True if training continues while a copy of its state is written."""


def saves_of(config: BaseConfig, rows: int | None) -> Saves:
    """Returns the checkpoints of a configuration. ``rows``: number of rows of data; None if unknown."""
    wish = config.checkpoint
    known = rows is not None or (config.total_train_epochs is None and config.total_train_steps is not None)
    steps = total_steps(config, rows or 0) if known else None
    made = stay = float("inf")
    if steps is not None or not wish.every_steps:
        often, rest = divmod(steps or 0, wish.every_steps) if wish.every_steps else (0, 1)
        made = often + (wish.at_end and (rest > 0 or not often))
    if wish.keep_last is not None and not (wish.keep_every and steps is None):
        ever = (steps or 0) // wish.keep_every if wish.keep_every else 0
        stay = max(1, wish.keep_last) + ever + (wish.keep_best is not None) + 1
    most = min(made, stay)
    beside = wish.every_steps is not None and wish.asynchronous and wish.resumable
    return Saves(wish.resumable, None if most == float("inf") else int(most), beside)


def checkpoint_of(models: Iterable[PlannedModel], saves: Saves) -> dict[str, float]:
    """Returns the bytes of one checkpoint of the trained models, by kind: `models`, the Hugging Face folders in the dtype of
    the computation, with adapters merged; `adapters`, their folders in float32; `state`, masters and both moments."""
    found = dict.fromkeys(("models", "adapters", "state"), 0.0)
    for model in models:
        if model.trained:
            whole = model.parameters if model.adapters is None else model.masters
            head = model.shape.hidden if model.head == "both" else 0  # saved in a separate float32 file
            found["models"] += BYTES[model.dtype] * (model.parameters - head) + FLOAT32 * head
            # the folder of a classifier's adapter also has the classifier's head
            found["adapters"] += FLOAT32 * (model.masters - head) if model.adapters is not None else 0
            found["state"] += 3 * FLOAT32 * whole * saves.resumable
    return found


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens of a sequence."""

    prompt: int
    longest: int
    """Tokens of the longest completion."""

    @property
    def total(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt + self.longest


def longest_of(config: BaseConfig, prompt: int) -> int:
    """Returns the number of tokens of the longest completion after a prompt of ``prompt`` tokens."""
    written = getattr(config, "gconfig", None)
    return written.max_new_tokens if written is not None else max(1, config.max_length - prompt)  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class Generator:
    """Inference engines that generate with the same model."""

    role: str = "engine"
    """Owner of weights and cache: the policy (`engine`), or a judge or partner by its role."""

    shape: Shape
    delivered: Dtype
    """Dtype of the weights that are delivered to the engines."""

    dtype: Dtype
    """Dtype of the engines' computation."""

    weights: float
    """Bytes of one engine's weights."""

    engines: int
    apart: bool = False
    """True: each engine has GPUs of its own; False: all share one memory."""

    own_process: bool
    kv_cache_gib: float
    max_running: int
    prefill_chunk: int
    sequences: int
    """Largest number of samples at the same time, over all engines."""

    lengths: Lengths
    """The largest lengths of a request."""

    sharing: int = 1
    """Number of samples of a prompt, which share the prompt's keys and values."""

    adapter: int = 0
    """Number of parameters of an adapter that is delivered without its base; 0: whole weights are delivered."""

    foreign: str | None = None
    """Kind of the servers, if they are vLLM or SGLang, which reserve a share of memory; else None."""

    seats: tuple[Seat, ...] = ()
    """The servers with their GPUs; empty on a CPU, and if the engines are inside the ranks."""

    opened: int = 0
    """Bytes of delivered weights that stay on the trainer's GPU until the next delivery, for servers that map them."""


QUESTION_TOKENS = 160
"""Tokens of a judge's prompt around the conversation: the built-in prompt in SmolLM2's tokens, and a question."""


@dataclass(frozen=True)
class Job:
    """The load of a run."""

    models: tuple[PlannedModel, ...]
    """All models, trained and frozen; the actor comes first."""

    lengths: Lengths
    groups: int
    """Number of prompts, or of rows, in one step."""

    trained: int
    """Number of sequences of each prompt that are trained."""

    together: bool = False
    """True if all sequences of a row must be in one micro-batch."""

    generator: Generator | None = None
    writers: Mapping[str, Generator] = field(default_factory=dict)
    """Role → engine of a judge that writes, or of the partner; each is on the first rank."""

    passes: tuple[tuple[str, str], ...] = ()
    """(name, model) of each pass without gradients before the update."""

    asked: tuple[str, ...] = ()
    """Models that episodes call while the engine generates; the plan counts one call per sample."""

    kept_versions: int = 0
    """Number of old versions that are kept to verify deliveries; 0: none is verified."""

    saves: Saves = field(default_factory=Saves)
    workers: int = 0
    """Number of reward worker processes."""

    sleeping: SleepPlan | None = None
    """The plan of sleeping parts under a memory limit; None without a limit."""

    awake: Mapping[str, tuple[frozenset[Part], ...]] = field(default_factory=dict)
    """Phase of memory → the parts awake in each stage of that phase; empty: all parts are awake in all phases."""

    @property
    def actor(self) -> PlannedModel:
        """The model that is trained."""
        return self.models[0]

    @property
    def partners(self) -> list[Generator]:
        """The partner's engines, which generate at the same time as the policy's."""
        return [one for role, one in self.writers.items() if role == "partner"]


def job_of(
    config: BaseConfig, machine: Machine, lengths: Lengths, read: Callable[[str], Shape], *, rows: int | None = None
) -> Job:
    """Returns the job of a configuration. ``read``: maps a model's path to its shape. ``rows``: number of rows of data.

    Raises:
        ConfigError: an engine would refuse a setting.
    """
    plan, training = plan_run(config), training_config(config) if isinstance(config, DistillConfig) else config
    models: dict[str, PlannedModel] = {}
    for resident in plan.residents:
        if (owner := models.get(resident.base_of or "")) is not None:  # the memory of the base is not counted again
            shared = {"head": "lm", "trained": False, "adapters": None, "own": False}
            models[resident.name] = replace(owner, role=resident.name, **shared)
        elif resident.engine is not None:
            models[resident.name] = planned_model(resident, machine, read(resident.engine.path))
    sleeping, more = sleep_plan(config, plan, machine, read), dict[str, Any]()
    if isinstance(training, TrainConfig):
        samples = training.gconfig.n_samples + plan.greedy_baseline
        more = {
            "trained": training.algorithm.update_samples or training.gconfig.n_samples,
            "generator": _generator(training, models["actor"], machine, lengths, samples),
            "writers": _writers(training, plan, models, lengths, machine, samples),
            "kept_versions": max(1, max_head_offpolicyness(training)) if plan.stage("verify") is not None else 0,
            "workers": training.reward_workers or min(machine.threads, samples_together(training)),  # of one that computes
        }
    return Job(
        models=tuple(models.values()),
        lengths=lengths,
        groups=training.rollout.batch_size if isinstance(training, TrainConfig) else training.batch_size,  # type: ignore[attr-defined]
        together=plan.paired,
        passes=tuple((stage.name, stage.awake[0]) for stage in plan.forwards),
        asked=tuple(resident.name for resident in plan.residents if resident.in_episodes),
        saves=saves_of(config, rows),
        sleeping=sleeping,
        awake=_awake(plan, sleeping) if sleeping is not None and sleeping.sleeps else {},
        **{"trained": 2 if plan.paired else 1} | more,
    )


def _awake(plan: RunPlan, sleeping: SleepPlan) -> dict[str, tuple[frozenset[Part], ...]]:
    """Returns the parts that are awake in each phase of memory; `memory.instants` has the same names of phases."""
    awake: dict[str, tuple[frozenset[Part], ...]] = {}
    done = {one.stage.name: one.awake for one in sleeping.steady()}
    for stage in plan.stages:
        for name in _phases(stage):
            awake[name] = (*awake.get(name, ()), done[stage.name])
    return awake


def _phases(stage: Stage) -> list[str]:
    """Returns the names of the phases of memory in a stage."""
    if stage.kind in ("score", "pass"):
        return [f"score: {name}" for name in stage.awake]
    if stage.kind == "update":
        return [f"{what}: {name}" for name in stage.awake for what in ("update", "optimizer")]
    return [stage.name]


def _engine(shape: Shape, delivered: Dtype, machine: Machine, settings: EmbeddedEngineConfig, **more: Any) -> Generator:
    """Returns an engine, with the values that follow from its model, its settings and the machine."""
    dtype = machine.engine_dtype(delivered)
    more |= {"weights": engine_bytes(shape, dtype, cpu=machine.cpu), "max_running": places(settings)}
    more["prefill_chunk"] = chunk_tokens(settings, machine.kind)
    return Generator(shape=shape, delivered=delivered, dtype=dtype, **more)


def _generator(config: TrainConfig, actor: PlannedModel, machine: Machine, lengths: Lengths, samples: int) -> Generator:
    rollout, shape, delivered = config.rollout, actor.shape, machine.dtype(config.rollout.dtype)
    servers = parse_backend(rollout.backend)
    for one in servers or ():
        check_tensor_parallel(one.tensor, shape.heads, shape.kv_heads, rollout.backend)
    kinds = {one.kind for one in servers or ()}
    foreign = sorted(kinds - {"embedded", "tandem"}) or (["attached"] if servers is not None and not kinds else [])
    ranks = len(generating_ranks(config))
    episodes = (max_head_offpolicyness(config) + 1) * rollout.batch_size
    if not config.async_training:
        episodes = int(rollout.batch_size * rollout.oversample)
    devices = _devices(config, machine)
    seats = devices.servers if devices is not None else ()
    share = share_of(devices, seats[0].name if seats else None) if devices is not None else 0.0
    weights = engine_bytes(shape, machine.engine_dtype(delivered), cpu=False)
    sizes = {"memory_gib": config.memory_limit_gib or machine.memory_gib, "share": share}
    cache = cache_gib(rollout.engine, machine.kind, **sizes, weights_gib=weights / GIB)
    # only Tandem's engines load an adapter without its base, and only with the channel `auto`
    alone = kinds <= {"embedded"} and not rollout.fleet.servers and rollout.weights.channel == "auto"
    return _engine(
        shape,
        delivered,
        machine,
        rollout.engine,
        engines=max(ranks, sum(one.count for one in servers or () if one.kind in ("embedded", "tandem"))),
        apart=(ranks > 1 and not machine.cpu) or bool(seats),
        own_process=servers is not None or placement(config) == "decoupled",
        kv_cache_gib=cache,
        sequences=min(episodes, rollout.max_concurrent or episodes) * samples,
        lengths=lengths,
        sharing=samples,
        adapter=actor.adapters.parameters(shape) if actor.adapters is not None and alone else 0,
        foreign=" and ".join(foreign) or None,
        seats=seats,
        opened=staged_bytes(shape.tensors(), getattr(torch, delivered)) if rollout.weights.terms.on_gpu else 0,
    )


def _devices(config: TrainConfig, machine: Machine) -> DeviceMap | None:
    """Returns the GPUs of ranks and servers; None on a CPU. Raises `ConfigError` if the machine has too few."""
    ranks = parse_layout(config.actor.backend).ranks
    wanted = {"ranks": ranks, "devices": max(machine.count, ranks)}
    return None if machine.cpu else devices_of(config.rollout, placement(config), **wanted)


def _writers(
    config: TrainConfig, plan: RunPlan, models: Mapping[str, PlannedModel], lengths: Lengths, machine: Machine, samples: int
) -> dict[str, Generator]:
    """Plans the engines of other models that write text: judges, and the partner, to which the workflow talks. Judges with
    the same model share an engine, planned for the judge with the largest load. For the partner one call per sample is
    assumed, with the question and the longest answer as prompt."""
    samples_of_a_step, ranks = config.rollout.batch_size * samples, len(generating_ranks(config))
    whole, settings = lengths.prompt + lengths.longest, config.rollout.engine
    loads: list[tuple[str, int, Lengths]] = []  # role, requests of a step, lengths of a request
    if config.partner is not None and "partner" in models:
        writes = int(read_term(config.partner, "partner").arguments.get("max_new_tokens", MAX_NEW_TOKENS))
        loads.append(("partner", samples_of_a_step, Lengths(whole, writes)))
    for planned in plan.scores:
        written = planned.score
        if isinstance(written, WritingReward):
            reads = QUESTION_TOKENS + lengths.prompt + lengths.longest * min(written.shown, config.gconfig.n_samples)
            requests = samples_of_a_step * written.requests
            loads.append((planned.resident, requests, Lengths(reads, written.client.max_tokens)))
    return {
        role: _engine(
            models[role].shape,
            models[role].dtype,
            machine,
            settings,
            role=role,
            engines=ranks,  # each engine judges a part of the samples
            apart=ranks > 1 and not machine.cpu,
            own_process=False,
            sequences=requests,
            kv_cache_gib=cache_gib(settings, "cpu"),  # no share of a GPU is reserved for it
            lengths=request,
        )
        for role, requests, request in sorted(loads, key=lambda load: load[1] * load[2].total)
    }
