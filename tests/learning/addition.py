"""One-digit addition with the real 135M model through the trainer's own step, for any preset; and the negative control.

What is measured is not the reward of the batches, which filters and several rewards colour, but the accuracy of sampled
answers to questions of the training split, before, now and then, and at the end.
"""

import dataclasses
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from tandem.config.arithmetic import total_steps
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.config.notes import NOTES
from tandem.roles.samples import with_fields
from tandem.tracking.statistics import PhaseTimer
from tandem.trainers.parts import check_names, open_rows
from tandem.trainers.process import start_process
from tandem.trainers.rl import step
from tandem.trainers.session import evaluate_if_due, open_session

ROOT = Path(__file__).resolve().parents[2]
EVERY = 3
"""Steps between two measurements."""

COMMON = (
    "valid_dataset.split=train",
    "evaluate.max_rows=16",
    "evaluate.n_samples=4",
    "evaluate.temperature=1",
    "evaluate.every_steps=1",  # the validation rows are loaded; when to look is decided here
    "checkpoint.at_end=false",
)

OWN: dict[str, tuple[str, ...]] = {
    "dapo": ("algorithm.filter.max_draws=30",),  # towards the end most groups are all right
}
"""Preset → what it needs on this task beside its values: learning rate, group size."""


@dataclass
class Curve:
    """What a run came to."""

    preset: str
    seed: int
    shuffled: bool
    settings: tuple[str, ...]
    budget: int
    """Steps that it might have taken."""

    reward: list[float] = field(default_factory=list)
    """Mean reward of each batch, before any shuffling."""

    measured: dict[int, float] = field(default_factory=dict)
    """Step → accuracy of sampled answers; step 0 is before training."""

    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last step."""

    seconds: float = 0.0
    """Time of the steps, without loading and measuring."""

    @property
    def first(self) -> float:
        """Accuracy before training."""
        return self.measured[0]

    @property
    def last(self) -> float:
        """Accuracy at the end."""
        return self.measured[max(self.measured)]

    def over_the_budget(self) -> dict[int, float]:
        """Step → accuracy at each measurement of the whole budget; a run that ended early keeps its last one."""
        due = [number for number in range(self.budget + 1) if number % EVERY == 0 or number == self.budget]
        return {number: self.measured.get(number, self.last) for number in due}

    @property
    def steps(self) -> int:
        """Steps that were taken."""
        return len(self.reward)


class ShuffledRewards:
    """A rollout whose batches have their rewards dealt out anew among all samples: nothing is left to learn from."""

    def __init__(self, rollout: Any, seed: int):
        self._rollout = rollout
        self._draw = torch.Generator().manual_seed(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rollout, name)

    def prepare_batch(self, loader: Any, workflow: Any) -> TensorDict:
        """See `Rollout.prepare_batch`. One answer is one sequence in this task."""
        batch = self._rollout.prepare_batch(loader, workflow)
        order = torch.randperm(len(batch["reward"]), generator=self._draw)
        names = [name for name in batch.keys() if name in ("reward", "accuracy") or str(name).startswith("rewards/")]
        return with_fields(batch, **{str(name): batch[name][order] for name in names})


def learn(
    preset: str,
    *,
    steps: int = 15,
    seed: int = 0,
    shuffled: bool = False,
    stop_at: float | None = None,
    more: tuple[str, ...] = (),
) -> Curve:
    """Trains. ``stop_at``: end as soon as that accuracy was measured. ``more``: further overrides, the last word."""
    settings = tuple(dict.fromkeys((*NOTES[preset].run, *OWN.get(preset, ()), *more)))
    overrides = [*COMMON, f"algorithm={preset}", f"seed={seed}", f"total_train_steps={steps}", *settings]
    config = load_config(TrainConfig, ROOT / "examples" / "addition_grpo.yaml", overrides).config
    check_names(config)
    rows, process = open_rows(config), start_process(config)
    curve = Curve(preset, seed, shuffled, settings, steps)
    with ExitStack() as stack:
        session = stack.enter_context(open_session(config, process, rows, total_steps(config, len(rows.train)), "learning"))
        if shuffled:
            session = dataclasses.replace(session, rollout=ShuffledRewards(session.rollout, seed))

        def measure() -> float:
            return evaluate_if_due(config, session, rows, 0, steps)["eval/accuracy"]

        curve.measured[0] = measure()
        timer = PhaseTimer()
        for number in range(1, steps + 1):
            began = time.perf_counter()
            curve.metrics = step(session, timer)
            curve.seconds += time.perf_counter() - began
            curve.reward.append(curve.metrics["reward/mean"])
            if number == steps or number % EVERY == 0:
                curve.measured[number] = measure()
                if stop_at is not None and curve.last >= stop_at:
                    break
    return curve
