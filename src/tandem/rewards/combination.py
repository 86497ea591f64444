"""The combination of the terms of a reward: gates, normalisation, clipping, weights.

A term whose value alone says what it counts is added inside its episode (`tandem.rewards.build.SumReward`). The others are
added here, when the groups of a batch stand: those that a model scores, and those with options.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from tandem.api.failures import DataFailure, WrongWorkflow
from tandem.api.samples import Sample
from tandem.config.terms import Options, Term

MOST = 1e38
"""Larger values would be infinite in float32."""

EPSILON = 1e-6
"""Added to a spread before something is divided by it."""

ROUNDING = 1e-12
"""A spread that is smaller than the mean by this factor is nothing but rounding."""


def is_open(options: Options, raw: Mapping[str, float]) -> bool:
    """True if the term counts. ``raw``: what the other terms gave; one that was not asked opens no gate."""
    return options.gate_name is None or raw.get(options.gate_name, -math.inf) > options.gate_above


def clipped(options: Options, value: float) -> float:
    """The value within `clip`."""
    return value if options.clip is None else min(max(value, options.clip[0]), options.clip[1])


def alone(term: Term, value: float) -> float:
    """Computes what one value counts where there is no batch to compare it with, as in evaluation: `normalise`, and the
    clip behind it, are left out."""
    return term.weight * (value if term.options.normalise else clipped(term.options, value))


def told_raw(sums: Iterable[Sequence[Term]]) -> frozenset[str]:
    """The terms whose value before the weight is recorded: in one of the sums it is another number, or opens the gate of
    another term."""
    terms = [term for one in sums for term in one]
    gates = {term.options.gate_name for term in terms}
    return frozenset(t.label for t in terms if t.weight != 1 or t.options != Options() or t.label in gates)


@dataclass
class RunningSpread:
    """Mean and spread of all values so far; the same however they are divided into calls, but for rounding."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared distances from the mean."""

    def add(self, values: Sequence[float]) -> None:
        """Takes in more of them (Chan, Golub and LeVeque's formula)."""
        if not values:
            return
        mean = math.fsum(values) / len(values)
        total, step = self.count + len(values), mean - self.mean
        self.squares += math.fsum((x - mean) ** 2 for x in values) + step**2 * self.count * len(values) / total
        self.mean += step * len(values) / total
        self.count = total

    def scale(self, value: float) -> float:
        """The value in units of the spread from the mean; 0 where all values are the same, whatever this one is: a sample
        outside statistics may have another."""
        spread = math.sqrt(self.squares / self.count) if self.count else 0.0
        return (value - self.mean) / (spread + EPSILON) if spread > ROUNDING * abs(self.mean) else 0.0


