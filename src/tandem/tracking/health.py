"""Health checks during training: one small function for each sickness, over the curves of the metrics so far.

A sickness is reported once on the terminal, with its remedy, and recorded in `health.jsonl`, which `tandem view` shows.
``python -m tandem.tracking.health`` prints the table of checks for docs/health.md.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tandem.api.shared_files import append_line, json_object

log = logging.getLogger(__name__)

FILE = "health.jsonl"
WINDOW = 5
"""Number of steps over which a mean is taken."""


class Curves(dict[str, list[float]]):
    """The metrics so far: name → its finite values, the oldest first."""

    def __init__(self, series: Mapping[str, Sequence[tuple[int, float]]]):
        """``series``: name → list of (step, value)."""
        self.series = series

    def __missing__(self, name: str) -> list[float]:
        self[name] = [value for _, value in self.series.get(name, ()) if math.isfinite(value)]
        return self[name]

    def mean(self, name: str, count: int = WINDOW, *, back: int = 0) -> float:
        """Returns the mean of ``count`` values that end ``back`` values before the last; NaN if there are fewer."""
        return _mean(self[name][: len(self[name]) - back][-count:], count)

    def first(self, name: str) -> float:
        """Returns the mean of the first `WINDOW` values; NaN if there are fewer."""
        return _mean(self[name][:WINDOW], WINDOW)

    @property
    def learns(self) -> bool:
        """True if the mean reward of the last 5 steps exceeds that of the 5 steps before by more than a third of
        ``reward/std``."""
        return self.mean("reward/mean") > self.mean("reward/mean", back=WINDOW) + self.mean("reward/std") / 3

    @property
    def learnt(self) -> bool:
        """True if at least 80 % of the answers are right."""
        return self.mean("accuracy") >= 0.8


def _mean(values: Sequence[float], count: int) -> float:
    return sum(values) / count if len(values) == count else math.nan


Sign = Callable[[Curves], str | None]


class Check(NamedTuple):
    """A sickness: its name, the function that describes its sign (or returns None if the run does not have it), and a
    remedy."""

    name: str
    sign: Sign
    remedy: str


CHECKS: list[Check] = []


def check(remedy: str) -> Callable[[Sign], Sign]:
    """Registers a function of the curves as a check. The function's name is the name of the sickness; its docstring is the
    rule in docs/health.md."""

    def register(sign: Sign) -> Sign:
        CHECKS.append(Check(sign.__name__, sign, remedy))
        return sign

    return register


@check("raise gconfig.max_new_tokens, or add overlong to algorithm.shaping")
def truncation(curves: Curves) -> str | None:
    """At least 20 % of the samples of the last 5 steps were cut at the length limit, and this share is at least 0.9 times
    the share of the 5 steps before."""
    now, before = curves.mean("truncated"), curves.mean("truncated", back=WINDOW)
    return f"{now:.0%} of the samples are cut at the length limit" if now >= 0.2 and now >= 0.9 * before else None


@check("choose easier or harder prompts, raise gconfig.n_samples, or use algorithm.filter=dynamic_sampling")
def dead_groups(curves: Curves) -> str | None:
    """In at least 80 % of the groups of the last 5 steps all rewards were equal, though fewer than 80 % of the answers were
    right."""
    share = curves.mean("groups/without_spread")
    dead = share >= 0.8 and curves.mean("groups/size") > 1 and not curves.learnt
    return f"{share:.0%} of the groups have samples with equal rewards, which teach nothing" if dead else None


@check("look at long samples with `tandem trajectories`; add overlong to algorithm.shaping, or lower the learning rate")
def length_explosion(curves: Curves) -> str | None:
    """Answers of the last 5 steps are at least twice as long as those of the first 5, and the reward has not risen."""
    now, then = curves.mean("completion_length/mean"), curves.first("completion_length/mean")
    longer = now >= 2 * then and curves.mean("reward/mean") <= curves.first("reward/mean")
    return f"answers have grown from {then:.0f} to {now:.0f} tokens without more reward" if longer else None


@check("lower the weight of that part (`tandem control RUN reward.weight NAME=…`), or gate it by the right answer")
def part_for_the_whole(curves: Curves) -> str | None:
    """A part of the reward has risen by at least 0.1 since the first 5 steps, while the accuracy fell by at least 0.1."""
    if not curves.first("accuracy") - curves.mean("accuracy") >= 0.1:
        return None
    risen = [name for name in curves.series if name.startswith("rewards/") and curves.mean(name) - curves.first(name) >= 0.1]
    return f"{risen[0]} rises while the accuracy falls: the reward is being exploited" if risen else None


@check("raise algorithm.entropy_coefficient, clip_high or the temperature, or lower the learning rate")
def entropy_collapse(curves: Curves) -> str | None:
    """The entropy of the last 5 steps is below 0.1 nats and below a fifth of that of the first 5, fewer than 80 % of the
    answers are right, and the reward no longer rises."""
    now, then = curves.mean("entropy"), curves.first("entropy")
    fell = now < 0.2 * then and now < 0.1 and not (curves.learnt or curves.learns)
    return f"the entropy fell from {then:.2g} to {now:.2g} nats: exploration has ended" if fell else None


@check("raise algorithm.kl.coefficient, or lower the learning rate")
def kl_run_away(curves: Curves) -> str | None:
    """The KL from the reference is at least 0.2 nats a token in the last 5 steps, and at least twice that of the 5 steps
    before."""
    now, before = curves.mean("kl/reference"), curves.mean("kl/reference", back=WINDOW)
    return f"the KL from the reference has grown to {now:.2g} nats a token" if now >= 0.2 and now >= 2 * before else None


@check("look at the reward, which accepts this text; lower the learning rate, raise algorithm.kl.coefficient")
def one_answer(curves: Curves) -> str | None:
    """At least 90 % of the samples of the last 3 steps were the same text, whatever the prompt, and fewer than 80 % of the
    answers are right."""
    share = curves.mean("samples/same", 3)
    return f"{share:.0%} of the samples are one and the same text" if share >= 0.9 and not curves.learnt else None


@check("see samples with `tandem trajectories` and `tandem check-reward`: a judge that always says the same teaches nothing")
def constant_judge(curves: Curves) -> str | None:
    """The mean reward, or a part of the reward other than 0 and 1, has been exactly the same in all steps, at least 8 of
    them."""
    for name in (name for name in curves.series if name.startswith(("reward/mean", "rewards/")) and not curves.learnt):
        values = curves[name]
        if len(values) >= 8 and max(values) - min(values) < 1e-9 and (name == "reward/mean" or values[0] not in (0, 1)):
            return f"{name} has been {values[0]:.4g} in each of the {len(values)} steps"
    return None


@check("raise actor.optimizer.lr (1e-6 to 1e-5 for a whole model, ten times that with LoRA)")
def weights_stand_still(curves: Curves) -> str | None:
    """No step so far has moved the weights by a millionth of their size, after at least 3 steps with a gradient, and the
    learning rate is not rising."""
    moved, rates = [x for x in curves["actor/update_ratio"] if x > 0], curves["lr"]
    still = len(moved) >= 3 and max(moved) < 1e-6 and rates[-1] <= rates[-2]
    return f"a step moves the weights by {max(moved):.1g} of their size (lr {rates[-1]:g})" if still else None


@check("shorten the answers, lower rollout.max_concurrent or rollout.max_head_offpolicyness, or set rollout.on_expiry=wait")
def stale_tokens(curves: Curves) -> str | None:
    """At least 10 % of the tokens of the last 5 steps were too old to be trained on."""
    share = curves.mean("expired")
    return f"{share:.0%} of the tokens are too old to be trained on" if share >= 0.1 else None


@check(
    "give training more of the machine: threads or devices, larger micro-batches; or lower rollout.max_head_offpolicyness"
)
def idle_engine(curves: Curves) -> str | None:
    """In asynchronous training the engine generated nothing during at least 90 % of the time of the last 5 steps."""
    share, asynchronous = curves.mean("time/engine_idle"), curves.mean("time/overlap") > 0
    return f"the engine is idle for {share:.0%} of the time" if share >= 0.9 and asynchronous else None


@check("lower gconfig.max_new_tokens or max_concurrent, or find the leak: `tandem view` has the curve of memory/peak_gib")
def growing_memory(curves: Curves) -> str | None:
    """The peak of memory grew by at least 3 % and at least 0.1 GiB in each of the last three intervals of 5 steps."""
    peaks = curves["memory/peak_gib"][-3 * WINDOW - 1 :][::WINDOW]
    grows = len(peaks) == 4 and all(b >= max(1.03 * a, a + 0.1) for a, b in zip(peaks, peaks[1:], strict=False))
    return f"memory has grown from {peaks[0]:.1f} to {peaks[-1]:.1f} GiB within {3 * WINDOW} steps" if grows else None


@check("read the reasons in `tandem trajectories RUN --dropped` and log.txt")
def lost_samples(curves: Curves) -> str | None:
    """In the last 5 steps the number of failed samples was at least a fifth of the number of trained samples."""
    lost = sum(_grown(curves[name]) for name in curves.series if name.startswith("samples/failed/"))
    trained = _grown(curves["episodes/trained"]) * curves.mean("groups/size")
    return (
        f"{lost:.0f} samples have failed in the last steps, and {trained:.0f} were trained"
        if 0 < lost >= 0.2 * trained
        else None
    )


def _grown(values: Sequence[float]) -> float:
    """Returns the growth of a cumulative count over the last `WINDOW` values."""
    return values[-1] - values[-WINDOW:][0] if values else 0.0


def _record(line: str) -> dict[str, Any] | None:
    """Reads a line of `health.jsonl`; None if the line is incomplete, as after a kill."""
    record = json_object(line) or {}
    return record if isinstance(record.get("name"), str) and isinstance(record.get("step"), int) else None


class HealthWatch:
    """The health checks of one run; each sickness is reported once."""

    def __init__(self, folder: Path):
        self._path, self._reported = folder / FILE, set[str]()

    def forget_after(self, step: int) -> None:
        """Removes the records of later steps from the file, so that these sicknesses may be reported again."""
        if self._path.is_file():
            records = map(_record, self._path.read_text(encoding="utf-8", errors="replace").splitlines())
            lines = {row["name"]: json.dumps(row) + "\n" for row in records if row is not None and row["step"] <= step}
            self._reported = set(lines)
            self._path.write_text("".join(lines.values()), encoding="utf-8")

    def look(self, step: int, series: Mapping[str, Sequence[tuple[int, float]]]) -> None:
        """Runs all checks at this step. Reports and records sicknesses that were not reported before."""
        curves = Curves(series)
        for name, sign, remedy in CHECKS:
            if name not in self._reported and (seen := sign(curves)) is not None:
                self._reported.add(name)
                log.warning("step %d: %s: %s; %s", step, name, seen, remedy)
                append_line(self._path, json.dumps({"step": step, "name": name, "sign": seen, "remedy": remedy}))


def markdown() -> str:
    """Returns the table of the checks in Markdown, for the documentation."""
    rows = [f"| `{name}` | {' '.join(str(sign.__doc__).split())} | {remedy}. |" for name, sign, remedy in CHECKS]
    return "\n".join(["| sickness | reported when | what to do |", "|---|---|---|", *rows])


if __name__ == "__main__":
    print(markdown())
