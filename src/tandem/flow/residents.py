"""Opens the models that the plan of a run names."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from tandem.api.engines import InferenceEngine, TrainEngine
from tandem.api.media import reader_of
from tandem.api.services import NOTHING
from tandem.config.arithmetic import generating_ranks, max_token_age
from tandem.config.backend import parse_layout
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.inference.check import check_inference_engine
from tandem.engines.train.build import build_train_engine
from tandem.engines.train.check import check_train_engine
from tandem.flow.critic import check_same_tokens, differing_token
from tandem.flow.delivery import make_proof, make_publisher
from tandem.flow.extensions import own_train_engine
from tandem.flow.plan import Resident, RunPlan
from tandem.flow.process import Process, choose_device
from tandem.flow.residency import Residency
from tandem.flow.scoring import ModelReader, ScoreRole
from tandem.flow.services import reads_reward
from tandem.flow.sleep_plan import BEGIN
from tandem.flow.team import TeamEngine, form_team
from tandem.flow.writing import WritingModel, WritingRole
from tandem.models.architecture import Architecture
from tandem.models.catalog import describing, resolve
from tandem.models.families import use_family
from tandem.models.footprint import adapters_of
from tandem.models.foreign import read_hf_config
from tandem.models.heads import is_classifier
from tandem.models.media.families import text_config
from tandem.models.precision import resolve_dtype
from tandem.models.shape import read_shape
from tandem.models.tokenizer import check_vocabulary, load_tokenizer
from tandem.roles.actor import Actor
from tandem.roles.constraint import Constraint
from tandem.roles.critic import Critic, SharedCritic
from tandem.roles.reference import Reference
from tandem.roles.teacher import Student, Teacher


class Open(Protocol):
    """Opens the train engine of a resident, as `open_model` does."""

    def __call__(self, resident: Resident, process: Process, *, optimizer_steps: int = 0) -> TrainEngine: ...


def open_model(
    resident: Resident, process: Process, *, optimizer_steps: int = 0, trunk: TrainEngine | None = None
) -> TrainEngine:
    """The train engine of a resident, on its ranks; the others reach it there. Collective. ``optimizer_steps``: of the whole
    run, for the learning rate's schedule. ``trunk``: the engine of the resident whose trunk it shares.

    Raises:
        ConfigError: the model cannot be opened, or laid out as its configuration says.
        WeightsChanged: that trunk has other numbers.
    """
    assert resident.engine is not None and resident.head != "text", f"{resident.name} has no train engine"
    copies = [(rank,) for rank in resident.ranks] if resident.in_episodes else [resident.ranks]
    teams = [form_team(ranks, process.team) for ranks in copies]
    team = next((team for team in teams if team.member), None)
    own = None if resident.own is None else own_train_engine(resident.own)
    build = partial(
        build_train_engine,
        resident.engine,
        total_steps=optimizer_steps,
        device=process.device,
        head=resident.head,
        key=resident.key,
        trained=resident.changes,
        team=team,
        adapter=resident.adapter,
        class_label=resident.class_label,
        own=own,
        trunk=trunk.engine if isinstance(trunk, TeamEngine) else trunk,
    )
    if team is process.team:
        return build()
    with process.team.together():
        engine = None if team is None else build()
    if engine is not None and resident.in_episodes:
        return engine  # asked by this rank's episodes alone
    return TeamEngine(engine, process.team, min(resident.ranks))


def open_scores(
    config: TrainConfig,
    plan: RunPlan,
    process: Process,
    tokenizer: PreTrainedTokenizerBase,
    residency: Residency,
    there: Mapping[str, TrainEngine | WritingModel] = NOTHING,
) -> dict[str, ScoreRole | WritingRole]:
    """Opens the models of the rewards that need one. Rewards that ask for the same model share it. ``tokenizer``: the
    actor's. Rank 0, where the samples are, reads them; every rank reads what its episodes await. ``there``: models that are
    open, by their names in the plan: those of other processes.

    Raises:
        ConfigError: see `open_model`; or a model has no chat template.
    """
    engines = dict(there)
    roles: dict[str, ScoreRole | WritingRole] = {}
    for planned in plan.scores:
        resident = plan.resident(planned.resident)
        assert resident is not None and resident.engine is not None, "the plan names the model of each score"
        if resident.name not in engines:
            if resident.head == "text":
                engines[resident.name] = residency.add(resident.name, _open_writer(config, resident.engine, process))
            else:
                engines[resident.name] = residency.open(resident, process)
        engine = engines[resident.name]
        if isinstance(engine, WritingModel):
            roles[planned.name] = WritingRole(planned, engine, process.team)
            continue
        path = planned.score.model.path  # not that of the base on which an adapter is
        reads = process.is_main or planned.in_episodes
        reader = open_reader(path, tokenizer, chats=planned.reads_chats) if reads else None
        vocabulary = Architecture.from_config(read_hf_config(describing(path))).vocab_size
        roles[planned.name] = ScoreRole(planned, engine, reader, vocabulary, timeout_s=config.reward_timeout_s)
    return roles


def check_models(
    plan: RunPlan, device: str, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Passes if each model of the plan can be opened on this device and laid over its ranks, and reads what the rows have.
    ``tokenizer``: the actor's.

    Raises:
        ConfigError: see `check_train_engine` and `check_vocabulary`; adapters for matrices that the model does not have; a
            critic or a reference with another tokenizer; or `extend.model_family` is that of no model.
    """
    kinds: dict[str, str] = {}
    for resident in plan.residents:
        config, key = resident.engine, resident.key
        if config is None or resident.base_of is not None:
            continue
        folder = describing(config.path)
        kinds[text_config(read_hf_config(folder)).model_type] = config.path
        own = tokenizer if tokenizer.name_or_path == str(folder) else load_tokenizer(folder)
        check_vocabulary(own, folder, rows)
        if resident.name in ("critic", "reference"):
            check_same_tokens(resident.name, config.path, own, tokenizer)
        if resident.head == "text":  # `check_scores` and `check_partner` look at it
            continue
        dtype, layout = resolve_dtype(config.dtype, device), parse_layout(config.backend, key)
        check_train_engine(config, folder, layout, torch.device(device), dtype, resident.head, key, resident.class_label)
        if config.lora.rank is not None:
            adapters_of(config.lora, read_shape(str(folder)))  # refuses names of matrices that are not there
    spec = None if plan.config is None else plan.config.extend.model_family
    if spec is not None and (family := use_family(spec)).model_type not in kinds:
        found = ", ".join(f"{path} is {kind!r}" for kind, path in kinds.items())
        raise ConfigError(
            f"extend.model_family={spec} is for models of model_type {family.model_type!r}, and this run has none "
            f"({found}); give the model_type that their config.json has, or leave extend.model_family out"
        )