@dataclass
class Scored:
    """A sample with what the terms that are added later gave it."""

    sample: Sample
    group: int
    reward: str
    """The sum that judges it."""

    row: Mapping[str, Any] = field(default_factory=dict)

    values: dict[str, list[float]] = field(default_factory=dict)
    """Name of a term → its value, or a value for each step."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    """Name of a term of steps → the tokens of the last trajectory that earn its values."""

    @property
    def raw(self) -> dict[str, float]:
        """The value that each term gave; of steps their mean."""
        own = {name: sum(values) / len(values) for name, values in self.values.items() if values}
        return {**self.sample.rewards, **self.sample.raw_rewards, **own}


class Combination:
    """Adds the terms that need more than their own sample. Running means are the only state; see `tandem.api.state`."""

    def __init__(self, sums: Mapping[str, Sequence[Term]], later: Mapping[str, Sequence[Term]], *, cost: str | None = None):
        """``sums``: each reward with all of its terms; ``later``: with those that are added here. ``cost``: the name of a
        term that is a part, but does not enter the sum."""
        self.later, self.told, self.cost = later, told_raw(sums.values()), cost
        self.spreads: dict[str, RunningSpread] = {}

    def change(
        self, sums: Mapping[str, Sequence[Term]], later: Mapping[str, Sequence[Term]], *, again: bool = False
    ) -> None:
        """From now on these terms count. The means of terms that stay go on; those of terms that are gone are forgotten.
        ``again``: the change was made before the means were loaded, which are as it and later changes left them."""
        self.later, self.told = later, told_raw(sums.values())
        running = {term.label for terms in later.values() for term in terms if term.options.normalise == "running"}
        self.spreads = {name: spread for name, spread in self.spreads.items() if again or name in running}

    def add(self, samples: Sequence[Scored], *, training: bool = True) -> list[Sample | DataFailure]:
        """Each sample with the whole reward, or why it cannot have one. In evaluation nothing is normalised or learnt."""
        failures = [self._failure(one) for one in samples]
        fine = [one for one, failure in zip(samples, failures, strict=True) if failure is None]
        parts = [self._values(one, training) for one in fine]
        if training:
            self._normalise(fine, parts)
        finished = iter([self._finished(one, part, training) for one, part in zip(fine, parts, strict=True)])
        return [next(finished) if failure is None else failure for failure in failures]

    def _failure(self, one: Scored) -> DataFailure | None:
        given = {name: [value] for name, value in one.sample.raw_rewards.items()} | one.values
        for name, values in given.items():
            if not values:
                return DataFailure("no_steps", f"reward {name!r} scores steps and found none in the reply")
        wrong = ((name, value) for name, values in given.items() for value in values if not abs(value) <= MOST)
        name, value = next(wrong, (None, 0.0))
        return None if name is None else DataFailure("reward_not_finite", f"reward {name!r} gave {value}")

    def _values(self, one: Scored, training: bool) -> dict[str, list[float]]:
        """The values of the terms that count for a sample."""
        raw, found = one.raw, {}
        for term in self.later[one.reward]:
            if not is_open(term.options, raw):
                continue
            if term.label not in one.values and term.label not in one.sample.raw_rewards:
                if not training:  # in evaluation no term compares the samples of a prompt
                    continue
                raise WrongWorkflow(
                    f"reward {term.label!r} has options, which count when its batch is there, and the workflow gave a "
                    "sample without its value; make samples with chat.sample(…) behind self.judge(…), or give "
                    "Sample.raw_rewards what RewardResult.raw_rewards says"
                )
            found[term.label] = one.values.get(term.label) or [one.sample.raw_rewards[term.label]]
        return found

    def _normalise(self, samples: Sequence[Scored], parts: Sequence[dict[str, list[float]]]) -> None:
        """Brings values to mean 0 and spread 1, over all so far or over those of their group."""
        terms = [{term.label: term for term in self.later[one.reward]} for one in samples]
        for name in sorted({name for part in parts for name in part}):
            having = [i for i, part in enumerate(parts) if name in part]
            running = [i for i in having if terms[i][name].options.normalise == "running"]
            if running:
                spread = self.spreads.setdefault(name, RunningSpread())
                spread.add([x for i in running if samples[i].sample.in_statistics for x in parts[i][name]])
                for i in running:
                    parts[i][name] = [spread.scale(x) for x in parts[i][name]]
            grouped = [i for i in having if terms[i][name].options.normalise == "group"]
            for _, members in groupby(grouped, lambda i: samples[i].group):
                together, spread = list(members), RunningSpread()
                spread.add([x for i in together if samples[i].sample.in_statistics for x in parts[i][name]])
                for i in together:
                    parts[i][name] = [spread.scale(x) for x in parts[i][name]]

    def _finished(self, one: Scored, values: Mapping[str, list[float]], training: bool) -> Sample:
        sample, parts, raws = one.sample, {}, {}
        trajectory, raw = sample.trajectories[-1], one.raw
        for term in self.later[one.reward]:
            name = term.label
            given = values.get(name, [])
            if not given and not training and is_open(term.options, raw):
                continue  # it compares samples, which evaluation does not, and 0 would be a verdict
            counted = [term.weight * clipped(term.options, x) if training else alone(term, x) for x in given]
            parts[name] = math.fsum(counted)
            if name in one.tokens and given:
                trajectory = trajectory.earning(one.tokens[name], counted)
            if given and name in self.told:
                raws[name] = raw[name]
        gates = {
            f"gate/{t.label}": float(t.label in values) for t in self.later[one.reward] if t.options.gate_name is not None
        }
        return replace(
            sample,
            trajectories=(*sample.trajectories[:-1], trajectory),
            reward=sample.reward + math.fsum(value for name, value in parts.items() if name != self.cost),
            rewards={**sample.rewards, **parts},
            raw_rewards={**sample.raw_rewards, **raws},
            metrics={**sample.metrics, **gates},
        )

    def state_dict(self) -> dict[str, Any]:
        return {"spreads": {name: [s.count, s.mean, s.squares] for name, s in self.spreads.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before the first batch."""
        self.spreads = {n: RunningSpread(int(c), float(mean), float(q)) for n, (c, mean, q) in state["spreads"].items()}
