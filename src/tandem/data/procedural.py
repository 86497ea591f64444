"""Data sets that are computed: one-digit addition, and the families of reasoning-gym.

Training and test rows never overlap: a fixed rule says of every question which split it belongs to.
"""

import hashlib
import importlib.util
import itertools
import random
from collections.abc import Iterator
from typing import Any

from tandem.config.errors import ConfigError
from tandem.config.extras import install_extra
from tandem.config.nearest import nearest_names

PAIRS = [(x, y) for x in range(1, 10) for y in range(1, 10)]
HELD_OUT = [(x, y) for x, y in PAIRS if (x + 2 * y) % 5 == 0 and x % 5 != 0]
"""16 of the 81 pairs, spread over the table."""


def addition(split: str, *, size: int, seed: int) -> Iterator[dict[str, Any]]:
    """`train`: ``size`` questions drawn from 65 pairs; `test`: the other 16 pairs, each once, at most ``size``.

    Raises:
        ConfigError: another split.
    """
    if split not in ("train", "test"):
        raise ConfigError(f"data set addition has the splits train and test, got {split!r}")
    pairs = [pair for pair in PAIRS if pair not in HELD_OUT]
    draw = random.Random(f"addition/{seed}")
    for x, y in HELD_OUT[:size] if split == "test" else (draw.choice(pairs) for _ in range(size)):
        yield {"question": f"What is {x} + {y}? Answer with just the number.", "answer": str(x + y)}


def addition_pairs(split: str, *, size: int, seed: int) -> Iterator[dict[str, Any]]:
    """The questions of `addition`, each with the right answer as ``chosen`` and a wrong one as ``rejected``.

    Raises:
        ConfigError: another split.
    """
    draw = random.Random(f"addition_pairs/{split}/{seed}")
    for row in addition(split, size=size, seed=seed):
        right = int(row["answer"])
        wrong = draw.choice([number for number in range(2, 19) if number != right])
        yield {"prompt": row["question"], "chosen": str(right), "rejected": str(wrong)}


def reasoning_gym(name: str, split: str, *, size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Rows of one family, with the ``metadata`` that its own scorer needs: use `reward=reasoning_gym`.

    One question in eight, by the hash of its text, belongs to `test`. At most ``size`` rows; a small family has fewer.

    Raises:
        ConfigError: the library is not installed, no such family (nearest name), another split.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError(f"data set reasoning_gym:{name} needs the library: {install_extra('data')}")
    from reasoning_gym.factory import DATASETS, create_dataset  # noqa: PLC0415 optional library, slow to import

    if name not in DATASETS:
        raise ConfigError(f"data set reasoning_gym:{name} is not known; {nearest_names(name, DATASETS)}")
    if split not in ("train", "test"):
        raise ConfigError(f"data set reasoning_gym:{name} has the splits train and test, got {split!r}")
    tried = 20 * size + 200
    source = create_dataset(name, size=tried, seed=seed)
    entries = (source[i] for i in range(tried))
    chosen = (dict(entry) for entry in entries if _held_out(entry["question"]) == (split == "test"))
    yield from itertools.islice(chosen, size)


def _held_out(question: str) -> bool:
    return hashlib.sha256(question.encode()).digest()[0] < 32
