"""The filter of samples as it is typed, such as ``truncated reward > 0 failed: timeout "the words"``, made a condition of
SQL, and words to look for in the texts."""

import re
from typing import NamedTuple

from tandem.config.errors import ConfigError

NUMBERS = {name: name for name in ("reward", "advantage", "accuracy", "tokens", "step", "sample")} | {"group": "grp"}
FLAGS = {
    "truncated": "truncated",
    "dropped": "dropped != ''",
    "trained": "dropped = ''",
    "failed": "(dropped != '' OR failures != '')",
    "right": "accuracy >= 1",
    "wrong": "accuracy < 1",
    "greedy": "greedy",
}
TEXTS = {
    "failed": "dropped || ' ' || why || ' ' || failures",
    "dropped": "dropped || ' ' || why",
    "source": "source",
    "stop": "stop",
}
_TERM = re.compile(
    r"(?P<no>not\s+)?(?:"
    r"(?P<number>[a-z]+)\s*(?P<sign>>=|<=|≥|≤|!=|==|=|>|<)\s*(?P<value>[^\s\"()]*)"
    r'|(?P<field>[a-z]+):\s*(?:"(?P<phrase>[^"]*)"|(?P<part>[^\s"]+))'
    r'|"(?P<quoted>[^"]*)"|(?P<word>[^\s"]+))',
    re.IGNORECASE,
)


_SIGNS = re.compile(r"[<>=!≥≤]+|[<>=!≥≤]?[-+.\d]+|\(.*|.*\)")
"""Words that are meant as something that there is not: a sign by itself, a number, brackets."""


class Condition(NamedTuple):
    """The samples that are asked for."""

    sql: str
    values: list[float | str]
    words: list[str]
    """Each of them must be in the prompt or in an answer; upper and lower case are the same."""


def read_filter(text: str) -> Condition:
    """All terms must hold; ``not`` before a term turns it round; ``and`` may stand between them.

    Raises:
        ConfigError: a name that there is not, or no number; says which there are.
    """
    parts: list[str] = []
    values: list[float | str] = []
    words: list[str] = []
    if text.count('"') % 2:
        raise ConfigError("a quote is open: words to look for stand between two")
    for term in _TERM.finditer(text):
        no = "NOT " if term["no"] else ""
        if term["number"]:
            column = _named(NUMBERS, term["number"], "figure")
            try:
                values.append(float(term["value"]))
            except ValueError:
                raise ConfigError(f"{term[0]!r}: {term['value']!r} is no number") from None
            sign = {"≥": ">=", "≤": "<=", "==": "="}.get(term["sign"], term["sign"])
            parts.append(f"{no}coalesce({column} {sign} ?, 0)")
        elif term["field"]:
            parts.append(f"{no}instr(lower({_named(TEXTS, term['field'], 'text')}), ?)")
            values.append((term["phrase"] or term["part"] or "").lower())
        elif term["word"] and term["word"].lower() in FLAGS:
            parts.append(f"{no}coalesce({FLAGS[term['word'].lower()]}, 0)")
        elif term["word"] and (term["word"].lower() in {*NUMBERS, *TEXTS, "or"} or _SIGNS.fullmatch(term["word"])):
            raise ConfigError(
                f'{term[0]!r}: terms are such as `reward > 0`, `truncated`, `failed: timeout` and "the words", and all of '
                "them must hold; words that read otherwise stand in quotes"
            )
        elif no:
            raise ConfigError(
                f"{term[0]!r}: `not` stands before a term such as `truncated` or `reward > 0`, not before words"
            )
        elif (word := term["quoted"] or term["word"]) and word.lower() != "and":
            words.append(word.lower())
    return Condition(" AND ".join(f"({part})" for part in parts), values, words)


def _named(table: dict[str, str], name: str, what: str) -> str:
    if name.lower() not in table:
        raise ConfigError(f"there is no {what} {name!r}; there are {', '.join(table)}; words to look for stand in quotes")
    return table[name.lower()]
