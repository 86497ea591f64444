"""Calls the stages of a step in the process that has their models, and measures how long training and generation wait.

`rollout.balance=auto` moves CPU threads between training and generation, which run at the same time, until neither waits.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from tandem.api.activity import span
from tandem.api.engines import InferenceEngine
from tandem.config.errors import ConfigError
from tandem.config.rollout import RolloutConfig
from tandem.engines.inference.check import engine_threads
from tandem.engines.inference.embedded import EmbeddedProcess
from tandem.flow.plan import RunPlan
from tandem.flow.process import Process
from tandem.flow.residency import Residency
from tandem.flow.stages import Role, Stage
from tandem.models.hardware import uses_gpu

Around = Callable[[Stage], AbstractContextManager[Any]]
"""A function that returns a context manager, which measures the time of a stage."""


class Conductor(ABC):
    """Calls stages, and first wakes the models that they need."""

    @abstractmethod
    def call(self, stage: Stage, work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Calls ``work``, the method of ``stage``, with the arguments, and returns its result. Collective."""

    @abstractmethod
    def prepare(self, name: str) -> None:
        """Wakes the models that the stage ``name`` needs, for work that is not run by `call`. Collective."""

    def value(self, promised: Any) -> Any:
        """Returns the value of ``promised``, the result of a stage. Scripts need this, because a conductor may return a
        promise of a result before the stage has run."""
        return promised

    def settle(self, batch: Any, metrics: Mapping[Any, Any]) -> tuple[Any, dict[str, float]]:
        """Ends a step that returned ``batch`` and ``metrics``, and waits for promised values. Collective."""
        return batch, dict(metrics)

    def of(self, objects: Mapping[str, Any]) -> Callable[..., Any]:
        """Returns the function that a `Handle` calls when the step calls one of its stages. ``objects``: the object of each
        role, by name."""

        def called(role: Role, call: str, *arguments: Any, **named: Any) -> Any:
            return self.run(role.stage(call), objects[role.name], *arguments, **named)

        return called

    def run(self, stage: Stage, of: Any, *arguments: Any, **named: Any) -> Any:
        """Calls the method ``stage.call`` of the role object ``of``."""
        return self.call(stage, getattr(of, stage.call), *arguments, **named)


