"""Builds rewards from a configuration string: ``math``, ``math + 0.2*length(target_tokens=100)``, ``my_file.py:name``."""

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from tandem.api.plugins import check_coroutine
from tandem.api.services import NOTHING, Services, arguments_of, factory_of
from tandem.api.workflow import GroupReward, RewardFn
from tandem.config.errors import ConfigError
from tandem.config.terms import Term, read_terms
from tandem.rewards.function import AsyncReward, FunctionReward, OwnGroupReward, OwnReward, WorkerPool, WorkerReward
from tandem.rewards.reward import Judge, RewardTerm, Sum, needs_model, read_sum
from tandem.rewards.signatures import adapted, is_async, origin_of

log = logging.getLogger(__name__)


def build_reward(spec: str, *, timeout_s: float, workers: int | None = None, services: Services | None = None) -> RewardFn:
    """Builds the configured reward for single samples. ``workers``: maximum number of processes of a reward that runs in
    workers; None: `most_workers`. ``services``: objects that a user's class gets if it names them as arguments.

    Raises:
        ConfigError: unknown name (suggests the nearest), file, function or knob; a malformed ``spec``; or a term that needs
            a model or a batch.
    """
    model = next((term for term in read_terms(spec) if needs_model(term)), None)
    if model is not None:
        raise ConfigError(
            f"reward {spec!r}: {model.short_name} needs a model, which `tandem train` and `tandem eval` load; leave it out"
        )
    total = build_sum(spec, read_sum(spec), timeout_s=timeout_s, workers=workers, services=services)
    return total.alone or total


def build_sum(
    spec: str,
    terms: Sequence[RewardTerm],
    *,
    timeout_s: float,
    workers: int | None = None,
    batch: bool = False,
    services: Services | None = None,
    made: dict[str, Judge] | None = None,
    cost: str | None = None,
    awaited: Mapping[str, RewardFn] = NOTHING,
) -> Sum:
    """Builds the sum of ``terms`` with the judges of single samples and of complete groups. ``made``: existing judges by the
    spelling of their terms; new judges are added to it. ``awaited``: rewards of models that are computed within the episode,
    by the labels of their terms. The other arguments: see `build_reward` and `Sum`.

    Raises:
        ConfigError: see `build_reward`.
    """
    late = next((term for term in terms if term.options.normalise), None)
    if late is not None and not batch:
        raise ConfigError(
            f"reward {spec!r}: normalise={late.options.normalise} of {late.label} needs the batches of `tandem train`; "
            "leave it out"
        )
    services, made = services or Services({"sandbox": "auto"}), {} if made is None else made
    judges: dict[str, Judge] = {}
    for term in terms:
        if term.score is None:
            spelling = term.term.spelling
            if spelling not in made:
                made[spelling] = build_judge(term.term, timeout_s, workers, services)
            judges[term.label] = made[spelling]
    judges |= {term.label: awaited[term.label] for term in terms if term.label in awaited}
    return Sum(terms, judges, batch=batch, cost=cost)


def worker_counts(judges: Sequence[Judge]) -> set[int]:
    """Returns the maximum numbers of worker processes of the judges that run in workers."""
    pools = (getattr(judge, "pool", None) for judge in judges)
    return {pool.size for pool in pools if isinstance(pool, WorkerPool)}


def asked_columns(judges: Sequence[Judge]) -> set[str]:
    """Returns the column names that users' functions take as arguments; ``row`` stands for all columns."""
    signatures = [judge.arguments for judge in judges if isinstance(judge, FunctionReward)]
    return {name for signature in signatures for name in signature.names} | {
        "row" for signature in signatures if signature.rest
    }


def build_judge(term: Term, timeout_s: float, workers: int | None, services: Services) -> Judge:
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
    if inspect.isclass(make):
        if not issubclass(make, RewardFn | GroupReward):
            name = make.__name__
            raise ConfigError(f"{key}: class {name} is not derived from tandem.RewardFn; write class {name}(RewardFn)")
        make = services.make(key, make, term.arguments, {"timeout_s": timeout_s})
    if isinstance(make, GroupReward):
        check_coroutine(key, make.compare, "compare(self, samples, row)", (), {})
        return OwnGroupReward(make, term.name, timeout_s=timeout_s)
    if isinstance(make, RewardFn):
        arguments = dict.fromkeys(("prompt", "completion", "prompt_ids", "completion_ids", "row"))
        form = "__call__(self, *, prompt, completion, prompt_ids, completion_ids, row)"
        check_coroutine(key, make.__call__, form, **arguments, **({"messages": ()} if make.reads_messages else {}))
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
        raise ConfigError(f"{key} has no signature that Python can read; wrap it in a function") from None
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
    """Returns the term, without the knob ``name`` if its reward takes no such argument. In that case the knob only sets the
    term's name in metrics."""
    takes_knobs = inspect.isclass(make) or not term.is_file
    if "name" not in term.knobs or (takes_knobs and "name" in arguments_of(make, term.name).names):
        return term
    return replace(term, knobs={knob: value for knob, value in term.knobs.items() if knob != "name"})
