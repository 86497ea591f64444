"""A tiny model that calls tools by chance, and the tools that it calls."""

import asyncio
import json
import random
import time

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


async def tarry(number: int) -> int:
    """Tells the number again after a while: longer than a step takes, so that updates come between two turns.

    Args:
        number: any
    """
    await asyncio.sleep(0.08 * (number % 44))
    return number
