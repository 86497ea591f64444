"""Derives the plan of a run from its configuration: its models, and the stages of a step.

Only this module decides which models exist; the stages are the trace of the step. The session opens the models of the plan,
`tandem plan` counts the stages, `--dry-run` and `tandem graph` show them. Planning opens no model and touches no tensor.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.algorithms.preference import PREFERENCE_LOSSES
from tandem.api.workflow import FrozenModel
from tandem.config.arithmetic import (
    evaluates_every,
    generating_ranks,
    max_head_offpolicyness,
    partner_of,
    rewards_of,
    workflow_of,
)
from tandem.config.check_algorithm import component_problems, part_problems
from tandem.config.errors import ConfigError, refuse
from tandem.config.experiment import BaseConfig, SFTConfig, TrainConfig
from tandem.config.preference import DistillConfig, PreferenceConfig, RewardModelConfig, training_config
from tandem.config.recipes import sum_of
from tandem.config.train_engine import (
    CriticConfig,
    LoRAConfig,
    ReferenceConfig,
    TrainEngineConfig,
    critic_engine,
    either,
    fewer_ranks_problems,
    key_of,
    layout_problems,
    overlay,
    parse_layout,
)
from tandem.flow.extensions import load_extensions
from tandem.flow.planned_models import (
    Head,
    PlannedScore,
    Resident,
    awaited,
    beside_episodes,
    check_rewards,
    share_trunks,
    with_adapter,
)
from tandem.flow.stages import (
    ACTOR,
    CONSTRAINT,
    CRITIC,
    EVALUATOR,
    LANGUAGE_MODEL,
    NEXT_BATCH,
    PREFERENCE,
    PREPARE_BATCH,
    PUBLISHER,
    RECORDER,
    REFERENCE,
    REWARD_MODEL,
    SAVER,
    SHARED_CRITIC,
    STUDENT,
    TEACHER,
    VERIFIER,
    Role,
    Stage,
    TraceError,
    score_stage,
    trace,
)
from tandem.flow.step import learn_from_preferences, learn_from_rewards, learn_from_rows
from tandem.rewards.reward import RewardTerm, read_sum
from tandem.roles.components import choose
from tandem.roles.parts import AlgorithmParts, choose_parts

Step = Callable[..., tuple[Any, dict[str, float]]]
"""A step function: one of `tandem.flow.step`, or the step of a script."""


@dataclass(frozen=True)
class RunPlan:
    """The models of a run, and the stages of a step in order."""

    residents: tuple[Resident, ...]
    stages: tuple[Stage, ...]
    roles: tuple[Role, ...] = dataclasses.field(default=(), compare=False, repr=False)
    """The roles that the step calls; the plan's stages are theirs."""

    step: Step | None = dataclasses.field(default=None, compare=False, repr=False)
    """The function that calls the stages; None if nothing trains."""

    greedy_baseline: bool = False
    """True if each prompt gets an additional greedy sample, which is a baseline and is not trained on."""

    paired: bool = False
    """True if each row has two sequences, which are trained on together."""

    scores: tuple[PlannedScore, ...] = ()
    """The rewards that need a model, in the order of their stages; a reward that episodes await has no stage."""

    sums: Mapping[str, tuple[RewardTerm, ...]] = dataclasses.field(default_factory=dict)
    """Every reward sum that judges rows, as written, with its terms."""

    reward: str = ""
    """The reward sum of rows that do not name a reward."""

    config: BaseConfig | None = dataclasses.field(default=None, compare=False, repr=False)
    """The configuration from which the plan was made."""

    algorithm: AlgorithmParts | None = dataclasses.field(default=None, compare=False, repr=False)
    """The functions of the algorithm; None if no actor learns from rewards."""

    def resident(self, name: str) -> Resident | None:
        """The resident of this name; None if the run has none."""
        return next((resident for resident in self.residents if resident.name == name), None)

    def stage(self, name: str) -> Stage | None:
        """The stage of this name; None if the run has none."""
        return next((stage for stage in self.stages if stage.name == name), None)

    def sum_of(self, row: Mapping[str, Any]) -> str:
        """Returns the reward sum that judges a row, as written."""
        return sum_of(row, self.reward)

    @property
    def staged(self) -> tuple[PlannedScore, ...]:
        """The model rewards that are computed after the episodes, in stages."""
        return tuple(score for score in self.scores if not score.in_episodes)

    @property
    def awaited(self) -> tuple[str, ...]:
        """Names of the model rewards that the workflow awaits in the middle of an episode."""
        return tuple(score.name for score in self.scores if score.in_episodes)

    @property
    def later(self) -> tuple[RewardTerm, ...]:
        """Those terms of all reward sums that are added to the rewards only when the batch is complete."""
        return tuple(term for terms in self.sums.values() for term in terms if term.is_late)

    @property
    def passes(self) -> tuple[Stage, ...]:
        """The stages that add fields to a batch before it is trained on."""
        return tuple(stage for stage in self.stages if stage.kind == "pass")

    @property
    def forwards(self) -> tuple[Stage, ...]:
        """The stages that run a model without gradients: scores, and passes that add fields to a batch."""
        return tuple(stage for stage in self.stages if stage.kind in ("score", "pass") and stage.awake)

    @property
    def weights_to(self) -> Iterator[tuple[Stage, str]]:
        """The stages that deliver weights to another model, each with the receiving model's name."""
        return ((stage, stage.awake[-1]) for stage in self.stages if stage.kind == "deliver")


