"""Parses an answer into unit, exact number and text, and compares two answers without algebra.

A unit is a measure (`UNITS`), a currency, a percent sign, degrees, or the base of a number (``52_8``). If both answers have
a unit, the units must be equal; if only one answer has a unit, the unit is ignored, so that ``5 cm`` equals 5 but not 5 km.
A percentage also equals its share of 1: ``12 %`` is 0.12, and also 12 if the other answer has no sign (but half a percent is
not a half). Other words after a space are ignored, and the first of them ends the unit: ``72 clips`` is 72; ``2ab`` is a
product. Units are not converted: 100 cm is not 1 m here.

Also finds the answer in a completion and in the row's answer column, in time linear in the text's length.

An *expression* here is one line without prose: its words are functions, units and scales, or inside ``\\text{…}``.
"""

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

MAX_LENGTH = 400
"""Maximum length in characters. A longer text is read without number and unit, so that no pattern and no arithmetic takes
long."""

SPELLINGS = """mm millimeter millimetre|cm centimeter centimetre|m meter metre|km kilometer kilometre|in inch inche|
    ft foot feet|yd yard|mi mile|mg milligram|g gram|kg kilogram|lb pound £|oz ounce|ml milliliter millilitre|l liter litre|
    gal gallon|ms millisecond|s sec second|min minute|h hr hour|day|week|month|yr year|$ dollar usd buck|¢ cent|€ euro eur|
    ¥ yen|₹ rupee inr|peso|yuan rmb|franc|ruble rouble|° circ degree deg|rad radian|% percent|mph|kmh kph|
    2 square squared sq|3 cubic cubed cu|/ per|_ base|am|pm|
    Hz hertz|kHz kilohertz|MHz megahertz|GHz gigahertz|B byte|kB KB kilobyte|MB megabyte|GB gigabyte|TB terabyte|Pa pascal|
    kPa kilopascal|MPa megapascal|eV|keV|MeV|GeV|W watt|mW milliwatt|kW kilowatt|MW megawatt|GW gigawatt|J joule|
    kJ kilojoule|MJ megajoule|N newton|kN kilonewton|V volt|mV millivolt|kV kilovolt|mol mole|mmol millimole|kWh"""
UNITS = {word + s: group.split()[0] for group in SPELLINGS.split("|") for word in group.split() for s in ("", "s")}
"""Maps each spelling of a unit, singular and plural, to the unit. Spellings in lower case match in any case."""

SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 1_000_000, "billion": 10**9, "trillion": 10**12}


def _rules(table: str) -> list[tuple[re.Pattern[str], str]]:
    """Returns (pattern, replacement) pairs from a table with one ``pattern ⇒replacement`` a line."""
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
"""Rules that replace alternative notations by the one that the other patterns expect."""

TEXT = _rules(
    r"""\\text ?\{([^{}]*)\} ⇒\040\1
        ^\s*\(?([A-Za-z])\)\s*$ ⇒\1
        \{(\w)\}|(?<!\d)\s|\s(?!\d)|(?<=[A-Za-z])\. ⇒\1"""
)
"""Rules that remove white space, full stops, LaTeX's marks of text, and the marks around the letter of a choice."""

NUMBER = _rules(
    r"""^(?:[A-Za-z]{2,}\s++(?![=:])|[A-Za-z]*+\s*+[=:]\s*+)++ ⇒
        \\frac ?(?:\{ ?(-?\d+) ?\}|(\d)) ?(?:\{ ?(\d+) ?\}|(\d)) ⇒\040\1\2/\3\4
        \s*([ /])\s* ⇒\1
        ^ ?([-+]?) ?[$€£¥]? ? ⇒\1
        ^([-+]?)10 ?\^ ⇒\g<1>1*10^
        (?<=[\d.]) ?(?:\\times|\\cdot|[x*]) ?10 ?\^ ?\{? ?([-+]?\d+) ?\}? ⇒e\1"""
)
"""Rules that convert LaTeX, and words before it, to the notation that `PLAIN` parses. Their quantifiers are possessive, so
that ``= = = = (`` does not backtrack."""

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
"""Pattern of a number or an expression, and the text behind it. It rejects words that change the number's meaning, and units
of one letter behind anything but a plain number. The middle group is text that is a factor if it is not a unit: ``ab`` in
``2ab``, ``5/ab`` and ``2 ab^2``."""

WORDS = re.compile(r"\\text ?\{[^{}\d]*\}|[^\W\d_](?:[^\W\d_]|[' -]){3,}|[A-Z]{2,4}")


