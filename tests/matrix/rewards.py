"""A reward of two parts, in which a random model has spread."""


def parts(completion_ids: tuple[int, ...]) -> dict[str, float]:
    even = sum(token % 2 == 0 for token in completion_ids) / max(1, len(completion_ids))
    low = sum(token < 100 for token in completion_ids) / max(1, len(completion_ids))
    return {"even": even, "low": low}
