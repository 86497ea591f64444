"""Generated data sets: one-digit addition, functions of one line, seeds, scenes, rows about published pictures and
recordings, and the families of reasoning-gym.

Training and test rows never overlap: a fixed rule assigns every question to a split.
"""

import hashlib
import importlib.util
import itertools
import json
import operator
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tandem.config.errors import ConfigError, install_extra, nearest_names
from tandem.media.public import easy_vqa_folder, spoken_digit_files
from tandem.media.scenes import COLOURS, KINDS, MAX_THINGS, MIN_VISIBLE, SHAPES, draw_things, render, visible


def check_split(name: str, split: str) -> None:
    """Checks that a split is `train` or `test`.

    Raises:
        ConfigError: it is another split.
    """
    if split not in ("train", "test"):
        raise ConfigError(f"data set {name} has the splits train and test, got {split!r}")


Rows = Iterator[dict[str, Any]]
Generator = Callable[..., Rows]

YES_NO = ("yes", "no")
QUESTIONS = [pair for pair in itertools.product([None, *COLOURS], [None, *SHAPES]) if any(pair)]
"""(colour, shape) of the things that a question counts. None stands for any colour or any shape; the pair of two None is
left out."""


def clevr_count(split: str, *, size: int, seed: int) -> Rows:
    """Yields ``size`` scenes of one to five things, each with a question: how many things have a colour, a shape, or both.
    Each answer from 0 to 4 is equally frequent for every wording, so the question alone says nothing about its answer.
    `train` and `test` use different random numbers.
    """
    draw = random.Random(f"clevr_count/{split}/{seed}")
    for _ in range(size):
        count, (colour, shape) = draw.randint(0, 4), draw.choice(QUESTIONS)
        counted = [kind for kind in KINDS if colour in (None, kind[0]) and shape in (None, kind[1])]
        others = [kind for kind in KINDS if kind not in counted]
        while True:  # redraws only the scene: with a new answer too, hidden things would make small answers frequent
            num_others = draw.randint(0 if count else 1, MAX_THINGS - count)
            kinds = draw.choices(counted, k=count) + draw.choices(others, k=num_others)
            draw.shuffle(kinds)
            things = draw_things(draw, kinds)
            if len(things) == len(kinds) and visible(things) >= MIN_VISIBLE:
                break
        words = " ".join([*([colour] if colour else []), f"{shape or 'thing'}s"])
        text = f"How many {words} are there? Answer with just the number."
        content = [{"type": "image", "image": render(things)}, {"type": "text", "text": text}]
        yield {"messages": [{"role": "user", "content": content}], "answer": str(count)}


def easy_vqa(
    split: str, *, size: int, seed: int, wanted: Callable[[str], bool] = lambda answer: True, even: bool = False
) -> Rows:
    """Yields at most ``size`` questions of easy-VQA about pictures of one shape, in random order, from its split.

    Args:
        split: `train` or `test`.
        size: maximum number of rows.
        seed: seed of the random order.
        wanted: selects questions by their answer.
        even: for every wording, keep equally many questions of each answer.

    Raises:
        ConfigError: the package cannot be fetched.
    """
    folder = easy_vqa_folder() / split
    questions = json.loads((folder / "questions.json").read_text(encoding="utf-8"))
    questions = [question for question in questions if wanted(question[1])]
    if even:
        questions = _evened(questions)
    random.Random(f"easy_vqa/{split}/{seed}").shuffle(questions)
    for text, answer, number in questions[:size]:
        image = (folder / "images" / f"{number}.png").read_bytes()
        yield _row([("image", image)], f"{text} Answer with one word.", answer)


def _evened(questions: list[Any]) -> list[Any]:
    """Selects, for each wording, equally many questions of each answer: as many as the rarer answer has."""
    by_text: dict[str, dict[str, list[Any]]] = {}
    for question in questions:
        by_text.setdefault(question[0], {answer: [] for answer in YES_NO})[question[1]].append(question)
    return [question for answers in by_text.values() for pair in zip(*answers.values(), strict=False) for question in pair]


def spoken_digits(split: str, *, size: int, seed: int) -> Rows:
    """Yields at most ``size`` recordings of one digit each, in random order. `spoken_digit_files` explains the splits.

    Raises:
        ConfigError: the recordings are missing.
    """
    files = spoken_digit_files(split)
    random.Random(f"spoken_digits/{split}/{seed}").shuffle(files)
    for file in files[:size]:
        yield _row([("audio", file.read_bytes())], "Which digit was said? Answer with just the number.", file.name[0])


def spoken_sums(split: str, *, size: int, seed: int) -> Rows:
    """Yields ``size`` rows with two recordings of one digit each, which ask for the sum. Raises `ConfigError` like
    `spoken_digits`."""
    files = spoken_digit_files(split)
    draw = random.Random(f"spoken_sums/{split}/{seed}")
    for _ in range(size):
        pair = [draw.choice(files), draw.choice(files)]
        text = "What is the sum of the two digits? Answer with just the number."
        yield _row([("audio", file.read_bytes()) for file in pair], text, str(sum(int(file.name[0]) for file in pair)))