def check_scores(config: TrainConfig, plan: RunPlan, tokenizer: PreTrainedTokenizerBase) -> None:
    """Passes if the rewards that need a model can be had where this run asks for them.

    Raises:
        ConfigError: a reward with options is asked for in the middle of an episode; a model's is replaced by a vote; a model
            has no chat template; or a judge is to see media and reads text alone.
    """
    later = next((term.label for term in plan.later), None)
    if later is not None and reads_reward(config) == "midway":
        raise ConfigError(
            f"the reward has {later!r}, which has options that count when the episode has ended, and "
            f"workflow={config.workflow} reads the whole reward in the middle of an episode; leave normalise, clip and gate "
            "out, or use workflow=rlvr"
        )
    first = next((one.name for one in plan.scores), later)
    if first is not None and config.algorithm.labels == "majority":
        how = "a model scores" if plan.scores else "has options"
        raise ConfigError(
            f"the reward has {first!r}, which {how}, and algorithm.labels=majority judges by a vote; leave one out"
        )
    for planned in plan.scores:
        resident = plan.resident(planned.resident)
        assert resident is not None and resident.engine is not None, "the plan names the model of each score"
        path = planned.score.model.path
        if resident.head == "scalar" and not is_classifier(read_hf_config(describing(path))):
            raise ConfigError(
                f"reward {planned.name!r}: {path} is no reward model, because it has no trained head that scores; give the "
                "folder of a checkpoint that `tandem reward` wrote, or a sequence classifier of one label"
            )
        if resident.head == "text":
            embedded = replace(config.rollout, backend="embedded")
            check_inference_engine(embedded, describing(path), choose_device(config))
        reader = open_reader(resident.engine.path, tokenizer, chats=planned.reads_chats)
        shows_media = getattr(getattr(planned.score, "reward", None), "show_media", False)
        if shows_media and reader_of(reader.tokenizer) is None:
            raise ConfigError(
                f"reward {planned.name!r}: show_media=true, and {path} reads text alone: give a model that reads images or "
                "sounds (docs/media_models.md), or leave show_media out"
            )


