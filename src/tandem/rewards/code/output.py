"""Comparing what a program printed with what it should print."""

import re
from decimal import Context, Decimal

DECIMAL = re.compile(r"[-+]?(?=\.?\d)\d{0,400}((?:\.\d{0,400})?(?:[eE][-+]?\d{1,3})?)", re.ASCII)
"""A number and what is behind its whole part. Longer ones are texts, so that no program makes the comparison slow."""

EXACT = Context(prec=50)


def same_output(printed: str, expected: str, tolerance: float) -> bool:
    """True if the outputs have the same lines of the same words.

    Spaces between words, at the ends of lines, and empty lines at the end do not count. Two words are the same if their
    letters are; or if both are decimal numbers, at least one is written with a point or an exponent, and they differ by at
    most ``tolerance``, absolutely or relative to the expected one. Where one is written as a whole number, both must be
    nearest to the same whole number besides: 1e9 is not 1000000006.
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
    one, other = DECIMAL.fullmatch(word), DECIMAL.fullmatch(expected)
    if not (one and other and (one[1] or other[1])):
        return False
    value, target = Decimal(word), Decimal(expected)  # a float has 16 digits, and none above 1e308
    if not (one[1] and other[1]) and value.to_integral_value() != target.to_integral_value():
        return False
    difference = EXACT.abs(EXACT.subtract(value, target))
    return difference <= EXACT.multiply(Decimal(tolerance), max(Decimal(1), EXACT.abs(target)))
