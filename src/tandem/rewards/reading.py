r"""Reading an answer: its unit, its exact number, its text; and comparing two of them without algebra.

A unit is a measure (`UNITS`), a currency, a percent sign, degrees, or the base of a number (``52_8``). Where both answers
have one, it must be the same; where only one has, it does not count, so that ``5 cm`` is 5 and is not 5 km. A percentage is
its share of 1 too: ``12 %`` is 0.12, and 12 beside an answer without the sign (but half a percent is no half). Other words
around a number say nothing: ``72 clips`` is 72. Nothing is converted: 100 cm is not 1 m here.
"""

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

MAX_DIGITS = 100
"""Longer digit strings are no numbers here: the time of exact arithmetic would be in the text's hands."""

MAX_EXPONENT = 400
"""Powers of ten beyond this are no numbers here, for the same reason. All floats are within."""

MAX_LENGTH = 300
"""Characters; a longer answer has no number and no unit."""

SPELLINGS = """mm millimeter millimetre|cm centimeter centimetre|m meter metre|km kilometer kilometre|in inch inche|
    ft foot feet|yd yard|mi mile|mg milligram|g gram|kg kilogram|lb pound £|oz ounce|ml milliliter millilitre|l liter litre|
    gal gallon|ms millisecond|s sec second|min minute|h hr hour|day|week|month|yr year|$ dollar usd buck|¢ cent|€ euro eur|
    ¥ yen|° circ degree deg|rad radian|% percent|mph|kmh kph|2 square squared sq|3 cubic cubed cu|/ per|_ base"""
UNITS = {word: group.split()[0] for group in SPELLINGS.split("|") for word in group.split()}
"""Each spelling of a unit, less the plural's s, and the unit."""

SCALES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}

COUNTS = re.compile(r"(?<!\\)\b(?:half|halves|thirds?|quarters?|th|infinity|minus|negative|not|plus|times)\b", re.IGNORECASE)
"""Words that say something about the number beside them."""

COSMETIC = [
    (re.compile(pattern), other)
    for pattern, _, other in (
        line.strip().partition(" ⇒")
        for line in r"""([⁻⁺⁰¹²³⁴-⁹]+) ⇒^{\1}
        ([₀-₉]+) ⇒_{\1}
        ([¼-¾⅐-⅞]) ⇒ \1~
        [−–] ⇒-
        [⁄÷] ⇒/
        × ⇒\\times~
        · ⇒\\cdot~
        π ⇒\\pi~
        ∞ ⇒\\infty~
        ≤ ⇒\\le~
        ≥ ⇒\\ge~
        ≠ ⇒\\ne~
        ∪ ⇒\\cup~
        ∩ ⇒\\cap~
        ∈ ⇒\\in~
        ± ⇒\\pm~
        ° ⇒^\\circ~
        [∅ø] ⇒\\emptyset~
        (?:√|(?<![\\A-Za-z])sqrt)\s*(?:\(([^()]*)\)|(\w+)) ⇒\\sqrt{\1\2}
        (?<![\\A-Za-z])(pi|infty|sin|cos|tan|log|ln)(?![A-Za-z]) ⇒\\\1
        \\[dtc]frac(?![a-z]) ⇒\\frac
        \\(?:left|right|displaystyle)(?![a-zA-Z])|(?<!\\)\\(?:!\s*|[()\[\]]) ⇒
        \\(?:mbox|textbf|textrm|textit|textnormal|mathrm)(?![a-z]) ⇒\\text
        \{,\} ⇒,
        \\([%$]) ⇒\1
        (?<=\d),? (?:in )?base (\d+) ⇒_\1
        (?:square |cubic )?\bunits?\b(?: ?\}? ?\^ ?\{?[23]\b)? ⇒""".splitlines()
    )
]
"""Ways to write the same, and the one that is read."""

SPACE = re.compile(r"(?<!\\)\\[,;: ]|\\q?quad(?![a-z])|[~\s]+")
WITH_UNIT = re.compile(
    r"(.+?)\s*((?:\\text\s*\{[^{}]*\}|(?<![\\A-Za-z])[A-Za-z]{2,}+|(?<=[\s/])[A-Za-z](?![A-Za-z])|[%$€£¥¢/]"
    r"|\^\s*\{?\s*\\circ\s*\}?|(?<=[a-z}])\s*\^\s*\{?[23]\}?|(?<=\d)_\{?\d+\}?|\s|(?<=[a-z])\.)*)"
)
BEFORE = re.compile(r"(?:[A-Za-z]{2,}\s++(?![=:])|[A-Za-z]*+\s*+[=:]\s*+)*+")
"""Words, and names with `=`. Possessive: one way to read a text, so that `= = = = (` is not tried in all of them."""

