"""From a configuration to the models of a run and the stages of a step.

This is the only place that decides which models exist, and so who can be called; the stages are the trace of the step. The
session makes what the plan names, `tandem plan` counts the stages, `--dry-run` and `tandem graph` show them. Making a plan
opens no model and touches no tensor.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tandem.algorithms.preference import PREFERENCE_LOSSES
from tandem.api.scoring import FrozenModel, Score
from tandem.config.arithmetic import (
    evaluates_every,
    generating_ranks,
    max_head_offpolicyness,
    partner_of,
    rewards_of,
    workflow_of,
)
from tandem.config.backend import fewer_ranks_problems, layout_problems, parse_layout
from tandem.config.check_algorithm import component_problems, part_problems
from tandem.config.errors import ConfigError, refuse
from tandem.config.experiment import BaseConfig, SFTConfig, TrainConfig
from tandem.config.lora import LoRAConfig
from tandem.config.overlay import either, key_of, overlay
from tandem.config.preference import DistillConfig, PreferenceConfig, RewardModelConfig, training_config
from tandem.config.recipes import sum_of
from tandem.config.roles import CriticConfig, ReferenceConfig
from tandem.config.terms import Term
from tandem.config.train_engine import TrainEngineConfig
from tandem.flow.calls import (
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
    score_stage,
)
from tandem.flow.extensions import load_extensions
from tandem.flow.mid_episode import awaited, beside_episodes
from tandem.flow.reward_checks import check_rewards
from tandem.flow.sharing import share_trunks, with_adapter
from tandem.flow.stages import Role, Stage, TraceError, trace
from tandem.flow.step import learn_from_preferences, learn_from_rewards, learn_from_rows
from tandem.models.adapter_beside import AdapterBeside
from tandem.rewards.model import ModelReward
from tandem.rewards.terms import RewardTerm, read_sum
from tandem.roles.components import choose
from tandem.roles.parts import AlgorithmParts, choose_parts

Head = Literal["lm", "scalar", "both", "text"]
Step = Callable[..., tuple[Any, dict[str, float]]]
"""A step of `tandem.flow.step`, or a script's own."""


@dataclass(frozen=True)
class Resident:
    """A model of a run, in the form in which it is there."""

    name: str
    """`actor`, `critic`, `reference`, `teacher`, `partner`; or `engine`, the inference engine, which generates."""

    engine: TrainEngineConfig | None = None
    """The configuration of its train engine; None for the inference engine."""

    head: Head = "lm"
    trained: bool = False
    key: str = "actor.backend"
    """The configuration key where its layout was written."""

    mini_batches: int = 1
    epochs: int = 1
    base_of: str | None = None
    """The resident with adapters whose model, without them, this one is; None if it is a model of its own."""

    adapter: AdapterBeside | None = None
    """Lies beside the weights of a frozen model; None: it has none."""

    class_label: str | int | None = None
    """The class whose log-odds a frozen classifier with several gives; None where it has one label."""

    trunk_of: str | None = None
    """The resident whose frozen weights it computes with, beside its own head and adapters; None: all are its own."""

    refresh_every_steps: int | None = None
    """It takes over the actor's weights every so many steps; None if it never does."""

    own: str | None = None
    """The user's class of its train engine, as `extend.train_engine` names it; None: Tandem's."""

    generating: tuple[int, ...] = (0,)
    """The ranks that it sits on if it is the inference engine, a model that writes, or one that episodes ask."""

    in_episodes: bool = False
    """Episodes ask it while they run: it is awake meanwhile, whole on each rank that generates."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that it sits on: those of its layout, or those that generate."""
        if self.engine is None or self.head == "text" or self.in_episodes:
            return self.generating
        layout = parse_layout(self.engine.backend, self.key)
        return tuple(range(layout.first, layout.first + layout.ranks))

    @property
    def changes(self) -> bool:
        """True if its weights are others at some later step: a model that never changes needs no float32 masters."""
        return self.trained or self.refresh_every_steps is not None


