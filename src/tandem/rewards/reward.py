"""The reward of a row: asked of its terms, and added up here, whenever their values come.

A term is judged by a `RewardFn` in the episode, by a `GroupReward` when all samples of its prompt stand, or by the model of
a `Score` when the batch stands. Its value counts at once, unless the run adds it later (`RewardTerm.is_late`): those of
models and those with options, which `Reward.add` puts on the samples of the whole batch. `added` is the sum in all three
places.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from tandem.api.failures import DataFailure, RewardFailure, WrongWorkflow
from tandem.api.samples import Sample
from tandem.api.workflow import EPISODE, GroupReward, RewardFn, RewardResult, messages_for
from tandem.config.errors import ConfigError
from tandem.config.recipes import sum_of
from tandem.config.terms import Options
from tandem.rewards.engine_judge import WritingReward
from tandem.rewards.majority import MajorityVote
from tandem.rewards.outcome import compared
from tandem.rewards.terms import RewardTerm, raw_names

Judge = RewardFn | GroupReward

MOST = 1e38
"""Larger values would be infinite in float32."""

EPSILON = 1e-6
"""Added to a spread before something is divided by it."""

ROUNDING = 1e-12
"""A spread that is smaller than the mean by this factor is nothing but rounding."""


def added(parts: Mapping[str, float], raw: Mapping[str, float], cost: str | None) -> RewardResult:
    """The sum of these parts but for the cost, in no order that would change its last bit."""
    return RewardResult(math.fsum(x for name, x in parts.items() if name != cost), parts, raw_rewards=raw)


def plus(sample: Sample, more: RewardResult) -> Sample:
    """The sample with more parts of its reward."""
    return replace(
        sample,
        reward=sample.reward + more.value,
        rewards={**sample.rewards, **more.rewards},
        raw_rewards={**sample.raw_rewards, **more.raw_rewards},
        words={**sample.words, **more.words},
    )


def is_open(options: Options, raw: Mapping[str, float]) -> bool:
    """True if the term counts. ``raw``: what the other terms gave; one that was not asked opens no gate."""
    return options.gate_name is None or raw.get(options.gate_name, -math.inf) > options.gate_above


def counted(term: RewardTerm, value: float, *, batch: bool = False) -> float:
    """The value clipped and weighed. Without a ``batch`` to compare it with, as in evaluation, `normalise`, and the clip
    behind it, are left out."""
    clip = term.options.clip if batch or not term.options.normalise else None
    return term.weight * (value if clip is None else min(max(value, clip[0]), clip[1]))


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
        means = {name: sum(values) / len(values) for name, values in self.values.items() if values}
        return {**self.sample.rewards, **self.sample.raw_rewards, **means}


class Sum(RewardFn):
    """The terms of one reward, with those who judge them. Accuracy and answer are the first one's that knows."""

    def __init__(
        self, terms: Sequence[RewardTerm], judges: Mapping[str, Judge], *, batch: bool = False, cost: str | None = None
    ):
        """``judges``: by the names of terms; the others are scored later. ``batch``: a batch will stand, in which late terms
        count. ``cost``: the name of a term that is a part, but does not enter the sum."""
        self.terms, self.judges, self.cost = tuple(terms), dict(judges), cost
        self.single = {name: judge for name, judge in judges.items() if isinstance(judge, RewardFn)}
        self.together = {name: judge for name, judge in judges.items() if isinstance(judge, GroupReward)}
        self.late = tuple(term for term in terms if batch and term.is_late)
        self.now = {term.label: term for term in terms if term.label in judges and term not in self.late}
        self.later = tuple(t.label for t in terms if batch and (t in self.late or t.label in self.together))
        """Names of the terms that are added when the episode has ended."""

        judged_terms = [term for term in terms if term.label in judges]
        self.own_told = raw_names(judged_terms) | (raw_names(terms) - {term.label for term in judged_terms})
        self.told = self.own_told
        """Terms whose value before the weight is recorded."""

        gates = {term.label: term.options.gate_name for term in terms if term.label in self.single}
        self._waits = {name: gate for name, gate in gates.items() if gate in gates or (gate and not batch)}

    @property
    def alone(self) -> RewardFn | None:
        """The judge of the only term, if its verdict is the reward, with all the parts that it has."""
        term = self.terms[0]
        plain = len(self.terms) == 1 and term.weight == 1.0 and term.options == Options() and term.score is None
        return self.single.get(term.label) if plain and term.label != self.cost else None

    @property
    def reads_messages(self) -> bool:  # type: ignore[override]
        """True if a term reads the conversation."""
        return any(judge.reads_messages for judge in self.single.values())

    async def __call__(self, *, messages: Sequence[Mapping[str, Any]] = (), **arguments: Any) -> RewardResult:
        """Implements `RewardFn.__call__`. Fails if a term fails."""
        if self.alone is not None:
            return await self.alone(**arguments, **messages_for(self.alone, messages))
        results = await self._asked(messages, arguments)
        judged = [results[name] for name in self.single if name in results and name != self.cost]
        accuracy = next((result.accuracy for result in judged if result.accuracy is not None), None)
        looking = next((result for result in judged if result.extracted is not None), RewardResult(0.0))
        words = {name: text for result in results.values() for name, text in result.words.items()}
        summed = self._added(self.single, {name: result.value for name, result in results.items()})
        return replace(summed, accuracy=accuracy, answer=looking.answer, extracted=looking.extracted, words=words)

    async def _asked(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> dict[str, RewardResult]:
        """Asks all terms at once, those with a gate behind the term that opens it, and not if it stays closed."""
        results: dict[str, RewardResult] = {}
        options = {term.label: term.options for term in self.terms}
        due, answered = [name for name in self.single if name not in self._waits], set[str]()
        while due:
            raw = {name: result.value for name, result in results.items()}
            names = [name for name in due if name not in self._waits or is_open(options[name], raw)]
            calls = [self.single[name](**arguments, **messages_for(self.single[name], messages)) for name in names]
            results |= zip(names, await asyncio.gather(*calls), strict=True)
            answered |= {*due}
            due = [name for name in self.single if name not in answered and self._waits[name] in answered]
        return results

    def _added(self, judges: Mapping[str, Judge], values: Mapping[str, float]) -> RewardResult:
        """Adds up what those of these judges gave that count at once; some were perhaps not asked."""
        now = [(name, self.now[name]) for name in judges if name in self.now]
        parts = {name: counted(term, values[name]) if name in values else 0.0 for name, term in now}
        return added(parts, {name: values[name] for name in judges if name in values and name in self.told}, self.cost)

    async def compare(self, samples: Sequence[Sample], row: Mapping[str, Any]) -> list[Sample]:
        """The samples of a prompt with what the terms that judge them together add."""
        results = await asyncio.gather(*(judge.compare(samples, row) for judge in self.together.values()))
        by_term = [compared(name, values, len(samples)) for name, values in zip(self.together, results, strict=True)]
        more = []
        for i, sample in enumerate(samples):
            each = {name: values[i] for name, values in zip(self.together, by_term, strict=True)}
            words = {name: text for judged in each.values() for name, text in judged.words.items()}
            more.append(
                plus(sample, replace(self._added(self.together, {n: x.value for n, x in each.items()}), words=words))
            )
        return more

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Asks each term that can tell whether the row has what it needs."""
        for judge in self.single.values():
            check = getattr(judge, "check_row", None)
            if check is not None:
                check(row)

    def compares(self, term: RewardTerm) -> bool:
        """True if the term judges the samples of a prompt together."""
        return term.label in self.together or (isinstance(term.score, WritingReward) and term.score.compares)

    def metrics(self) -> dict[str, float]:
        """Collects what the terms count."""
        return {name: value for judge in self.single.values() for name, value in judge.metrics().items()}

    def close(self) -> None:
        """Closes all of them, also if one of them fails to."""
        with contextlib.ExitStack() as stack:
            for judge in self.judges.values():
                stack.callback(judge.close)


class Reward(RewardFn):
    """The reward of a run: each row is judged by the sum of its recipe or its data set. Running means are the only state;
    see `tandem.api.state`. ``vote``: who judges in training instead, where there are no labels."""

    def __init__(self, default: str, sums: Mapping[str, Sum], vote: MajorityVote | None = None):
        """``default``: the reward of rows whose data set names none. ``sums``: every sum that judges rows."""
        sums = {spec: copy(reward_sum) for spec, reward_sum in sums.items()}
        for reward_sum in sums.values():  # or a mean of raw values would be over other rows than that of the parts
            reward_sum.told = reward_sum.own_told.union(*(other.own_told for other in sums.values()))
        self._judging = (default, sums)  # one object: while it is changed, episodes read it in another thread
        self.cost, self.vote = next((reward_sum.cost for reward_sum in sums.values()), None), vote
        self.goes_on = False
        """True: the workflow goes on by the terms that are there at once (`RolloutWorkflow.reads_reward`)."""

        self.spreads: dict[str, RunningSpread] = {}
        self._gone: list[Judge] = []
        self._waits = (0, 0.0, 0.0)  # since the last call of `metrics`: samples, seconds of all of them, of the slowest

    @property
    def default(self) -> str:
        """The reward of rows whose data set names none."""
        return self._judging[0]

    @property
    def sums(self) -> Mapping[str, Sum]:
        """Every sum that judges rows."""
        return self._judging[1]

    def change(self, other: "Reward", *, again: bool = False) -> None:
        """From now on it judges as the other one, which may share judges with it. Episodes may still be in a reward that is
        gone, so that is closed at the end. The means of terms that stay go on; those of terms that are gone are forgotten.
        ``again``: the change was made before the means were loaded, which are as it and later changes left them."""
        self._gone += self.judges
        self._judging = other._judging
        late = (term for reward_sum in self.sums.values() for term in reward_sum.late)
        running = {term.label for term in late if term.options.normalise == "running"}
        self.spreads = {name: spread for name, spread in self.spreads.items() if again or name in running}

    @property
    def judges(self) -> list[Judge]:
        """Those of all sums, each once."""
        return list({id(judge): judge for reward_sum in self.sums.values() for judge in reward_sum.judges.values()}.values())

    @property
    def reads_messages(self) -> bool:  # type: ignore[override]
        """True if a reward reads the conversation."""
        return any(reward_sum.reads_messages for reward_sum in self.sums.values())

    @property
    def samples(self) -> int:
        """Samples judged since the last call of `metrics`."""
        return self._waits[0]

    def of(self, row: Mapping[str, Any]) -> Sum:
        """The sum that judges a row.

        Raises:
            ConfigError: the row names no recipe (`tandem.config.recipes`).
        """
        default, sums = self._judging
        return sums[sum_of(row, default)]

    async def __call__(self, *, row: Mapping[str, Any], **arguments: Any) -> RewardResult:
        """Implements `RewardFn.__call__`: what counts at once."""
        try:
            began, reward_sum = time.perf_counter(), self.of(row)
        except ConfigError as error:
            raise RewardFailure("unknown_recipe", str(error)) from error
        try:
            result = await reward_sum(row=row, **arguments)
            episode = EPISODE.get()
            if reward_sum.later and not self.goes_on and episode is not None:
                episode.has_read((*arguments["prompt_ids"], *arguments["completion_ids"]), reward_sum.later)
            return result
        finally:
            waited_s = time.perf_counter() - began
            samples, total_s, longest_s = self._waits
            self._waits = samples + 1, total_s + waited_s, max(longest_s, waited_s)

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Asks the row's reward whether the row has what it needs.

        Raises:
            ConfigError: it lacks something; or it names no recipe.
        """
        self.of(row).check_row(row)

    @property
    def compares(self) -> bool:
        """True if the reward of any row has a term that judges the samples of a prompt together."""
        return any(reward_sum.together for reward_sum in self.sums.values())

    async def compare(self, samples: Sequence[Sample], row: Mapping[str, Any]) -> list[Sample]:
        """The samples of a prompt with what such terms add, by the reward of the row."""
        return await self.of(row).compare(samples, row)

    def add(self, samples: Sequence[Scored], *, training: bool = True) -> list[Sample | DataFailure]:
        """Each sample of a batch with the whole reward, or why it cannot have one. In evaluation nothing is normalised or
        learnt."""
        failures = [_failure(scored) for scored in samples]
        fine = [scored for scored, failure in zip(samples, failures, strict=True) if failure is None]
        values = [self._values(scored, training) for scored in fine]
        if training:
            self._normalise(fine, values)
        finished = iter([self._finished(scored, rewards, training) for scored, rewards in zip(fine, values, strict=True)])
        return [next(finished) if failure is None else failure for failure in failures]

    def _values(self, scored: Scored, training: bool) -> dict[str, list[float]]:
        """The values of the late terms that count for a sample."""
        raw, rewards = scored.raw, {}
        for term in self.sums[scored.reward].late:
            if not is_open(term.options, raw):
                continue
            if term.label not in scored.values and term.label not in scored.sample.raw_rewards:
                if not training:  # in evaluation no term compares the samples of a prompt
                    continue
                raise WrongWorkflow(
                    f"reward {term.label!r} has options, which count when its batch is there, and the workflow gave a "
                    "sample without its value; make samples with chat.sample(…) behind self.judge(…), or give "
                    "Sample.raw_rewards what RewardResult.raw_rewards says"
                )
            rewards[term.label] = scored.values.get(term.label) or [scored.sample.raw_rewards[term.label]]
        return rewards

    def _normalise(self, samples: Sequence[Scored], parts: Sequence[dict[str, list[float]]]) -> None:
        """Brings values to mean 0 and spread 1, over all so far or over those of their group."""
        over = [{term.label: term.options.normalise for term in self.sums[scored.reward].late} for scored in samples]
        for name in sorted({name for part in parts for name in part}):
            having = [i for i, part in enumerate(parts) if name in part]
            running = [i for i in having if over[i][name] == "running"]
            if running:
                _scale(name, running, samples, parts, self.spreads.setdefault(name, RunningSpread()))
            grouped = [i for i in having if over[i][name] == "group"]
            for _, members in groupby(grouped, lambda i: samples[i].group):
                _scale(name, list(members), samples, parts, RunningSpread())

    def _finished(self, scored: Scored, values: Mapping[str, list[float]], training: bool) -> Sample:
        sample, raw, summing = scored.sample, scored.raw, self.sums[scored.reward]
        trajectory, parts = sample.trajectories[-1], {}
        for term in summing.late:
            name = term.label
            term_values = values.get(name, [])
            if not term_values and not training and is_open(term.options, raw):
                continue  # it compares samples, which evaluation does not, and 0 would be a verdict
            earned = [counted(term, x, batch=training) for x in term_values]
            parts[name] = math.fsum(earned)
            if name in scored.tokens and term_values:
                trajectory = trajectory.earning(scored.tokens[name], earned)
        reported = {name: raw[name] for name in parts if values.get(name) and name in summing.told}
        gates = {f"gate/{t.label}": float(t.label in values) for t in summing.late if t.options.gate_name is not None}
        return replace(
            plus(sample, added(parts, reported, self.cost)),
            trajectories=(*sample.trajectories[:-1], trajectory),
            metrics={**sample.metrics, **gates},
        )

    def metrics(self) -> dict[str, float]:
        """Seconds until the reward was there, for the samples judged since the last call, and what the rewards count
        themselves. Empty if there were none."""
        (samples, total_s, longest_s), self._waits = self._waits, (0, 0.0, 0.0)
        times = {"time/judge_s": total_s / samples, "time/judge_max_s": longest_s} if samples else {}
        return times | {name: value for reward_sum in self.sums.values() for name, value in reward_sum.metrics().items()}

    def close(self) -> None:
        """Closes all of them."""
        for judge in {id(judge): judge for judge in (*self.judges, *self._gone)}.values():
            judge.close()
        if self.vote is not None:
            self.vote.close()

    def state_dict(self) -> dict[str, Any]:
        return {"spreads": {name: [s.count, s.mean, s.squares] for name, s in self.spreads.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before the first batch."""
        self.spreads = {n: RunningSpread(int(c), float(mean), float(q)) for n, (c, mean, q) in state["spreads"].items()}


def _failure(scored: Scored) -> DataFailure | None:
    rewards = {name: [value] for name, value in scored.sample.raw_rewards.items()} | scored.values
    for name, values in rewards.items():
        if not values:
            return DataFailure("no_steps", f"reward {name!r} scores steps and found none in the reply")
    wrong = ((name, value) for name, values in rewards.items() for value in values if not abs(value) <= MOST)
    name, value = next(wrong, (None, 0.0))
    return None if name is None else DataFailure("reward_not_finite", f"reward {name!r} gave {value}")


def _scale(
    name: str,
    chosen: Sequence[int],
    samples: Sequence[Scored],
    parts: Sequence[dict[str, list[float]]],
    spread: RunningSpread,
) -> None:
    """Takes the values of those samples that are in statistics into the spread, and scales those of all by it."""
    spread.add([x for i in chosen if samples[i].sample.in_statistics for x in parts[i][name]])
    for i in chosen:
        parts[i][name] = [spread.scale(x) for x in parts[i][name]]
