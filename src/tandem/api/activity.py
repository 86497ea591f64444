"""The progress of this process, for whoever watches over it: counted where something was done, never by a clock.

A thread that only shows that it lives is no progress: the count grows where the work is, and a thread that works for the
main one names the phases in which the main one waits for it.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

OTHER_RANKS = "the other ranks"
"""The name of those that a rank waits for in a collective call."""

GENERATING = ("generate", "evaluate", "verify")
"""Phases in which the main thread waits for episodes."""


@dataclass
class Activity:
    """One process's."""

    count: int = 0
    """Things done: micro-batches, optimizer steps, answers, tensors read or written, meetings of ranks, phases."""

    phase: str = "start"
    step: int = 0
    waits: str = ""
    """The thing that the main thread waits for; empty while it works."""

    span: Callable[[str], AbstractContextManager[Any]] = contextlib.nullcontext
    """Makes a block that a profile of this process shows under a name; without a profile the block is nothing."""


ACTIVITY = Activity()


def activity() -> Mapping[str, Any]:
    """The state of this process, in the form in which the launcher is told."""
    now = ACTIVITY
    return {"count": now.count, "phase": now.phase, "step": now.step, "waits": now.waits}


def did(*during: str) -> None:
    """Something was done, by the main thread or, ``during`` these phases, by a thread for which that one waits then. What
    other threads do besides is no progress of the main one, and not counted."""
    if ACTIVITY.phase in during or threading.current_thread() is threading.main_thread():
        ACTIVITY.count += 1


def enter(phase: str, step: int | None = None) -> None:
    """The main thread begins a phase, and stays in it until the next one."""
    ACTIVITY.phase = phase
    ACTIVITY.step = ACTIVITY.step if step is None else step
    ACTIVITY.count += 1


@contextlib.contextmanager
def within(phase: str) -> Iterator[None]:
    """A block of the main thread that is a phase of its own."""
    before = ACTIVITY.phase
    enter(phase)
    try:
        yield
    finally:
        enter(before)


def span(name: str) -> AbstractContextManager[Any]:
    """A block of any thread that a profile shows. ``name``: `KIND: WHAT`, such as ``stage: publish``."""
    return ACTIVITY.span(name)


def is_profiled() -> bool:
    """True while a profile of this process is recorded."""
    return ACTIVITY.span is not contextlib.nullcontext


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """A block in which the main thread waits for something that others do; of other threads nothing is noted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, ACTIVITY.waits = ACTIVITY.waits, what
    try:
        with span(f"wait: {what}"):
            yield
    finally:
        ACTIVITY.waits = before
        ACTIVITY.count += 1