def plan_run(config: BaseConfig, step: Step | None = None) -> RunPlan:
    """Makes the plan of a configuration. ``step``: a script's step for training with rewards; None: Tandem's own step.

    Raises:
        ConfigError: a part of the algorithm is unknown, a configured role is not used, a model is on ranks where it cannot
            be, or ``step`` cannot be traced or leaves out a pass that the configuration needs.
    """
    backend = config.rollout.backend if isinstance(config, TrainConfig | DistillConfig) else "auto"
    step = load_extensions(config.extend, backend, step)
    if isinstance(config, DistillConfig):
        teacher = Resident("teacher", _frozen(config.actor, config.teacher), key=key_of(config, "teacher", "backend"))
        plan = _reinforcement(training_config(config), teacher)
    elif isinstance(config, TrainConfig):
        plan = _reinforcement(config)
    elif isinstance(config, PreferenceConfig):
        plan = _preference(config)
    elif isinstance(config, SFTConfig | RewardModelConfig):
        plan = _supervised(config)
    else:
        raise ConfigError(f"there is no plan for {type(config).__name__}")
    if step is not None:
        if not isinstance(config, TrainConfig):
            raise ConfigError(f"a step of your own is for training with rewards; {type(config).__name__} has another loop")
        plan = _with_step(step, plan)
    for resident in plan.residents:
        if resident.engine is not None and resident.changes and resident.ranks[0]:
            raise ConfigError(
                f"{resident.key}={resident.engine.backend}: a model whose weights change sits on the first ranks, "
                "because rank 0 writes its checkpoints; leave @ out"
            )
    return dataclasses.replace(plan, config=config)


