"""Opens the models that the plan of a run names, with what delivers the actor's weights and proves their arrival.

Also opens a reward model outside of a run, for `tandem serve-reward` (`open_judge`).
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from tandem.api.batch import pack
from tandem.api.engines import InferenceEngine, TrainEngine
from tandem.api.failures import DataFailure
from tandem.api.media import reader_of
from tandem.api.services import NOTHING
from tandem.config.arithmetic import generating_ranks, max_head_offpolicyness, max_token_age
from tandem.config.devices import machines
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.fleet import INSIDE
from tandem.config.train_engine import TrainEngineConfig, parse_layout
from tandem.engines.inference.check import check_inference_engine
from tandem.engines.train.engine import SpreadEngine
from tandem.engines.train.spread import check_train_engine
from tandem.flow.extensions import own_train_engine, own_weight_channel
from tandem.flow.plan import RunPlan
from tandem.flow.planned_models import Resident
from tandem.flow.process import Process, TeamEngine, form_team
from tandem.flow.residency import Residency
from tandem.flow.scoring import ModelReader, ScoreRole
from tandem.flow.services import reads_reward
from tandem.flow.sleep_plan import BEGIN
from tandem.flow.writing import WritingModel, WritingRole
from tandem.models.architecture import Architecture
from tandem.models.catalog import describing, resolve
from tandem.models.families import use_family
from tandem.models.foreign import read_hf_config
from tandem.models.hardware import choose_device, resolve_dtype
from tandem.models.load import is_classifier
from tandem.models.media.families import text_config
from tandem.models.shape import adapters_of, read_shape
from tandem.models.tokenizer import check_vocabulary, load_tokenizer
from tandem.proof.verification import Schedule, Scorer, Verifier, beginning
from tandem.protocol.reward_layouts import NotJudged, Question, Verdict
from tandem.rewards.serving import ServedJudge
from tandem.roles.actor import Actor
from tandem.roles.constraint import Constraint
from tandem.roles.critic import Critic, SharedCritic
from tandem.roles.reference import Reference, Student, Teacher
from tandem.weights.channel import WeightChannel
from tandem.weights.collective import CollectiveChannel
from tandem.weights.cuda_ipc import CudaIpcChannel
from tandem.weights.disk import DiskChannel
from tandem.weights.publisher import VersionArchive, WeightPublisher


def check_same_tokens(role: str, path: str, theirs: PreTrainedTokenizerBase, tokenizer: PreTrainedTokenizerBase) -> None:
    """Checks that every token of the actor has the same id in the tokenizer of ``role``, which may have further tokens.

    Raises:
        ConfigError: names the first token that differs.
    """
    token = differing_token(theirs, tokenizer)
    if token is not None:
        role_id, actor_id = theirs.get_vocab().get(token, "missing"), tokenizer.get_vocab()[token]
        raise ConfigError(
            f"{role}.path={path} has another tokenizer than the actor: {token!r} is {role_id} "
            f"there and {actor_id} for the actor; use a {role} of the same model family, or leave {role}.path out"
        )


def differing_token(theirs: PreTrainedTokenizerBase, ours: PreTrainedTokenizerBase) -> str | None:
    """Returns the first token of ``ours`` that is missing from ``theirs`` or has another id there; None if all agree."""
    numbers = theirs.get_vocab()
    ordered = sorted(ours.get_vocab().items(), key=lambda item: item[1])
    return next((token for token, number in ordered if numbers.get(token) != number), None)


WEIGHTS_FOLDER = ".weights"
"""Subfolder of `run.root` from which servers read weights, unless `rollout.weights.folder` names another folder."""


def weights_folder(config: TrainConfig) -> Path:
    """Returns the folder from which this machine's servers read weights. Each machine has its own folder, because other
    machines cannot know which versions are in use here."""
    folder = Path(config.rollout.weights.folder or Path(config.run.root) / WEIGHTS_FOLDER).expanduser().absolute()
    return folder.with_name("-".join(filter(None, (folder.name, machines().folder))))


def make_disk_channel(config: TrainConfig, model: Path) -> DiskChannel:
    """Returns the channel for servers that read weights from a folder. It keeps every version that may have to be scored
    again, and at least two."""
    return DiskChannel(**_folder_terms(config, model))


def _folder_terms(config: TrainConfig, model: Path) -> dict[str, Any]:
    keep_parent = config.rollout.weights.folder is not None
    keep = max(2, max_head_offpolicyness(config) + 1)
    return {"parent": weights_folder(config), "base": model, "keep": keep, "keep_parent": keep_parent}


def make_channel(config: TrainConfig, process: Process, model: Path) -> WeightChannel | None:
    """Returns the weight channel of the user's class, or the one that `rollout.weights.channel` names. None on ranks other
    than 0, and if the clients of the servers deliver the weights themselves."""
    if not process.is_main:
        return None
    if config.extend.weight_channel is not None:
        user_class = own_weight_channel(config.extend.weight_channel)
        channel: WeightChannel = user_class(**_folder_terms(config, model), device=process.device)
        return channel
    makers: dict[str, Callable[[], WeightChannel]] = {
        "disk": lambda: make_disk_channel(config, model),
        "ipc": lambda: CudaIpcChannel(process.device),
        "collective": lambda: CollectiveChannel(1, backend="nccl" if process.device.startswith("cuda") else "gloo"),
    }
    delivery = config.rollout.weights
    if delivery.terms.by_group and config.rollout.backend not in INSIDE:
        return None  # each server's client broadcasts the tensors from memory
    return makers[delivery.channel]() if delivery.channel in makers else None


def make_proof(
    config: TrainConfig, process: Process, trainer: TrainEngine, model: Path
) -> tuple[VersionArchive | None, Verifier]:
    """Makes the archive of weight versions (None except on rank 0) and the verifier, which scores trajectories again under
    these versions. Collective.

    Version 0 is read from the model's own folder.
    """
    verify, eta = config.rollout.verify, max_head_offpolicyness(config)
    schedule, archive = Schedule(verify, eta), None
    first = beginning(model, trainer) if verify.every_steps is not None else None
    if process.is_main:
        archive = VersionArchive(schedule.wants, max(1, eta))
        if first is not None:
            archive.keep(0, first)
    adapts = trainer.adapter is not None  # the inference engine rounds the weights into which an adapter is merged
    generated, trained = (resolve_dtype(name, process.device) for name in (config.rollout.dtype, config.actor.dtype))
    verifier = Verifier(
        Scorer(
            trainer,
            archive,
            generated,
            process.team,
            rounds=generated == torch.bfloat16 and (trained == torch.float32 or adapts),
        ),
        verify,
        torch.bfloat16 if torch.bfloat16 in (generated, trained) else torch.float32,
        schedule=schedule,
        keeps_kv=config.rollout.engine.keep_kv_on_update,
        seed=config.seed,
    )
    return archive, verifier


def make_publisher(
    config: TrainConfig,
    process: Process,
    trainer: TrainEngine,
    engine: InferenceEngine | None,
    model: Path,
    *,
    run: str,
    archive: VersionArchive | None,
) -> WeightPublisher:
    """Makes the publisher, which delivers the actor's weights to the inference engine. Collective."""
    return WeightPublisher(
        trainer,
        () if engine is None else (engine,),
        run=run,
        dtype=resolve_dtype(config.rollout.dtype, process.device),
        channel=make_channel(config, process, model),
        disk=lambda: make_disk_channel(config, model),
        archive=archive,
        team=process.team,
    )


