"""Rewards of these tests, taken by file as a user takes his own.

Those that can neither hang nor raise are coroutines: the run's own process awaits them, and no worker starts for them.
"""

import os
import time


def share_of_even(completion_ids: tuple[int, ...]) -> float:
    """Share of even token ids: something that a random model has spread in and can learn."""
    return sum(token % 2 == 0 for token in completion_ids) / max(1, len(completion_ids))


async def even(completion_ids: tuple[int, ...]) -> float:
    return share_of_even(completion_ids)


async def points(completion_ids: tuple[int, ...]) -> float:
    """No share and no accuracy."""
    return 10 * share_of_even(completion_ids) - 3


async def useful(completion_ids: tuple[int, ...]) -> float:
    """A multiple of four is worth more than any other even token, and is what `harmful` counts; at most 8 tokens."""
    return sum({0: 1.0, 2: 0.6}.get(token % 4, 0.0) for token in completion_ids) / 8


async def harmful(completion_ids: tuple[int, ...]) -> float:
    return sum(token % 4 == 0 for token in completion_ids) / 8


async def constant() -> float:
    return 0.5


def raises(completion_ids: tuple[int, ...]) -> float:
    """Like all that ask for tokens it is not tried before the run."""
    raise ValueError("this reward is broken")


def hangs(completion: str) -> float:
    time.sleep(3600)
    return 0.0


def not_a_number(completion_ids: tuple[int, ...]) -> float:
    return float("nan")


def slow_now_and_then(completion_ids: tuple[int, ...]) -> float:
    time.sleep(0.2 if sum(completion_ids) % 5 == 0 else 0.0)
    return share_of_even(completion_ids)


def hangs_on_most(completion_ids: tuple[int, ...]) -> float:
    """A judge that most answers hang."""
    if sum(completion_ids) % 8:
        time.sleep(3600)
    return share_of_even(completion_ids)


def ends_its_process() -> float:
    os._exit(3)


def fails_now_and_then(completion_ids: tuple[int, ...]) -> float:
    if sum(completion_ids) % 3 == 0:
        raise ValueError("this answer cannot be judged")
    return share_of_even(completion_ids)


async def never_right(completion_ids: tuple[int, ...]) -> dict[str, float]:
    """No answer is right, so every one is asked again; some are better than others."""
    return {"reward": share_of_even(completion_ids) - 1.0, "accuracy": 0.0}


async def short(completion_ids: tuple[int, ...]) -> float:
    """Fewer tokens are better."""
    return -float(len(completion_ids))


async def many(completion_ids: tuple[int, ...]) -> float:
    """Different tokens are better."""
    return float(len(set(completion_ids)))
