"""Roles, their stages by the name that a step calls, and the trace of a step.

Most roles declare their stages on their own methods. The stages of the rollout, the verifier and other objects whose modules
import torch are declared here, because a plan must not import torch. A test compares these declarations with the calls of a
real step.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

from tandem.api.batch import Declaration, StageKind, stages_of
from tandem.config.errors import ConfigError, kind_and_text
from tandem.roles.actor import Actor
from tandem.roles.constraint import Constraint
from tandem.roles.critic import Critic, SharedCritic
from tandem.roles.learners import LanguageModel, PreferenceLearner, RewardModel
from tandem.roles.reference import Reference, Student, Teacher


class TraceError(ConfigError):
    """A step cannot be traced: it reads a value that exists only in a real step, or calls a stage too early."""


@dataclass(frozen=True)
class Stage:
    """One call of a role in a step."""

    name: str
    role: str
    """Name of the role whose method is called: `actor`, `critic`, …, or `rollout`, `verifier`, `publisher`, `evaluator`,
    `saver`."""

    call: str
    declared: Declaration
    awake: tuple[str, ...] = ()
    """Residents that must be awake."""

    when: str = ""
    """The steps at which it runs, in words; empty: at every step."""

    inside: bool = False
    """True for a score, which the stage that collects the batch calls, possibly several times."""

    @property
    def kind(self) -> StageKind:
        """The kind of the stage."""
        return "score" if self.inside else self.declared.kind

    @property
    def time(self) -> str:
        """The name under which its time is reported, in the metric ``time/<time>_s``."""
        return self.declared.time

    @property
    def added(self) -> tuple[str, ...]:
        """The fields that it always adds to the batch; if there are none, those that it may add. ("batch",) for the stage
        that makes the batch."""
        return ("batch",) if self.kind == "collect" else self.declared.adds or self.declared.may_add


@dataclass(frozen=True)
class Role:
    """An object that a step calls."""

    name: str
    calls: Mapping[str, Declaration]
    """Name of the call → its declaration."""

    models: tuple[str, ...] = ()
    """The residents that its stages use."""

    others: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Method → residents, for methods that use other residents than `models`."""

    when: Mapping[str, str] = field(default_factory=dict)
    """Method → the steps at which it runs, in words."""

    constants: Mapping[str, Any] = field(default_factory=dict)
    """Constants of the role that a step may read."""

    inner: tuple[Stage, ...] = ()
    """The stages that the role itself calls."""

    def stage(self, call: str) -> Stage:
        """Returns the stage of a method."""
        declared = self.calls[call]
        awake = self.others.get(call, self.models if declared.computes else ())
        return Stage(declared.title or call, self.name, declared.name, declared, awake, self.when.get(call, ""))


Call = Callable[..., Any]
"""Runs a stage, given the role, the name of the call and its arguments."""


class Handle:
    """A role as a step sees it: its stages and constants. Calls go to the conductor of the step."""

    def __init__(self, role: Role, conduct: Call):
        self._role, self._conduct = role, conduct

    def __getattr__(self, name: str) -> Any:
        if name in self._role.constants:
            return self._role.constants[name]
        if name in self._role.calls:
            return partial(self._conduct, self._role, name)
        known = ", ".join(sorted([*self._role.calls, *self._role.constants]))
        raise AttributeError(f"the role {self._role.name} has no {name!r} that a step can use; it has {known}")


MAY_BE_ABSENT = ("verifier", "reference", "critic", "teacher", "constraint")


def handles(roles: Iterable[Role], conduct: Call, **beside: Any) -> SimpleNamespace:
    """Returns the ``run`` that a step receives: a handle for each role, the objects ``beside``, and None for each optional
    role that the run lacks."""
    present = {role.name: Handle(role, conduct) for role in roles}
    return SimpleNamespace(**dict.fromkeys(MAY_BE_ABSENT) | beside | present)


