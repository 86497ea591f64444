"""Two agents: a planner, which is trained, and a worker, another model that stays as it is (docs/recipes/two_models.md).

    python examples/planner.py planner_data     # makes train.jsonl and test.jsonl
    tandem train examples/planner.yaml

The planner reads a story of a journey and passes a country on. The worker sees this country and not the story, and says its
capital. The planner is rewarded if that is the capital of the country where the journey ended, and if it has not written
the capital itself.
"""

import argparse
import json
import random
from dataclasses import replace
from pathlib import Path

from tandem import ChatWorkflow

CAPITALS = {
    "France": "Paris", "Spain": "Madrid", "Germany": "Berlin", "Japan": "Tokyo", "China": "Beijing", "England": "London",
    "Norway": "Oslo", "Austria": "Vienna", "Poland": "Warsaw", "Sweden": "Stockholm", "Hungary": "Budapest",
    "Thailand": "Bangkok",
}  # fmt: skip
"""Those that SmolLM2-135M-Instruct, the worker, knows."""

PEOPLE = ("Ann", "Ben", "Eva", "Tom", "Mia", "Jan")
STORIES = (
    "{who} lives in {home} and flies to {goal}, with a stop in {stop}. Where is {who} at the end?",
    "{who}, who was born in {home}, left {stop} and moved to {goal}. Where does {who} live now?",
    "On the way from {home} to {goal} {who} wrote a letter in {stop}. Where did the journey end?",
    "{who} wanted to see {stop}, but took the train from {home} to {goal}. Where did {who} go?",
)
ASKED = "What is the capital of {}?"
SHOWN = (("Belgium", "Brussels"), ("Denmark", "Copenhagen"))
"""Read by the worker: how it is done."""

NAMED = (
    ("Kim packs in Greece, and then in Italy. Where does Kim pack first?", "Greece"),
    ("Of Peru and Chile, Kim likes Chile. What does Kim like?", "Chile"),
)
"""Read by the planner: a country is a whole answer. None of them is a journey: which country counts is left to learn."""


class Planner(ChatWorkflow):
    """One sample: the planner's turn, which is trained, and the worker's answer to it, which is not."""

    def __init__(self, partner, **rest):
        super().__init__(**rest)
        self.worker = partner

    async def arun_episode(self, engine, data):
        chat = self.start({**data, "messages": [*turns(NAMED), *data["messages"]]})
        await self.reply(engine, chat)
        plan = chat.completion.strip()
        said = await self.worker.reply(engine, seen_by_the_worker(plan))
        right = float(data["answer"] in said and data["answer"] not in plan)
        return chat.sample(right, accuracy=right, words={"worker": said})


class Control(Planner):
    """The same plans and worker, the rewards of a story dealt out anew among its plans: they say nothing of a plan."""

    async def finish_group(self, samples, data):
        rewards = random.Random(str(data)).sample([one.reward for one in samples], len(samples))
        return tuple(replace(one, reward=reward) for one, reward in zip(samples, rewards, strict=True))


def seen_by_the_worker(plan):
    """Two questions with their answers, which show how it is done, and the planner's."""
    shown = turns((ASKED.format(country), city) for country, city in SHOWN)
    return [*shown, {"role": "user", "content": ASKED.format(plan)}]


def turns(pairs):
    """Questions with their answers, as messages."""
    return [
        {"role": role, "content": text} for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def story(draw):
    """A journey through three countries, of which one counts."""
    home, stop, goal = draw.sample(sorted(CAPITALS), 3)
    told = draw.choice(STORIES).format(who=draw.choice(PEOPLE), home=home, stop=stop, goal=goal)
    return {"question": told, "answer": CAPITALS[goal]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder, draw = parser.parse_args().folder, random.Random(0)
    rows = list({row["question"]: row for row in (story(draw) for _ in range(600))}.values())
    test, train = rows[:96], rows[96:]
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", train), ("test", test)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
        print(f"{folder / name}.jsonl: {len(part)} rows")


if __name__ == "__main__":
    main()
