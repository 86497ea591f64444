"""A reward of one's own: use it with `reward=examples/exact_match.py:reward`."""


def reward(completion: str, answer: str) -> float:
    """1 if the whole completion is the answer."""
    return 1.0 if completion.strip() == answer else 0.0
