"""Data sets that are computed: one-digit addition, functions of one line, seeds,
pictures, sounds, and the families of reasoning-gym.

Training and test rows never overlap: a fixed rule says of every question which split it belongs to.
"""

import hashlib
import importlib.util
import itertools
import operator
import random
from collections.abc import Callable, Iterator
from typing import Any

from tandem.config.errors import ConfigError, nearest_names
from tandem.config.extras import install_extra
from tandem.data.published import MEDIA
from tandem.data.splits import check_split

PAIRS = [(x, y) for x in range(1, 10) for y in range(1, 10)]
HELD_OUT = [(x, y) for x, y in PAIRS if (x + 2 * y) % 5 == 0 and x % 5 != 0]
"""16 of the 81 pairs, spread over the table."""


def addition(split: str, *, size: int, seed: int) -> Iterator[dict[str, Any]]:
    """`train`: ``size`` questions drawn from 65 pairs; `test`: the other 16 pairs, each once, at most ``size``.

    Raises:
        ConfigError: another split.
    """
    check_split("addition", split)
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


FORMULAS: dict[str, tuple[str, Callable[[int, int], int | bool]]] = {
    "x plus {n}": ("x + {n}", operator.add),
    "x minus {n}": ("x - {n}", operator.sub),
    "{n} minus x": ("{n} - x", lambda x, n: n - x),
    "x times {n}": ("x * {n}", operator.mul),
    "the square of x, plus {n}": ("x * x + {n}", lambda x, n: x * x + n),
    "the remainder of x divided by {n}": ("x % {n}", operator.mod),
    "x divided by {n} and rounded down": ("x // {n}", operator.floordiv),
    "the larger one of x and {n}": ("max(x, {n})", max),
    "the smaller one of x and {n}": ("min(x, {n})", min),
    "True if x is greater than {n}, and False if not": ("x > {n}", operator.gt),
}
"""The results of functions of one line: in words, in Python, and as a function of x and n."""

NUMBERS = range(2, 20)


def functions(split: str, *, size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Functions of one line to write, with the tests that the reward `code` needs. One in eight, by the hash of its text,
    belongs to `test`, which has each once; `train` draws ``size`` of the others.

    Raises:
        ConfigError: another split.
    """
    check_split("functions", split)
    tasks = [(words.format(n=n), python.format(n=n), rule, n) for words, (python, rule) in FORMULAS.items() for n in NUMBERS]
    chosen = [task for task in tasks if _held_out(task[0]) == (split == "test")]
    draw = random.Random(f"functions/{split}/{seed}")
    if split == "test":
        draw.shuffle(chosen)
    for words, python, rule, n in chosen[:size] if split == "test" else (draw.choice(chosen) for _ in range(size)):
        yield {
            "question": f"Write a Python function f(x) that returns {words}. Answer with the code alone.",
            "answer": f"```python\ndef f(x):\n    return {python}\n```",
            "program_tests": {"names": ["f"], "cases": [f"assert f({x}) == {rule(x, n)}" for x in (0, 5, -3, n, 4 * n + 1)]},
        }


def functions_shuffled(split: str, *, size: int, seed: int) -> Iterator[dict[str, Any]]:
    """The questions of `functions`, each with the tests of another: a control, whose reward says nothing about the question.

    Raises:
        ConfigError: another split.
    """
    rows = list(functions(split, size=size, seed=seed))
    tests = [row["program_tests"] for row in rows]
    random.Random(f"functions_shuffled/{seed}").shuffle(tests)
    for row, other in zip(rows, tests, strict=True):
        yield {"question": row["question"], "program_tests": other}


def seeds(split: str, *, size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Numbers, for environments that make their own questions: `train` and `test` have no number in common.

    Raises:
        ConfigError: another split.
    """
    check_split("seeds", split)
    first = 0 if split == "train" else 2**30
    for number in range(first, first + size):
        yield {"messages": [{"role": "user", "content": ""}], "seed": number}


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
    check_split(f"reasoning_gym:{name}", split)
    tried = 20 * size + 200
    source = create_dataset(name, size=tried, seed=seed)
    entries = (source[i] for i in range(tried))
    chosen = (dict(entry) for entry in entries if _held_out(entry["question"]) == (split == "test"))
    yield from itertools.islice(chosen, size)


def _held_out(question: str) -> bool:
    return hashlib.sha256(question.encode()).digest()[0] < 32


PROCEDURAL = {
    "addition": addition,
    "addition_pairs": addition_pairs,
    "functions": functions,
    "functions_shuffled": functions_shuffled,
    "seeds": seeds,
    **MEDIA,
}
"""By name."""