class Open(Protocol):
    """Opens the train engine of a resident, as `open_model` does."""

    def __call__(self, resident: Resident, process: Process, *, optimizer_steps: int = 0) -> TrainEngine: ...


def open_model(
    resident: Resident, process: Process, *, optimizer_steps: int = 0, trunk: TrainEngine | None = None
) -> TrainEngine:
    """Opens the train engine of a resident on its ranks; on other ranks returns a proxy that calls it there. Collective.

    ``optimizer_steps``: number of optimizer steps of the whole run, for the learning-rate schedule. ``trunk``: the engine of
    the resident whose trunk this one shares.

    Raises:
        ConfigError: the model cannot be opened, or not with the layout of its configuration.
        WeightsChanged: the weights of ``trunk`` differ from those in this model's folder.
    """
    assert resident.engine is not None and resident.head != "text", f"{resident.name} has no train engine"
    copies = [(rank,) for rank in resident.ranks] if resident.in_episodes else [resident.ranks]
    teams = [form_team(ranks, process.team) for ranks in copies]
    team = next((team for team in teams if team.member), None)
    if isinstance(trunk, TeamEngine):
        trunk = trunk.engine
    assert trunk is None or isinstance(trunk, SpreadEngine), "only frozen models share a trunk"
    make: Callable[..., TrainEngine] = own_train_engine(resident.own) if resident.own is not None else SpreadEngine
    build = partial(
        make,
        config=resident.engine,
        total_steps=optimizer_steps,
        device=process.device,
        head=resident.head,
        key=resident.key,
        trained=resident.changes,
        process_group=None if team is None else team.group,
        adapter=resident.adapter,
        label=resident.class_label,
        trunk=trunk,
    )
    if team is process.team:
        return build()
    with process.team.together():
        engine = None if team is None else build()
    if engine is not None and resident.in_episodes:
        return engine  # called only by this rank's episodes
    return TeamEngine(engine, process.team, min(resident.ranks))


