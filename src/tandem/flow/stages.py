"""Roles, their stages, and the trace of a step."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

from tandem.api.stage import Declaration, Kind
from tandem.config.errors import ConfigError, kind_and_text


class TraceError(ConfigError):
    """A step reads a value that exists only while it runs, or calls a stage before the fields that it reads exist."""


@dataclass(frozen=True)
class Stage:
    """One call of a role in a step."""

    name: str
    role: str
    """Name of the object whose method is called: a resident's role, or `rollout`, `verifier`, `publisher`, `evaluator`,
    `saver`."""

    call: str
    declared: Declaration
    awake: tuple[str, ...] = ()
    """Residents that must be awake."""

    when: str = ""
    """The steps at which it runs, in words; empty: at every step."""

    inside: bool = False
    """True: the stage before it calls it, repeatedly: a score, called by the stage that collects the batch."""

    @property
    def kind(self) -> Kind:
        """The kind of stage."""
        return "score" if self.inside else self.declared.kind

    @property
    def time(self) -> str:
        """Name of its time in metrics, ``time/<time>_s``."""
        return self.declared.time

    @property
    def added(self) -> tuple[str, ...]:
        """The fields that it adds to the batch: for a pass that is there to add them all of them, otherwise those that it
        always adds. A stage that makes the batch adds all fields at once."""
        return ("batch",) if self.kind == "collect" else self.declared.adds or self.declared.may_add


@dataclass(frozen=True)
class Role:
    """An object that a step calls."""

    name: str
    calls: Mapping[str, Declaration]
    """Name of the call → its declaration."""

    models: tuple[str, ...] = ()
    """Residents that its stages compute with."""

    others: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Method → residents, for methods that need others than `models`."""

    when: Mapping[str, str] = field(default_factory=dict)
    """Method → the steps at which it runs, in words."""

    constants: Mapping[str, Any] = field(default_factory=dict)
    """Constants that a step may read."""

    inner: tuple[Stage, ...] = ()
    """Stages that the role itself calls."""

    def stage(self, call: str) -> Stage:
        """The stage of a method."""
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
        raise AttributeError(f"a step can ask of {self._role.name}: {known}; {name!r} is none of these")


MAY_BE_ABSENT = ("verifier", "reference", "critic", "teacher", "constraint")


def handles(roles: Iterable[Role], conduct: Call, **beside: Any) -> SimpleNamespace:
    """The run as its step sees it: a handle for each role, the objects ``beside`` them, and None for roles that the run
    lacks."""
    there = {role.name: Handle(role, conduct) for role in roles}
    return SimpleNamespace(**dict.fromkeys(MAY_BE_ABSENT) | beside | there)


@dataclass
class Traced:
    """A stand-in for a batch while a step is traced: it has fields, but no values."""

    fields: frozenset[str] = field(default_factory=frozenset)

    def keys(self) -> frozenset[str]:
        """Names of the fields."""
        return self.fields

    def _refuse(self, *_: Any) -> NoReturn:
        raise TraceError(
            "a step may not read the values of a batch: the graph of a run is its step, traced before there is one. Ask "
            "whether a role is there, or decide inside of a stage"
        )

    __getitem__ = __setitem__ = __iter__ = __bool__ = __len__ = __contains__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()


class TracedMetrics(dict[str, float]):
    """A stand-in for the metrics of a stage while a step is traced."""

    def __missing__(self, name: str) -> NoReturn:
        raise TraceError(f"a step may not read a metric ({name}): it is traced before there is one")


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
        batches = [one.fields for one in (*arguments, *named.values()) if isinstance(one, Traced)]
        if declared.reads and not batches:
            raise TraceError(f"{role.name}.{call} was given no batch")
        there = batches[0] if batches else frozenset()
        if missing := sorted(set(declared.reads) - there):
            raise TraceError(f"{role.name}.{call} reads {', '.join(missing)}, which no stage before it adds")
        if kind in ("collect", "pass"):
            return Traced(there | {*declared.adds, *declared.may_add})
        return TracedMetrics()

    try:
        beside = {"loader": object(), "workflow": object(), "value": Traced()._refuse}
        returned = step(handles(roles, write_down, **beside))
    except ConfigError:
        raise
    except Exception as error:  # boundary: a script's step
        if isinstance(error, AttributeError) and error.obj is None:
            raise TraceError(
                f"a step asked for .{error.name} of None: a role that this run does not have is None, such as the verifier; "
                "ask whether it is there, as in `if run.verifier is not None`"
            ) from error
        raise TraceError(
            f"a step may not read values: it failed while it was traced, before any batch or metric is there: "
            f"{kind_and_text(error)}"
        ) from error
    match returned:
        case (Traced(), dict()):
            yield from stages
        case _:
            raise TraceError("a step returns the batch and a dict of metrics: return batch, metrics")