FRACTION = re.compile(r"\\frac ?(?:\{ ?(-?\d+) ?\}|(\d)) ?(?:\{ ?(\d+) ?\}|(\d))")
PLAIN = re.compile(
    r"([-+]?) ?[$€£¥]? ?([-+]?) ?(?:(\d+) (?=\d+ ?/))?(\d{1,3}(?:[, ]\d{3})+|\d+)?(\.\d*)?"
    r"(?:(?:[eE]| ?(?:\\times|\\cdot|[x*]) ?10 ?\^ ?)\{? ?([-+]?\d{1,9}) ?\}?)?(?: ?/ ?(\d+))?"
)
WORDS = re.compile(r"\\text ?\{[^{}\d]*\}|[^\W\d_](?:[^\W\d_]|[' -]){3,}")


class Reading(NamedTuple):
    """An answer as it is compared. ``body``: LaTeX less its spacing and unit. ``text``: all of it, less form and case."""

    body: str
    unit: str
    number: Fraction | None
    text: str


def tidy(text: str) -> str:
    """One way to write it: LaTeX and ASCII, without what only looks nice."""
    for _ in range(2):  # ½ is a fraction only when Unicode's normal form has taken it apart
        for pattern, other in COSMETIC:
            text = pattern.sub(other, text)
        text = unicodedata.normalize("NFKC", text)
    text = " ".join(SPACE.sub(" ", text).split())
    text = text.strip(" *").rstrip(".,;: ").rstrip("*")
    return (text[1:-1] if text[:1] == text[-1:] == "$" else text.rstrip("$")).strip()


def as_text(text: str) -> str:
    """The text less white space, full stops, the marks of LaTeX for words, and, in words, case."""
    text = re.sub(r"\\text ?\{([^{}]*)\}", r" \1", tidy(text)).strip()
    text = re.sub(r"^\(([A-Za-z])\)$|^([A-Za-z])\)$", r"\1\2", text)  # the letter of a choice
    text = re.sub(r"\{(\w)\}|(?<!\d)\s|\s(?!\d)|(?<=[A-Za-z])\.", r"\1", text)
    return text.casefold() if re.search(r"[^\W\d_]{2}", text) else text


@lru_cache(maxsize=1024)
def read(text: str) -> Reading:
    """Reads an answer, in time that grows with its length alone."""
    if len(text) > 3 * MAX_LENGTH:  # all these patterns take milliseconds for a page
        return Reading(text, "", None, " ".join(text.casefold().split()))
    body = tidy(text)
    match = WITH_UNIT.fullmatch(body) if len(body) <= MAX_LENGTH else None
    whole = Reading(body, "", None, as_text(body))
    if match is None or not re.search(r"\d", match[1]):
        return whole
    number, names = None if COUNTS.search(body) else _number(match[1]), re.findall("[$€£¥]", match[1])
    for word in re.findall(r"[^\W\d_]+|[%$€£¥¢/_]|\d+", match[2].replace("\\text", "")):
        word = word.lower()
        name = UNITS.get(word) or UNITS.get(word.removesuffix("s")) or (word if word.isdigit() else None)
        if name:
            names.append(UNITS.get(name, name))
        elif number is None or len(word) == 1:
            return whole
        else:
            number *= SCALES.get(word, 1)
    return Reading(match[1], " ".join(sorted(names)), number, whole.text)


def _number(text: str) -> Fraction | None:
    """The exact value of a number without unit, with words before it or none."""
    text = FRACTION.sub(r" \1\2/\3\4", BEFORE.sub("", text, 1))
    match = PLAIN.fullmatch(re.sub(r"^([-+]? ?)10 ?\^", r"\1 1*10^", text).replace("  ", " ").strip())
    if match is None or (match[1] and match[2]):
        return None
    mixed, whole, decimals, power, below = (group or "" for group in match.group(3, 4, 5, 6, 7))
    digits, power = re.sub("[, ]", "", whole) + decimals[1:], int(power or 0)
    if not digits or len(mixed + digits + below) > MAX_DIGITS or abs(power) > MAX_EXPONENT or (below and not int(below)):
        return None
    value = int(mixed or 0) + Fraction(int(digits), int(below or 1)) * Fraction(10) ** (power - len(decimals[1:]))
    return -value if "-" in (match[1], match[2]) else value


def plain_number(text: str) -> Fraction | None:
    r"""The exact value of ``-1,234.5``, ``$18``, ``3/4``, ``1 1/2``, ``½``, ``1e-05``, ``2 \times 10^{3}``, ``50 %`` (a
    half), ``18 dollars``, ``x = 18``; None if it is not one plain number."""
    answer = read(text)
    return answer.number / 100 if answer.number is not None and answer.unit == "%" else answer.number


def agree(gold: str, answer: str) -> bool | None:
    """True or False if the answers are plainly equal or not; None if only algebra can say."""
    one, other = read(gold), read(answer)
    if one.text == other.text:
        return True
    if one.unit and other.unit and one.unit != other.unit:
        return False
    if one.number is None or other.number is None:
        of_words = any(each.number is None and WORDS.fullmatch(each.body) for each in (one, other))
        return False if of_words else None
    if (one.unit == "%") == (other.unit == "%"):
        return one.number == other.number
    share, bare = (one.number, other.number) if one.unit == "%" else (other.number, one.number)
    return share == 100 * bare or (share == bare and abs(bare) >= 1)