def open_scores(
    config: TrainConfig,
    plan: RunPlan,
    process: Process,
    tokenizer: PreTrainedTokenizerBase,
    residency: Residency,
    there: Mapping[str, TrainEngine | WritingModel] = NOTHING,
) -> dict[str, ScoreRole | WritingRole]:
    """Opens the models of rewards, and makes the role of each such reward. Rewards that ask for the same model share it.
    Rank 0 has the samples and encodes them for the model; if episodes await the reward, every rank encodes its own samples.

    ``tokenizer``: the actor's. ``there``: models that are already open, in other processes, by their names in the plan.

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
        path = planned.score.model.path  # not the path of an adapter's base model
        reads = process.is_main or planned.in_episodes
        reader = open_reader(path, tokenizer, chats=planned.reads_chats) if reads else None
        vocabulary = Architecture.from_config(read_hf_config(describing(path))).vocab_size
        roles[planned.name] = ScoreRole(planned, engine, reader, vocabulary, timeout_s=config.reward_timeout_s)
    return roles


def check_models(
    plan: RunPlan, device: str, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Checks that each model of the plan can be opened on this device and spread over its ranks, and can read the rows.
    ``tokenizer``: the actor's.

    Raises:
        ConfigError: see `check_train_engine` and `check_vocabulary`; adapters for matrices that the model does not have; a
            critic or a reference with another tokenizer; or no model is of the family `extend.model_family`.
    """
    kinds: dict[str, str] = {}
    for resident in plan.residents:
        config, key = resident.engine, resident.key
        if config is None or resident.base_of is not None:
            continue
        folder = describing(config.path)
        kinds[text_config(read_hf_config(folder)).model_type] = config.path
        model_tokenizer = tokenizer if tokenizer.name_or_path == str(folder) else load_tokenizer(folder)
        check_vocabulary(model_tokenizer, folder, rows)
        if resident.name in ("critic", "reference"):
            check_same_tokens(resident.name, config.path, model_tokenizer, tokenizer)
        if resident.head == "text":  # checked by `check_scores` and `check_partner`
            continue
        dtype, layout = resolve_dtype(config.dtype, device), parse_layout(config.backend, key)
        check_train_engine(config, folder, layout, torch.device(device), dtype, resident.head, key, resident.class_label)
        if config.lora.rank is not None:
            adapters_of(config.lora, read_shape(str(folder)))  # refuses names of matrices that the model does not have
    spec = None if plan.config is None else plan.config.extend.model_family
    if spec is not None and (family := use_family(spec)).model_type not in kinds:
        types = ", ".join(f"{path} is {kind!r}" for kind, path in kinds.items())
        raise ConfigError(
            f"extend.model_family={spec} is for models of model_type {family.model_type!r}, and this run has none "
            f"({types}); give the model_type that their config.json has, or leave extend.model_family out"
        )


