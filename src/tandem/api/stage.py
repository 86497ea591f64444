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
class Declaration:
    """The reads and writes of one role method, or of a stage that no role calls.

    Example: ``Declaration("compute_advantages", reads=("reward", "group_id"), adds=("advantages",))``
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
    """Declares a role method as a stage: ``method(self, batch, …)``, which checks that the fields it reads are there, or one
    that takes no batch and reads and writes state alone.

    Raises:
        BatchError: the batch lacks a field; the message names the stage and the fields that are there.
    """
    unknown = set(reads_state + writes_state) - set(ROLE_STATES)
    if unknown:
        raise ValueError(f"role state must be one of {ROLE_STATES}, got {sorted(unknown)}")

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        declaration = Declaration(method.__name__, reads, adds, reads_state, writes_state, may_read, may_add)

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


def stages_of(role: type) -> dict[str, Declaration]:
    """The declarations of a role class, by method name."""
    methods = ((name, getattr(role, name)) for name in dir(role))
    return {name: method.stage for name, method in methods if hasattr(method, "stage")}
