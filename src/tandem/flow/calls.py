"""The stages of each role: by the names under which a step calls them.

Roles declare their stages at their methods. The others are declared here: their modules load torch, which a plan must not. A
test holds them to what a step really does.
"""

from tandem.api.stage import Declaration, stages_of
from tandem.flow.stages import Stage
from tandem.roles.actor import Actor
from tandem.roles.constraint import Constraint
from tandem.roles.critic import Critic, SharedCritic
from tandem.roles.language_model import LanguageModel
from tandem.roles.preference import PreferenceLearner
from tandem.roles.reference import Reference
from tandem.roles.reward_model import RewardModel
from tandem.roles.teacher import Student, Teacher

Calls = dict[str, Declaration]

ACTOR, CRITIC, SHARED_CRITIC = stages_of(Actor), stages_of(Critic), stages_of(SharedCritic)
REFERENCE, TEACHER, CONSTRAINT = stages_of(Reference), stages_of(Teacher), stages_of(Constraint)
STUDENT = ACTOR | stages_of(Student)
"""It trains as the actor does."""

_PREFERENCE, _SCORES = stages_of(PreferenceLearner), stages_of(RewardModel)
PREFERENCE = _PREFERENCE | {"train": _PREFERENCE["train_preference"]}
LANGUAGE_MODEL = {"train": stages_of(LanguageModel)["train_lm"]}
REWARD_MODEL = {kind: {"train": _SCORES[f"train_{kind}"]} for kind in ("pairs", "safety", "steps")}
"""By what it learns from."""


def _calls(name: str, **declared: object) -> Calls:
    return {name: Declaration(name, **declared)}  # type: ignore[arg-type]


PREPARE_BATCH = _calls(
    "prepare_batch",
    adds=(
        *("input_ids", "loss_mask", "rollout_logprobs", "versions", "temperature", "stop_reason", "expired"),
        *("reward", "accuracy", "group_id", "sample_id", "in_statistics", "in_loss"),
    ),
    may_add=("token_rewards", "greedy", "replayed", "rewards/"),
    reads_state=("weights", "random"),
    writes_state=("random",),
    title="generate",
    time="generate",
)
NEXT_BATCH = _calls(
    "next_batch",
    adds=("input_ids", "loss_mask"),
    may_add=("temperature", "chosen", "unit_id", "margin", "safe", "step_end", "step_right"),
    title="rows",
    time="rows",
)
VERIFIER = _calls(
    "verify_if_due",
    reads=("input_ids", "loss_mask", "rollout_logprobs", "versions", "temperature", "group_id"),
    reads_state=("weights",),
    title="verify",
    time="verify",
)
PUBLISHER = _calls("publish", reads_state=("weights",), writes_state=("weights",), title="publish", time="update_weights")
RECORDER = _calls("record", reads_state=("weights",), time="save")
EVALUATOR = _calls("evaluate", reads_state=("weights",), time="evaluate")
SAVER = _calls("save", reads_state=("weights", "optimizer", "random"), time="save")


def score_stage(name: str, role: str, resident: str) -> Stage:
    """A reward's model gives its part of the reward."""
    declared = Declaration("score", reads=("input_ids",), adds=(f"rewards/{role}",), reads_state=("weights",), time="score")
    return Stage(name, role, "score", declared, (resident,), inside=True)
