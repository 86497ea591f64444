"""Posts to be summarised, and the true preference between summaries (docs/recipes/tldr_on_a_laptop.md).

    python examples/tldr_data.py tldr_laptop     # train.jsonl, test.jsonl (other things), sft.jsonl (to imitate)

The posts have the layout of trl-lib/tldr, which is made of OpenAI's TL;DR posts: SUBREDDIT, TITLE, POST, TL;DR.
They are put together from sentences, and one sentence holds the fact that a summary must keep.
"""

import argparse
import json
import random
import re
from itertools import product
from pathlib import Path

LAYOUT = "SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"
TITLES = ("I need some advice", "Not sure what to do now", "Has this happened to you?", "What would you do?")
DETAILS = (
    "I paid {price} dollars in the shop around the corner, and the man there was very friendly.",
    "My neighbour has the same one and says that he likes it.",
    "It was a present from my aunt, who lives far away.",
    "I had wanted one for years, and a friend told me which to take.",
)
ENDS = (
    "I called the shop, and nobody answered.",
    "My family says that I worry too much.",
    "What would you do in my place?",
    "I am tired and do not know whom to ask.",
)
FACTS = {
    "leak": ("Since yesterday the {thing} leaks.", "This morning I saw that the {thing} is leaking."),
    "smok": ("Since yesterday the {thing} smokes.", "This morning I saw that the {thing} is smoking."),
    "rust": ("After one week the {thing} began to rust.", "Now I see that the {thing} is all rusty."),
    "broke": ("Yesterday the {thing} broke.", "On the second day the {thing} was broken."),
    "stole": ("Last night somebody stole the {thing}.", "Then I found that the {thing} had been stolen."),
    "noise": ("Since yesterday the {thing} makes a loud noise.", "At night a strange noise comes from the {thing}."),
}
"""The beginning of the word that names what happened → sentences that say so."""
SUMMARIES = {
    "leak": "My {thing} leaks.",
    "smok": "My {thing} smokes.",
    "rust": "My {thing} is rusty.",
    "broke": "My {thing} broke.",
    "stole": "Somebody stole my {thing}.",
    "noise": "My {thing} makes a noise.",
}
"""The same → a summary that says so, to be imitated."""
THINGS = """
    bicycle boiler camera car chainsaw clock computer dishwasher drill dryer fan fountain freezer fridge furnace generator
    grill guitar heater kettle lamp mixer motorcycle mower oven piano printer pump radiator radio scooter shower sink stove
    telephone television toaster tractor trailer typewriter
"""
TRAINING_THINGS, MOST_WORDS, TEST_POSTS, SHOWN_POSTS = 30, 15, 96, 64


def kept(completion: str, thing: str, fact: str) -> dict[str, float]:
    """The true preference: one line of at most 15 words that says which thing it is and what happened. No training reads it.

    `accuracy` shows the rate in the metrics, also where the reward has weight 0.
    """
    text = completion.strip().lower()
    fits = "\n" not in text and len(text.split()) <= MOST_WORDS and re.search(rf"\b{thing}", text) and fact in text
    return {"kept": float(bool(fits)), "accuracy": float(bool(fits))}


def posts(things: list[str], seed: int) -> list[dict[str, str]]:
    """A post about everything that may have happened to each thing, in each way of saying so, shuffled."""
    draw, rows = random.Random(seed), []
    for thing, fact, way in product(things, FACTS, (0, 1)):
        sentences = (draw.choice(DETAILS), FACTS[fact][way], draw.choice(ENDS))
        bought = f"Some time ago I got a {thing}."
        told = [text.format(thing=thing, price=draw.randrange(40, 900)) for text in sentences]
        post = " ".join([bought, *told])
        question = LAYOUT.format(subreddit="advice", title=draw.choice(TITLES), post=post)
        rows.append({"question": question, "thing": thing, "fact": fact})
    draw.shuffle(rows)
    return rows


def shown(row: dict[str, str]) -> dict[str, list[dict[str, str]]]:
    """A post with a summary that is liked, as a chat."""
    summary = SUMMARIES[row["fact"]].format(thing=row["thing"])
    return {"messages": [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": summary}]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder, things = parser.parse_args().folder, THINGS.split()
    random.Random(0).shuffle(things)
    folder.mkdir(parents=True, exist_ok=True)
    train, test = posts(things[:TRAINING_THINGS], seed=1), posts(things[TRAINING_THINGS:], seed=2)[:TEST_POSTS]
    for name, rows in (("train", train), ("test", test), ("sft", [shown(row) for row in train[-SHOWN_POSTS:]])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{folder / name}.jsonl: {len(rows)} rows")


if __name__ == "__main__":
    main()
