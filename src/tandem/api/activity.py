"""Counts the progress of this process, and profiles its work.

The launcher reads the count, to tell a slow process from a stalled one. The count grows only where work was done, never by a
clock, because a heartbeat thread also runs in a stalled process. A thread that works for the main thread names the phases in
which the main thread waits for its work (see `did`). A profile shows the same work as named spans.
"""

import contextlib
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from tandem.api.lazy_torch import torch

OTHER_RANKS = "the other ranks"
"""Value of `Activity.waits` during a collective call."""

GENERATING = ("generate", "evaluate", "verify")
"""Phases in which the main thread waits for episodes."""


@dataclass
class Activity:
    """The progress of one process."""

    count: int = 0
    """Units of work done: micro-batches, optimizer steps, answers, tensors read or written, collective calls, phases."""

    phase: str = "start"
    step: int = 0
    waits: str = ""
    """Name of the thing that the main thread waits for; empty while it works."""

    span: Callable[[str], AbstractContextManager[Any]] = contextlib.nullcontext
    """Returns a context manager that records a named span in the profile of this process; a null context if there is no
    profile."""


ACTIVITY = Activity()


def activity() -> Mapping[str, Any]:
    """Returns the progress of this process as the plain data that is sent to the launcher."""
    return {"count": ACTIVITY.count, "phase": ACTIVITY.phase, "step": ACTIVITY.step, "waits": ACTIVITY.waits}


def did(*during: str) -> None:
    """Counts a unit of work. Work of the main thread always counts. Work of another thread counts only in the phases
    ``during``, in which the main thread waits for it."""
    if ACTIVITY.phase in during or threading.current_thread() is threading.main_thread():
        ACTIVITY.count += 1


def enter(phase: str, step: int | None = None) -> None:
    """Records that the main thread begins a phase, which lasts until the next call; ``step``: None keeps the step."""
    ACTIVITY.phase = phase
    ACTIVITY.step = ACTIVITY.step if step is None else step
    ACTIVITY.count += 1


@contextlib.contextmanager
def within(phase: str) -> Iterator[None]:
    """A block of the main thread that counts as the phase ``phase``. After the block the earlier phase continues."""
    before = ACTIVITY.phase
    enter(phase)
    try:
        yield
    finally:
        enter(before)


def span(name: str) -> AbstractContextManager[Any]:
    """A block of any thread that a profile shows as a span. ``name``: `KIND: WHAT`, such as ``stage: publish``."""
    return ACTIVITY.span(name)


def is_profiled() -> bool:
    """True while a profile of this process is recorded."""
    return ACTIVITY.span is not contextlib.nullcontext


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """A block in which the main thread waits for ``what``. In any other thread it does nothing."""
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


Trace = dict[str, Any]
"""A trace in the format of chrome://tracing: its ``traceEvents`` have microseconds after ``baseTimeNanoseconds``."""


class ProcessProfile:
    """Records operators, GPU kernels and spans from its construction until `stop`. At most one per process at a time."""

    def __init__(self) -> None:
        profiler = torch.profiler
        kinds = [profiler.ProfilerActivity.CPU, *([profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        # profile_all_threads: otherwise only this thread is recorded, and generation runs in another one
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self._profile = profiler.profile(activities=kinds, experimental_config=config)
        self._profile.start()
        # replace unprintable characters and quotes: the profiler drops a whole name that has one
        ACTIVITY.span = lambda name: profiler.record_function(re.sub(r"[^ -~]|[\"\\]", "?", name))

    def stop(self, process: str) -> Trace:
        """Ends the profile and returns its trace, with the names of threads, and ``process`` as the name of this process."""
        ACTIVITY.span = contextlib.nullcontext
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the profile includes kernels that are still queued
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "trace.json")
            self._profile.export_chrome_trace(str(file))
            trace: Trace = orjson.loads(file.read_bytes())
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        for event in trace["traceEvents"]:
            if event["name"] == "thread_name" and event["tid"] in names:
                event["args"]["name"] = names[event["tid"]]
            if event["name"] == "process_name" and event["pid"] == os.getpid():
                event["args"]["name"] = process
        return trace
