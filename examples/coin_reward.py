"""A reward for controls: a coin decides it, whatever the answer.

Use it with `reward=examples/coin_reward.py:reward`. The accuracy is shown, and not learned from.
"""

import random
import re


def reward(completion: str, answer: str) -> dict[str, float]:
    """1 or 0, equally often; the accuracy is 1 if the completion ends with the answer."""
    right = re.search(rf"(?<!\w){re.escape(answer)}\W*$", completion) is not None
    return {"coin": float(random.random() < 0.5), "accuracy": float(right)}
