"""Mathematical equality by math-verify. It can run far past any deadline: imported in worker processes only."""

import logging

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns each time that its time-outs are off


def verify_answer(gold: str, answer: str) -> float:
    """1 if the two expressions (LaTeX or plain) are mathematically equal, else 0.

    math-verify's own time-outs are off: they are signals, and would not stop a power tower anyway.
    """
    expected, given = (parse(f"${text.strip().strip('$')}$", parsing_timeout=None) for text in (gold, answer))
    return 1.0 if expected and given and verify(expected, given, timeout_seconds=None) else 0.0
