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

ASKED = (
    "What is {}?",
    "What is {} used for?",
    "Why would somebody buy {}?",
    "Describe {}.",
    "Where would you look for {}?",
)
THINGS = """
    anchor apron arrow axe backpack balloon banner barrel basket bed bell belt bench blanket boat book boot bottle bowl
    box bracelet bridge broom brush bucket button cabinet cage camera candle cannon canoe carpet cart chain chair
    chimney clock coat coin comb compass crown cup curtain cushion desk doll door dress drum fence flag flute fork
    fountain frame gate glove guitar hammer harp hat helmet hook jacket jar kettle key kite knife ladder lamp lantern
    lens lock map mask mattress mirror mug nail napkin necklace needle net notebook oar oven pan pen pencil piano pillow
    pipe plate plough pot purse quilt raft rake ring robe rocket rope ruler saddle sail scarf saw scale shelf shirt shoe
    shovel skirt sled soap sofa spade spoon stamp statue stool stove suitcase sweater sword table tent ticket towel
    tower toy train tray trumpet tunnel umbrella vase violin wagon wallet wheel whistle window
"""
TRAINING_THINGS = 110
PAIRS_OF_A_QUESTION, WRONG_LABELS, HELD_OUT = 3, 0.1, 64


def preferred(completion: str, thing: str) -> dict[str, float]:
    """The true preference: one whole sentence of 6 to 20 words that names the thing. No training reads it.

    `accuracy` shows the rate in the metrics, also where the reward has weight 0.
    """
    text = completion.strip()
    is_one_sentence = re.fullmatch(r"[^.!?\n]+[.!]", text) is not None
    fits = is_one_sentence and 6 <= len(text.split()) <= 20 and thing in text.lower()
    return {"preferred": float(fits), "accuracy": float(fits)}


def questions(things: Iterable[str], seed: int) -> list[dict[str, str]]:
    """Every question about every thing, shuffled."""
    named = {thing: f"{'an' if thing[0] in 'aou' else 'a'} {thing}" for thing in things}
    rows = [{"question": asked.format(named[thing]), "thing": thing} for thing, asked in product(named, ASKED)]
    random.Random(seed).shuffle(rows)
    return rows


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
        things = THINGS.split()
        write(options.folder / "train.jsonl", questions(things[:TRAINING_THINGS], seed=1))
        write(options.folder / "test.jsonl", questions(things[TRAINING_THINGS:], seed=2))
        return
    rows, samples = read(options.folder / "train.jsonl"), read(options.answers / "samples.jsonl")
    for name, wrong in (("pairs", WRONG_LABELS), ("shuffled", 0.5)):
        made = make_pairs(rows, samples, wrong)
        write(options.folder / name / "train.jsonl", made[:-HELD_OUT])
        write(options.folder / name / "test.jsonl", made[-HELD_OUT:])


if __name__ == "__main__":
    main()
