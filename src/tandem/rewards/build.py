"""Builds rewards from their spelling: ``math``, ``math + 0.2*length(target_tokens=100)``, ``my_file.py:name``."""

import asyncio
import contextlib
import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from tandem.api.plugins import check_coroutine
from tandem.api.samples import Sample
from tandem.api.scoring import FrozenModel, Score
from tandem.api.services import NOTHING, Services, arguments_of, factory_of
from tandem.api.workflow import GroupReward, RewardFn, RewardResult, messages_for
from tandem.config.errors import ConfigError
from tandem.config.services import SERVICES, service_of
from tandem.config.terms import Options, Term, read_terms
from tandem.rewards.combination import alone, is_open, told_raw
from tandem.rewards.engine_judge import WritingReward
from tandem.rewards.function import AsyncReward, FunctionReward, OwnGroupReward, OwnReward, WorkerReward
from tandem.rewards.outcome import compared, is_async
from tandem.rewards.pool import WorkerPool
from tandem.rewards.signatures import adapted, origin_of

log = logging.getLogger(__name__)

Judge = RewardFn | GroupReward


class SumReward(RewardFn):
    """The weighted sum of several rewards; each is a named part. Accuracy and answer are the first one's that knows."""

    def __init__(
        self,
        terms: Sequence[tuple[Term, RewardFn]],
        together: Sequence[tuple[Term, GroupReward]] = (),
        *,
        options_later: bool = False,
        cost: str | None = None,
        later: Sequence[str] = (),
    ):
        """``together``: the terms that judge the samples of a prompt together. ``options_later``: what terms with options
        count is added when the batch is there (`tandem.rewards.combination`); here they only say what they found.
        ``cost``: the name of a term that is a part, but does not enter the sum. `told` may be given more names.
        ``later``: the names of all terms that are added when the episode has ended."""
        self.later = tuple(later)
        self.terms, self.together, self.options_later, self.cost = list(terms), list(together), options_later, cost
        self.reads_messages = any(reward.reads_messages for _, reward in terms)
        self.told = told_raw([[term for term, _ in (*self.terms, *self.together)]])
        names = {term.label for term, _ in self.terms}
        gates = {term.label: term.options.gate_name for term, _ in self.terms}
        self._waits = {name: gate for name, gate in gates.items() if gate in names or (gate and not options_later)}

    @property
    def judges(self) -> list[Judge]:
        """The rewards that judge, term by term."""
        return [*(judge for _, judge in self.terms), *(judge for _, judge in self.together)]

    async def __call__(
        self,
        *,
        prompt: str,
        completion: str,
        prompt_ids: tuple[int, ...],
        completion_ids: tuple[int, ...],
        row: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]] = (),
    ) -> RewardResult:
        """Asks all terms at once, those with a gate behind the term that opens it, and not if it stays closed. Fails if one
        of them fails."""
        given = {
            "prompt": prompt,
            "completion": completion,
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "row": row,
        }
        results: dict[str, RewardResult] = {}
        due = [(term, reward) for term, reward in self.terms if term.label not in self._waits]
        answered: set[str] = set()
        while due:
            raw = {name: result.value for name, result in results.items()}
            asked = [(t, reward) for t, reward in due if t.label not in self._waits or is_open(t.options, raw)]
            calls = [reward(**given, **messages_for(reward, messages)) for _, reward in asked]
            results |= {t.label: r for (t, _), r in zip(asked, await asyncio.gather(*calls), strict=True)}
            answered |= {term.label for term, _ in due}
            due = [(t, r) for t, r in self.terms if t.label not in answered and self._waits[t.label] in answered]
        judges = [results[t.label] for t, _ in self.terms if t.label in results and t.label != self.cost]
        known = [result.accuracy for result in judges if result.accuracy is not None]
        looking = next((result for result in judges if result.extracted is not None), RewardResult(0.0))
        words = {name: text for result in results.values() for name, text in result.words.items()}
        summed = self._summed([term for term, _ in self.terms], {name: result.value for name, result in results.items()})
        accuracy = known[0] if known else None
        return replace(summed, accuracy=accuracy, answer=looking.answer, extracted=looking.extracted, words=words)

    def _summed(self, terms: Sequence[Term], found: Mapping[str, float]) -> RewardResult:
        """The sum of these terms, of which some were perhaps not asked, in no order that would change its last bit."""
        now = [term for term in terms if not (self.options_later and term.options != Options())]
        parts = {term.label: alone(term, found[term.label]) if term.label in found else 0.0 for term in now}
        raw = {t.label: found[t.label] for t in terms if t.label in found and t.label in self.told}
        return RewardResult(math.fsum(x for name, x in parts.items() if name != self.cost), parts, raw_rewards=raw)

    async def compare(self, samples: Sequence[Sample], row: Mapping[str, Any]) -> list[RewardResult]:
        """Computes what the terms that judge a group add to each sample's reward; nothing without such terms."""
        results = await asyncio.gather(*(reward.compare(samples, row) for _, reward in self.together))
        found: list[dict[str, float]] = [{} for _ in samples]
        words: list[dict[str, str]] = [{} for _ in samples]
        for (term, _), given in zip(self.together, results, strict=True):
            for each, texts, judged in zip(found, words, compared(term.label, given, len(samples)), strict=True):
                each[term.label] = judged.value
                texts.update(judged.words)
        terms = [term for term, _ in self.together]
        return [replace(self._summed(terms, each), words=texts) for each, texts in zip(found, words, strict=True)]

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Asks each term that can tell whether the row has what it needs."""
        for _, reward in self.terms:
            check = getattr(reward, "check_row", None)
            if check is not None:
                check(row)

    def metrics(self) -> dict[str, float]:
        """Collects what the terms count."""
        return {name: value for _, reward in self.terms for name, value in reward.metrics().items()}

    def close(self) -> None:
        """Closes all of them, also if one of them fails to."""
        with contextlib.ExitStack() as stack:
            for judge in self.judges:
                stack.callback(judge.close)


DTYPES = ("auto", "bfloat16", "float32")


def build_reward(
    spec: str,
    *,
    timeout_s: float,
    workers: int | None = None,
    models_later: bool = False,
    services: Services | None = None,
    made: dict[str, Judge] | None = None,
    cost: str | None = None,
    awaited: Mapping[str, RewardFn] = NOTHING,
) -> RewardFn:
    """The reward that a configuration names. ``workers``: most processes of one that runs in workers; None: `most_workers`.
    ``models_later``: the terms that need a model are left out here, for `build_scores` gives them, and so is what terms with
    options count. ``services``: what a class of the user's may ask for by argument name, besides ``timeout_s``. ``made``:
    terms that are there, by their spelling; the others are added to it. ``cost``: the name of a term that is judged, but not
    rewarded. ``awaited``: the terms that need a model and judge in the episode, by the names of `build_scores`.

    Raises:
        ConfigError: no such name (tells the nearest), file, function or knob, or a spec that cannot be read; or a term needs
            a model or a batch, and nobody scores with it later.
    """
    services, made = services or Services({"sandbox": "auto"}), {} if made is None else made
    terms = read_terms(spec)
    model = next((term for term in terms if needs_model(term)), None)
    if model is not None and not models_later:
        raise ConfigError(
            f"reward {spec!r}: {model.short_name} needs a model, which `tandem train` and `tandem eval` hold; leave it out"
        )
    batch = next((term for term in terms if term.options.normalise), None)
    if batch is not None and not models_later:
        raise ConfigError(
            f"reward {spec!r}: normalise={batch.options.normalise} of {batch.label} needs the batches of `tandem train`; "
            "leave it out"
        )
    cheap = [term for term in terms if not needs_model(term)]
    for term in cheap:
        if term.spelling not in made:
            made[term.spelling] = _judge(term, timeout_s, workers, services)
    names = {term.spelling: name for name, term, _ in build_scores(spec)} if awaited else {}
    beside = [replace(t, knobs={**t.knobs, "name": names[t.spelling]}) for t in terms if names.get(t.spelling) in awaited]
    judges = [(term, made[term.spelling]) for term in cheap] + [(term, awaited[term.label]) for term in beside]
    one = [(term, judge) for term, judge in judges if isinstance(judge, RewardFn)]
    together = [(term, judge) for term, judge in judges if isinstance(judge, GroupReward)]
    plain = len(terms) == len(one) == len(cheap) == 1 and one[0][0].weight == 1.0 and one[0][0].options == Options()
    if plain and one[0][0].label != cost:
        return one[0][1]
    here = {term.spelling for term, _ in one} | {spelling for spelling, name in names.items() if name in awaited}
    later = [t.label for t in terms if t.spelling not in here or t.options != Options()]
    return SumReward(one, together, options_later=models_later, cost=cost, later=later if models_later else ())


def judges_of(spec: str, reward: RewardFn) -> dict[str, Judge]:
    """The terms of a reward that `build_reward` made of ``spec``, by their spelling."""
    if isinstance(reward, SumReward):
        terms = [*(term for term, _ in reward.terms), *(term for term, _ in reward.together)]
        return {term.spelling: judge for term, judge in zip(terms, reward.judges, strict=True)}
    return {read_terms(spec)[0].spelling: reward}


def refuse_only_groups(spec: str, reward: RewardFn) -> None:
    """Passes if a single sample can be judged, as evaluation does.

    Raises:
        ConfigError: all terms judge the samples of a prompt together.
    """
    scores = [score for _, _, score in build_scores(spec)]
    comparing = [score for score in scores if isinstance(score, WritingReward) and score.compares]
    together = isinstance(reward, SumReward) and not reward.terms and len(scores) == len(comparing)
    if together:
        raise ConfigError(
            f"reward={spec} compares the samples of a prompt, and evaluation judges them one by one: add a term such as "
            "0*math, which counts for nothing in training; a run may also leave evaluation out (evaluate.every_steps=null)"
        )


def build_scores(spec: str) -> list[tuple[str, Term, Score]]:
    """The terms that need a model: name, the term as it is spelt, and what scores.

    Raises:
        ConfigError: as `build_reward`.
    """
    scores = []
    for term in read_terms(spec):
        if needs_model(term):
            make, key = factory_of("reward", term.name, "reward"), f"reward={term.name}"
            score = Services().make(key, make, term.arguments, {"timeout_s": math.inf} if needs_writer(term) else {})
            if needs_writer(term):
                score = WritingReward(score, str(term.knobs.get("model")))
            assert isinstance(score, Score), "needs_model has seen to it"
            _check_score(term, score)
            scores.append((str(score.name) or term.short_name, term, score))
    return scores


def _check_score(term: Term, score: Score) -> None:
    model = getattr(score, "model", None)
    if not isinstance(model, FrozenModel):
        given = "is missing" if model is None else f"is a {type(model).__name__}"
        raise ConfigError(f"reward {term.name!r}: its attribute `model` {given}; set self.model = FrozenModel(path, head=…)")
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


def needs_model(term: Term) -> bool:
    """True if a term is scored by a model that the run holds, and not inside its episode."""
    if term.is_file:
        found = factory_of("reward", term.name)
        return inspect.isclass(found) and issubclass(found, Score)
    service = service_of("reward", term.name.partition(":")[0], "reward")
    return service.needs_model or bool(service.writes_without and term.knobs.get(service.writes_without) is None)


def compares_group(term: Term) -> bool:
    """True if a term judges the samples of a prompt together."""
    make = factory_of("reward", term.name, "reward")
    return isinstance(make, GroupReward) or (inspect.isclass(make) and issubclass(make, GroupReward))


def needs_writer(term: Term) -> bool:
    """True if the model of a term writes its judgement, in the run."""
    return not term.is_file and bool(SERVICES["reward"][term.name.partition(":")[0]].writes_without) and needs_model(term)


def worker_counts(reward: RewardFn) -> set[int]:
    """The most worker processes of the reward, or of each term of the sum; empty if none runs in workers."""
    if isinstance(reward, SumReward):
        return {count for _, term in reward.terms for count in worker_counts(term)}
    pool = getattr(reward, "pool", None)
    return {pool.size} if isinstance(pool, WorkerPool) else set()


def asked_columns(reward: RewardFn) -> set[str]:
    """The names that functions of the user's ask for in this reward, or in the terms of the sum; ``row`` is all of them."""
    if isinstance(reward, SumReward):
        return {name for _, term in reward.terms for name in asked_columns(term)}
    if not isinstance(reward, FunctionReward):
        return set()
    return reward.arguments.names | ({"row"} if reward.arguments.rest else set())


