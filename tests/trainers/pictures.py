"""Rows with pictures, a reward that sees them, and a world that shows one, for runs of tests."""

import numpy as np
from PIL import Image


def picture(seed: int) -> Image.Image:
    size = (16, 20 + 4 * (seed % 3), 3)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))


def shown(*parts):
    texts = ({"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts)
    return [{"role": "user", "content": list(texts)}]


def rows(split: str = "train") -> list[dict]:
    """One picture, two, none, and the same one twice, all with the same words."""
    made = []
    for i in range(3):
        one, two = picture(i), picture(10 + i)
        chats = shown(one, "which?"), shown(one, "or", two, "which?"), shown("which?"), shown(two, two, "which?")
        made += [{"messages": chat, "answer": "a"} for chat in chats]
    return made


def chats(split: str = "train") -> list[dict]:
    """The same with replies, for SFT."""
    return [{"messages": [*row["messages"], {"role": "assistant", "content": f"it is {i}"}]} for i, row in enumerate(rows())]


def brightness(completion: str, media: list) -> float:
    """Depends on the reply and on what is shown."""
    return float(len(completion) % 3) + sum(np.asarray(one).mean() for one in media) / 256


class Gallery:
    """Shows another picture after each reply."""

    def reset(self, data, seed):
        return ["look", picture(seed % 5)]

    def step(self, action):
        return [picture(len(action) % 7), "and now?"], float(len(action) % 2), False