class LocalConductor(Conductor):
    """Calls every stage in this process, immediately. The time of a stage counts towards `Stage.time`."""

    def __init__(self, around: Around, residency: Residency, plan: RunPlan):
        """``residency``: wakes the models of a stage. ``plan``: the run's plan, used only by subclasses that order calls."""
        self._around, self._residency = around, residency

    def prepare(self, name: str) -> None:
        """Wakes the sleeping models of the stage ``name``."""
        self._residency.enter(name)

    def call(self, stage: Stage, work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Calls ``work`` in this process and measures its time."""
        self._residency.enter(stage.name)
        with span(f"stage: {stage.name}"), self._around(stage), self._residency.making(stage.name):
            return work(*arguments, **named)


LITTLE = 0.1
"""If training and generation each wait for at most this share of the time, no thread is moved."""

_STEPS = 2
"""Number of steps for which a split of threads is measured. The first step after a change is not counted, because it began
under the old split."""

_REMEMBERED = 30
"""Number of steps after which a worse split may be tried again: the lengths of answers change while a run learns."""


class Balance:
    """Measures how long training and generation wait for each other, and moves a thread to the side that is waited for.

    A split that was tried and was worse is not tried again for a while, to avoid oscillation.
    """

    def __init__(self, generating: int, training: int, give: Callable[[int, int], None]):
        """``generating``, ``training``: present number of CPU threads for generation and for training. ``give(generating,
        training)`` sets both numbers."""
        self._generating, self._total, self._give = generating, generating + training, give
        self._step, self._since = 0, 0
        self._waits: list[tuple[float, float]] = []
        self._seen: dict[int, tuple[int, float]] = {}
        """Threads of the engine → the step of the last measurement, and the larger of the two waiting shares."""

    def after_step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Receives ``time/trainer_wait`` and ``time/engine_idle`` of a step; returns the threads that generation and
        training had in this step."""
        threads = {"threads/generate": float(self._generating), "threads/train": float(self._total - self._generating)}
        self._step += 1
        self._since += 1
        if self._since > 1:
            self._waits.append((metrics["time/trainer_wait"], metrics["time/engine_idle"]))
        if len(self._waits) == _STEPS:
            trainer_waits, engine_idles = (sum(values) / _STEPS for values in zip(*self._waits, strict=True))
            self._waits = []
            self._move(trainer_waits, engine_idles)
        return threads

    def _move(self, trainer_waits: float, engine_idles: float) -> None:
        worst = max(trainer_waits, engine_idles)
        self._seen[self._generating] = (self._step, worst)
        if worst <= LITTLE:
            return
        wanted = self._generating + (1 if trainer_waits > engine_idles else -1)
        step, was = self._seen.get(wanted, (-_REMEMBERED, 0.0))
        if not 1 <= wanted < self._total or (was >= worst and self._step - step < _REMEMBERED):
            return
        self._generating, self._since = wanted, 0
        self._give(wanted, self._total - wanted)


def make_balance(rollout: RolloutConfig, process: Process, engine: InferenceEngine | None) -> Balance | None:
    """Makes the balance of `rollout.balance=auto`; None if it is not set.

    Raises:
        ConfigError: the run computes on a GPU.
    """
    if rollout.balance is None:
        return None
    if uses_gpu(process.device):
        raise ConfigError("rollout.balance=auto moves threads of a CPU, and this run computes on a GPU; leave it out")
    assert isinstance(engine, EmbeddedProcess), "the configuration was checked: one process trains, another generates"
    threads = process.generation_threads("decoupled", 1)

    def give(generating: int, training: int) -> None:
        torch.set_num_threads(training)
        engine.set_threads(generating)

    generating = engine_threads(rollout, placement="decoupled", threads=threads)
    return Balance(generating, torch.get_num_threads(), give)


class EngineMeter:
    """Measures for how much of the training time the engine generates, and how long trainer and engine wait. Call `begins`
    at every stage, or use it as a ``with`` block around training.

    Without an engine (on ranks that do not generate) the engine's figures are 0. ``balance`` receives the waiting times
    after each step.
    """

    def __init__(self, engine: InferenceEngine | None, balance: Balance | None = None):
        self.engine, self._balance = engine, balance
        self._began: float | None = None  # None: the trainer is not training
        self._busy_s = 0.0
        self._overlap = 0.0
        self._counted = (0.0, 0.0)
        self._preempted = 0.0
        self._wait_began: float | None = None  # None: the trainer is not waiting for a batch
        self._waited_s = 0.0
        self._last = time.perf_counter()

    def _statistics(self, name: str) -> float:
        return self.engine.statistics().get(name, 0.0) if self.engine is not None else 0.0

    def begins(self, phase: str) -> None:
        """Notes that a stage of ``phase`` begins. Training lasts from the first stage of `train` to the next stage of
        another phase."""
        if self._wait_began is not None:
            self._waited_s += time.perf_counter() - self._wait_began
        self._wait_began = time.perf_counter() if phase == "generate" else None
        if phase == "train" and self._began is None:
            self._began, self._busy_s = time.perf_counter(), self._statistics("busy_s")
        elif phase != "train" and self._began is not None:
            trained_s = max(time.perf_counter() - self._began, 1e-9)
            self._overlap = min(1.0, (self._statistics("busy_s") - self._busy_s) / trained_s)
            self._began = None

    def __enter__(self) -> None:
        self.begins("train")

    def __exit__(self, *_: object) -> None:
        self.begins("after training")

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call.

        ``time/overlap``: share of the last training time during which the engine generated, 0 to 1. ``time/trainer_wait``
        and ``time/engine_idle``: shares of the time in which the trainer waited for a batch, and in which the engine did not
        generate. ``tokens_per_s/generate``: generated tokens per second of the engine's busy time. A fleet adds ``fleet/…``;
        the embedded engine adds ``rollout/preempted``, the number of times that a request gave up its place in the cache.
        """
        statistics = self.engine.statistics() if self.engine is not None else {}
        (tokens, busy_s), self._counted = (
            self._counted,
            (statistics.get("generated_tokens", 0.0), statistics.get("busy_s", 0.0)),
        )
        rate = (self._counted[0] - tokens) / max(self._counted[1] - busy_s, 1e-9)
        now = time.perf_counter()
        passed_s, self._last = max(now - self._last, 1e-9), now
        waits = {
            "time/trainer_wait": min(1.0, self._waited_s / passed_s),
            "time/engine_idle": min(1.0, max(0.0, 1.0 - (self._counted[1] - busy_s) / passed_s)) if self.engine else 0.0,
        }
        self._waited_s = 0.0
        # statistics of a fleet, and of a user's engine
        further = {name: value for name, value in statistics.items() if "/" in name}
        if "preempted" in statistics:
            before, self._preempted = self._preempted, statistics["preempted"]
            further["rollout/preempted"] = self._preempted - before
        threads = self._balance.after_step(waits) if self._balance is not None else {}
        return {"time/overlap": self._overlap, **waits, **threads, "tokens_per_s/generate": rate, **further}


def of_all_ranks(per_rank: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Combines engine and reward metrics of all ranks. ``per_rank``: (number of judged samples, metrics) of each rank.

    Rates, preemptions and counts of fleets are added. For overlaps, waiting shares and longest times the maximum is taken,
    for all others the mean over the samples.
    """
    metrics = dict(per_rank[0][1])
    for name in {name for _, rank_metrics in per_rank for name in rank_metrics}:
        weighted = [(samples, rank_metrics[name]) for samples, rank_metrics in per_rank if name in rank_metrics]
        count = sum(samples for samples, _ in weighted)
        if "_per_s" in name or name == "rollout/preempted" or (name.startswith("fleet/") and name != "fleet/work_spread"):
            metrics[name] = sum(value for _, value in weighted)
        elif name in ("time/overlap", "time/trainer_wait", "time/engine_idle", "fleet/work_spread") or "_max" in name:
            metrics[name] = max(value for _, value in weighted)
        else:
            metrics[name] = sum(samples * value for samples, value in weighted) / count if count else weighted[0][1]
    return metrics