def check_scores(config: TrainConfig, plan: RunPlan, tokenizer: PreTrainedTokenizerBase) -> None:
    """Checks that the rewards that need a model, or have options, can be computed where this run needs them.

    Raises:
        ConfigError: the workflow reads a reward with options in the middle of an episode; `algorithm.labels=majority` would
            replace the reward of a model; a model has no chat template; or a judge with `show_media` reads only text.
    """
    later = next((term.label for term in plan.later), None)
    if later is not None and reads_reward(config) == "midway":
        raise ConfigError(
            f"the reward has {later!r}, whose options are applied only after the episode, and "
            f"workflow={config.workflow} reads the whole reward in the middle of an episode; leave normalise, clip and gate "
            "out, or use workflow=rlvr"
        )
    first = next((score.name for score in plan.scores), later)
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
                f"reward {planned.name!r}: {path} is no reward model, because it has no trained scoring head; give the "
                "folder of a checkpoint that `tandem reward` wrote, or a sequence classifier with one label"
            )
        if resident.head == "text":
            embedded = replace(config.rollout, backend="embedded")
            check_inference_engine(embedded, describing(path), choose_device(config.device, config.actor.backend))
        reader = open_reader(resident.engine.path, tokenizer, chats=planned.reads_chats)
        shows_media = getattr(getattr(planned.score, "reward", None), "show_media", False)
        if shows_media and reader_of(reader.tokenizer) is None:
            raise ConfigError(
                f"reward {planned.name!r}: show_media=true, and {path} reads only text: give a model that reads images or "
                "sounds (docs/media_models.md), or leave show_media out"
            )


def open_partner(config: TrainConfig, plan: RunPlan, process: Process, residency: Residency) -> WritingModel | None:
    """Opens the model that the workflow talks to; None if the plan has none. Without a memory limit, its engine starts."""
    resident = plan.resident("partner")
    if resident is None:
        return None
    assert resident.engine is not None, "the plan gives the partner an engine configuration"
    model = residency.add(resident.name, _open_writer(config, resident.engine, process))
    if residency.plan is None and model.member:
        model.engine()
    return model


def _open_writer(config: TrainConfig, engine: TrainEngineConfig, process: Process) -> WritingModel:
    """Makes the model of a judge or a partner, which writes text; its engine starts when it is first needed."""
    ranks = generating_ranks(config)
    threads = process.generation_threads("colocate", len(ranks))
    settings = replace(config.rollout.engine, threads=threads, max_model_len=None)
    folder, dtype = resolve(engine.path), resolve_dtype(engine.dtype, process.device)
    return WritingModel(folder, settings, dtype, process.device, threads=threads, member=process.rank in ranks)


def open_reader(path: str, actor: PreTrainedTokenizerBase, *, chats: bool = True) -> ModelReader:
    """Returns a reader that encodes samples for the model in ``path``, without its weights. ``chats``: True if the reader
    must encode conversations, which needs a chat template.

    Raises:
        ConfigError: the model's tokenizer cannot be read, or has no chat template.
    """
    folder = describing(path)
    tokenizer = load_tokenizer(folder, chats=chats)
    context = Architecture.from_config(read_hf_config(folder)).max_position_embeddings
    same_tokens = differing_token(tokenizer, actor) is None
    return ModelReader(tokenizer, same_tokens=same_tokens, max_length=context, actor=actor)


