r"""Reads an answer: its unit, its exact number, its text; and comparing two of them without algebra.

A unit is a measure (`UNITS`), a currency, a percent sign, degrees, or the base of a number (``52_8``). Where both answers
have one, it must be the same; where only one has, it does not count, so that ``5 cm`` is 5 and is not 5 km. A percentage is
its share of 1 too: ``12 %`` is 0.12, and 12 beside an answer without the sign (but half a percent is no half). Other words
behind a blank say nothing, and a unit ends with the first of them: ``72 clips`` is 72; ``2ab`` is a product. Nothing is
converted: 100 cm is not 1 m here.
"""

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

MAX_LENGTH = 400
"""Characters; a longer text has no number and no unit, so that no pattern and no arithmetic takes long."""

SPELLINGS = """mm millimeter millimetre|cm centimeter centimetre|m meter metre|km kilometer kilometre|in inch inche|
    ft foot feet|yd yard|mi mile|mg milligram|g gram|kg kilogram|lb pound £|oz ounce|ml milliliter millilitre|l liter litre|
    gal gallon|ms millisecond|s sec second|min minute|h hr hour|day|week|month|yr year|$ dollar usd buck|¢ cent|€ euro eur|
    ¥ yen|₹ rupee inr|peso|yuan rmb|franc|ruble rouble|° circ degree deg|rad radian|% percent|mph|kmh kph|
    2 square squared sq|3 cubic cubed cu|/ per|_ base|am|pm|
    Hz hertz|kHz kilohertz|MHz megahertz|GHz gigahertz|B byte|kB KB kilobyte|MB megabyte|GB gigabyte|TB terabyte|Pa pascal|
    kPa kilopascal|MPa megapascal|eV|keV|MeV|GeV|W watt|mW milliwatt|kW kilowatt|MW megawatt|GW gigawatt|J joule|
    kJ kilojoule|MJ megajoule|N newton|kN kilonewton|V volt|mV millivolt|kV kilovolt|mol mole|mmol millimole|kWh"""
UNITS = {word + s: group.split()[0] for group in SPELLINGS.split("|") for word in group.split() for s in ("", "s")}
"""Each spelling of a unit, in both numbers, and the unit. Any case will do for those in small letters."""

SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 1_000_000, "billion": 10**9, "trillion": 10**12}


def _rules(table: str) -> list[tuple[re.Pattern[str], str]]:
    """From a line for each: pattern, ``⇒``, what stands in its place."""
    lines = (line.strip().partition(" ⇒") for line in table.splitlines())
    return [(re.compile(pattern), other) for pattern, _, other in lines]


SPELLING = _rules(
    r"""([⁻⁺⁰¹²³⁴-⁹]+) ⇒^{\1}
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
        (?<![\\A-Za-z])(pi|infty|(?:sin|cos|tan|log|ln)(?=.))(?![A-Za-z]) ⇒\\\1
        \\[dtc]frac(?![a-z]) ⇒\\frac
        \\(?:left|right|displaystyle)(?![a-zA-Z])|(?<!\\)\\(?:!\s*|[()\[\]]) ⇒
        \\(?:mbox|textbf|textrm|textit|textnormal|mathrm)(?![a-z]) ⇒\\text
        \{,\} ⇒,
        \\([%$]) ⇒\1
        (?<=\d),? (?:in )?base (\d+) ⇒_\1
        (?:square |cubic )?\bunits?\b(?: ?\}? ?\^ ?\{?[23]\b)? ⇒
        (?:(?<!\\)\\[,;: ]|\\q?quad(?![a-z])|[~\s])+ ⇒\040
        ^(?i:negative|minus) (?=[\d\\]) ⇒-
        ^\$?(.*?)\$+$ ⇒\1"""
)
"""Ways to write the same, and the one that is read."""

TEXT = _rules(
    r"""\\text ?\{([^{}]*)\} ⇒\040\1
        ^\s*\(?([A-Za-z])\)\s*$ ⇒\1
        \{(\w)\}|(?<!\d)\s|\s(?!\d)|(?<=[A-Za-z])\. ⇒\1"""
)
"""Takes away white space, full stops, the marks of LaTeX for words, and those of a choice's letter."""

NUMBER = _rules(
    r"""^(?:[A-Za-z]{2,}\s++(?![=:])|[A-Za-z]*+\s*+[=:]\s*+)++ ⇒
        \\frac ?(?:\{ ?(-?\d+) ?\}|(\d)) ?(?:\{ ?(\d+) ?\}|(\d)) ⇒\040\1\2/\3\4
        \s*([ /])\s* ⇒\1
        ^ ?([-+]?) ?[$€£¥]? ? ⇒\1
        ^([-+]?)10 ?\^ ⇒\g<1>1*10^
        (?<=[\d.]) ?(?:\\times|\\cdot|[x*]) ?10 ?\^ ?\{? ?([-+]?\d+) ?\}? ⇒e\1"""
)
"""From LaTeX, with words before it, to what `PLAIN` reads. Possessive, so that `= = = = (` is not tried in all ways."""