def _judge(term: Term, timeout_s: float, workers: int | None, services: Services) -> Judge:
    make, key = factory_of("reward", term.name, "reward"), f"reward={term.name}"
    term = _named(term, make)
    if not term.is_file:
        parameters = inspect.signature(make).parameters
        for knob, value in term.knobs.items():
            counts = knob in parameters and parameters[knob].annotation in (int, int | None)
            if counts and isinstance(value, int) and value < 1:
                raise ConfigError(f"{key}: {knob} must be a whole number, at least 1, got {value}")
        knobs = ({"workers": workers} if "workers" in parameters else {}) | term.arguments
        return cast(Judge, services.make(key, make, knobs, {"timeout_s": timeout_s}))
    if inspect.isclass(make) and issubclass(make, RewardFn | GroupReward):
        make = services.make(key, make, term.arguments, {"timeout_s": timeout_s})
    if isinstance(make, GroupReward):
        check_coroutine(key, make.compare, "compare(self, samples, row)", (), {})
        return OwnGroupReward(make, term.name, timeout_s=timeout_s)
    if isinstance(make, RewardFn):
        given = dict.fromkeys(("prompt", "completion", "prompt_ids", "completion_ids", "row"))
        form = "__call__(self, *, prompt, completion, prompt_ids, completion_ids, row)"
        check_coroutine(key, make.__call__, form, **given, **({"messages": ()} if make.reads_messages else {}))
        return OwnReward(make, term.name, timeout_s=timeout_s)
    if not callable(make):
        raise ConfigError(f"{key} is a {type(make).__name__}; it must be a function, sync or async")
    if term.knobs:
        raise ConfigError(f"{key} is a function, and only a class takes knobs: leave {next(iter(term.knobs))} out")
    if inspect.isgeneratorfunction(make) or inspect.isasyncgenfunction(make):
        raise ConfigError(f"{key} has a `yield`, so a call gives no reward but a generator; return the number")
    try:
        inspect.signature(make)
    except (TypeError, ValueError):
        raise ConfigError(f"{key} does not say which arguments it takes; wrap it in a function") from None
    if origin := origin_of(make):
        log.warning("%s has the signature of %s: it is called so, with one completion at a time", key, origin)
        make = adapted(make)
    reward: FunctionReward = (
        AsyncReward(make, term.name, timeout_s=timeout_s)
        if is_async(make)
        else WorkerReward(make, term.name, name=term.name, timeout_s=timeout_s, workers=workers)
    )
    reward.tokenizer = services.given("tokenizer")
    return reward


def _named(term: Term, make: Any) -> Term:
    """The term without the knob ``name`` where nobody takes it: it is its name in metrics all the same."""
    takes_knobs = inspect.isclass(make) or not term.is_file
    if "name" not in term.knobs or (takes_knobs and "name" in arguments_of(make, term.name).names):
        return term
    return replace(term, knobs={knob: value for knob, value in term.knobs.items() if knob != "name"})
