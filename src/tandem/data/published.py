"""Data sets with pictures and sounds: scenes that are computed, and rows about published pictures and recordings."""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from tandem.data.splits import check_split
from tandem.media.public import easy_vqa_folder, spoken_digit_files
from tandem.media.scenes import COLOURS, KINDS, MAX_THINGS, MIN_VISIBLE, SHAPES, draw_things, render, visible

Rows = Iterator[dict[str, Any]]
Generator = Callable[..., Rows]

YES_NO = ("yes", "no")
QUESTIONS = [pair for pair in itertools.product([None, *COLOURS], [None, *SHAPES]) if any(pair)]
"""A colour, a shape, or both: of these there may be none in a scene that is not empty."""


def clevr_count(split: str, *, size: int, seed: int) -> Rows:
    """``size`` scenes of one to five things, and a question about each: how many things of a colour, of a shape, or of
    both there are. The answers 0 to 4 are equally frequent behind every wording, so the question alone tells nothing of its
    answer. `train` and `test` are drawn apart.

    Raises:
        ConfigError: another split.
    """
    check_split("clevr_count", split)
    draw = random.Random(f"clevr_count/{split}/{seed}")
    for _ in range(size):
        wanted, (colour, shape) = draw.randint(0, 4), draw.choice(QUESTIONS)
        meant = [kind for kind in KINDS if colour in (None, kind[0]) and shape in (None, kind[1])]
        others = [kind for kind in KINDS if kind not in meant]
        while True:  # answer and wording stay while places are drawn, or hidden things would make small answers frequent
            more = draw.randint(0 if wanted else 1, MAX_THINGS - wanted)
            kinds = draw.choices(meant, k=wanted) + draw.choices(others, k=more)
            draw.shuffle(kinds)
            things = draw_things(draw, kinds)
            if len(things) == len(kinds) and visible(things) >= MIN_VISIBLE:
                break
        words = " ".join([*([colour] if colour else []), f"{shape or 'thing'}s"])
        text = f"How many {words} are there? Answer with just the number."
        content = [{"type": "image", "image": render(things)}, {"type": "text", "text": text}]
        yield {"messages": [{"role": "user", "content": content}], "answer": str(wanted)}


def easy_vqa(
    split: str, *, size: int, seed: int, wanted: Callable[[str], bool] = lambda answer: True, even: bool = False
) -> Rows:
    """At most ``size`` questions of easy-VQA about pictures of one shape, drawn from its split; those whose answer is
    ``wanted``. ``even``: every wording has each of its answers equally often.

    Raises:
        ConfigError: another split, or the package cannot be fetched.
    """
    check_split("easy_vqa", split)
    folder = easy_vqa_folder() / split
    questions = json.loads((folder / "questions.json").read_text(encoding="utf-8"))
    questions = [question for question in questions if wanted(question[1])]
    if even:
        questions = _evened(questions)
    random.Random(f"easy_vqa/{split}/{seed}").shuffle(questions)
    for text, answer, number in questions[:size]:
        image = (folder / "images" / f"{number}.png").read_bytes()
        yield _row([("image", image)], f"{text} Answer with one word.", answer)


def easy_vqa_open(split: str, *, size: int, seed: int) -> Rows:
    """The questions of `easy_vqa` for a colour or a shape. Raises `ConfigError` as it does."""
    return easy_vqa(split, size=size, seed=seed, wanted=lambda answer: answer not in YES_NO)


def easy_vqa_yes_no(split: str, *, size: int, seed: int) -> Rows:
    """The questions of `easy_vqa` for yes or no, of every wording as many of either answer: in the data set "Is there a red
    shape?" is answered by no five times out of six, so that 84 % can be right without a look. Raises `ConfigError` as it
    does."""
    return easy_vqa(split, size=size, seed=seed, wanted=lambda answer: answer in YES_NO, even=True)


def _evened(questions: list[Any]) -> list[Any]:
    """Questions of each wording, as many of every answer that it has as of the rarest."""
    by_text: dict[str, dict[str, list[Any]]] = {}
    for question in questions:
        by_text.setdefault(question[0], {answer: [] for answer in YES_NO})[question[1]].append(question)
    return [one for answers in by_text.values() for pair in zip(*answers.values(), strict=False) for one in pair]


def spoken_digits(split: str, *, size: int, seed: int) -> Rows:
    """At most ``size`` recordings of one digit each, in an order by chance; see `spoken_digit_files` for the splits.

    Raises:
        ConfigError: another split, or the recordings are not there.
    """
    check_split("spoken_digits", split)
    files = spoken_digit_files(split)
    random.Random(f"spoken_digits/{split}/{seed}").shuffle(files)
    for file in files[:size]:
        yield _row([("audio", file.read_bytes())], "Which digit was said? Answer with just the number.", file.name[0])


def spoken_sums(split: str, *, size: int, seed: int) -> Rows:
    """``size`` times two recordings of one digit each, and the question for their sum. Raises `ConfigError` as
    `spoken_digits`."""
    check_split("spoken_sums", split)
    files = spoken_digit_files(split)
    draw = random.Random(f"spoken_sums/{split}/{seed}")
    for _ in range(size):
        pair = [draw.choice(files), draw.choice(files)]
        text = "What is the sum of the two digits? Answer with just the number."
        yield _row([("audio", file.read_bytes()) for file in pair], text, str(sum(int(file.name[0]) for file in pair)))


def shuffled(generator: Generator) -> Generator:
    """The rows of a generator, each with the pictures or sounds of another row: a control, with nothing to see."""

    def rows(split: str, *, size: int, seed: int) -> Rows:
        own = list(generator(split, size=size, seed=seed))
        contents = [row["messages"][0]["content"] for row in own]
        media = [content[:-1] for content in contents]
        random.Random(f"shuffled/{seed}").shuffle(media)
        for row, content, other in zip(own, contents, media, strict=True):
            yield {"messages": [{"role": "user", "content": [*other, content[-1]]}], "answer": row["answer"]}

    return rows


def _row(media: list[tuple[str, bytes]], text: str, answer: str) -> dict[str, Any]:
    content = [*({"type": kind, kind: data} for kind, data in media), {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": content}], "answer": answer}


_GENERATORS: dict[str, Generator] = {
    "clevr_count": clevr_count,
    "easy_vqa": easy_vqa,
    "easy_vqa_open": easy_vqa_open,
    "easy_vqa_yes_no": easy_vqa_yes_no,
    "spoken_digits": spoken_digits,
    "spoken_sums": spoken_sums,
}
MEDIA = {**_GENERATORS, **{f"{name}_shuffled": shuffled(generator) for name, generator in _GENERATORS.items()}}
"""By name; each also as ``…_shuffled``."""
