"""Stages: role methods that declare which fields of a batch they read and add.

The dataflow graph is derived from these declarations and from nothing else.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tandem.api.failures import BatchError

ROLE_STATES = ("weights", "optimizer", "random")


@dataclass(frozen=True)
class Stage:
    """Declaration of one role method.

    Example: ``Stage("compute_advantages", reads=("reward", "group_id"), adds=("advantages",))``
    """

    name: str
    reads: tuple[str, ...] = ()
    adds: tuple[str, ...] = ()
    reads_state: tuple[str, ...] = ()
    writes_state: tuple[str, ...] = ()
    may_read: tuple[str, ...] = ()
    """Read where they are there, or where the role's configuration needs them."""

    may_add: tuple[str, ...] = ()
    """Added where the role's configuration needs them."""


def stage(
    *,
    reads: tuple[str, ...] = (),
    adds: tuple[str, ...] = (),
    reads_state: tuple[str, ...] = (),
    writes_state: tuple[str, ...] = (),
    may_read: tuple[str, ...] = (),
    may_add: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declares a role method ``method(self, batch, …)`` as a stage and checks that the fields it reads are there.

    Raises:
        BatchError: the batch lacks a field; the message names the stage and the fields that are there.
    """
    unknown = set(reads_state + writes_state) - set(ROLE_STATES)
    if unknown:
        raise ValueError(f"role state must be one of {ROLE_STATES}, got {sorted(unknown)}")

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        declaration = Stage(method.__name__, reads, adds, reads_state, writes_state, may_read, may_add)

        @functools.wraps(method)
        def checked(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            missing = [name for name in reads if name not in batch.keys()]
            if missing:
                raise BatchError(f"{declaration.name} needs the fields {missing}; the batch has {sorted(batch.keys())}")
            return method(self, batch, *args, **kwargs)

        checked.stage = declaration  # type: ignore[attr-defined]
        return checked

    return decorate


def stages_of(role: type) -> dict[str, Stage]:
    """All stages of a role class, by method name."""
    methods = ((name, getattr(role, name)) for name in dir(role))
    return {name: method.stage for name, method in methods if hasattr(method, "stage")}
