"""A simulated user: a frozen model plays the customer of a shop, and the clerk is trained (docs/recipes/two_models.md).

    python examples/simulated_user.py user_data     # makes train.jsonl, test.jsonl and secret.jsonl, a control
    tandem train examples/simulated_user.yaml

The customer names a thing and keeps its colour to himself until the clerk asks. The clerk, who has two turns, is rewarded if
what he says last has the thing and the colour that was wished for.
"""

import argparse
import json
import random
from itertools import product
from pathlib import Path

from tandem import ChatWorkflow

COLOURS = ("red", "blue", "green", "white", "black", "yellow", "brown", "pink")
THINGS = ("cup", "hat", "bag", "scarf", "coat", "lamp", "chair", "plate", "vase", "kite", "towel", "umbrella")


class Clerk(ChatWorkflow):
    """One sample: question and order are the policy's, which is trained; what the customer says is not trained."""

    def __init__(self, partner, **rest):
        super().__init__(**rest)
        self.customer = partner

    async def arun_episode(self, engine, data):
        chat = self.start(data)
        await self.reply(engine, chat)
        answer = await self.customer.reply(engine, seen_by_the_customer(chat.completion.strip(), data))
        chat.say(answer)
        await self.reply(engine, chat)
        order = chat.completion.lower()
        right = float(data["thing"] in order and data["answer"] in order)
        told = float(data["answer"] in answer.lower())
        return chat.sample(right, accuracy=right, words={"customer": answer}, metrics={"told": told})


def seen_by_the_customer(question, data):
    """The conversation from the other side: the clerk's words are the user's of this chat."""
    return [
        {"role": "system", "content": f"You want a {data['known']} {data['thing']}. Answer the question in one word."},
        {"role": "user", "content": question},
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder, draw = parser.parse_args().folder, random.Random(0)
    pairs = list(product(COLOURS, THINGS))
    draw.shuffle(pairs)
    rows = [
        {"question": f"I would like a {thing}, please.", "thing": thing, "answer": wish, "known": wish}
        for wish, thing in pairs
    ]
    test, train = rows[:24], rows[24:]
    # the control: the customer knows another colour than the one that counts
    secret = [row | {"known": draw.choice([c for c in COLOURS if c != row["answer"]])} for row in train]
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", train), ("test", test), ("secret", secret)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
        print(f"{folder / name}.jsonl: {len(part)} rows")


if __name__ == "__main__":
    main()
