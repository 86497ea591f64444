"""From a name in a configuration to a reward: ``math``, ``math + 0.2*length(target_tokens=100)``, ``my_file.py:name``."""

import ast
import asyncio
import inspect
import math
from collections.abc import Mapping
from typing import Any

from tandem.api.plugins import in_user_code, load_object
from tandem.api.workflow import RewardFn, RewardResult
from tandem.config.errors import ConfigError
from tandem.rewards import reasoning_gym, verifiable
from tandem.rewards.function import AsyncReward, OwnReward, WorkerReward
from tandem.rewards.outcome import is_async
from tandem.rewards.pool import WorkerPool
from tandem.rewards.registry import REWARDS, make

__all__ = ["REWARDS", "SumReward", "build_reward", "reasoning_gym", "verifiable"]

GRAMMAR = "a name, name(knob=value), a sum such as math + 0.2*format, or my_file.py:function"


class SumReward(RewardFn):
    """The weighted sum of several rewards; each is a named part. Accuracy and answer are the first one's that knows."""

    def __init__(self, terms: list[tuple[str, float, RewardFn]]):
        self.terms = terms

    async def __call__(
        self,
        *,
        prompt: str,
        completion: str,
        prompt_ids: tuple[int, ...],
        completion_ids: tuple[int, ...],
        row: Mapping[str, Any],
    ) -> RewardResult:
        """See `RewardFn`; fails if one of the rewards fails."""
        given = {
            "prompt": prompt,
            "completion": completion,
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "row": row,
        }
        results = await asyncio.gather(*(reward(**given) for _, _, reward in self.terms))
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

    def close(self) -> None:
        """Closes all of them."""
        for _, _, reward in self.terms:
            reward.close()


def build_reward(spec: str, *, timeout_s: float, workers: int | None = None) -> RewardFn:
    """The reward that a configuration names. ``workers``: most processes of one that runs in workers; None: `most_workers`.

    Raises:
        ConfigError: no such name (tells the nearest), file, function or knob, or a spec that cannot be read.
    """
    source, _, name = spec.rpartition(":")
    if source.endswith(".py"):
        return _from_file(spec, name, timeout_s, workers)
    try:
        expression = ast.parse(spec.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"reward {spec!r} cannot be read; it is {GRAMMAR}") from error
    terms = [(name, weight, make(name, timeout_s, knobs, workers)) for name, weight, knobs in _terms(expression, spec)]
    if len(terms) == 1 and terms[0][1] == 1.0:
        return terms[0][2]
    names = [name for name, _, _ in terms]
    if len(set(names)) < len(names):
        raise ConfigError(f"reward {spec!r} names a reward twice; add their weights up")
    return SumReward(terms)


def worker_counts(reward: RewardFn) -> set[int]:
    """The most worker processes of the reward, or of each term of the sum; empty if none runs in workers."""
    if isinstance(reward, SumReward):
        return {count for _, _, term in reward.terms for count in worker_counts(term)}
    pool = getattr(reward, "pool", None)
    return {pool.size} if isinstance(pool, WorkerPool) else set()


def _from_file(spec: str, name: str, timeout_s: float, workers: int | None) -> RewardFn:
    found = load_object(spec)
    if inspect.isclass(found) and issubclass(found, RewardFn):
        found = in_user_code(spec, found)
    if isinstance(found, RewardFn):
        return OwnReward(found, name, timeout_s=timeout_s)
    if not callable(found):
        raise ConfigError(f"reward {spec!r} is a {type(found).__name__}; it must be a function, sync or async")
    try:
        inspect.signature(found)
    except (TypeError, ValueError):
        raise ConfigError(f"reward {spec!r} does not say which arguments it takes; wrap it in a function") from None
    if is_async(found):
        return AsyncReward(found, name, timeout_s=timeout_s)
    return WorkerReward(found, spec, name=name, timeout_s=timeout_s, workers=workers)


def _terms(node: ast.expr, spec: str) -> list[tuple[str, float, dict[str, Any]]]:
    """(name, weight, knobs) of each term of the sum."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _terms(node.left, spec) + _terms(node.right, spec)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        try:
            factor = float(ast.literal_eval(node.left))
            if not math.isfinite(factor):
                raise ValueError(factor)
        except (ValueError, TypeError, OverflowError):
            raise ConfigError(f"reward {spec!r}: a weight is a finite number before a name; it is {GRAMMAR}") from None
        return [(name, factor * weight, knobs) for name, weight, knobs in _terms(node.right, spec)]
    if isinstance(node, ast.Name):
        return [(node.id, 1.0, {})]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
        try:
            knobs = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
        except ValueError:
            raise ConfigError(f"reward {spec!r}: knobs of {node.func.id} must be plain values, as in name(knob=3)") from None
        return [(node.func.id, 1.0, knobs)]
    raise ConfigError(f"reward {spec!r} cannot be read; it is {GRAMMAR}")