def open_reference(
    plan: RunPlan, process: Process, actor: TrainEngine | None = None, open_engine: Open = open_model
) -> Reference | None:
    """Opens the frozen policy; None if the plan has none. ``actor``: the engine whose base may serve as the reference.

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
    """Opens the critic; None if no stage needs values, or if another process has the critic's model. ``actor``: the actor's
    engine, whose second head is the critic if `critic.shared` is set. ``steps``: number of steps of the run.

    Raises:
        ConfigError: the critic's model cannot be opened, or has more than one label.
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
    """The roles of a run, with open models."""

    objects: dict[str, Any]
    """The object of each role, by `Role.name`."""

    scores: Scores
    """The roles of rewards that need a model, by the reward's name."""


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
    """Opens the plan's models that have a train engine, and makes their roles. The models are opened one after another, so
    that each finds room in memory. Collective.

    ``steps``: number of steps of the run; ``run``: its name. ``folder``, ``tokenizer``: of the actor's model. ``engine``:
    receives the actor's weights. ``stack``: closes the publisher. ``own``: the plan with only this process's models, if
    other processes have the rest; None: this process opens all models."""
    local = own or plan
    policy, frozen = local.resident("actor"), local.resident("teacher")
    updates = (steps - config.critic.warmup_steps) * config.actor.mini_batches * config.actor.epochs_per_batch
    trainer = None if policy is None else residency.open(policy, process, optimizer_steps=updates)
    critic = open_critic(local, config, process, trainer, steps, residency.open)
    reference = open_reference(local, process, trainer, residency.open)
    teacher = None if frozen is None else Teacher(residency.open(frozen, process))
    scores = open_scores(config, local, process, tokenizer, residency)
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
        roles |= {"actor": student, "verifier": verifier, "publisher": publisher}
        if (cost := config.constraint.cost) is not None:  # its multiplier does not change while the actor is not trained
            everywhere = is_everywhere(plan, cost)
            roles["constraint"] = Constraint(config.constraint, everywhere=everywhere, resting=actor.resting)
    return Roles({name: role for name, role in roles.items() if role is not None}, scores)


def make_actor(config: TrainConfig, plan: RunPlan, trainer: TrainEngine, shared_critic: SharedCritic | None) -> Actor:
    """Makes the actor. It is not trained during the first `critic.warmup_steps` steps, while a separate critic warms up."""
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


def is_everywhere(plan: RunPlan, cost: str) -> bool:
    """Tells whether the reward of every row contains the cost term."""
    return all(any(term.label == cost for term in terms) for terms in plan.sums.values())


def open_judge(
    path: str, device: str, dtype: Literal["auto", "bfloat16", "float32"], class_label: str | int | None = None
) -> ServedJudge:
    """Opens the reward model in ``path``. ``class_label``: for a classifier with several classes, the class whose log-odds
    are the score.

    Raises:
        ConfigError: there is no model; it is not a classifier; ``class_label`` is missing or not one of its classes; or it
            has no chat template.
    """
    folder = resolve(path)
    config = read_hf_config(folder)
    if not is_classifier(config):
        raise ConfigError(
            f"{path} is no reward model, because it has no trained scoring head; give a checkpoint that "
            "`tandem reward` wrote, or a sequence classifier"
        )
    tokenizer: PreTrainedTokenizerBase = load_tokenizer(folder, chats=True)
    reader = ModelReader(tokenizer, same_tokens=False, max_length=Architecture.from_config(config).max_position_embeddings)
    engine = SpreadEngine(
        TrainEngineConfig(path=str(folder), dtype=dtype),
        total_steps=0,
        device=device,
        head="scalar",
        trained=False,
        label=class_label,
    )

    def judge(questions: Sequence[Question]) -> list[Verdict]:
        verdicts: list[Verdict] = [NotJudged("not_read", "")] * len(questions)
        readable = []
        for number, question in enumerate(questions):
            try:
                text = question.prompt + question.completion
                sequence = reader.chat(question.messages) if question.messages else reader.text(text)
                readable.append((number, sequence))
            except DataFailure as failure:
                verdicts[number] = NotJudged(failure.reason, str(failure))
        if readable:
            batch = pack([sequence for _, sequence in readable])
            with torch.no_grad():
                scores = engine.forward(batch).scores
            assert scores is not None, "its head is scalar"
            last = scores[batch["cu_seqlens"][1:] - 1].float().tolist()
            for (number, _), score in zip(readable, last, strict=True):
                verdicts[number] = score
        return verdicts

    reads = reader_of(tokenizer)
    return ServedJudge(judge, () if reads is None else reads.kinds)