@dataclass(frozen=True)
class PlannedScore:
    """A term of one reward, or of those of several data sets, that needs a model."""

    name: str
    term: Term
    score: Score
    resident: str
    """The model that it reads; several scores share one that they ask for alike."""

    rewards: Mapping[str, RewardTerm]
    """The sums that it is a term of, each with the term as it stands there."""

    in_episodes: bool = False
    """True: the workflow awaits it in the middle of an episode, so it is judged there and has no stage."""

    @property
    def reads_chats(self) -> bool:
        """True if it reads conversations, for which its model needs a chat template."""
        return type(self.score).read in (Score.read, ModelReward.read)

    @property
    def stage(self) -> str:
        """Name of its stage."""
        return f"score: {self.name}"


@dataclass(frozen=True)
class RunPlan:
    """The models of a run, and the stages of a step in order."""

    residents: tuple[Resident, ...]
    stages: tuple[Stage, ...]
    roles: tuple[Role, ...] = dataclasses.field(default=(), compare=False, repr=False)
    """Those whose stages they are."""

    step: Step | None = dataclasses.field(default=None, compare=False, repr=False)
    """Calls them; None where nothing trains."""

    greedy_baseline: bool = False
    """Each prompt gets a greedy sample beside the others, which is compared with and not trained on."""

    paired: bool = False
    """The two sequences of a row are trained on together."""

    scores: tuple[PlannedScore, ...] = ()
    """The rewards that need a model, in the order of their stages; those that episodes await have none."""

    sums: Mapping[str, tuple[RewardTerm, ...]] = dataclasses.field(default_factory=dict)
    """Every sum that judges rows, with its terms."""

    reward: str = ""
    """The reward of the rows that name none."""

    config: BaseConfig | None = dataclasses.field(default=None, compare=False, repr=False)
    """The configuration that it is of."""

    algorithm: AlgorithmParts | None = dataclasses.field(default=None, compare=False, repr=False)
    """The functions that the algorithm names; None where no actor learns from rewards."""

    def resident(self, name: str) -> Resident | None:
        """The resident of this name; None if the run has none."""
        return next((resident for resident in self.residents if resident.name == name), None)

    def stage(self, name: str) -> Stage | None:
        """The stage of this name; None if the run has none."""
        return next((stage for stage in self.stages if stage.name == name), None)

    def sum_of(self, row: Mapping[str, Any]) -> str:
        """The sum that judges a row."""
        return sum_of(row, self.reward)

    @property
    def staged(self) -> tuple[PlannedScore, ...]:
        """The rewards of models that come when the episodes have ended."""
        return tuple(score for score in self.scores if not score.in_episodes)

    @property
    def awaited(self) -> tuple[str, ...]:
        """Names of the rewards of models that the workflow awaits in the middle of an episode."""
        return tuple(score.name for score in self.scores if score.in_episodes)

    @property
    def later(self) -> tuple[RewardTerm, ...]:
        """The terms of all sums that are added when a batch is there."""
        return tuple(term for terms in self.sums.values() for term in terms if term.is_late)

    @property
    def passes(self) -> tuple[Stage, ...]:
        """The stages that add fields to a batch before it is trained on."""
        return tuple(stage for stage in self.stages if stage.kind == "pass")

    @property
    def forwards(self) -> tuple[Stage, ...]:
        """The passes through a model without gradients: those of scores, and those that add fields to a batch."""
        return tuple(stage for stage in self.stages if stage.kind in ("score", "pass") and stage.awake)

    @property
    def weights_to(self) -> Iterator[tuple[Stage, str]]:
        """The stages that bring weights to another model, each with the model that takes them over."""
        return ((stage, stage.awake[-1]) for stage in self.stages if stage.kind == "deliver")