def open_partner(config: TrainConfig, plan: RunPlan, process: Process, residency: Residency) -> WritingModel | None:
    """The model that the workflow talks to; None if the plan has none. Without a memory limit it is awake from now on."""
    resident = plan.resident("partner")
    if resident is None:
        return None
    assert resident.engine is not None, "the plan says how it is opened"
    model = residency.add(resident.name, _open_writer(config, resident.engine, process))
    if residency.plan is None and model.member:
        model.engine()
    return model


def _open_writer(config: TrainConfig, engine: TrainEngineConfig, process: Process) -> WritingModel:
    """A judge or a partner, which write; its engine starts when it is first needed."""
    ranks = generating_ranks(config)
    threads = process.generation_threads("colocate", len(ranks))
    settings = replace(config.rollout.engine, threads=threads, max_model_len=None)
    folder, dtype = resolve(engine.path), resolve_dtype(engine.dtype, process.device)
    return WritingModel(folder, settings, dtype, process.device, threads=threads, member=process.rank in ranks)


def open_reader(path: str, actor: PreTrainedTokenizerBase, *, chats: bool = True) -> ModelReader:
    """Reads samples in the tokens of the model in ``path``; no weights are needed for it. ``chats``: conversations, which
    needs a chat template.

    Raises:
        ConfigError: its tokenizer cannot be read, or has no chat template.
    """
    folder = describing(path)
    own = load_tokenizer(folder, chats=chats)
    context = Architecture.from_config(read_hf_config(folder)).max_position_embeddings
    return ModelReader(own, same_tokens=differing_token(own, actor) is None, max_length=context, actor=actor)


def open_reference(
    plan: RunPlan, process: Process, actor: TrainEngine | None = None, open_engine: Open = open_model
) -> Reference | None:
    """The frozen policy; None if nothing compares with one. ``actor``: the engine whose base may be its own reference.

    Raises:
        ConfigError: see `open_model`.
    """
    resident = plan.resident("reference")
    if resident is None:
        return None
    if actor is not None and resident.base_of is not None:
        return Reference(actor, base=True)
    return Reference(open_engine(resident, process), refresh_every_steps=resident.refresh_every_steps)


def open_critic(
    plan: RunPlan,
    config: TrainConfig,
    process: Process,
    actor: TrainEngine | None,
    steps: int,
    open_engine: Open = open_model,
) -> Critic | SharedCritic | None:
    """The critic; None if nothing asks for values, or its model is elsewhere. ``actor``: its engine, whose second head is
    the critic with `critic.shared`. ``steps``: of the run.

    Raises:
        ConfigError: its model cannot be opened, or has more than one label.
    """
    resident = plan.resident("critic")
    if plan.stage("values") is None or (resident is None and not config.critic.shared):
        return None
    if resident is None:
        return None if actor is None else SharedCritic(actor, config.critic)
    engine = open_engine(resident, process, optimizer_steps=steps * resident.mini_batches * resident.epochs)
    return Critic(engine, config.critic, config.actor, seed=config.seed)