def _reinforcement(config: TrainConfig, teacher: Resident | None = None) -> RunPlan:
    actor, critic, kl = config.actor, config.critic, config.algorithm.kl
    parts = choose_parts(config.algorithm, config.gconfig.max_new_tokens, config.seed)
    refuse(part_problems(config))  # again, now that the records of functions in files are known
    fields = parts.credit.advantage.inputs
    values = _has_critic(config, fields)
    head: Head = "both" if critic.shared else "lm"
    counts: dict[str, Any] = {"mini_batches": actor.mini_batches, "epochs": actor.epochs_per_batch}
    residents = [Resident("actor", actor, head, trained=True, own=config.extend.train_engine, **counts)]
    if values and not critic.shared:
        residents.append(_critic(config))
    if kl.coefficient > 0:
        residents.append(_reference(config))
    if teacher is not None:
        residents.append(teacher)
    partner = _partner(config)
    residents += partner
    scores, frozen, sums = _scores(config, rewards_of(config), {resident.name for resident in residents})
    ranks = generating_ranks(config)
    residents += frozen
    judges = [resident.name for resident in frozen if resident.in_episodes]
    generating = ("engine", *(resident.name for resident in partner), *judges)
    constraint = config.constraint.cost
    stepwise = [planned.name for planned in scores if planned.score.per_step]
    advantage = config.algorithm.advantage.name
    check_rewards(config.reward, constraint, sums, stepwise, advantage, of_tokens=parts.credit.of_tokens)
    names = {resident.name for resident in residents}
    updates = actor.mini_batches * actor.epochs_per_batch
    warmup = critic.warmup_steps
    rests = {"ppo_update": f"the actor is not trained in the first {warmup} steps"} if warmup else {}
    proximal = teacher is not None or parts.needs_proximal(config.algorithm, updates)
    collects = {"prepare_batch": _collecting(config, judges)}
    score_stages = tuple(_scoring(scores))
    roles = [
        Role("rollout", PREPARE_BATCH, generating, when=collects, inner=score_stages),
        *_verification(config),
        Role("actor", ACTOR if teacher is None else STUDENT, ("actor",), when=rests, constants={"needs_proximal": proximal}),
        *(_reference_role(resident) for resident in residents if resident.name == "reference"),
        *([Role("critic", CRITIC, ("critic",))] if "critic" in names else []),
        *([Role("critic", SHARED_CRITIC, ("actor",))] if values and "critic" not in names else []),
        *([Role("teacher", TEACHER, ("teacher",))] if teacher is not None else []),
        *([_penalty(warmup)] if constraint is not None else []),
        Role("publisher", PUBLISHER, ("actor", "engine")),
    ]
    every = (*share_trunks(residents, config.device), Resident("engine", generating=ranks))
    return _traced(
        config,
        learn_from_rewards,
        roles,
        generating,
        every,
        greedy_baseline="greedy" in fields,
        scores=scores,
        sums=sums,
        reward=config.reward,
        algorithm=parts,
    )


def _traced(
    config: BaseConfig, step: Step, roles: list[Role], models: tuple[str, ...], residents: tuple[Resident, ...], **more: Any
) -> RunPlan:
    """Makes a plan from the trace of ``step`` and the stages after it. ``models``: residents that evaluation needs."""
    trained = tuple(resident.name for resident in residents if resident.trained)
    changing = tuple(resident.name for resident in residents if resident.changes)
    after = tuple(_following(config, trained, models, changing))
    stages = (*trace(step, roles), *(role.stage(call) for role in after for call in role.calls))
    return RunPlan(residents, stages, (*roles, *after), step, **more)


def _with_step(step: Step, plan: RunPlan) -> RunPlan:
    """Returns the plan with a script's step, which must call every stage of the configuration's step and publish last."""
    after = [stage for stage in plan.stages if stage.kind == "keep"]
    roles = [role for role in plan.roles if role.name not in {stage.role for stage in after}]
    traced = tuple(trace(step, roles))
    names = [stage.name for stage in traced]
    left_out = [item for item in plan.stages if item.kind not in ("score", "keep") and item.name not in names]
    _refuse_left_out(left_out, "stages that the script's step leaves out")
    if max(names.index(item.name) for item in traced if item.kind == "update") > names.index("publish"):
        raise TraceError("the step publishes weights before it has made them: call publisher.publish() after the updates")
    return dataclasses.replace(plan, stages=(*traced, *after), step=step)


def check_passes(plan: RunPlan, passes: Collection[str]) -> None:
    """Checks that a script's loop, which makes these ``passes``, makes every pass of the plan.

    Raises:
        ConfigError: the loop leaves out a pass; the message names it.
    """
    missing = [stage for stage in plan.passes if stage.name not in passes]
    _refuse_left_out(missing, "passes that the script's loop does not make")