def plan_run(config: BaseConfig, step: Step | None = None) -> RunPlan:
    """The plan of a configuration. ``step``: of a script that trains with rewards; None: that of `tandem.flow.step`.

    Raises:
        ConfigError: a part of the algorithm is not known, a role is configured that nothing asks for, a model sits where it
            cannot, or ``step`` cannot be traced or leaves out a pass that the configuration needs.
    """
    backend = config.rollout.backend if isinstance(config, TrainConfig | DistillConfig) else "auto"
    step = load_extensions(config.extend, backend, step)
    if isinstance(config, DistillConfig):
        plan = _distillation(config)
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
        plan = _by(step, plan)
    for resident in plan.residents:
        if resident.engine is not None and resident.changes and resident.ranks[0]:
            raise ConfigError(
                f"{resident.key}={resident.engine.backend}: a model whose weights change sits on the first ranks, of which "
                "rank 0 writes its checkpoints; leave @ out"
            )
    return dataclasses.replace(plan, config=config)


def _reinforcement(config: TrainConfig, teacher: Resident | None = None) -> RunPlan:
    actor, critic, kl = config.actor, config.critic, config.algorithm.kl
    parts = choose_parts(config.algorithm, config.gconfig.max_new_tokens, config.seed)
    refuse(part_problems(config))  # again, now that the records of functions in files are known
    fields = parts.credit.advantage.asked
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
    rests = {"ppo_update": f"the actor rests in the first {warmup} steps"} if warmup else {}
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
    """The plan whose stages are the trace of a step, and what follows it. ``models``: residents that evaluations need."""
    trained = tuple(resident.name for resident in residents if resident.trained)
    changing = tuple(resident.name for resident in residents if resident.changes)
    after = tuple(_following(config, trained, models, changing))
    stages = (*trace(step, roles), *(role.stage(call) for role in after for call in role.calls))
    return RunPlan(residents, stages, (*roles, *after), step, **more)


def _by(step: Step, plan: RunPlan) -> RunPlan:
    """The plan with the step of a script, which calls all that the configuration's own step calls, and publishes last."""
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
    """Passes if a loop that makes these passes makes all of the plan's.

    Raises:
        ConfigError: it leaves some out; names them.
    """
    missing = [stage for stage in plan.passes if stage.name not in passes]
    _refuse_left_out(missing, "passes that the script's loop does not make")