class StatedAnswer(NamedTuple):
    """A parsed answer. ``text``: the whole text, normalised in notation and case. ``body``: LaTeX without its spacing and
    unit. ``number``: the exact value, 0.12 for 12 %; ``shown``: the number as written, 12."""

    text: str
    body: str
    unit: str = ""
    number: Fraction | None = None
    shown: Fraction | None = None


@lru_cache(maxsize=1024)
def read(text: str) -> StatedAnswer:
    """Parses an answer, in time linear in its length."""
    if len(text) > MAX_LENGTH:
        return StatedAnswer(" ".join(text.casefold().split()), text)
    body = text
    for _ in range(2):  # twice, because ½ becomes a fraction only in Unicode's normal form
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
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


def _number(text: str) -> Fraction | None:
    """Returns the exact value of a number without a unit; words before the number are allowed. None if the text is not such
    a number."""
    match = PLAIN.fullmatch(_rewritten(text, NUMBER).strip())
    if match is None:
        return None
    value = Fraction(match[2] or 0) + Fraction(re.sub("[, ]", "", match[3])) / int(match[4] or 1)
    return -value if match[1] == "-" else value


def plain_number(text: str) -> Fraction | None:
    r"""Returns the exact value of ``-1,234.5``, ``$18``, ``3/4``, ``1 1/2``, ``½``, ``1e-05``, ``2 \times 10^{3}``, ``50 %``
    (0.5), ``18 dollars``, ``x = 18``; None if the text is not one plain number."""
    return read(text).number


def agree(gold: str, answer: str) -> bool | None:
    """Returns whether two answers are equal, by text, unit and number; None if only algebra can decide."""
    expected, other = read(gold), read(answer)
    # a multiple choice is decided by its letter, whatever text follows the letter
    if expected.text in (
        other.text,
        re.sub(r"^(?:(?i:option|choice) )?(?:\\text ?\{)?\(?([A-J])(?:[).:}].*)?$", r"\1", other.body),
    ):
        return True
    if expected.unit and other.unit and expected.unit != other.unit:
        return False
    if expected.number is None or other.number is None:
        return False if any(WORDS.fullmatch(each.body) for each in (expected, other)) else None
    if expected.number == other.number or expected.shown != other.shown:
        return expected.number == other.number
    return max(abs(expected.number), abs(other.number)) >= 1  # 12 equals 12 %, but a half is not half a percent


NUMBER_IN_TEXT = re.compile(
    r"(?<![\w.])(?=[-−+\\$€£¥\d.½⅓⅔¼¾])(?:"
    r"[-−+]?(?:\d++\s?+)?(?:\\[dt]?frac(?:\{-?\d++\}|\s?\d)(?:\{\d++\}|\d)|[½⅓⅔¼¾])"
    r"|[-−+]?\\?[$€£¥]?(?:\d{1,3}(?:,\d{3})++(?!\d)|\d++)?(?:(?<=\d)\.\d++|(?<!\d)\.\d++|(?<=\d))"
    r"(?:[eE][-+]?\d++|(?:\s?+(?:\\times|×|\\cdot|[*x])\s?+10|(?<=10))(?:\^\{?[-+]?\d++\}?|[⁻⁰¹²³⁴-⁹]++)"
    r"|(?:\s\d++)?/\d++|\s?+\\?%|_\{?\d++\}?)?+)"
    rf"(?!\.\d|/?(?!(?i:{'|'.join(UNITS)})\b)[A-Za-z]{{1,4}}\b)"
)
"""Pattern of a number in a text: ``-1,234.5``, ``$18``, ``3/4``, ``1 1/2``, ``1e-05``, ``10^{-5}``, ``50 %``; not the 2 of
``2ab``."""

BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""Pattern of a brace, or of a backslash with the character that it escapes."""

HASHES = re.compile(r"####(?<!#####)(?!#)[ \t]*(.*)")
LIST_NUMBER = re.compile(
    r"^[ \t]*(?:#+[ \t]+(?!(?i:answer|total|result))[A-Za-z]+[ \t]+\d+|\d{1,3}[.)][ \t]+(?=\S))", re.MULTILINE
)
"""Pattern of the number of a list item, or of a heading."""

STATED = re.compile(
    r"^(?:.*(?:\b(?:is|are|be|equals|get|answer)\b|[:=≈])[\s*:]*(.*)|.*?(?<!\\)(?:\$|\*\*)([^$*]+)(?:\$|\*\*)[.\s]*)$"
)
"""Pattern of a line. Its groups are the end of the line behind the last verb or sign, or the text between marks."""

ANSWER_IS = re.compile(r"\banswer(?:\s+is)?\b[\s:*]*((?:[^\n.]|\.(?!\s|$))*)[^\n]*", re.IGNORECASE)
"""Pattern of the word "answer" and the rest of its line. Its group ends with the sentence."""

FEW_WORDS = r"[^\W\d]+(?:[ '-][^\W\d]+){0,2}[.*]*"
HASHES_WORDS = re.compile(rf"####[ \t]*({FEW_WORDS})\s*\Z")

PROSE = re.compile(r"(?<![\\A-Za-z\d])[^\W\d_]{2,}")
FUNCTIONS = "sin cos tan cot sec csc log ln exp sqrt pi infinity max min mod gcd lcm det and or"
MATHS = {*UNITS, *SCALES, *FUNCTIONS.split()}
VARIABLE = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])")
MOST_WORDS = 4
"""Maximum number of words in an answer; a longer text counts as prose."""


def boxed(text: str) -> str | None:
    r"""Returns the contents of the last complete ``\boxed{…}`` (or ``\fbox{…}``) with balanced braces; None if there is
    none. A box that is cut off does not count."""
    opened: list[int] = []
    begins = ends = -1
    for match in BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            start = opened.pop()
            if start > begins and text[max(0, start - 6) : start].endswith(("\\boxed", "\\fbox")):
                begins, ends = start, match.start()
    return text[begins + 1 : ends].strip() if begins >= 0 else None


def after_hashes(text: str) -> str | None:
    """Returns the rest of the line after the last ``####`` that is followed by a number or an expression, as in GSM8K; None
    if there is none. Headings (``#### Step 2``) are skipped; up to three words count only at the end of the text."""
    words = HASHES_WORDS.search(text)
    return words[1] if words else next(filter(None, map(_expression, reversed(HASHES.findall(text)))), None)


def last_number(text: str) -> str | None:
    """Returns the last number in digits, except numbers of list items and headings."""
    numbers = NUMBER_IN_TEXT.findall(LIST_NUMBER.sub("", text))
    return numbers[-1] if numbers else None


def prose_words(text: str) -> int:
    r"""Returns the number of words that are not mathematical, including those in ``\text{…}``."""
    return sum(word not in MATHS for word in PROSE.findall(text.lower()))


def is_answer(text: str) -> bool:
    """True if a gold answer can be compared: an expression, a plain number, or a few words; not a solution in prose."""
    if ("\n" in text and "\\begin" not in text) or LIST_NUMBER.match(text):
        return False
    return prose_words(text) <= MOST_WORDS or read(text).number is not None


def _expression(text: str) -> str | None:
    """Returns the text if it is an expression or begins with a number (``18 clips``); else None. The left side of an
    equation of numbers is removed."""
    text = text.strip(" \t\n*").rstrip(".")
    if len(text) > MAX_LENGTH or "\n" in text or LIST_NUMBER.match(text) or not re.search(r"\w", text):
        return None
    if prose_words(re.sub(r"\\[a-z]+\s*\{[\w.' ]*\}", "", text)) and (text[0].isalpha() or read(text).number is None):
        return None
    left, _, right = text.rpartition("=")
    return text if VARIABLE.search(left) and "=" not in left else right.strip()


def _stated(text: str) -> str | None:
    """Returns the expression that the last line contains, alone or at the end of a statement; None if there is none."""
    line = text.rstrip().rsplit("\n", 1)[-1]
    return _expression(line) or _expression(STATED.sub(r"\1\2", line[-MAX_LENGTH:]))


def final_answer(completion: str) -> str | None:
    r"""Returns the final answer of a completion: the first that exists of ``\boxed{}``; the text after ``####``; the whole
    completion if it is an expression; the text after "the answer is"; the expression in the last line; the last number. The
    text before ``</think>`` is searched only if nothing follows that mark."""
    completion = completion.rpartition("</think>")[2].strip() or completion
    answer = boxed(completion) or after_hashes(completion) or _expression(completion)
    if answer is None and (sentences := ANSWER_IS.findall(completion)):
        match = NUMBER_IN_TEXT.match(sentences[-1]) or re.fullmatch(rf"{FEW_WORDS}|\(?[A-J][):].*", sentences[-1])
        answer = _stated(sentences[-1]) or (match and match[0])
    return answer or _stated(completion) or last_number(completion)


def gold_answer(answer: object) -> str:
    r"""Returns the expected answer from a column that may hold a whole solution: ``\boxed{}``, or the text after ``####``,
    or the whole text if it is an answer, or the expression in its last line. Check the result with `is_answer`."""
    text = str(answer).strip()
    return boxed(text) or after_hashes(text) or (text if is_answer(text) else _stated(text) or text)