def _refuse_left_out(stages: Sequence[Stage], phrase: str) -> None:
    if stages:
        named = ", ".join(f"{stage.name} ({stage.role}.{stage.call})" for stage in stages)
        raise ConfigError(
            f"this configuration needs {phrase}: {named}; use `tandem train`, which makes all of them, or change the keys "
            "that ask for them (algorithm.*, critic.*, constraint.*, rollout.verify)"
        )


def _reference_role(resident: Resident) -> Role:
    every = resident.refresh_every_steps
    return Role(
        "reference",
        REFERENCE,
        ("reference",),
        others={"refresh_if_due": ("actor", "reference")},
        when={"refresh_if_due": f"every {every} steps"},
        constants={"refreshes": bool(every)},
    )


def _collecting(config: TrainConfig, judges: Sequence[str]) -> str:
    """Describes when a batch is collected, if that takes several rounds, runs beside training or calls models; else ""."""
    filter_, eta = config.algorithm.filter.name, max_head_offpolicyness(config)
    words = [f"again until enough groups pass {filter_}"] if filter_ != "none" else []
    words += [f"beside training, at most {eta} version{'s' if eta > 1 else ''} behind"] if eta else []
    words += [f"episodes ask {' and '.join(judges)}"] if judges else []
    return ", ".join(["each step", *words]) if words else ""


Scores = tuple[tuple[PlannedScore, ...], list[Resident], dict[str, tuple[RewardTerm, ...]]]


def plan_scores(config: TrainConfig, specs: Sequence[str]) -> RunPlan:
    """Makes the plan of an evaluation without training: the rewards that need a model, as stages, and their models.
    ``config``: its actor is the evaluated model, whose settings the other models inherit. ``specs``: the reward sums; the
    first is the default of rows that name none.

    Raises:
        ConfigError: see `plan_run`.
    """
    scores, frozen, sums = _scores(config, specs, {"actor", "partner"})
    models = tuple(share_trunks(frozen, config.device))
    return RunPlan(models, tuple(_scoring(scores)), scores=scores, sums=sums, reward=specs[0])


def _scoring(scores: Iterable[PlannedScore]) -> Iterator[Stage]:
    for score in scores:
        if not score.in_episodes:
            yield score_stage(score.stage, score.name, score.resident)


def _scores(config: TrainConfig, specs: Iterable[str], names: set[str]) -> Scores:
    """Returns the rewards that need a model, these models, and the terms of each reward sum.

    Raises:
        ConfigError: a reward cannot be parsed, or has the name of another reward or of a role.
    """
    scores: dict[str, PlannedScore] = {}
    residents: dict[FrozenModel, Resident] = {}
    sums: dict[str, tuple[RewardTerm, ...]] = {}
    for spec in specs:
        sums[spec] = read_sum(spec)
        plain = {term.label for term in sums[spec] if term.score is None}
        if both := plain & scores.keys():
            raise _name_taken(spec, min(both))
        names = names | plain
        for term_score in sums[spec]:
            name, term, score = term_score.label, term_score.term, term_score.score
            if score is None:
                continue
            known = scores.get(name)
            if known is not None and (known.term.name, known.term.knobs) == (term.name, term.knobs):
                scores[name] = dataclasses.replace(known, rewards={**known.rewards, spec: term_score})
                continue
            if name in names | {"engine", "rollout", "verifier", "publisher"}:
                raise _name_taken(spec, name)
            names = names | {name}
            model = score.model
            if model not in residents:
                residents[model] = _judge(config.actor, name, model)
            scores[name] = PlannedScore(name, term, score, residents[model].name, {spec: term_score})
    ordered, ranks = _gates_first(scores), generating_ranks(config)
    midway = awaited(workflow_of(config), ordered)
    ordered = tuple(dataclasses.replace(planned, in_episodes=planned.name in midway) for planned in ordered)
    for spec, terms in sums.items():
        sums[spec] = tuple(dataclasses.replace(term, awaited=term.label in midway) for term in terms)
    in_episodes = {planned.resident for planned in ordered if planned.in_episodes}
    return ordered, [_placed(resident, ranks, resident.name in in_episodes) for resident in residents.values()], sums


