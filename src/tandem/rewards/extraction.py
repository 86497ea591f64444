r"""Finding the answer in a completion, and in the row's answer column. Linear in the text, whatever it holds.

An expression here is one line without prose: its words are functions, units and scales, or stand in ``\text{…}``.
"""

import re

from tandem.rewards.reading import MAX_LENGTH, SCALES, UNITS, read

NUMBER = re.compile(
    r"(?<![\w.])(?=[-−+\\$€£¥\d.½⅓⅔¼¾])(?:"
    r"[-−+]?(?:\d++\s?+)?(?:\\[dt]?frac(?:\{-?\d++\}|\s?\d)(?:\{\d++\}|\d)|[½⅓⅔¼¾])"
    r"|[-−+]?\\?[$€£¥]?(?:\d{1,3}(?:,\d{3})++(?!\d)|\d++)?(?:(?<=\d)\.\d++|(?<!\d)\.\d++|(?<=\d))"
    r"(?:[eE][-+]?\d++|(?:\s?+(?:\\times|×|\\cdot|[*x])\s?+10|(?<=10))(?:\^\{?[-+]?\d++\}?|[⁻⁰¹²³⁴-⁹]++)"
    r"|(?:\s\d++)?/\d++|\s?+\\?%|_\{?\d++\}?)?+)"
    rf"(?!\.\d|/?(?!(?i:{'|'.join(UNITS)})\b)[A-Za-z]{{1,4}}\b)"
)
"""A number as it is written: ``-1,234.5``, ``$18``, ``3/4``, ``1 1/2``, ``1e-05``, ``10^{-5}``, ``50 %``; not in ``2ab``."""

BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace, or a backslash with what it takes the meaning from."""

HASHES = re.compile(r"####(?<!#####)(?!#)[ \t]*(.*)")
LIST_NUMBER = re.compile(
    r"^[ \t]*(?:#+[ \t]+(?!(?i:answer|total|result))[A-Za-z]+[ \t]+\d+|\d{1,3}[.)][ \t]+(?=\S))", re.MULTILINE
)
"""The number of an item of a list, or a heading."""

STATED = re.compile(
    r"^(?:.*(?:\b(?:is|are|be|equals|get|answer)\b|[:=≈])[\s*:]*(.*)|.*?(?<!\\)(?:\$|\*\*)([^$*]+)(?:\$|\*\*)[.\s]*)$"
)
"""The end of a line behind its last verb or sign, or between marks."""

ANSWER_IS = re.compile(r"\banswer(?:\s+is)?\b[\s:*]*((?:[^\n.]|\.(?!\s|$))*)[^\n]*", re.IGNORECASE)
"""And the rest of its line; the group ends with the sentence."""

FEW_WORDS = r"[^\W\d]+(?:[ '-][^\W\d]+){0,2}[.*]*"
HASHES_WORDS = re.compile(rf"####[ \t]*({FEW_WORDS})\s*\Z")

PROSE = re.compile(r"(?<![\\A-Za-z\d])[^\W\d_]{2,}")
FUNCTIONS = "sin cos tan cot sec csc log ln exp sqrt pi infinity max min mod gcd lcm det and or"
MATHS = {*UNITS, *SCALES, *FUNCTIONS.split()}
VARIABLE = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])")
MOST_WORDS = 4
"""Words of an answer in words; a longer one is prose."""


def boxed(text: str) -> str | None:
    r"""The contents of the last complete ``\boxed{…}`` (or ``\fbox{…}``), braces balanced; one that is cut off does not
    count."""
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
    """The rest of the line after the last ``####`` that is followed by a number or an expression, as GSM8K writes it; None
    where there is none. Headings (``#### Step 2``) are not; up to three words are at the end of the text only."""
    words = HASHES_WORDS.search(text)
    return words[1] if words else next(filter(None, map(_expression, reversed(HASHES.findall(text)))), None)


def last_number(text: str) -> str | None:
    """The last number written in digits, less those of list items and headings."""
    found = NUMBER.findall(LIST_NUMBER.sub("", text))
    return found[-1] if found else None


def prose_words(text: str) -> int:
    r"""The number of words that are not mathematics. Those in ``\text{…}`` count too."""
    return sum(word not in MATHS for word in PROSE.findall(text.lower()))


def is_answer(text: str) -> bool:
    """True if a gold can be compared: an expression, a plain number, or a few words; not a solution in prose."""
    if ("\n" in text and "\\begin" not in text) or LIST_NUMBER.match(text):
        return False
    return prose_words(text) <= MOST_WORDS or read(text).number is not None


def _expression(text: str) -> str | None:
    """The text if it is an expression or begins with its number (``18 clips``), less what is on the left of an equality of
    numbers."""
    text = text.strip(" \t\n*").rstrip(".")
    if len(text) > MAX_LENGTH or "\n" in text or LIST_NUMBER.match(text) or not re.search(r"\w", text):
        return None
    if prose_words(re.sub(r"\\[a-z]+\s*\{[\w.' ]*\}", "", text)) and (text[0].isalpha() or read(text).number is None):
        return None
    left, _, right = text.rpartition("=")
    return text if VARIABLE.search(left) and "=" not in left else right.strip()


def _stated(text: str) -> str | None:
    """The expression that the last line is or states."""
    line = text.rstrip().rsplit("\n", 1)[-1]
    return _expression(line) or _expression(STATED.sub(r"\1\2", line[-MAX_LENGTH:]))


def final_answer(completion: str) -> str | None:
    r"""The answer that a completion gives: ``\boxed{}``, else behind ``####``, else all of it if it is an expression, else
    what it says behind "the answer is" or states at its end, else its last number. Thinking counts only where
    nothing stands behind ``</think>``."""
    completion = completion.rpartition("</think>")[2].strip() or completion
    found = boxed(completion) or after_hashes(completion) or _expression(completion)
    if found is None and (said := ANSWER_IS.findall(completion)):
        match = NUMBER.match(said[-1]) or re.fullmatch(rf"{FEW_WORDS}|\(?[A-J][):].*", said[-1])
        found = _stated(said[-1]) or (match and match[0])
    return found or _stated(completion) or last_number(completion)


def gold_answer(answer: object) -> str:
    r"""The expected answer; the column may hold a whole solution: ``\boxed{}``, else behind ``####``, else all of it; or
    what its last line states, if all of it is no answer. It may be none even so (`is_answer`)."""
    text = str(answer).strip()
    return boxed(text) or after_hashes(text) or (text if is_answer(text) else _stated(text) or text)
