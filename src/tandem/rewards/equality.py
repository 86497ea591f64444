"""Mathematical equality by math-verify. A comparison can run past any deadline, so only worker processes import this
module."""

import logging

from latex2sympy2_extended import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from tandem.rewards.reading import read

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at each call that its time-outs are off


# units are compared separately before: math-verify would read 5m as 5
FORMS = (
    LatexExtractionConfig(normalization_config=NormalizationConfig(malformed_operators=True, nits=True)),
    ExprExtractionConfig(),
)


def verify_answer(gold: str, answer: str) -> float:
    """Returns 1 if two expressions (LaTeX or plain) are mathematically equal, else 0.

    math-verify's own time-outs are off: they use signals, and would not stop a power tower anyway.
    """
    expected, actual = (parse(f"${read(text).body}$", FORMS, parsing_timeout=None) for text in (gold, answer))
    return 1.0 if expected and actual and verify(expected, actual, timeout_seconds=None) else 0.0
