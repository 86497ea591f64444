"""Mathematical equality by math-verify. It can run far past any deadline: imported in worker processes only."""

import logging

from latex2sympy2_extended import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from tandem.rewards.reading import read

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns each time that its time-outs are off


# units are told apart before: left to math-verify, 5m were 5
FORMS = (
    LatexExtractionConfig(normalization_config=NormalizationConfig(malformed_operators=True, nits=True)),
    ExprExtractionConfig(),
)


def verify_answer(gold: str, answer: str) -> float:
    """1 if the two expressions (LaTeX or plain) are mathematically equal, else 0.

    math-verify's own time-outs are off: they are signals, and would not stop a power tower anyway.
    """
    expected, given = (parse(f"${read(text).body}$", FORMS, parsing_timeout=None) for text in (gold, answer))
    return 1.0 if expected and given and verify(expected, given, timeout_seconds=None) else 0.0
