"""Builds rewards from their spelling: ``math``, ``math + 0.2*length(target_tokens=100)``, ``my_file.py:name``."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tandem.api.plugins import in_user_code, load_object
from tandem.api.sandbox import Sandbox
from tandem.api.scoring import FrozenModel, Score
from tandem.api.workflow import RewardFn, RewardResult, messages_for
from tandem.config.errors import ConfigError
from tandem.config.terms import Term, read_terms
from tandem.rewards import judge, model, reasoning_gym, remote, verifiable
from tandem.rewards.code import reward as code
from tandem.rewards.function import AsyncReward, OwnReward, WorkerReward
from tandem.rewards.outcome import is_async
from tandem.rewards.pool import WorkerPool
from tandem.rewards.registry import REWARDS, SCORES, make

__all__ = [
    "REWARDS",
    "SCORES",
    "SumReward",
    "build_reward",
    "build_scores",
    "code",
    "judge",
    "model",
    "reasoning_gym",
    "remote",
    "verifiable",
]


class SumReward(RewardFn):
    """The weighted sum of several rewards; each is a named part. Accuracy and answer are the first one's that knows."""

    def __init__(self, terms: list[tuple[str, float, RewardFn]]):
        self.terms = terms
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
        """See `RewardFn`; fails if one of the rewards fails."""
        given = {
            "prompt": prompt,
            "completion": completion,
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "row": row,
        }
        calls = [reward(**given, **messages_for(reward, messages)) for _, _, reward in self.terms]
        results = await asyncio.gather(*calls)
        rewards = {name: weight * result.value for (name, weight, _), result in zip(self.terms, results, strict=True)}
        known = [result.accuracy for result in results if result.accuracy is not None]
        looking = next((result for result in results if result.extracted is not None), RewardResult(0.0))
        return RewardResult(sum(rewards.values()), rewards, known[0] if known else None, looking.answer, looking.extracted)

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
        """Closes all of them."""
        for _, _, reward in self.terms:
            reward.close()


DTYPES = ("auto", "bfloat16", "float32")


def build_reward(
    spec: str,
    *,
    timeout_s: float,
    workers: int | None = None,
    models_later: bool = False,
    sandbox: Callable[[], Sandbox] | None = None,
) -> RewardFn:
    """The reward that a configuration names. ``workers``: most processes of one that runs in workers; None: `most_workers`.
    ``models_later``: the terms that need a model are left out here, for `build_scores` gives them. ``sandbox``: opens one,
    for rewards that run programs.

    Raises:
        ConfigError: no such name (tells the nearest), file, function or knob, or a spec that cannot be read; or a term needs
            a model, and nobody scores with it later.
    """
    terms = read_terms(spec)
    model = next((term for term in terms if needs_model(term)), None)
    if model is not None and not models_later:
        raise ConfigError(
            f"reward {spec!r}: {model.short_name} needs a model, which only `tandem train` holds; leave it out"
        )
    cheap = [term for term in terms if not needs_model(term)]
    made = [(term.short_name, term.weight, _judge(term, timeout_s, workers, sandbox)) for term in cheap]
    return made[0][2] if len(terms) == 1 and made and made[0][1] == 1.0 else SumReward(made)


def build_scores(spec: str) -> list[tuple[str, Term, Score]]:
    """The terms that need a model: name, the term as it is spelt, and what scores.

    Raises:
        ConfigError: as `build_reward`.
    """
    scores = []
    for term in read_terms(spec):
        if needs_model(term):
            score = _made(term)
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
    for name, value, allowed in (("head", model.head, ("lm", "scalar")), ("dtype", model.dtype, (None, *DTYPES))):
        if value not in allowed:
            raise ConfigError(f"reward {term.name!r}: FrozenModel.{name} must be one of {allowed}, got {value!r}")
    if not isinstance(model.backend, str | None):
        raise ConfigError(f"reward {term.name!r}: FrozenModel.backend must be a text such as fsdp:d1, got {model.backend!r}")
    if not isinstance(score.name, str):
        raise ConfigError(f"reward {term.name!r}: its attribute `name` must be a text, got {score.name!r}")


def needs_model(term: Term) -> bool:
    """True if a term is scored by a model that the run holds, and not inside its episode."""
    if term.is_file:
        found = load_object(term.name)
        return inspect.isclass(found) and issubclass(found, Score)
    return term.name in SCORES


def worker_counts(reward: RewardFn) -> set[int]:
    """The most worker processes of the reward, or of each term of the sum; empty if none runs in workers."""
    if isinstance(reward, SumReward):
        return {count for _, _, term in reward.terms for count in worker_counts(term)}
    pool = getattr(reward, "pool", None)
    return {pool.size} if isinstance(pool, WorkerPool) else set()


def _judge(term: Term, timeout_s: float, workers: int | None, sandbox: Callable[[], Sandbox] | None) -> RewardFn:
    if not term.is_file:
        return make(term.name, timeout_s, term.knobs, workers, sandbox)
    found, spec, name = load_object(term.name), term.name, term.short_name
    if inspect.isclass(found) and issubclass(found, RewardFn):
        found = _made(term)
    if isinstance(found, RewardFn):
        return OwnReward(found, name, timeout_s=timeout_s)
    if not callable(found):
        raise ConfigError(f"reward {spec!r} is a {type(found).__name__}; it must be a function, sync or async")
    if term.knobs:
        raise ConfigError(f"reward {spec!r} is a function, and only a class takes knobs: leave {next(iter(term.knobs))} out")
    try:
        inspect.signature(found)
    except (TypeError, ValueError):
        raise ConfigError(f"reward {spec!r} does not say which arguments it takes; wrap it in a function") from None
    if is_async(found):
        return AsyncReward(found, name, timeout_s=timeout_s)
    return WorkerReward(found, spec, name=name, timeout_s=timeout_s, workers=workers)


def _made(term: Term) -> Any:
    """The object of a class with knobs.

    Raises:
        ConfigError: it has no such knob, or lacks one; or its constructor raises.
    """
    make = load_object(term.name) if term.is_file else SCORES[term.name]
    knobs = inspect.signature(make)
    unknown = next((name for name in term.knobs if name not in knobs.parameters), None)
    try:
        knobs.bind(**term.knobs)
    except TypeError as error:
        wrong = f"has no knob {unknown!r}" if unknown else str(error)
        raise ConfigError(f"reward {term.name!r} {wrong}; it has: {', '.join(knobs.parameters) or 'none'}") from None
    return in_user_code(term.name, make, **term.knobs) if term.is_file else make(**term.knobs)
