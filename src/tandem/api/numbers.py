"""Reads as a float all that is a number to a person. Imports neither torch nor numpy: a user's worker may do without."""

import math
from decimal import Decimal
from numbers import Real
from typing import Any


def as_float(value: Any) -> float | None:
    """The number as a float: a bool, int, float, Fraction or Decimal, or an array or tensor that holds a single one.

    None if it is no number: a text, None, several values, a complex number. A number that no float holds is infinite.
    """
    if math.prod(getattr(value, "shape", (0,))) == 1:
        value = value.item()
    if not isinstance(value, Real | Decimal):
        return None
    try:
        return float(value)
    except (OverflowError, ValueError):  # 10**400; a Decimal that signals NaN
        return math.inf
