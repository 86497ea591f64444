"""The declarations of a plan's stages: fields read and added, role state read and written.

Role methods declare theirs where they stand. Stages that no role calls are declared here, because the rooms that do their
work are above this one or load torch. A test holds them to what a step really does.
"""

from collections.abc import Iterator

from tandem.api.stage import Declaration, stages_of
from tandem.flow.plan import RunPlan, Stage
from tandem.roles.actor import Actor
from tandem.roles.constraint import Constraint
from tandem.roles.critic import Critic
from tandem.roles.language_model import LanguageModel
from tandem.roles.preference import PreferenceLearner
from tandem.roles.reference import Reference
from tandem.roles.reward_model import RewardModel
from tandem.roles.teacher import Student, Teacher

ROLES: dict[str, tuple[type, ...]] = {
    "actor": (Actor,),
    "critic": (Critic,),
    "reference": (Reference,),
    "teacher": (Teacher,),
    "constraint": (Constraint,),
    "learner": (PreferenceLearner, RewardModel, LanguageModel),
}

OTHERS: dict[tuple[str, str], Declaration] = {
    ("rollout", "prepare_batch"): Declaration(
        "prepare_batch",
        adds=(
            *("input_ids", "loss_mask", "rollout_logprobs", "versions", "temperature", "stop_reason", "expired"),
            *("reward", "accuracy", "group_id", "sample_id", "in_statistics", "in_loss"),
        ),
        may_add=("token_rewards", "greedy", "replayed"),
        reads_state=("weights", "random"),
        writes_state=("random",),
    ),
    ("batches", "next_batch"): Declaration(
        "next_batch",
        adds=("input_ids", "loss_mask"),
        may_add=("temperature", "chosen", "unit_id", "margin", "safe", "step_end", "step_right"),
    ),
    ("verifier", "verify_if_due"): Declaration(
        "verify_if_due",
        reads=("input_ids", "loss_mask", "rollout_logprobs", "versions", "temperature"),
        reads_state=("weights",),
    ),
    ("publisher", "publish"): Declaration("publish", reads_state=("weights",), writes_state=("weights",)),
    ("recorder", "record"): Declaration("record", reads_state=("weights",)),
    ("evaluator", "evaluate"): Declaration("evaluate", reads_state=("weights",)),
    ("saver", "save"): Declaration("save", reads_state=("weights", "optimizer", "random")),
}
"""By role and method of the plan."""


def declaration(plan: RunPlan, stage: Stage) -> Declaration | None:
    """The fields and states that a stage reads and writes; None for a score, whose fields follow from its name."""
    taught = stage.role == "actor" and plan.resident("teacher") is not None
    for role in (Student, *ROLES["actor"]) if taught else ROLES.get(stage.role, ()):
        if stage.call in stages_of(role):
            return stages_of(role)[stage.call]
    return OTHERS.get((stage.role, stage.call))


def added(plan: RunPlan, stage: Stage) -> tuple[str, ...]:
    """The fields that a stage gives the batch: all of a pass that is there because it adds them, else those for sure. A
    stage that makes the batch gives it as a whole."""
    if stage.kind in ("score", "collect"):
        return (f"rewards/{stage.role}",) if stage.kind == "score" else ("batch",)
    declared = declaration(plan, stage)
    if declared is None:
        return ()
    return declared.adds or declared.may_add


def weights_to(plan: RunPlan) -> Iterator[tuple[Stage, str]]:
    """The stages that bring weights to another model, each with the model that takes them over."""
    for stage in plan.stages:
        declared = declaration(plan, stage)
        if stage.kind == "deliver" and declared is not None and "weights" in declared.writes_state:
            yield stage, stage.awake[-1]
