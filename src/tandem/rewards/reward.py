"""The reward of a row: the values of its terms, and their sum, whenever the values are computed.

A term is judged by a `RewardFn` within the episode, by a `GroupReward` when all samples of its prompt are complete, or by
the model of a `Score` when the batch is complete. A value that comes from a model or has options (`RewardTerm.is_late`) is
added later, by `Reward.add` for all samples of the batch; any other value is added at once. `added` computes the sum in all
these cases.

Also has the terms of a reward as objects: weight, options, name in metrics, and the score of a term that needs a model. The
configuration's text is parsed only here; `tandem.flow.plan` stores the terms and passes them on.
"""

import asyncio
import contextlib
import inspect
import math
import time
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from tandem.api.failures import DataFailure, RewardFailure, WrongWorkflow
from tandem.api.services import Services, factory_of
from tandem.api.workflow import (
    EPISODE,
    EpisodeView,
    FrozenModel,
    GroupReward,
    RewardFn,
    RewardResult,
    Sample,
    Score,
    messages_to,
)
from tandem.config.errors import ConfigError
from tandem.config.recipes import sum_of
from tandem.config.services import SERVICES, service_of
from tandem.config.terms import Options, Term, read_terms
from tandem.rewards.engine_judge import WritingReward
from tandem.rewards.majority import MajorityVote
from tandem.rewards.signatures import compared


@dataclass(frozen=True)
class RewardTerm:
    """One term of a sum."""

    term: Term
    """The term as written in the configuration."""

    label: str
    """The term's name in metrics."""

    options: Options
    """The term's options. Their gate refers to another term by its name in metrics."""

    score: Score | None = field(default=None, compare=False)
    """The score that judges the term with a model that the run loads; None if the term judges single samples, or the samples
    of a prompt."""

    awaited: bool = False
    """True: the workflow waits for the model within the episode, so that the value is available at once."""

    @property
    def weight(self) -> float:
        """The factor by which the value is multiplied."""
        return self.term.weight

    @property
    def is_late(self) -> bool:
        """True if the term is added only when the batch is complete: it has options, or a model scores it after the
        episodes."""
        return self.options != Options() or (self.score is not None and not self.awaited)


def read_sum(spec: str) -> tuple[RewardTerm, ...]:
    """Parses a sum such as ``math + 0.2*model(path=FOLDER)`` into its terms; does not load the models of scores.

    Raises:
        ConfigError: the text is malformed, a name is unknown, or a score does not name its model.
    """
    terms = read_terms(spec)
    scores = {term.label: _score_of(term) for term in terms if needs_model(term)}
    names = {term.label: str(scores[term.label].name) or term.short_name for term in terms if term.label in scores}
    return tuple(
        RewardTerm(term, names.get(term.label, term.label), _renamed(term.options, names), scores.get(term.label))
        for term in terms
    )


def _renamed(options: Options, names: dict[str, str]) -> Options:
    """Returns the options; a gate that refers to a term gets that term's name in metrics."""
    gate = options.gate_name
    return replace(options, gate=f"{names[gate]} > {options.gate_above!r}") if gate in names else options


def raw_names(terms: Sequence[RewardTerm]) -> frozenset[str]:
    """Returns the labels of the terms whose unweighted value is recorded: it differs from the weighted value, or it opens a
    gate."""
    gates = {term.options.gate_name for term in terms}
    return frozenset(t.label for t in terms if t.weight != 1 or t.options != Options() or t.label in gates)


def needs_model(term: Term) -> bool:
    """True if a term is scored by a model that the run loads, after the episode."""
    if term.is_file:
        reward_class = factory_of("reward", term.name)
        return inspect.isclass(reward_class) and issubclass(reward_class, Score)
    service = service_of("reward", term.registered, "reward")
    return service.needs_model or bool(service.writes_without and term.knobs.get(service.writes_without) is None)