def shuffled(generator: Generator) -> Generator:
    """Returns a generator whose rows have the pictures or sounds of other rows. It serves as a control: these media say
    nothing about the answer."""

    def rows(split: str, *, size: int, seed: int) -> Rows:
        originals = list(generator(split, size=size, seed=seed))
        contents = [row["messages"][0]["content"] for row in originals]
        media = [content[:-1] for content in contents]
        random.Random(f"shuffled/{seed}").shuffle(media)
        for row, content, other in zip(originals, contents, media, strict=True):
            yield {"messages": [{"role": "user", "content": [*other, content[-1]]}], "answer": row["answer"]}

    return rows


def _row(media: list[tuple[str, bytes]], text: str, answer: str) -> dict[str, Any]:
    content = [*({"type": kind, kind: data} for kind, data in media), {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": content}], "answer": answer}


_GENERATORS: dict[str, Generator] = {
    "clevr_count": clevr_count,
    "easy_vqa": easy_vqa,
    # the questions whose answer is a colour or a shape
    "easy_vqa_open": partial(easy_vqa, wanted=lambda answer: answer not in YES_NO),
    # for every wording equally many of both answers: in the original data set the answer to "Is there a red shape?" is no
    # five times out of six, so a model that ignores the picture gets 84 % right
    "easy_vqa_yes_no": partial(easy_vqa, wanted=lambda answer: answer in YES_NO, even=True),
    "spoken_digits": spoken_digits,
    "spoken_sums": spoken_sums,
}
MEDIA = {**_GENERATORS, **{f"{name}_shuffled": shuffled(generator) for name, generator in _GENERATORS.items()}}
"""Name → generator of rows with pictures or sounds; each has a control ``…_shuffled``."""


PAIRS = [(x, y) for x in range(1, 10) for y in range(1, 10)]
HELD_OUT = [(x, y) for x, y in PAIRS if (x + 2 * y) % 5 == 0 and x % 5 != 0]
"""The 16 of the 81 pairs that form the test split, spread over the addition table."""


def addition(split: str, *, size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yields questions for the sum of two digits. `train`: ``size`` questions drawn from 65 pairs. `test`: each of the other
    16 pairs once, at most ``size``.
    """
    pairs = [pair for pair in PAIRS if pair not in HELD_OUT]
    draw = random.Random(f"addition/{seed}")
    for x, y in HELD_OUT[:size] if split == "test" else (draw.choice(pairs) for _ in range(size)):
        yield {"question": f"What is {x} + {y}? Answer with just the number.", "answer": str(x + y)}


def addition_pairs(split: str, *, size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yields the questions of `addition`, each with the right answer as ``chosen`` and a wrong one as ``rejected``."""
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
"""Maps a function's result in words to the result as a Python expression, and to a function of x and n that computes the
result."""

NUMBERS = range(2, 20)


def functions(split: str, *, size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yields tasks to write a function of one line, with tests for the reward `code`. One task in eight, by the hash of its
    text, belongs to `test`, which has each task once (at most ``size``); `train` draws ``size`` of the others.
    """
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
    """Yields the questions of `functions`, each with the tests of another question. They serve as a control: their reward
    says nothing about the answer.
    """
    rows = list(functions(split, size=size, seed=seed))
    tests = [row["program_tests"] for row in rows]
    random.Random(f"functions_shuffled/{seed}").shuffle(tests)
    for row, other in zip(rows, tests, strict=True):
        yield {"question": row["question"], "program_tests": other}


def seeds(split: str, *, size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yields ``size`` rows with a number ``seed``, for environments that make their own questions. No number is in both
    `train` and `test`.
    """
    first = 0 if split == "train" else 2**30
    for number in range(first, first + size):
        yield {"messages": [{"role": "user", "content": ""}], "seed": number}


def reasoning_gym(name: str, split: str, *, size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yields rows of one family of reasoning-gym, with the ``metadata`` that its scorer needs: use `reward=reasoning_gym`.

    One question in eight, by the hash of its text, belongs to `test`. There are at most ``size`` rows; a small family has
    fewer.

    Raises:
        ConfigError: the library is not installed, the family does not exist (the message suggests the nearest name), or
            ``split`` is neither `train` nor `test`.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError(f"data set reasoning_gym:{name} needs the library: {install_extra('data')}")
    from reasoning_gym.factory import DATASETS, create_dataset  # noqa: PLC0415 optional library, slow to import

    if name not in DATASETS:
        raise ConfigError(f"data set reasoning_gym:{name} is not known; {nearest_names(name, DATASETS)}")
    check_split(f"reasoning_gym:{name}", split)
    num_candidates = 20 * size + 200
    source = create_dataset(name, size=num_candidates, seed=seed)
    entries = (source[i] for i in range(num_candidates))
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
"""Name → generator, for all generated data sets except those of reasoning-gym."""
