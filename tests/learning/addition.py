"""One-digit addition with the real 135M model through the trainer's own step, for any preset; and the negative control.

What counts is not the reward of the batches, which filters and several rewards colour, but the accuracy of sampled answers
(T = 1) to the 16 pairs that are never trained on: before, whenever a batch looks good enough, and at the end.
"""

import dataclasses
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tandem.api.batch import with_fields
from tandem.config.algorithm import PRESETS
from tandem.config.arithmetic import total_steps
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.evaluation.validation import evaluate
from tandem.flow.conductor import Conductor
from tandem.flow.opening import open_rows, open_session
from tandem.flow.process import start_process
from tandem.flow.services import check_names
from tandem.flow.stages import Stage
from tandem.trainers.loop import step

ROOT = Path(__file__).resolve().parents[2]

GOAL = 0.8
"""What a preset is to reach, and where its run ends."""

OWN_GOAL = {"ttrl": 0.5}
"""Without labels a model becomes surer of what it holds true already: here the right answer to 12 of the 16 pairs."""

BUDGET = 15
"""Steps that a run may take."""

EVERY = 3
"""Steps between two measurements, unless a batch looks good before."""

LOOKS_GOOD = 0.7
"""Share of right answers in a batch from which on it is worth measuring."""

COMMON = (
    "threads=1",
    "system_prompt=Add.",  # a third of the tokens of the template's own
    "rollout.batch_size=6",
    "gconfig.max_new_tokens=8",
    "rollout.engine.kv_cache_gib=0.25",
    "actor.optimizer.lr=3e-5",
    "actor.optimizer.schedule=constant",  # so that a control of fewer steps is the same run
    "actor.optimizer.min_lr_ratio=0",
    "evaluate.n_samples=4",  # of each of the 16 held-out pairs
    "evaluate.temperature=1",
    "evaluate.every_steps=1",  # the validation rows are loaded; when to look is decided here
)

OWN: dict[str, tuple[str, ...]] = {
    "dapo": ("algorithm.filter.max_draws=30",),  # towards the end most groups are all right
    "ttrl": ("gconfig.temperature=0.6",),  # at 1 the majority is wrong on most of these questions, and becomes unanimous
}
"""Preset → what it needs on this task beside its values and what its page says."""


@dataclass
class Curve:
    """What a run came to."""

    preset: str
    seed: int
    shuffled: bool
    settings: tuple[str, ...]
    """Beside `COMMON`."""

    batches: list[float] = field(default_factory=list)
    """Share of right answers in each batch, before the update that it gives."""

    measured: dict[int, float] = field(default_factory=dict)
    """Step → accuracy of 64 sampled answers to held-out pairs; step 0 is before training."""

    step_s: float = 0.0
    """Mean time of a step."""

    seconds: float = 0.0
    """Time of the whole run, with loading and measuring."""

    goal: float | None = None
    """Accuracy at which it ends; None is the preset's."""

    @property
    def first(self) -> float:
        """Accuracy before training."""
        return self.measured[0]

    @property
    def last(self) -> float:
        """Accuracy at the end."""
        return self.measured[max(self.measured)]

    @property
    def reached(self) -> bool:
        """Whether that is the goal."""
        return self.last >= (OWN_GOAL.get(self.preset, GOAL) if self.goal is None else self.goal)

    @property
    def steps(self) -> int:
        """Steps that were taken."""
        return len(self.batches)


class ShuffledRewards(Conductor):
    """Its batches have their rewards dealt out anew among all samples: nothing is left to learn from."""

    def __init__(self, conductor: Conductor, seed: int):
        self._conductor = conductor
        self._draw = torch.Generator().manual_seed(seed)

    def prepare(self, name: str) -> None:
        """See `Conductor`."""
        self._conductor.prepare(name)

    def call(self, stage: Stage, work: Callable[..., Any], *arguments: Any) -> Any:
        """See `Conductor`. One answer is one sequence in this task."""
        batch = self._conductor.call(stage, work, *arguments)
        if stage.kind != "collect":
            return batch
        order = torch.randperm(len(batch["reward"]), generator=self._draw)
        names = [name for name in batch.keys() if name in ("reward", "accuracy") or str(name).startswith("rewards/")]
        return with_fields(batch, **{str(name): batch[name][order] for name in names})


def learn(
    preset: str,
    *,
    steps: int = BUDGET,
    seed: int = 0,
    shuffled: bool = False,
    more: tuple[str, ...] = (),
    goal: float | None = None,
    observe: Callable[[Curve, dict[str, float]], None] = lambda curve, metrics: None,
) -> Curve:
    """Trains until the goal was measured; with ``shuffled`` rewards for all ``steps``, measured at the end alone.

    ``goal``: None is the preset's. ``more``: further overrides, the last word. ``observe`` gets the metrics of each step.
    """
    began = time.perf_counter()
    settings = tuple(dict.fromkeys((*PRESETS[preset].example.split(), *OWN.get(preset, ()), *more)))
    overrides = [*COMMON, f"algorithm={preset}", f"seed={seed}", f"total_train_steps={steps}", *settings]
    config = load_config(TrainConfig, ROOT / "examples" / "addition_grpo.yaml", overrides).config
    check_names(config)
    rows, process = open_rows(config), start_process(config)
    curve = Curve(preset, seed, shuffled, settings, goal=goal)
    with ExitStack() as stack:
        session = stack.enter_context(open_session(config, process, rows, total_steps(config, len(rows.train)), "learning"))
        if shuffled:
            session = dataclasses.replace(session, conductor=ShuffledRewards(session.conductor, seed))

        def measure(number: int) -> None:
            curve.measured[number] = evaluate(config, session, rows)["eval/accuracy"]

        measure(0)
        training_s = 0.0
        for number in range(1, steps + 1):
            started = time.perf_counter()
            metrics, _ = step(session)
            training_s += time.perf_counter() - started
            curve.batches.append(metrics["accuracy"])
            good = not shuffled and (metrics["accuracy"] >= LOOKS_GOOD or number % EVERY == 0)
            if good or number == steps:
                measure(number)
            observe(curve, metrics | session.timer.metrics())
            if curve.reached and not shuffled:
                break
    curve.step_s = training_s / curve.steps
    curve.seconds = time.perf_counter() - began
    return curve