def _score_of(term: Term) -> Score:
    make, key = factory_of("reward", term.name, "reward"), f"reward={term.name}"
    writes = not term.is_file and bool(SERVICES["reward"][term.registered].writes_without)
    score = Services().make(key, make, term.arguments, {"timeout_s": math.inf} if writes else {})
    if writes:
        score = WritingReward(score, str(term.knobs.get("model")))
    assert isinstance(score, Score), "needs_model has checked this"
    _check_score(term, score)
    return score


DTYPES = ("auto", "bfloat16", "float32")


def _check_score(term: Term, score: Score) -> None:
    model = getattr(score, "model", None)
    if not isinstance(model, FrozenModel):
        fault = "is missing" if model is None else f"is a {type(model).__name__}"
        raise ConfigError(f"reward {term.name!r}: its attribute `model` {fault}; set self.model = FrozenModel(path, head=…)")
    if not isinstance(model.path, str) or not model.path:
        raise ConfigError(f"reward {term.name!r}: FrozenModel.path must be a folder or a name, got {model.path!r}")
    heads = ("text",) if isinstance(score, WritingReward) else ("lm", "scalar")
    for name, value, allowed in (("head", model.head, heads), ("dtype", model.dtype, (None, *DTYPES))):
        if value not in allowed:
            raise ConfigError(f"reward {term.name!r}: FrozenModel.{name} must be one of {allowed}, got {value!r}")
    if isinstance(model.class_label, bool) or not isinstance(model.class_label, str | int | None):
        raise ConfigError(f"reward {term.name!r}: class_label must be a class's name or number, got {model.class_label!r}")
    if model.class_label is not None and model.head != "scalar":
        raise ConfigError(f"reward {term.name!r}: class_label is for head='scalar', got head={model.head!r}; leave it out")
    if not isinstance(model.backend, str | None):
        raise ConfigError(f"reward {term.name!r}: FrozenModel.backend must be a text such as fsdp:d1, got {model.backend!r}")
    if not isinstance(score.name, str):
        raise ConfigError(f"reward {term.name!r}: its attribute `name` must be a text, got {score.name!r}")


Judge = RewardFn | GroupReward

MOST = 1e38
"""Maximum absolute value of a reward; larger values would be infinite in float32."""

EPSILON = 1e-6
"""Added to a standard deviation before a division by it."""

ROUNDING = 1e-12
"""A standard deviation below this factor times the mean is treated as rounding error."""


def added(parts: Mapping[str, float], raw: Mapping[str, float], cost: str | None) -> RewardResult:
    """Returns the exact sum of ``parts`` without the part ``cost``. The order of the parts does not change the result."""
    return RewardResult(math.fsum(x for name, x in parts.items() if name != cost), parts, raw_rewards=raw)


def plus(sample: Sample, result: RewardResult) -> Sample:
    """Returns the sample with ``result`` added to its reward."""
    return replace(
        sample,
        reward=sample.reward + result.value,
        rewards={**sample.rewards, **result.rewards},
        raw_rewards={**sample.raw_rewards, **result.raw_rewards},
        words={**sample.words, **result.words},
    )


def is_open(options: Options, raw: Mapping[str, float]) -> bool:
    """True if the term's gate is open, or the term has no gate. ``raw``: unweighted values of the other terms; if the gate's
    value is missing, the gate is closed."""
    return options.gate_name is None or raw.get(options.gate_name, -math.inf) > options.gate_above


def counted(term: RewardTerm, value: float, *, batch: bool = False) -> float:
    """Returns the value clipped and multiplied by the weight. Without ``batch``, as in evaluation, values are not
    normalised, so the clip that follows `normalise` is omitted too."""
    clip = term.options.clip if batch or not term.options.normalise else None
    return term.weight * (value if clip is None else min(max(value, clip[0]), clip[1]))