Scores = dict[str, ScoreRole | WritingRole]


class Roles(NamedTuple):
    """Roles that have their models."""

    objects: dict[str, Any]
    """By `Role.name`."""

    scores: Scores
    """The models of rewards."""


def open_roles(
    config: TrainConfig,
    plan: RunPlan,
    process: Process,
    steps: int,
    run: str,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    engine: InferenceEngine | None,
    residency: Residency,
    stack: contextlib.ExitStack,
    own: RunPlan | None = None,
) -> Roles:
    """Opens the models of the plan in a training engine, one after another, so that each finds room, and makes the roles on
    them; ``stack`` closes the publisher. Collective. ``steps`` and ``run``: of the whole run, and its name. ``folder``: of
    the actor's model, whose ``tokenizer`` it is. ``engine``: takes the actor's weights. ``own``: the plan
    with the models of this process, where others have the rest; None: all."""
    own = own or plan
    policy, judge = own.resident("actor"), own.resident("teacher")
    updates = (steps - config.critic.warmup_steps) * config.actor.mini_batches * config.actor.epochs_per_batch
    trainer = None if policy is None else residency.open(policy, process, optimizer_steps=updates)
    critic = open_critic(own, config, process, trainer, steps, residency.open)
    reference = open_reference(own, process, trainer, residency.open)
    teacher = None if judge is None else Teacher(residency.open(judge, process))
    scores = open_scores(config, own, process, tokenizer, residency)
    residency.enter(BEGIN)
    roles: dict[str, Any] = {"reference": reference, "critic": critic, "teacher": teacher}
    if trainer is not None:
        actor = make_actor(config, plan, trainer, critic if isinstance(critic, SharedCritic) else None)
        if reference is not None:
            reference.follow(trainer, lambda: actor.version)
        archive, verifier = make_proof(config, process, trainer, folder)
        publisher = make_publisher(config, process, trainer, engine, folder, run=run, archive=archive)
        stack.callback(publisher.close)
        residency.deliver_by(publisher.deliver_again)
        verifier.follow(lambda: publisher.version.number)
        student = actor if plan.resident("teacher") is None else Student(actor)
        constraint = make_constraint(config, plan, actor)
        roles |= {"actor": student, "constraint": constraint, "verifier": verifier, "publisher": publisher}
    return Roles({name: role for name, role in roles.items() if role is not None}, scores)


def make_actor(config: TrainConfig, plan: RunPlan, trainer: TrainEngine, shared_critic: SharedCritic | None) -> Actor:
    """The actor on its engine. It rests in the first steps, while a critic with a model of its own warms up."""
    critic, warmup = plan.stage("values"), 0 if config.critic.shared else config.critic.warmup_steps
    actor = Actor(
        trainer,
        config.algorithm,
        config.actor,
        reference=plan.resident("reference"),
        shared_critic=shared_critic,
        max_head_offpolicyness=max_token_age(config),
        max_new_tokens=config.gconfig.max_new_tokens,
        seed=config.seed,
        parts=plan.algorithm,
        resting=None if critic is None else lambda: actor.version < warmup,
    )
    return actor


def make_constraint(config: TrainConfig, plan: RunPlan, actor: Actor) -> Constraint | None:
    """The constraint, which keeps a cost at or below its limit; None if no term of the reward is a cost. It rests while the
    actor does."""
    cost = config.constraint.cost
    if cost is None:
        return None
    return Constraint(config.constraint, everywhere=is_everywhere(plan, cost), resting=actor.resting)


def is_everywhere(plan: RunPlan, cost: str) -> bool:
    """True if every row is judged by a reward with this cost."""
    return all(any(term.label == cost for term in terms) for terms in plan.sums.values())
