"""Builds rewards from their spelling: ``math``, ``math + 0.2*length(target_tokens=100)``, ``my_file.py:name``."""

import asyncio
import contextlib
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tandem.api.failures import RewardFailure
from tandem.api.samples import Sample
from tandem.api.scoring import FrozenModel, Score
from tandem.api.services import Services, factory_of
from tandem.api.workflow import GroupReward, RewardFn, RewardResult, messages_for
from tandem.config.errors import ConfigError
from tandem.config.services import SERVICES, service_of
from tandem.config.terms import Term, read_terms
from tandem.rewards.function import AsyncReward, OwnReward, WorkerReward
from tandem.rewards.outcome import is_async
from tandem.rewards.pool import WorkerPool
from tandem.rewards.written import Written


class SumReward(RewardFn):
    """The weighted sum of several rewards; each is a named part. Accuracy and answer are the first one's that knows.

    ``together``: the terms that judge the samples of a prompt together.
    """

    def __init__(
        self, terms: list[tuple[str, float, RewardFn]], together: list[tuple[str, float, GroupReward]] | None = None
    ):
        self.terms, self.together = terms, together or []
        self.reads_messages = any(reward.reads_messages for _, _, reward in terms)

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
        """Asks all terms at once; fails if one of them fails."""
        given = {
            "prompt": prompt,
            "completion": completion,
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "row": row,
        }
        calls = [reward(**given, **messages_for(reward, messages)) for _, _, reward in self.terms]
        results = await asyncio.gather(*calls)
        values = [weight * result.value for (_, weight, _), result in zip(self.terms, results, strict=True)]
        rewards = {name: value for (name, _, _), value in zip(self.terms, values, strict=True)}
        known = [result.accuracy for result in results if result.accuracy is not None]
        looking = next((result for result in results if result.extracted is not None), RewardResult(0.0))
        written = {name: texts for result in results for name, texts in result.written.items()}
        accuracy = known[0] if known else None
        return RewardResult(sum(values), rewards, accuracy, looking.answer, looking.extracted, written)

    async def compare(self, samples: Sequence[Sample], row: Mapping[str, Any]) -> list[dict[str, float]]:
        """The parts of each sample's reward that come from terms which judge a group; empty without such terms."""
        results = await asyncio.gather(*(reward.compare(samples, row) for _, _, reward in self.together))
        parts: list[dict[str, float]] = [{} for _ in samples]
        for (name, weight, _), values in zip(self.together, results, strict=True):
            for part, value in zip(parts, _numbers(name, values, len(samples)), strict=True):
                part[name] = weight * value
        return parts

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Asks each term that can tell whether the row has what it needs."""
        for _, _, reward in self.terms:
            check = getattr(reward, "check_row", None)
            if check is not None:
                check(row)

    def metrics(self) -> dict[str, float]:
        """What the terms count."""
        return {name: value for _, _, reward in self.terms for name, value in reward.metrics().items()}

    def close(self) -> None:
        """Closes all of them, also if one of them fails to."""
        with contextlib.ExitStack() as stack:
            for _, _, reward in (*self.terms, *self.together):
                stack.callback(reward.close)


def _numbers(name: str, values: Any, count: int) -> list[float]:
    """The rewards of a group as plain numbers.

    Raises:
        RewardFailure: they are something else, or not as many as samples.
    """
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise RewardFailure("reward_wrong_type", f"{name} must give a list of numbers: {error}") from error
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise RewardFailure("reward_wrong_type", f"{name} must give each of {count} samples a finite number, got {numbers}")
    return numbers


DTYPES = ("auto", "bfloat16", "float32")


def build_reward(
    spec: str,
    *,
    timeout_s: float,
    workers: int | None = None,
    models_later: bool = False,
    services: Services | None = None,
    made: dict[str, RewardFn | GroupReward] | None = None,
) -> RewardFn:
    """The reward that a configuration names. ``workers``: most processes of one that runs in workers; None: `most_workers`.
    ``models_later``: the terms that need a model are left out here, for `build_scores` gives them. ``services``: what
    a class of the user's may ask for by argument name, besides ``timeout_s``. ``made``: terms that are there, by their
    spelling; the others are added to it.

    Raises:
        ConfigError: no such name (tells the nearest), file, function or knob, or a spec that cannot be read; or a term needs
            a model, and nobody scores with it later.
    """
    services, made = services or Services({"sandbox": "auto"}), {} if made is None else made
    terms = read_terms(spec)
    model = next((term for term in terms if needs_model(term)), None)
    if model is not None and not models_later:
        raise ConfigError(
            f"reward {spec!r}: {model.short_name} needs a model, which only `tandem train` holds; leave it out"
        )
    cheap = [term for term in terms if not needs_model(term)]
    for term in cheap:
        if term.spelling not in made:
            made[term.spelling] = _judge(term, timeout_s, workers, services)
    judges = [(term.label, term.weight, made[term.spelling]) for term in cheap]
    alone = [(name, weight, reward) for name, weight, reward in judges if isinstance(reward, RewardFn)]
    together = [(name, weight, reward) for name, weight, reward in judges if isinstance(reward, GroupReward)]
    if len(terms) == len(alone) == 1 and alone[0][1] == 1.0:
        return alone[0][2]
    return SumReward(alone, together)


def refuse_only_groups(spec: str, reward: RewardFn) -> None:
    """Passes if a single sample can be judged, as evaluation does.

    Raises:
        ConfigError: all terms judge the samples of a prompt together.
    """
    if isinstance(reward, SumReward) and reward.together and not reward.terms:
        raise ConfigError(
            f"reward={spec} compares the samples of a prompt, and evaluation judges them one by one: add a term such as "
            "0*math, which counts for nothing in training, or leave evaluation out (evaluate.every_steps=null)"
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
                score = Written(score, str(term.knobs.get("model")))
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
    for name, value, allowed in (("head", model.head, ("lm", "scalar", "text")), ("dtype", model.dtype, (None, *DTYPES))):
        if value not in allowed:
            raise ConfigError(f"reward {term.name!r}: FrozenModel.{name} must be one of {allowed}, got {value!r}")
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
    return service.needs_model or bool(service.writes_without and service.writes_without not in term.knobs)


def needs_writer(term: Term) -> bool:
    """True if the model of a term writes its judgement, in the run."""
    return not term.is_file and bool(SERVICES["reward"][term.name.partition(":")[0]].writes_without) and needs_model(term)


def worker_counts(reward: RewardFn) -> set[int]:
    """The most worker processes of the reward, or of each term of the sum; empty if none runs in workers."""
    if isinstance(reward, SumReward):
        return {count for _, _, term in reward.terms for count in worker_counts(term)}
    pool = getattr(reward, "pool", None)
    return {pool.size} if isinstance(pool, WorkerPool) else set()


def _judge(term: Term, timeout_s: float, workers: int | None, services: Services) -> RewardFn | GroupReward:
    make, name, key = factory_of("reward", term.name, "reward"), term.short_name, f"reward={term.name}"
    if not term.is_file:
        parameters = inspect.signature(make).parameters
        for knob, value in term.knobs.items():
            counts = knob in parameters and parameters[knob].annotation in (int, int | None)
            if counts and isinstance(value, int) and value < 1:
                raise ConfigError(f"{key}: {knob} must be a whole number, at least 1, got {value}")
        knobs = ({"workers": workers} if "workers" in parameters else {}) | term.arguments
        return cast(RewardFn | GroupReward, services.make(key, make, knobs, {"timeout_s": timeout_s}))
    if inspect.isclass(make) and issubclass(make, RewardFn | GroupReward):
        make = services.make(key, make, term.arguments, {"timeout_s": timeout_s})
    if isinstance(make, GroupReward):
        if not inspect.iscoroutinefunction(make.compare):
            raise ConfigError(f"{key}: compare must be `async def compare(self, samples, row)`")
        return make
    if isinstance(make, RewardFn):
        return OwnReward(make, name, timeout_s=timeout_s)
    if not callable(make):
        raise ConfigError(f"{key} is a {type(make).__name__}; it must be a function, sync or async")
    if term.knobs:
        raise ConfigError(f"{key} is a function, and only a class takes knobs: leave {next(iter(term.knobs))} out")
    try:
        inspect.signature(make)
    except (TypeError, ValueError):
        raise ConfigError(f"{key} does not say which arguments it takes; wrap it in a function") from None
    if is_async(make):
        return AsyncReward(make, name, timeout_s=timeout_s)
    return WorkerReward(make, term.name, name=name, timeout_s=timeout_s, workers=workers)