def _placed(resident: Resident, ranks: tuple[int, ...], in_episodes: bool) -> Resident:
    """Sets the ranks of a reward's model: a model that writes, or that episodes call, is on the generating ranks."""
    if in_episodes:
        return beside_episodes(resident, ranks)
    return dataclasses.replace(resident, generating=ranks) if resident.head == "text" else resident


def _name_taken(spec: str, name: str) -> ConfigError:
    return ConfigError(
        f"reward {spec!r}: {name!r} is the name of another reward's model or of a role; give this reward another name: "
        "model(path=…, name=helpful), or the attribute `name` of your class"
    )


def _gates_first(scores: Mapping[str, PlannedScore]) -> tuple[PlannedScore, ...]:
    """Returns the scores in their order, except that a score on which the gate of another depends comes before it."""
    ordered: dict[str, PlannedScore] = {}
    begun: set[str] = set()

    def add(score: PlannedScore) -> None:
        if score.name in begun:  # the gates of two scores may depend on each other, in different sums
            return
        begun.add(score.name)
        gates = {term.options.gate_name for term in score.rewards.values()}
        for name in scores:
            if name in gates:
                add(scores[name])
        ordered[score.name] = score

    for score in scores.values():
        add(score)
    return tuple(ordered.values())


def _penalty(warmup: int) -> Role:
    """Returns the role that adapts the multiplier λ to the batch's mean cost and weighs the costs against the rewards."""
    return Role("constraint", CONSTRAINT, when={"follow": f"λ stays as it is in the first {warmup} steps"} if warmup else {})


def _judge(actor: TrainEngineConfig, name: str, model: FrozenModel) -> Resident:
    """Returns the model of a reward. A model that writes text is on each generating rank, in an inference engine that reads
    the weights from the model's folder."""
    engine = _frozen(actor, model)
    if model.head == "text":
        return Resident(name, dataclasses.replace(engine, backend="fsdp:d1", offload=False), "text")
    key = "actor.backend" if model.backend is None else f"reward {name!r}: backend"
    if model.backend is not None:
        layout, written = parse_layout(model.backend, key), f"{key}={model.backend}"
        refuse([*fewer_ranks_problems(layout, written, actor), *layout_problems(layout, written, actor)])
    return with_adapter(Resident(name, engine, model.head, key=key, class_label=model.class_label))


def _partner(config: TrainConfig) -> list[Resident]:
    """Returns the frozen model that the workflow talks to, whose engine is beside rank 0's; empty if there is none.

    Raises:
        ConfigError: the model has no path, or several ranks generate.
    """
    path = partner_of(config)
    if path is None:
        return []
    if generating_ranks(config) != (0,):
        raise ConfigError(
            f"partner={config.partner} is a model beside the engine of rank 0, and {len(generating_ranks(config))} ranks "
            "generate with an engine each; use placement=decoupled, one server (rollout.backend=tandem:d1), or "
            "actor.backend=fsdp:d1"
        )
    engine = dataclasses.replace(_frozen(config.actor, FrozenModel(path, head="text")), backend="fsdp:d1", offload=False)
    return [Resident("partner", engine, "text", key="partner")]