def _refuse_left_out(stages: Sequence[Stage], what: str) -> None:
    if stages:
        named = ", ".join(f"{stage.name} ({stage.role}.{stage.call})" for stage in stages)
        raise ConfigError(
            f"this configuration needs {what}: {named}; use `tandem train`, which makes all of them, or change the keys "
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
    """Words for a batch that takes more than one round of generation, or models that its episodes ask; empty for others."""
    filter_, eta = config.algorithm.filter.name, max_head_offpolicyness(config)
    words = [f"again until enough groups pass {filter_}"] if filter_ != "none" else []
    words += [f"beside training, at most {eta} version{'s' if eta > 1 else ''} behind"] if eta else []
    words += [f"episodes ask {' and '.join(judges)}"] if judges else []
    return ", ".join(["each step", *words]) if words else ""


Scores = tuple[tuple[PlannedScore, ...], list[Resident], dict[str, tuple[RewardTerm, ...]]]


def plan_scores(config: TrainConfig, specs: Sequence[str]) -> RunPlan:
    """The plan of an evaluation without training: the rewards that need a model, as stages, and their models. ``config``:
    its actor is the model that is evaluated, whose settings the others take. ``specs``: the sums that judge rows, the first
    those that name none.

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
    """The rewards that need a model, the models that they need, and the terms of each sum under their names in metrics.

    Raises:
        ConfigError: a reward cannot be read, or has the name of another one or of a role.
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
            same = scores.get(name)
            if same is not None and (same.term.name, same.term.knobs) == (term.name, term.knobs):
                scores[name] = dataclasses.replace(same, rewards={**same.rewards, spec: term_score})
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
    """The model of rewards on its ranks: one that writes, or that episodes ask, sits on those that generate."""
    if in_episodes:
        return beside_episodes(resident, ranks)
    return dataclasses.replace(resident, generating=ranks) if resident.head == "text" else resident


def _name_taken(spec: str, name: str) -> ConfigError:
    return ConfigError(
        f"reward {spec!r}: {name!r} is the name of another reward's model or of a role; give it one of its own: "
        "model(path=…, name=helpful), or the attribute `name` of your class"
    )


def _gates_first(scores: Mapping[str, PlannedScore]) -> tuple[PlannedScore, ...]:
    """The scores in their order, but for those that open the gates of others: these come before them."""
    ordered: dict[str, PlannedScore] = {}
    begun: set[str] = set()

    def add(score: PlannedScore) -> None:
        if score.name in begun:  # in two sums they may open each other's gates
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
    """The multiplier follows the mean cost of the batch, and then weighs the costs."""
    return Role("constraint", CONSTRAINT, when={"follow": f"λ rests in the first {warmup} steps"} if warmup else {})


def _judge(actor: TrainEngineConfig, name: str, model: FrozenModel) -> Resident:
    """The model that a reward asks for. One that writes sits on each rank that generates, in an engine that reads
    its weights itself."""
    engine = _frozen(actor, model)
    if model.head == "text":
        return Resident(name, dataclasses.replace(engine, backend="fsdp:d1", offload=False), "text")
    key = "actor.backend" if model.backend is None else f"reward {name!r}: backend"
    if model.backend is not None:
        layout, written = parse_layout(model.backend, key), f"{key}={model.backend}"
        refuse([*fewer_ranks_problems(layout, written, actor), *layout_problems(layout, written, actor)])
    return with_adapter(Resident(name, engine, model.head, key=key, class_label=model.class_label))


def _partner(config: TrainConfig) -> list[Resident]:
    """The frozen model that the workflow talks to, in an engine beside that of rank 0; empty if there is none.

    Raises:
        ConfigError: it has no path, or several ranks generate.
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


def _distillation(config: DistillConfig) -> RunPlan:
    teacher = Resident("teacher", _frozen(config.actor, config.teacher), key=key_of(config, "teacher", "backend"))
    return _reinforcement(training_config(config), teacher)


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
    """The roles that are called after a step. ``trained`` and ``changing``: residents; ``models``: those that an evaluation
    needs."""
    if config.deterministic:
        yield Role("recorder", RECORDER, trained)
    every, wish = evaluates_every(config), config.checkpoint
    if every is not None:
        yield Role("evaluator", EVALUATOR, models, when={"evaluate": f"before step 1, every {every} steps, at the end"})
    if wish.every_steps is not None or wish.at_end:
        whens = (f"every {wish.every_steps} steps" if wish.every_steps else "", "at the end" if wish.at_end else "")
        yield Role("saver", SAVER, changing, when={"save": ", ".join(filter(None, whens))})


def _has_critic(config: TrainConfig, fields: tuple[str, ...]) -> bool:
    """True if the advantage, registered or of a file, asks for values."""
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
        overlay(TrainEngineConfig, critic, actor, freeze=()),
        "scalar",
        True,
        key_of(config, "critic", "backend"),
        mini_batches=either(critic, actor, "mini_batches"),
        epochs=either(critic, actor, "epochs_per_batch"),
    )


def _reference(config: TrainConfig | PreferenceConfig) -> Resident:
    """The frozen policy: the base of an actor with adapters if `reference` says nothing else, otherwise a model."""
    reference = config.reference
    base_of = "actor" if config.actor.lora.rank is not None and reference == type(reference)() else None
    every = reference.refresh_every_steps if isinstance(reference, ReferenceConfig) else None
    key, engine = key_of(config, "reference", "backend"), _frozen(config.actor, reference)
    if every is not None:
        engine = dataclasses.replace(engine, freeze=config.actor.freeze)  # it takes over what the actor trains
    return Resident("reference", engine, key=key, base_of=base_of, refresh_every_steps=every)


def _frozen(actor: TrainEngineConfig, section: object) -> TrainEngineConfig:
    """A model that nobody trains, which never has adapters; what it leaves open is the actor's."""
    return overlay(TrainEngineConfig, section, actor, lora=LoRAConfig(), freeze=())