PLAIN = re.compile(
    r"([-+]?)(?:(\d+) (?=\d+/))?((?:(?:\d{1,3}(?:[, ]\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3})?)(?:/(0*[1-9]\d*))?"
)
WITH_UNIT = re.compile(
    r"(?!.*(?<!\\)\b(?i:half|halves|thirds?|quarters?|th|infinity|minus|negative|not|plus|times)\b)"
    r"(?!.*(?:\\(?!frac|text|times|cdot)|(?<!10)\s?\^).*(?<!\{)[\s/][mglshMGLSHJNVW](?![A-Za-z]))(\D*\d.*?)"
    r"(?=([A-Za-z]{1,4}(?![A-Za-z])|\s?/\s?[A-Za-z]{1,3}(?![A-Za-z])|\s[A-Za-z]+\s?\^)?)\s*"
    r"((?:(?:\\text\s*\{[^{}]*\}|(?<![\\A-Za-z])[A-Za-z]{2,}+|(?:(?<=[\d}]\s)|(?<=[A-Za-z}]/))[mglshMGLSHJNVW](?![A-Za-z]))"
    r"(?:\s*\^\s*\{?[23]\}?)?|(?<=\w\s)a(?=\s[A-Za-z]{3})|[%$€£¥₹¢/]|\^\s*\{?\s*\\circ\s*\}?|(?<=\d)_\{?\d+\}?|\s|(?<=[a-z])\.)*)"
)
"""A number or an expression, and what stands behind it; not with words that say something about the number beside them,
nor with a unit of one letter behind anything but a plain number.
Between them a group for what is a factor unless it is a unit: ``ab`` in ``2ab``, ``5/ab`` and ``2 ab^2``."""

WORDS = re.compile(r"\\text ?\{[^{}\d]*\}|[^\W\d_](?:[^\W\d_]|[' -]){3,}|[A-Z]{2,4}")


class StatedAnswer(NamedTuple):
    """An answer as it is compared. ``text``: all of it, less form and case. ``body``: LaTeX less its spacing and unit.
    ``number``: its exact value, 0.12 for 12 %; ``shown``: 12."""

    text: str
    body: str
    unit: str = ""
    number: Fraction | None = None
    shown: Fraction | None = None


@lru_cache(maxsize=1024)
def read(text: str) -> StatedAnswer:
    """Reads an answer, in time that grows with its length alone."""
    if len(text) > MAX_LENGTH:
        return StatedAnswer(" ".join(text.casefold().split()), text)
    body = text
    for _ in range(2):  # ½ is a fraction only when Unicode's normal form has taken it apart
        body = unicodedata.normalize("NFKC", _rewritten(body, SPELLING)).strip(" *").rstrip(" *.,;:")
    text = _rewritten(body, TEXT)
    if re.search(r"[^\W\d_]{2}", text):
        text = text.casefold()
    match = WITH_UNIT.fullmatch(body)
    if match is None:
        return StatedAnswer(text, body)
    shown, names = _number(match[1]), []
    for word in re.findall("[$€£¥₹]", match[1]) + re.findall(
        r"\bin [a-zA-Z]+|(?<![A-Za-z])(?!text ?\{)[^\W\d_]+|[%$€£¥₹¢/_]|\d+", match[3]
    ):
        word = word if word in UNITS else word.lower()
        if word in UNITS or word.isdigit():
            names.append(UNITS.get(word, word))
        elif shown is None or match[2]:
            return StatedAnswer(text, body)
        elif word in SCALES:
            shown *= SCALES[word]
        elif names:
            break
    unit = " ".join(sorted(names))
    number = shown / 100 if shown and unit == "%" else shown
    return StatedAnswer(text, match[1] if number is None else str(number), unit, number, shown)


def _rewritten(text: str, rules: list[tuple[re.Pattern[str], str]]) -> str:
    for pattern, other in rules:
        text = pattern.sub(other, text)
    return text


def _number(text: str) -> Fraction | None:
    """The exact value of a number without unit, with words before it or none."""
    match = PLAIN.fullmatch(_rewritten(text, NUMBER).strip())
    if match is None:
        return None
    value = Fraction(match[2] or 0) + Fraction(re.sub("[, ]", "", match[3])) / int(match[4] or 1)
    return -value if match[1] == "-" else value


def plain_number(text: str) -> Fraction | None:
    r"""The exact value of ``-1,234.5``, ``$18``, ``3/4``, ``1 1/2``, ``½``, ``1e-05``, ``2 \times 10^{3}``, ``50 %`` (a
    half), ``18 dollars``, ``x = 18``; None if it is not one plain number."""
    return read(text).number


def agree(gold: str, answer: str) -> bool | None:
    """True or False if the answers are plainly equal or not; None if only algebra can say."""
    one, other = read(gold), read(answer)
    # a choice is its letter, whatever text stands behind that
    if one.text in (
        other.text,
        re.sub(r"^(?:(?i:option|choice) )?(?:\\text ?\{)?\(?([A-J])(?:[).:}].*)?$", r"\1", other.body),
    ):
        return True
    if one.unit and other.unit and one.unit != other.unit:
        return False
    if one.number is None or other.number is None:
        return False if any(WORDS.fullmatch(each.body) for each in (one, other)) else None
    if one.number == other.number or one.shown != other.shown:
        return one.number == other.number
    return max(abs(one.number), abs(other.number)) >= 1  # 12 is 12 %, and a half is not half a percent