@dataclass
class Traced:
    """A stand-in for a batch while a step is traced: it has fields, but no values."""

    fields: frozenset[str] = field(default_factory=frozenset)

    def keys(self) -> frozenset[str]:
        """Names of the fields."""
        return self.fields

    def _refuse(self, *_: Any) -> NoReturn:
        raise TraceError(
            "a step may not read the values of a batch: to get the run's graph, the step is traced before there is a batch. "
            "A step may test whether a role is None; decisions by value belong inside a stage"
        )

    __getitem__ = __setitem__ = __iter__ = __bool__ = __len__ = __contains__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()


class TracedMetrics(dict[str, float]):
    """A stand-in for the metrics of a stage while a step is traced."""

    def __missing__(self, name: str) -> NoReturn:
        raise TraceError(f"a step may not read a metric ({name}): it is traced before there are metrics")


def trace(step: Callable[..., Any], roles: Iterable[Role]) -> Iterator[Stage]:
    """Yields the stages that a step calls, in order, and computes nothing.

    Raises:
        TraceError: the step reads a value, calls a stage before the fields that it reads are added, or does not return a
            batch and metrics.
    """
    stages: list[Stage] = []

    def write_down(role: Role, call: str, *arguments: Any, **named: Any) -> Any:
        stage = role.stage(call)
        stages.extend((stage, *role.inner))
        declared, kind = stage.declared, stage.kind
        batches = [argument.fields for argument in (*arguments, *named.values()) if isinstance(argument, Traced)]
        if declared.reads and not batches:
            raise TraceError(f"{role.name}.{call} was given no batch")
        fields = batches[0] if batches else frozenset()
        if missing := sorted(set(declared.reads) - fields):
            raise TraceError(f"{role.name}.{call} reads {', '.join(missing)}, which no stage before it adds")
        if kind in ("collect", "pass"):
            return Traced(fields | {*declared.adds, *declared.may_add})
        return TracedMetrics()

    try:
        beside = {"loader": object(), "workflow": object(), "value": Traced()._refuse}
        returned = step(handles(roles, write_down, **beside))
    except ConfigError:
        raise
    except Exception as error:  # boundary: a script's step
        if isinstance(error, AttributeError) and error.obj is None:
            raise TraceError(
                f"a step read .{error.name} of None: an optional role that this run does not have, such as the verifier, is "
                "None; test it first, as in `if run.verifier is not None`"
            ) from error
        raise TraceError(
            f"a step may not read values: it failed while it was traced, before any batch or metric is there: "
            f"{kind_and_text(error)}"
        ) from error
    match returned:
        case (Traced(), dict()):
            yield from stages
        case _:
            raise TraceError("a step must return the batch and a dict of metrics: return batch, metrics")


Calls = dict[str, Declaration]

ACTOR, CRITIC, SHARED_CRITIC = stages_of(Actor), stages_of(Critic), stages_of(SharedCritic)

REFERENCE, TEACHER, CONSTRAINT = stages_of(Reference), stages_of(Teacher), stages_of(Constraint)

STUDENT = ACTOR | stages_of(Student)
"""The stages of a student, which is an actor that learns from a teacher: those of an actor, except that the student has its
own update."""

_PREFERENCE, _SCORES = stages_of(PreferenceLearner), stages_of(RewardModel)

PREFERENCE = _PREFERENCE | {"train": _PREFERENCE["train_preference"]}

LANGUAGE_MODEL = {"train": stages_of(LanguageModel)["train_lm"]}

REWARD_MODEL = {kind: {"train": _SCORES[f"train_{kind}"]} for kind in ("pairs", "safety", "steps")}
"""The stages of a reward model, by its kind of supervision."""


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
    """Returns the stage in which a reward's model (``resident``) computes the field ``rewards/<role>``."""
    declared = Declaration("score", reads=("input_ids",), adds=(f"rewards/{role}",), reads_state=("weights",), time="score")
    return Stage(name, role, "score", declared, (resident,), inside=True)
