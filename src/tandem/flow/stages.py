"""Who a step can call, and what a call is: roles, stages, and the trace of a step."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

from tandem.api.stage import Declaration, Kind
from tandem.config.errors import ConfigError, kind_and_text


class TraceError(ConfigError):
    """A step asks for something that is only known when it runs, or calls a stage before what it reads is there."""


@dataclass(frozen=True)
class Stage:
    """One call of a role in a step."""

    name: str
    role: str
    """The object whose method is called: a resident's role, or `rollout`, `verifier`, `publisher`, `evaluator`, `saver`."""

    call: str
    declared: Declaration
    awake: tuple[str, ...] = ()
    """The residents that it needs on the devices."""

    when: str = ""
    """The steps at which it runs, in words; empty if at each."""

    inside: bool = False
    """It is called by the stage before it, again and again: a score, by what collects the batch."""

    @property
    def kind(self) -> Kind:
        """One of `Kind`."""
        return "score" if self.inside else self.declared.kind

    @property
    def time(self) -> str:
        """The metric that it counts towards, as ``time/<time>_s``."""
        return self.declared.time

    @property
    def added(self) -> tuple[str, ...]:
        """The fields that it gives the batch: all of a pass that is there because it adds them, else those for sure. A stage
        that makes the batch gives it as a whole."""
        return ("batch",) if self.kind == "collect" else self.declared.adds or self.declared.may_add


@dataclass(frozen=True)
class Role:
    """Who is called in a step."""

    name: str
    calls: Mapping[str, Declaration]
    """Its stages, by the name under which a step calls them."""

    models: tuple[str, ...] = ()
    """The residents that its stages compute with."""

    others: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Those of methods that need other residents."""

    when: Mapping[str, str] = field(default_factory=dict)
    """The steps at which it runs, in words, by method."""

    constants: Mapping[str, Any] = field(default_factory=dict)
    """Facts that a step may ask about it."""

    inner: tuple[Stage, ...] = ()
    """The stages that it calls itself."""

    def stage(self, call: str) -> Stage:
        """The stage that a method is."""
        declared = self.calls[call]
        awake = self.others.get(call, self.models if declared.computes else ())
        return Stage(declared.title or call, self.name, declared.name, declared, awake, self.when.get(call, ""))


Call = Callable[..., Any]
"""Runs a stage: gets the role, the name of the call and its arguments."""


class Handle:
    """A role as a step sees it: its stages, and what is constant of it. Each call goes to whoever conducts the step."""

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
    """The run as its step sees it: a handle for each role, what is ``beside`` them, and None for what it has not."""
    there = {role.name: Handle(role, conduct) for role in roles}
    return SimpleNamespace(**dict.fromkeys(MAY_BE_ABSENT) | beside | there)


@dataclass
class Traced:
    """Stands for a batch while a step is traced: it has fields, and no values."""

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
    """Stands for what a stage returns besides a batch."""

    def __missing__(self, name: str) -> NoReturn:
        raise TraceError(f"a step may not read a metric ({name}): it is traced before there is one")


def trace(step: Callable[..., Any], roles: Iterable[Role]) -> Iterator[Stage]:
    """The stages that a step calls, in order; nothing is computed.

    Raises:
        TraceError: it asks for a value, calls a stage before what that reads was added, or returns something else than a
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
