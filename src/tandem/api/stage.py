"""Stages: methods that a step may call. Each declares which fields of a batch it reads and adds, and which state.

The graph of a run is the trace of its step, and these declarations are all that the trace knows of a stage.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from tandem.api.failures import BatchError

ROLE_STATES = ("weights", "optimizer", "random")


Kind = Literal["collect", "score", "check", "pass", "update", "deliver", "keep"]
"""The work of a stage: `collect` makes the batch; `pass` adds fields; `update` trains; `check` only gives metrics; `deliver`
brings weights to another model; `keep` follows a step; `score` runs inside of `collect`."""


@dataclass(frozen=True)
class Declaration:
    """The reads and writes of one stage.

    Example: ``Declaration("compute_advantages", reads=("reward", "group_id"), adds=("advantages",))``
    """

    name: str
    """The method's."""

    reads: tuple[str, ...] = ()
    adds: tuple[str, ...] = ()
    reads_state: tuple[str, ...] = ()
    writes_state: tuple[str, ...] = ()
    may_read: tuple[str, ...] = ()
    """Read where they are there, or where the role's configuration needs them. ``rewards/``: every field that begins so."""

    may_add: tuple[str, ...] = ()
    """Added where the role's configuration needs them."""

    title: str = ""
    """The name of the stage; empty: the method's."""

    time: str = "train"
    """The metric that it counts towards, as ``time/<time>_s``."""

    @property
    def kind(self) -> Kind:
        """It follows from what is read and written."""
        if self.adds or self.may_add:
            return "pass" if self.reads else "collect"
        if "optimizer" in self.writes_state:
            return "update"
        if "weights" in self.writes_state:
            return "deliver"
        return "check" if self.reads else "keep"

    @property
    def computes(self) -> bool:
        """True if it needs the models of its role awake."""
        return "weights" in (*self.reads_state, *self.writes_state)


def stage(
    title: str = "",
    *,
    reads: tuple[str, ...] = (),
    adds: tuple[str, ...] = (),
    reads_state: tuple[str, ...] = (),
    writes_state: tuple[str, ...] = (),
    may_read: tuple[str, ...] = (),
    may_add: tuple[str, ...] = (),
    time: str = "train",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declares a method as a stage: ``method(self, batch, …)``, which checks that the fields it reads are there, or one that
    takes no batch and reads and writes state alone. ``title`` and ``time``: see `Declaration`.

    Raises:
        BatchError: the batch lacks a field; the message names the stage and the fields that are there.
    """
    unknown = set(reads_state + writes_state) - set(ROLE_STATES)
    if unknown:
        raise ValueError(f"role state must be one of {ROLE_STATES}, got {sorted(unknown)}")

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        declaration = Declaration(method.__name__, reads, adds, reads_state, writes_state, may_read, may_add, title, time)

        @functools.wraps(method)
        def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
            batch = args[0] if args else kwargs.get("batch", {})
            missing = [name for name in reads if name not in batch.keys()]
            if missing:
                raise BatchError(f"{declaration.name} needs the fields {missing}; the batch has {sorted(batch.keys())}")
            return method(self, *args, **kwargs)

        checked.stage = declaration  # type: ignore[attr-defined]
        return checked

    return decorate


update_stage = functools.partial(
    stage, title="update", reads_state=("weights", "optimizer"), writes_state=("weights", "optimizer")
)
"""A stage with optimizer steps."""


def stages_of(role: type) -> dict[str, Declaration]:
    """The declarations of a role class, by method name."""
    methods = ((name, getattr(role, name)) for name in dir(role))
    return {name: method.stage for name, method in methods if hasattr(method, "stage")}
