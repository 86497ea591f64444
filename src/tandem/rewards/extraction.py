r"""Finding the final answer in a text, and comparing plain numbers exactly. Linear in the text, whatever it holds."""

import re
from fractions import Fraction

MAX_DIGITS = 100
"""Longer digit strings are no numbers here: the time of exact arithmetic would be in the text's hands."""

NUMBER = re.compile(r"(?<![\w.])[-−+]?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:(?<=\d)\.\d+|(?<!\d)\.\d+|(?<=\d))")
PLAIN = re.compile(r"([-−+]?)\\?\$?([-−+]?)(\d{1,3}(?:,\d{3})+|\d+)?(\.\d*)?(?:/(\d+))?")
WORDS_AROUND = re.compile(r"(?:[A-Za-z]{2,}\s++(?![=:])|[A-Za-z]*+\s*+[=:]\s*+)*+(\S+?)(?:\s++[A-Za-z]{2,}+)*+[.!]?")
"""Possessive: one way to read a text, so that `= = = = (` is not tried in all of them."""

BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace, or a backslash with what it takes the meaning from."""

MULTIPLIERS = re.compile(r"\b(?:hundred|thousand|million|billion|trillion|dozen|percent|half|th|cents?)\b", re.IGNORECASE)


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
    """The rest of the line after the last ``####``; None where there is none or it is empty."""
    start = text.rfind("####")
    if start < 0:
        return None
    return text[start + 4 :].strip().split("\n", 1)[0].strip() or None


def last_number(text: str) -> str | None:
    """The last number written in digits."""
    found = None
    for match in NUMBER.finditer(text):
        found = match.group()
    return found


def final_answer(completion: str) -> str | None:
    r"""The answer that a completion gives: ``\boxed{}``, else after ``####``, else its last number."""
    return boxed(completion) or after_hashes(completion) or last_number(completion)


def gold_answer(answer: object) -> str:
    r"""The expected answer; the column may hold a whole solution: ``\boxed{}``, else ``####``, else all of it."""
    text = str(answer)
    return boxed(text) or after_hashes(text) or text.strip()


def plain_number(text: str) -> Fraction | None:
    """The exact value of ``-1,234.5``, ``$18``, ``3/4``, ``18 dollars``, ``x = 18``; None if it is not one plain number."""
    text = text.strip().strip("$").strip()
    match = PLAIN.fullmatch(text.rstrip("."))
    if match is None and len(text) <= 200 and not MULTIPLIERS.search(text) and (words := WORDS_AROUND.fullmatch(text)):
        match = PLAIN.fullmatch(words.group(1).rstrip("."))
    if match is None or (match.group(1) and match.group(2)):
        return None
    whole, decimals, below = (group or "" for group in match.group(3, 4, 5))
    whole, decimals = whole.replace(",", ""), decimals.removeprefix(".")
    if not (whole or decimals) or len(whole + decimals + below) > MAX_DIGITS or (below and not int(below)):
        return None
    value = Fraction(int(whole + decimals), 10 ** len(decimals) * int(below or 1))
    negative = (match.group(1) or match.group(2)) in ("-", "−")
    return -value if negative else value
