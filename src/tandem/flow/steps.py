"""The steps of a reply, and where they lie among the tokens of whoever wrote it."""

import bisect
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from tandem.api.failures import DataFailure
from tandem.api.samples import Trajectory


def step_spans(text: str, separator: str) -> list[tuple[int, int]]:
    """Where each step begins and ends, without the white space around it; one step where there is no separator."""
    spans, start = [], 0
    for piece in text.split(separator):
        step = piece.strip()
        if step:
            begin = start + piece.index(step)
            spans.append((begin, begin + len(step)))
        start += len(piece) + len(separator)
    return spans


def last_tokens(tokenizer: PreTrainedTokenizerBase, trajectory: Trajectory, reply: str, ends: Sequence[int]) -> list[int]:
    """For each place behind a character of ``reply`` the token of the trajectory that brought that character. The reply is
    the last run of tokens that the policy made.

    Raises:
        DataFailure: these tokens say something else.
    """
    made = (trajectory.versions >= 0).tolist()
    end = max((place + 1 for place, own in enumerate(made) if own), default=0)
    first = max((place + 1 for place, own in enumerate(made[:end]) if not own), default=0)
    ids = trajectory.input_ids[first:end].tolist()
    text = str(tokenizer.decode(ids, skip_special_tokens=True))
    begin = text.find(reply)
    if not ids or begin < 0:
        raise DataFailure("steps_not_placed", "the reply is not the text of the last tokens that the policy made")

    def written(count: int) -> int:
        """Characters of the text that stand once so many tokens are there; one that is cut in two does not."""
        said = str(tokenizer.decode(ids[:count], skip_special_tokens=True))
        whole = next((part for part in (said, said.rstrip("\ufffd")) if text.startswith(part)), None)
        if whole is not None:
            return len(whole)
        return next((place for place, (a, b) in enumerate(zip(said, text, strict=False)) if a != b), len(text))

    counts = [bisect.bisect_left(range(len(ids)), begin + end, key=written) for end in ends]
    return [first + max(count, 1) - 1 for count in counts]
