"""A simulated user: a frozen model plays the customer of a shop, and the clerk is trained (docs/recipes/two_models.md).

    python examples/simulated_user.py user_data     # makes train.jsonl and test.jsonl
    tandem train examples/simulated_user.yaml

The customer names a thing and keeps its colour to himself until he is asked something. The clerk, who has two turns, is
rewarded for a question, and for an order that has the thing and the colour that was wished for.
"""

import argparse
import json
import random
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

from tandem import ChatWorkflow

COLOURS = ("red", "blue", "green", "white", "black", "yellow", "brown", "pink")
THINGS = ("cup", "hat", "bag", "scarf", "coat", "lamp", "chair", "plate", "vase", "kite", "towel", "umbrella")
SHOWN_TO_THE_CLERK = (
    ("user", "I would like a table, please."),
    ("assistant", "What size should the table be?"),
    ("user", "large"),
    ("assistant", "A large table, thank you."),
    ("user", "I would like a door, please."),
    ("assistant", "Which wood should the door be made of?"),
    ("user", "oak"),
    ("assistant", "An oak door, thank you."),
)
SHOWN_TO_THE_CUSTOMER = (
    ("user", "You want a purple book. What colour would you like?"),
    ("assistant", "purple"),
    ("user", "You want a small book. How large should it be?"),
    ("assistant", "small"),
)
"""Without these a model of 135M parameters answers that it is not sure."""
NOT_ASKED = "Yes, please."


class Clerk(ChatWorkflow):
    """One sample: question and order are the policy's, which is trained; what the customer says is not trained."""

    def __init__(self, partner, **rest):
        super().__init__(**rest)
        self.customer = partner

    async def arun_episode(self, engine, data):
        chat = self.start(data)
        await self.reply(engine, chat)
        asked = "?" in chat.completion
        seen = seen_by_the_customer(chat.completion.strip(), data)
        answer = await self.customer.reply(engine, seen) if asked else NOT_ASKED
        chat.say(answer)
        await self.reply(engine, chat)
        told = data["answer"] in answer.lower()
        words = re.findall(r"[a-z]+", chat.completion.lower())
        thing = data["thing"] in words
        right = thing and {word for word in words if word in COLOURS} == {data["answer"]}
        reward = 0.25 * told + 0.25 * thing + 0.5 * right
        return chat.sample(reward, accuracy=float(right), words={"customer": answer}, metrics={"told": float(told)})


class Control(Clerk):
    """The same conversations, the rewards of an order dealt out anew among them: they say nothing of a conversation."""

    async def finish_group(self, samples, data):
        rewards = random.Random(str(data)).sample([one.reward for one in samples], len(samples))
        return tuple(replace(one, reward=reward) for one, reward in zip(samples, rewards, strict=True))


def chat_of(*turns):
    """Messages from pairs of role and text."""
    return [{"role": role, "content": text} for role, text in turns]


def seen_by_the_customer(question, data):
    """Two questions with their answers, which show how it is done, and the clerk's, after the customer's wish."""
    return chat_of(*SHOWN_TO_THE_CUSTOMER, ("user", f"You want a {data['answer']} {data['thing']}. {question}"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder, draw = parser.parse_args().folder, random.Random(0)
    wishes = list(product(COLOURS, THINGS))
    draw.shuffle(wishes)
    rows = [
        {
            "messages": chat_of(*SHOWN_TO_THE_CLERK, ("user", f"I would like a {thing}, please.")),
            "thing": thing,
            "answer": colour,
        }
        for colour, thing in wishes
    ]
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("test", rows[:24]), ("train", rows[24:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
        print(f"{folder / name}.jsonl: {len(part)} rows")


if __name__ == "__main__":
    main()
