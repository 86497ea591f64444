"""Questions, the true preference, and labelled pairs for RLHF on a laptop (docs/recipes/rlhf_on_a_laptop.md).

    python examples/rlhf_data.py questions rlhf_laptop               # train.jsonl and test.jsonl: no thing is in both
    python examples/rlhf_data.py pairs rlhf_laptop evaluations/rlhf_answers    # pairs of the model's own answers

`pairs` makes two folders. In rlhf_laptop/pairs a judge chose between two answers by the true preference, and erred about one
pair in ten. In rlhf_laptop/shuffled he tossed a coin.
"""

import argparse
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

ASKED = {
    "What is {}?": "{} is {kind} that many people have.",
    "What is {} used for?": "People use {} to {use}.",
    "Why would somebody buy {}?": "Somebody would buy {} to {use}.",
    "Describe {}.": "{} is {kind}, and people use it to {use}.",
    "Where would you look for {}?": "You would look for {} {place}.",
}
"""Question → the sentence that answers it, for a demonstration."""
MORE = (
    "It is {kind}.",
    "People use it to {use}.",
    "You find it {place}.",
    "There are old ones and new ones, and they cost little.",
)
KINDS = {
    ("a piece of clothing", "keep warm and look good", "in a wardrobe"): """apron belt boot button coat crown dress glove
        hat helmet jacket mask robe scarf shirt shoe skirt sweater""",
    ("a part of a home", "make a room comfortable", "in a bedroom or a living room"): """bed bench blanket cabinet carpet
        chair chimney curtain cushion desk door lamp mattress mirror pillow quilt shelf sofa stool stove table towel
        window""",
    ("a thing to keep things in", "carry and store other things", "in a kitchen or a store room"): """backpack barrel
        basket bottle bowl box bucket cage cup jar kettle mug oven pan plate pot purse suitcase tray vase wallet""",
    ("a tool", "get some work done", "in a shed or a workshop"): """arrow axe broom brush cannon chain comb fork hammer hook
        key knife ladder lens lock nail needle net plough rake rope ruler saw scale shovel spade spoon sword""",
    ("a thing that makes a sound", "make music", "in a music shop"): """bell drum flute guitar harp piano pipe trumpet violin
        whistle""",
    ("a thing for travellers", "get from one place to another", "at a harbour or a station"): """anchor balloon boat bridge
        canoe cart compass gate lantern map oar raft rocket saddle sail sled tent ticket train tunnel umbrella wagon
        wheel""",
    ("a thing for the eye", "decorate a house or a garden", "in a park or a museum"): """banner bracelet candle clock coin
        fence flag fountain frame necklace ring statue tower""",
    ("a small thing of every day", "write, learn or play at home", "in a drawer or on a desk"): """book camera doll kite
        napkin notebook pen pencil soap stamp toy""",
}
"""Kind, use and place of a thing → the things that are answered about in this way."""
THINGS = sorted(" ".join(KINDS.values()).split())
TRAINING_THINGS, DEMONSTRATIONS = 110, 128
SAYING_IT, GOING_ON = 0.25, 0.4
PAIRS_OF_A_QUESTION, WRONG_LABELS, HELD_OUT = 3, 0.1, 64


def preferred(completion: str, thing: str) -> dict[str, float]:
    """The true preference: one whole sentence of 6 to 20 words that names the thing. No training reads it.

    `accuracy` shows the rate in the metrics, also where the reward has weight 0.
    """
    text = completion.strip()
    is_one_sentence = re.fullmatch(r"[^.!?\n]+[.!]", text) is not None
    fits = is_one_sentence and 6 <= len(text.split()) <= 20 and thing in text.lower()
    return {"preferred": float(fits), "accuracy": float(fits)}


def with_article(thing: str) -> str:
    return f"{'an' if thing[0] in 'aou' else 'a'} {thing}"


def questions(things: Iterable[str], seed: int) -> list[dict[str, str]]:
    """Every question about every thing, shuffled."""
    rows = [{"question": asked.format(with_article(thing)), "thing": thing} for thing, asked in product(things, ASKED)]
    random.Random(seed).shuffle(rows)
    return rows


def demonstrations(rows: list[dict[str, str]], seed: int) -> list[dict[str, list[dict[str, str]]]]:
    """Each question as a chat with an answer: some are one sentence, some go on, and some say "it", as people do."""
    draw, chats = random.Random(seed), []
    about = {
        thing: dict(zip(("kind", "use", "place"), said, strict=True))
        for said, some in KINDS.items()
        for thing in some.split()
    }
    for row in rows:
        thing, style = row["thing"], draw.random()
        (asked,) = [asked for asked in ASKED if asked.format(with_article(thing)) == row["question"]]
        named = "it" if style < SAYING_IT else with_article(thing)
        more = draw.sample(MORE, draw.choice((1, 2))) if style > 1 - GOING_ON else []
        told = [sentence.format(named, **about[thing]) for sentence in (ASKED[asked], *more)]
        answer = " ".join(sentence[0].upper() + sentence[1:] for sentence in told)
        chats.append({"messages": [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": answer}]})
    return chats


def make_pairs(rows: list[dict[str, str]], samples: list[dict[str, Any]], wrong: float) -> list[dict[str, str]]:
    """Up to three pairs a question of a preferred and another answer, a share of ``wrong`` with their sides exchanged."""
    draw = random.Random(0)
    answers: dict[int, dict[bool, list[str]]] = defaultdict(lambda: {True: [], False: []})
    for sample in samples:
        if sample["accuracy"] is not None and sample["text"].strip():
            answers[sample["row"]][sample["accuracy"] > 0].append(sample["text"])
    pairs = []
    for row, sides in sorted(answers.items()):
        both = list(product(sides[True], sides[False]))
        for better, worse in draw.sample(both, min(PAIRS_OF_A_QUESTION, len(both))):
            chosen, rejected = (worse, better) if draw.random() < wrong else (better, worse)
            pairs.append({"prompt": rows[row]["question"], "chosen": chosen, "rejected": rejected})
    return pairs


def write(file: Path, rows: list[dict[str, str]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{file}: {len(rows)} rows")


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("questions").add_argument("folder", type=Path)
    pairs = commands.add_parser("pairs")
    pairs.add_argument("folder", type=Path)
    pairs.add_argument("answers", type=Path, help="folder of the evaluation that asked the training questions")
    options = parser.parse_args()
    if options.command == "questions":
        train = questions(THINGS[:TRAINING_THINGS], seed=1)
        write(options.folder / "train.jsonl", train)
        write(options.folder / "test.jsonl", questions(THINGS[TRAINING_THINGS:], seed=2))
        write(options.folder / "sft.jsonl", demonstrations(train[-DEMONSTRATIONS:], seed=3))
        return
    rows, samples = read(options.folder / "train.jsonl"), read(options.answers / "samples.jsonl")
    for name, wrong in (("pairs", WRONG_LABELS), ("shuffled", 0.5)):
        made = make_pairs(rows, samples, wrong)
        write(options.folder / name / "train.jsonl", made[:-HELD_OUT])
        write(options.folder / name / "test.jsonl", made[-HELD_OUT:])


if __name__ == "__main__":
    main()
