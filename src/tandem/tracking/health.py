"""Health of a run while it trains: one small function for each sickness, over the curves of the metrics so far.

A sickness is told once, on the terminal with its remedy, and recorded in `health.jsonl`, which `tandem view` shows.
docs/health.md is made from the table: ``python -m tandem.tracking.health``.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tandem.api.lines import append_line

log = logging.getLogger(__name__)

FILE = "health.jsonl"
WINDOW = 5
"""Steps that a mean is of."""


class Curves(dict[str, list[float]]):
    """The metrics so far: name → its finite values, oldest first."""

    def __init__(self, series: Mapping[str, Sequence[tuple[int, float]]]):
        """``series``: name → (step, value)."""
        self.series = series

    def __missing__(self, name: str) -> list[float]:
        self[name] = [value for _, value in self.series.get(name, ()) if math.isfinite(value)]
        return self[name]

    def mean(self, name: str, count: int = WINDOW, *, back: int = 0) -> float:
        """The mean of the last ``count`` values, ``back`` values before the end; NaN if there are fewer."""
        return _mean(self[name][: len(self[name]) - back][-count:], count)

    def first(self, name: str) -> float:
        """The mean of the first values; NaN if there are fewer."""
        return _mean(self[name][:WINDOW], WINDOW)

    @property
    def learns(self) -> bool:
        """True if the reward of the last steps is above that of the steps before, by a third of their spread or more."""
        return self.mean("reward/mean") > self.mean("reward/mean", back=WINDOW) + self.mean("reward/std") / 3

    @property
    def learnt(self) -> bool:
        """True if most answers are right."""
        return self.mean("accuracy") >= 0.8


def _mean(values: Sequence[float], count: int) -> float:
    return sum(values) / count if len(values) == count else math.nan


Sign = Callable[[Curves], str | None]


class Check(NamedTuple):
    """A sickness: its name, what is seen of it (None: it is not there), and what to do."""

    name: str
    sign: Sign
    remedy: str


CHECKS: list[Check] = []


def check(remedy: str) -> Callable[[Sign], Sign]:
    """Registers a function of the curves, by its name; its docstring is the rule, for docs/health.md."""

    def register(sign: Sign) -> Sign:
        CHECKS.append(Check(sign.__name__, sign, remedy))
        return sign

    return register


@check("raise gconfig.max_new_tokens, or take algorithm.shaping with overlong")
def truncation(curves: Curves) -> str | None:
    """At least 20 % of the samples were cut by their length in the last 5 steps, no fewer than in the 5 before."""
    now, before = curves.mean("truncated"), curves.mean("truncated", back=WINDOW)
    return f"{now:.0%} of the samples are cut by their length" if now >= 0.2 and now >= 0.9 * before else None


@check("choose easier or harder prompts, raise gconfig.n_samples, or use algorithm.filter=dynamic_sampling")
def dead_groups(curves: Curves) -> str | None:
    """At least 80 % of the groups of the last 5 steps had no spread, though fewer than 80 % of the answers were right."""
    share = curves.mean("groups/without_spread")
    dead = share >= 0.8 and curves.mean("groups/size") > 1 and not curves.learnt
    return f"{share:.0%} of the groups have samples of one reward, which teach nothing" if dead else None


@check("look at long samples with `tandem trajectories`; take algorithm.shaping with overlong, or lower the learning rate")
def length_explosion(curves: Curves) -> str | None:
    """Answers of the last 5 steps are twice as long as those of the first 5, and the reward has not risen since."""
    now, then = curves.mean("completion_length/mean"), curves.first("completion_length/mean")
    longer = now >= 2 * then and curves.mean("reward/mean") <= curves.first("reward/mean")
    return f"answers have grown from {then:.0f} to {now:.0f} tokens without more reward" if longer else None


@check("lower the weight of that part (`tandem control RUN reward.weight NAME=…`), or gate it by the right answer")
def part_for_the_whole(curves: Curves) -> str | None:
    """A part of the reward has risen by 0.1 since the first 5 steps while the accuracy fell by 0.1."""
    if not curves.first("accuracy") - curves.mean("accuracy") >= 0.1:
        return None
    risen = [name for name in curves.series if name.startswith("rewards/") and curves.mean(name) - curves.first(name) >= 0.1]
    return f"{risen[0]} rises while the accuracy falls: the reward is being exploited" if risen else None


@check("raise algorithm.entropy_coefficient, clip_high or the temperature, or lower the learning rate")
def entropy_collapse(curves: Curves) -> str | None:
    """The entropy of the last 5 steps is below a fifth of the first 5 and below 0.1 nats, before 80 % of the answers are
    right; the reward does not rise any more."""
    now, then = curves.mean("entropy"), curves.first("entropy")
    fell = now < 0.2 * then and now < 0.1 and not (curves.learnt or curves.learns)
    return f"the entropy fell from {then:.2g} to {now:.2g} nats: exploration has ended" if fell else None


@check("raise algorithm.kl.coefficient, or lower the learning rate")
def kl_run_away(curves: Curves) -> str | None:
    """The KL from the reference is 0.2 nats a token or more in the last 5 steps, and twice what it was 5 steps before."""
    now, before = curves.mean("kl/reference"), curves.mean("kl/reference", back=WINDOW)
    return f"the KL from the reference has grown to {now:.2g} nats a token" if now >= 0.2 and now >= 2 * before else None


@check("look at the reward, which is content with it; lower the learning rate, raise algorithm.kl.coefficient")
def one_answer(curves: Curves) -> str | None:
    """At least 90 % of the samples of the last 3 steps were the same text, whatever the prompt."""
    share = curves.mean("samples/same", 3)
    return f"{share:.0%} of the samples are one and the same text" if share >= 0.9 and not curves.learnt else None


@check("see samples with `tandem trajectories` and `tandem check-reward`: a judge that always says the same teaches nothing")
def constant_judge(curves: Curves) -> str | None:
    """The reward, or a part of it that is neither 0 nor 1, has had the same mean to the last digit in all
    steps, 8 or more."""
    for name in (name for name in curves.series if name.startswith(("reward/mean", "rewards/")) and not curves.learnt):
        values = curves[name]
        if len(values) >= 8 and max(values) - min(values) < 1e-9 and (name == "reward/mean" or values[0] not in (0, 1)):
            return f"{name} has been {values[0]:.4g} in each of the {len(values)} steps"
    return None


@check("raise actor.optimizer.lr (1e-6 to 1e-5 for a whole model, ten times that with LoRA)")
def weights_stand_still(curves: Curves) -> str | None:
    """No step so far has moved the weights by a millionth of their size, after 3 that had a gradient; the learning rate is
    not still rising."""
    moved, rates = [x for x in curves["actor/update_ratio"] if x > 0], curves["lr"]
    still = len(moved) >= 3 and max(moved) < 1e-6 and rates[-1] <= rates[-2]
    return f"a step moves the weights by {max(moved):.1g} of their size (lr {rates[-1]:g})" if still else None


@check("shorten the answers, lower rollout.max_concurrent or rollout.max_head_offpolicyness, or take rollout.on_expiry=wait")
def stale_tokens(curves: Curves) -> str | None:
    """At least 10 % of the tokens of the last 5 steps were too old to be trained on."""
    share = curves.mean("expired")
    return f"{share:.0%} of the tokens are too old to be trained on" if share >= 0.1 else None


@check(
    "give training more of the machine: threads or devices, larger micro-batches; or lower rollout.max_head_offpolicyness"
)
def idle_engine(curves: Curves) -> str | None:
    """In asynchronous training the engine generated nothing for nine tenths of the last 5 steps."""
    share, asynchronous = curves.mean("time/engine_idle"), curves.mean("time/overlap") > 0
    return f"the engine stands idle for {share:.0%} of the time" if share >= 0.9 and asynchronous else None


@check(
    "lower gconfig.max_new_tokens or max_concurrent, or find what is kept: `tandem view` has the curve of memory/peak_gib"
)
def growing_memory(curves: Curves) -> str | None:
    """The peak of memory grew by 3 % or more, and 0.1 GiB, in each of the last three times 5 steps."""
    peaks = curves["memory/peak_gib"][-3 * WINDOW - 1 :][::WINDOW]
    grows = len(peaks) == 4 and all(b >= max(1.03 * a, a + 0.1) for a, b in zip(peaks, peaks[1:], strict=False))
    return f"memory has grown from {peaks[0]:.1f} to {peaks[-1]:.1f} GiB within {3 * WINDOW} steps" if grows else None


@check("read the reasons in `tandem trajectories RUN --dropped` and log.txt")
def lost_samples(curves: Curves) -> str | None:
    """In the last 5 steps at least a fifth as many samples failed as were trained."""
    lost = sum(_grown(curves[name]) for name in curves.series if name.startswith("samples/failed/"))
    trained = _grown(curves["episodes/trained"]) * curves.mean("groups/size")
    return f"{lost:.0f} samples have failed in the last steps, and {trained:.0f} not" if 0 < lost >= 0.2 * trained else None


def _grown(values: Sequence[float]) -> float:
    """Growth of a count in the last steps."""
    return values[-1] - values[-WINDOW:][0] if values else 0.0


def _record(line: str) -> dict[str, Any] | None:
    """Reads what was told from a line; None where a kill has torn it."""
    try:
        one = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(one, dict) and isinstance(one.get("name"), str) and isinstance(one.get("step"), int)
    return one if whole else None


class HealthWatch:
    """The checks of one run; each sickness is told once."""

    def __init__(self, folder: Path):
        self._path, self._told = folder / FILE, set[str]()

    def forget_after(self, step: int) -> None:
        """Those told up to the step are not told again, those after it are."""
        if self._path.is_file():
            told = map(_record, self._path.read_text(encoding="utf-8", errors="replace").splitlines())
            kept = {one["name"]: json.dumps(one) + "\n" for one in told if one is not None and one["step"] <= step}
            self._told = set(kept)
            self._path.write_text("".join(kept.values()), encoding="utf-8")

    def look(self, step: int, series: Mapping[str, Sequence[tuple[int, float]]]) -> None:
        """Tells and records what is new at this step."""
        curves = Curves(series)
        for name, sign, remedy in CHECKS:
            if name not in self._told and (seen := sign(curves)) is not None:
                self._told.add(name)
                log.warning("step %d: %s: %s; %s", step, name, seen, remedy)
                append_line(self._path, json.dumps({"step": step, "name": name, "sign": seen, "remedy": remedy}))


def markdown() -> str:
    """The table of the checks, for the documentation."""
    rows = [f"| `{name}` | {' '.join(str(sign.__doc__).split())} | {remedy}. |" for name, sign, remedy in CHECKS]
    return "\n".join(["| sickness | told when | what to do |", "|---|---|---|", *rows])


if __name__ == "__main__":
    print(markdown())
