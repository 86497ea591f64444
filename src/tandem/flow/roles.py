"""The roles of a run that have models, on those of them that this process has."""

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from tandem.api.engines import InferenceEngine, TrainEngine
from tandem.config.arithmetic import max_token_age
from tandem.config.experiment import TrainConfig
from tandem.flow.delivery import make_proof, make_publisher
from tandem.flow.plan import RunPlan
from tandem.flow.process import Process
from tandem.flow.residency import Residency
from tandem.flow.residents import open_critic, open_reference, open_scores
from tandem.flow.scoring import ScoreRole
from tandem.flow.sleep_plan import BEGIN
from tandem.flow.writing import WritingRole
from tandem.roles.actor import Actor
from tandem.roles.constraint import Constraint
from tandem.roles.critic import SharedCritic
from tandem.roles.teacher import Student, Teacher

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