def _preference(config: PreferenceConfig) -> RunPlan:
    loss = choose(PREFERENCE_LOSSES, config.loss, "loss").part
    refuse(component_problems("loss", "loss", config.loss))
    actor = Resident("actor", config.actor, trained=True, own=config.extend.train_engine)
    residents = (actor, _reference(config)) if loss.needs_reference else (actor,)
    both = tuple(resident.name for resident in residents)
    awake = {"compute_reference": ("reference",), "compute_baseline": both}
    needs = {"needs_reference": loss.needs_reference, "needs_baseline": loss.needs_baseline}
    roles = [Role("batches", NEXT_BATCH), Role("learner", PREFERENCE, ("actor",), others=awake, constants=needs)]
    return _traced(config, learn_from_preferences, roles, both, residents, paired=loss.is_paired)


def _supervised(config: SFTConfig | RewardModelConfig) -> RunPlan:
    kind = config.supervision if isinstance(config, RewardModelConfig) else None
    train_engine = config.extend.train_engine
    actor = Resident("actor", config.actor, "lm" if kind is None else "scalar", trained=True, own=train_engine)
    learner = Role("learner", LANGUAGE_MODEL if kind is None else REWARD_MODEL[kind], ("actor",))
    roles = [Role("batches", NEXT_BATCH), learner]
    return _traced(config, learn_from_rows, roles, ("actor",), (actor,), paired=kind in ("pairs", "safety"))


def _verification(config: TrainConfig) -> Iterator[Role]:
    every = config.rollout.verify.every_steps
    if every is not None:
        yield Role("verifier", VERIFIER, ("actor",), when={"verify_if_due": f"steps 1 and 3, then every {every}"})


def _following(
    config: BaseConfig, trained: tuple[str, ...], models: tuple[str, ...], changing: tuple[str, ...]
) -> Iterator[Role]:
    """Yields the roles that are called after a step. ``trained``, ``changing``: names of residents; ``models``: those that
    evaluation needs."""
    if config.deterministic:
        yield Role("recorder", RECORDER, trained)
    every, saves = evaluates_every(config), config.checkpoint
    if every is not None:
        yield Role("evaluator", EVALUATOR, models, when={"evaluate": f"before step 1, every {every} steps, at the end"})
    if saves.every_steps is not None or saves.at_end:
        times = (f"every {saves.every_steps} steps" if saves.every_steps else "", "at the end" if saves.at_end else "")
        yield Role("saver", SAVER, changing, when={"save": ", ".join(filter(None, times))})


def _has_critic(config: TrainConfig, fields: tuple[str, ...]) -> bool:
    """Tells whether the advantage function, built in or from a file, needs values."""
    if "values" not in fields and config.critic != CriticConfig():
        raise ConfigError(
            f"critic.* is not used, because algorithm.advantage={config.algorithm.advantage.name} asks for no values; use "
            "algorithm=ppo, or leave the critic's keys out"
        )
    return "values" in fields


def _critic(config: TrainConfig) -> Resident:
    actor, critic = config.actor, config.critic
    return Resident(
        "critic",
        critic_engine(critic, actor),
        "scalar",
        True,
        key_of(config, "critic", "backend"),
        mini_batches=actor.mini_batches,
        epochs=either(critic, actor, "epochs_per_batch"),
    )


def _reference(config: TrainConfig | PreferenceConfig) -> Resident:
    """Returns the frozen policy: the actor's base if the actor has adapters and `reference` is not set, else a model."""
    reference = config.reference
    base_of = "actor" if config.actor.lora.rank is not None and reference == type(reference)() else None
    every = reference.refresh_every_steps if isinstance(reference, ReferenceConfig) else None
    key, engine = key_of(config, "reference", "backend"), _frozen(config.actor, reference)
    if every is not None:
        engine = dataclasses.replace(engine, freeze=config.actor.freeze)  # it copies the weights that the actor trains
    return Resident("reference", engine, key=key, base_of=base_of, refresh_every_steps=every)


def _frozen(actor: TrainEngineConfig, section: object) -> TrainEngineConfig:
    """Returns the engine configuration of a frozen model, without adapters; keys that ``section`` leaves unset have the
    actor's values."""
    return overlay(TrainEngineConfig, section, actor, lora=LoRAConfig(), freeze=())
