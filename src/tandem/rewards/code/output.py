"""Comparing what a program printed with what it should print."""

import re

DECIMAL = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,3})?", re.ASCII)


def same_output(printed: str, expected: str, tolerance: float) -> bool:
    """True if the outputs have the same lines of the same words.

    Spaces between words, at the ends of lines, and empty lines at the end do not count. Two words are the same if their
    letters are; or if both are decimal numbers, at least one is written with a point or an exponent, and they differ by at
    most ``tolerance``, absolutely or relative to the expected one.
    """
    printed, expected = printed.rstrip(), expected.rstrip()
    if printed.count("\n") != expected.count("\n"):
        return False
    for line, wanted in zip(printed.split("\n"), expected.split("\n"), strict=True):
        others = wanted.split()
        words = line.split(None, len(others) + 1)  # a flood is not split to its end
        if len(words) != len(others) or not all(map(_same, words, others, [tolerance] * len(words))):
            return False
    return True


def _same(word: str, expected: str, tolerance: float) -> bool:
    if word == expected:
        return True
    numbers = DECIMAL.fullmatch(word), DECIMAL.fullmatch(expected)
    if None in numbers or not re.search("[.eE]", word + expected) or max(len(word), len(expected)) > 400:
        return False
    value, target = float(word), float(expected)
    return abs(value - target) <= tolerance * max(1.0, abs(target))