@dataclass
class RunningSpread:
    """Running mean and standard deviation of all added values. They depend on the values only, not on the number of calls
    (except for rounding)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared distances from the mean."""

    def add(self, values: Sequence[float]) -> None:
        """Adds values (Chan, Golub and LeVeque's formula)."""
        if not values:
            return
        mean = math.fsum(values) / len(values)
        total, step = self.count + len(values), mean - self.mean
        self.squares += math.fsum((x - mean) ** 2 for x in values) + step**2 * self.count * len(values) / total
        self.mean += step * len(values) / total
        self.count = total

    def scale(self, value: float) -> float:
        """Returns (value − mean) / standard deviation. Returns 0 if all added values are equal. (The value itself may differ
        from them: it may belong to a sample outside statistics.)"""
        spread = math.sqrt(self.squares / self.count) if self.count else 0.0
        return (value - self.mean) / (spread + EPSILON) if spread > ROUNDING * abs(self.mean) else 0.0


@dataclass
class Scored:
    """A sample, with its values of the terms that are added after the episode."""

    sample: Sample
    group: int
    reward: str
    """The sum that judges the sample, as written in the configuration."""

    row: Mapping[str, Any] = field(default_factory=dict)

    values: dict[str, list[float]] = field(default_factory=dict)
    """Values by term: one value, or one for each step."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    """Label of a term with steps → the positions of the tokens in the last trajectory that get the values of the steps."""

    @property
    def raw(self) -> dict[str, float]:
        """The unweighted value of each term; the mean for steps."""
        means = {name: sum(values) / len(values) for name, values in self.values.items() if values}
        return {**self.sample.rewards, **self.sample.raw_rewards, **means}


class Sum(RewardFn):
    """The terms of one reward with their judges. Accuracy and answer come from the first term that provides them."""

    def __init__(
        self, terms: Sequence[RewardTerm], judges: Mapping[str, Judge], *, batch: bool = False, cost: str | None = None
    ):
        """``judges``: by the labels of their terms; the other terms are scored later. ``batch``: True if late terms will be
        added for a batch. ``cost``: the label of a term that is recorded as a part but not included in the sum."""
        self.terms, self.judges, self.cost = tuple(terms), dict(judges), cost
        self.single = {name: judge for name, judge in judges.items() if isinstance(judge, RewardFn)}
        self.together = {name: judge for name, judge in judges.items() if isinstance(judge, GroupReward)}
        self.late = tuple(term for term in terms if batch and term.is_late)
        self.now = {term.label: term for term in terms if term.label in judges and term not in self.late}
        self.later = tuple(t.label for t in terms if batch and (t in self.late or t.label in self.together))
        """Labels of the terms that are added after the episode."""

        judged_terms = [term for term in terms if term.label in judges]
        self.own_recorded = raw_names(judged_terms) | (raw_names(terms) - {term.label for term in judged_terms})
        self.recorded = self.own_recorded
        """Labels of the terms whose unweighted value is recorded."""

        gates = {term.label: term.options.gate_name for term in terms if term.label in self.single}
        self._waits = {name: gate for name, gate in gates.items() if gate in gates or (gate and not batch)}

    @property
    def alone(self) -> RewardFn | None:
        """The judge of the only term, if the reward equals its result without any change; else None."""
        term = self.terms[0]
        plain = len(self.terms) == 1 and term.weight == 1.0 and term.options == Options() and term.score is None
        return self.single.get(term.label) if plain and term.label != self.cost else None

    @property
    def reads_messages(self) -> bool:  # type: ignore[override]
        """True if a term needs the conversation's messages."""
        return any(judge.reads_messages for judge in self.single.values())

    async def __call__(self, *, messages: Sequence[Mapping[str, Any]] = (), **arguments: Any) -> RewardResult:
        """Implements `RewardFn.__call__`. Fails if a term fails."""
        if self.alone is not None:
            return await self.alone(**arguments, **messages_to(self.alone, messages))
        results = await self._results(messages, arguments)
        judged = [results[name] for name in self.single if name in results and name != self.cost]
        accuracy = next((result.accuracy for result in judged if result.accuracy is not None), None)
        parsed = next((result for result in judged if result.extracted is not None), RewardResult(0.0))
        words = {name: text for result in results.values() for name, text in result.words.items()}
        summed = self._added(self.single, {name: result.value for name, result in results.items()})
        return replace(summed, accuracy=accuracy, answer=parsed.answer, extracted=parsed.extracted, words=words)

    async def _results(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> dict[str, RewardResult]:
        """Judges all terms concurrently. A term with a gate is judged after the term that opens it, or not at all."""
        results: dict[str, RewardResult] = {}
        options = {term.label: term.options for term in self.terms}
        due, answered = [name for name in self.single if name not in self._waits], set[str]()
        while due:
            raw = {name: result.value for name, result in results.items()}
            names = [name for name in due if name not in self._waits or is_open(options[name], raw)]
            calls = [self.single[name](**arguments, **messages_to(self.single[name], messages)) for name in names]
            results |= zip(names, await asyncio.gather(*calls), strict=True)
            answered |= {*due}
            due = [name for name in self.single if name not in answered and self._waits[name] in answered]
        return results

    def _added(self, judges: Mapping[str, Judge], values: Mapping[str, float]) -> RewardResult:
        """Adds up the values of those terms of ``judges`` that are not late. A term without a value counts 0."""
        now = [(name, self.now[name]) for name in judges if name in self.now]
        parts = {name: counted(term, values[name]) if name in values else 0.0 for name, term in now}
        return added(parts, {name: values[name] for name in judges if name in values and name in self.recorded}, self.cost)

    async def compare(self, samples: Sequence[Sample], row: Mapping[str, Any]) -> list[Sample]:
        """Returns the samples of a prompt with the values of the terms that compare them."""
        results = await asyncio.gather(*(judge.compare(samples, row) for judge in self.together.values()))
        by_term = {name: compared(name, values, len(samples)) for name, values in zip(self.together, results, strict=True)}
        finished = []
        for i, sample in enumerate(samples):
            by_name = {name: values[i] for name, values in by_term.items()}
            words = {name: text for judged in by_name.values() for name, text in judged.words.items()}
            finished.append(
                plus(sample, replace(self._added(self.together, {n: x.value for n, x in by_name.items()}), words=words))
            )
        return finished

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Checks the row with each term that has a check."""
        for judge in self.single.values():
            check = getattr(judge, "check_row", None)
            if check is not None:
                check(row)

    def compares(self, term: RewardTerm) -> bool:
        """True if the term judges the samples of a prompt together."""
        return term.label in self.together or (isinstance(term.score, WritingReward) and term.score.compares)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of all terms."""
        return {name: value for judge in self.single.values() for name, value in judge.metrics().items()}

    def close(self) -> None:
        """Closes all judges, even if closing one of them fails."""
        with contextlib.ExitStack() as stack:
            for judge in self.judges.values():
                stack.callback(judge.close)


class Reward(RewardFn):
    """The reward of a run: each row is judged by the sum of its recipe or of its data set. Running means are the only state;
    see `tandem.api.state`. ``vote``: the majority vote, which replaces the sum in training without labels."""

    def __init__(self, default: str, sums: Mapping[str, Sum], vote: MajorityVote | None = None):
        """``default``: the reward of rows whose data set names none. ``sums``: every sum that judges rows, by its text in
        the configuration."""
        sums = {spec: copy(reward_sum) for spec, reward_sum in sums.items()}
        for reward_sum in sums.values():  # otherwise the means of raw values and of parts would cover different rows
            reward_sum.recorded = reward_sum.own_recorded.union(*(other.own_recorded for other in sums.values()))
        self._judging = (default, sums)  # one object, because episodes read it in another thread while it is replaced
        self.cost, self.vote = next((reward_sum.cost for reward_sum in sums.values()), None), vote
        self.accepts_partial = False
        """True if episodes may act on a reward that lacks its late terms (`RolloutWorkflow.reads_reward` is `partly`)."""

        self.spreads: dict[str, RunningSpread] = {}
        self._gone: list[Judge] = []
        self._waits = (0, 0.0, 0.0)  # since the last `metrics()`: number of samples, total seconds, longest seconds

    @property
    def default(self) -> str:
        """The reward of rows whose data set names none."""
        return self._judging[0]

    @property
    def sums(self) -> Mapping[str, Sum]:
        """Every sum that judges rows, by its text in the configuration."""
        return self._judging[1]

    def change(self, other: "Reward", *, again: bool = False) -> None:
        """Replaces the sums by those of ``other``, which may share judges with this reward. Episodes may still use a removed
        judge, so removed judges are closed at the end of the run. The running means of terms that remain continue; the
        others are deleted. ``again``: the change is repeated on a resume; the loaded means already reflect it, so none is
        deleted."""
        self._gone += self.judges
        self._judging = other._judging
        late = (term for reward_sum in self.sums.values() for term in reward_sum.late)
        running = {term.label for term in late if term.options.normalise == "running"}
        self.spreads = {name: spread for name, spread in self.spreads.items() if again or name in running}

    @property
    def judges(self) -> list[Judge]:
        """The judges of all sums, each once."""
        return list({id(judge): judge for reward_sum in self.sums.values() for judge in reward_sum.judges.values()}.values())

    @property
    def reads_messages(self) -> bool:  # type: ignore[override]
        """True if a reward needs the conversation's messages."""
        return any(reward_sum.reads_messages for reward_sum in self.sums.values())

    @property
    def samples(self) -> int:
        """Number of samples judged since the last call of `metrics`."""
        return self._waits[0]

    def of(self, row: Mapping[str, Any]) -> Sum:
        """Returns the sum that judges a row.

        Raises:
            ConfigError: the row names an unknown recipe (`tandem.config.recipes`).
        """
        default, sums = self._judging
        return sums[sum_of(row, default)]

    async def __call__(self, *, row: Mapping[str, Any], **arguments: Any) -> RewardResult:
        """Implements `RewardFn.__call__`. The result has the values of the terms that are available within the episode."""
        try:
            began, reward_sum = time.perf_counter(), self.of(row)
        except ConfigError as error:
            raise RewardFailure("unknown_recipe", str(error)) from error
        try:
            result = await reward_sum(row=row, **arguments)
            episode = EPISODE.get()
            if reward_sum.later and not self.accepts_partial and isinstance(episode, EpisodeView):
                episode.has_read((*arguments["prompt_ids"], *arguments["completion_ids"]), reward_sum.later)
            return result
        finally:
            waited_s = time.perf_counter() - began
            samples, total_s, longest_s = self._waits
            self._waits = samples + 1, total_s + waited_s, max(longest_s, waited_s)

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Checks the row with the sum that judges it.

        Raises:
            ConfigError: the row lacks something that a term needs, or names an unknown recipe.
        """
        self.of(row).check_row(row)

    @property
    def compares(self) -> bool:
        """True if the reward of any row has a term that judges the samples of a prompt together."""
        return any(reward_sum.together for reward_sum in self.sums.values())

    async def compare(self, samples: Sequence[Sample], row: Mapping[str, Any]) -> list[Sample]:
        """Returns the samples of a prompt with the values of the comparing terms of the row's reward."""
        return await self.of(row).compare(samples, row)

    def add(self, samples: Sequence[Scored], *, training: bool = True) -> list[Sample | DataFailure]:
        """Returns each sample of a batch with its complete reward, or a failure if a value is missing. In evaluation values
        are not normalised, and running means are not updated."""
        failures = [_failure(scored) for scored in samples]
        valid = [scored for scored, failure in zip(samples, failures, strict=True) if failure is None]
        values = [self._values(scored, training) for scored in valid]
        if training:
            self._normalise(valid, values)
        finished = iter([self._finished(scored, rewards, training) for scored, rewards in zip(valid, values, strict=True)])
        return [next(finished) if failure is None else failure for failure in failures]

    def _values(self, scored: Scored, training: bool) -> dict[str, list[float]]:
        """Returns label → values for one sample's late terms (`RewardTerm.is_late`) without those whose gate is closed."""
        raw, rewards = scored.raw, {}
        for term in self.sums[scored.reward].late:
            if not is_open(term.options, raw):
                continue
            if term.label not in scored.values and term.label not in scored.sample.raw_rewards:
                if not training:  # in evaluation no term compares the samples of a prompt
                    continue
                raise WrongWorkflow(
                    f"reward {term.label!r} has options, which are applied when its batch is complete, but the workflow "
                    "gave a sample without its value; make samples with chat.sample(…) after self.judge(…), or set "
                    "Sample.raw_rewards to RewardResult.raw_rewards"
                )
            rewards[term.label] = scored.values.get(term.label) or [scored.sample.raw_rewards[term.label]]
        return rewards

    def _normalise(self, samples: Sequence[Scored], parts: Sequence[dict[str, list[float]]]) -> None:
        """Normalises the values of each term to mean 0 and standard deviation 1: over all values so far, or over the values
        of the same group."""
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
        sample, raw, reward_sum = scored.sample, scored.raw, self.sums[scored.reward]
        trajectory, parts = sample.trajectories[-1], {}
        for term in reward_sum.late:
            name = term.label
            term_values = values.get(name, [])
            if not term_values and not training and is_open(term.options, raw):
                continue  # a comparing term: evaluation does not compare samples, and 0 would be a verdict
            earned = [counted(term, x, batch=training) for x in term_values]
            parts[name] = math.fsum(earned)
            if name in scored.tokens and term_values:
                trajectory = trajectory.earning(scored.tokens[name], earned)
        reported = {name: raw[name] for name in parts if values.get(name) and name in reward_sum.recorded}
        gates = {f"gate/{t.label}": float(t.label in values) for t in reward_sum.late if t.options.gate_name is not None}
        return replace(
            plus(sample, added(parts, reported, self.cost)),
            trajectories=(*sample.trajectories[:-1], trajectory),
            metrics={**sample.metrics, **gates},
        )

    def metrics(self) -> dict[str, float]:
        """Returns the mean and maximum seconds of a sample's judgement since the last call, and the rewards' own metrics.
        Empty if no sample was judged and the rewards have no metrics."""
        (samples, total_s, longest_s), self._waits = self._waits, (0, 0.0, 0.0)
        times = {"time/judge_s": total_s / samples, "time/judge_max_s": longest_s} if samples else {}
        return times | {name: value for reward_sum in self.sums.values() for name, value in reward_sum.metrics().items()}

    def close(self) -> None:
        """Closes all judges."""
        for judge in {id(judge): judge for judge in (*self.judges, *self._gone)}.values():
            judge.close()
        if self.vote is not None:
            self.vote.close()

    def state_dict(self) -> dict[str, Any]:
        return {"spreads": {name: [s.count, s.mean, s.squares] for name, s in self.spreads.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the state. Must be called before the first batch."""
        self.spreads = {n: RunningSpread(int(c), float(mean), float(q)) for n, (c, mean, q) in state["spreads"].items()}


def _failure(scored: Scored) -> DataFailure | None:
    rewards = {name: [value] for name, value in scored.sample.raw_rewards.items()} | scored.values
    for name, values in rewards.items():
        if not values:
            return DataFailure("no_steps", f"reward {name!r} scores steps and found none in the reply")
    non_finite = ((name, value) for name, values in rewards.items() for value in values if not abs(value) <= MOST)
    for name, value in non_finite:
        return DataFailure("reward_not_finite", f"reward {name!r} gave {value}")
    return None


def _scale(
    name: str,
    chosen: Sequence[int],
    samples: Sequence[Scored],
    parts: Sequence[dict[str, list[float]]],
    spread: RunningSpread,
) -> None:
    """Adds the values of the chosen samples that are in statistics to ``spread``, and scales the values of all chosen
    samples with it."""
    spread.add([x for i in chosen if samples[i].sample.in_statistics for x in parts[i][name]])
    for i in chosen:
        parts[i][name] = [spread.scale(x) for x in parts[i][name]]
