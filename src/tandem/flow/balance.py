"""`rollout.balance=auto`: threads move between training and generation, which run side by side, until neither waits."""

from collections.abc import Callable, Mapping

import torch

from tandem.api.engines import InferenceEngine
from tandem.config.errors import ConfigError
from tandem.config.rollout import RolloutConfig
from tandem.engines.inference.build import engine_threads
from tandem.engines.inference.embedded import EmbeddedProcess
from tandem.flow.process import Process, uses_gpu

LITTLE = 0.1
"""Both sides may wait for this share of the time: below it nothing is moved."""

_STEPS = 2
"""Steps that a split is watched for. The first after a change is not one of them: it began under the old split."""

_REMEMBERED = 30
"""Steps after which a split may be tried again: lengths of answers change while a run learns."""


class Balance:
    """Watches who waits, and gives a thread of the other side to the side that is waited for.

    A split that was tried and was worse is not tried again for a while, so that the two do not swing.
    """

    def __init__(self, generating: int, training: int, give: Callable[[int, int], None]):
        """``generating``, ``training``: threads now. ``give(generating, training)`` makes it so."""
        self._generating, self._total, self._give = generating, generating + training, give
        self._step, self._since = 0, 0
        self._waits: list[tuple[float, float]] = []
        self._seen: dict[int, tuple[int, float]] = {}
        """The larger of the two waits by threads of the engine, and the step when that was."""

    def after_step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Hears ``time/trainer_wait`` and ``time/engine_idle`` of a step; returns the threads of both sides in that step."""
        told = {"threads/generate": float(self._generating), "threads/train": float(self._total - self._generating)}
        self._step += 1
        self._since += 1
        if self._since > 1:
            self._waits.append((metrics["time/trainer_wait"], metrics["time/engine_idle"]))
        if len(self._waits) == _STEPS:
            trainer_waits, engine_idles = (sum(values) / _STEPS for values in zip(*self._waits, strict=True))
            self._waits = []
            self._move(trainer_waits, engine_idles)
        return told

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
    """The balance; None unless the run asks for it.

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
