"""A tiny model that calls tools by chance, and the tools that it calls."""

import asyncio
import json
import random
import time
from contextlib import asynccontextmanager
from pathlib import Path

from tandem import Tool, Toolbox, tool_schema
from tests.tiny import VOCAB_SIZE, tiny_model_folder, tiny_tokenizer

CALLS = 40
"""Tokens of the vocabulary that are a whole call each."""


def calling_model_folder(tmp):
    """A tiny model whose last tokens are calls of `double` and `halve`, some of them with wrong arguments."""
    folder = tiny_model_folder(tmp, vocab_size=VOCAB_SIZE + CALLS, max_position_embeddings=2048)
    tokenizer = tiny_tokenizer()
    calls = [
        {"name": ("double", "halve")[i % 2], "arguments": {"number" if i % 8 else "nummer": i}}
        for i in range(VOCAB_SIZE + CALLS - len(tokenizer))
    ]
    tokenizer.add_tokens([f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls])
    tokenizer.save_pretrained(folder)
    return folder


def double(number: int) -> int:
    """Doubles a number.

    Args:
        number: any
    """
    time.sleep(random.SystemRandom().uniform(0.0, 0.02))  # a thread of its own
    return 2 * number


async def halve(number: int) -> float:
    """Halves a number, now and then slowly.

    Args:
        number: any
    """
    await asyncio.sleep(random.SystemRandom().choice([0.0, 0.0, 0.0, 0.02]))
    return number / 2


class Tarry(Toolbox):
    """`halve`, but one call at a time waits for the end of the run's next step: its chat goes on under other weights."""

    waits = False

    def __init__(self, *, root: str):
        self.root = Path(root)

    def steps(self):
        """Steps that have ended, of all runs below the folder."""
        return sum(path.read_text().count("\n") for path in self.root.glob("**/metrics.jsonl"))

    @asynccontextmanager
    async def open(self, data):
        async def run(arguments):
            if not Tarry.waits:
                Tarry.waits, before = True, self.steps()
                try:
                    while self.steps() == before:
                        await asyncio.sleep(0.01)
                finally:
                    Tarry.waits = False
            return str(await halve(**arguments))

        yield [Tool(tool_schema(halve), run)]
