"""Measures how often `math` errs about answers that are written otherwise, and about near misses.

    python benchmarks/answer_agreement.py FOLDER/math500/test.jsonl            # 500 rows, ten ways to write each answer
    python benchmarks/answer_agreement.py FOLDER/math500/test.jsonl --rows 50 --show 20

False zeros are right answers that get 0; false ones are near misses that get 1. Failures (a deadline, a gold that is prose)
are counted apart: their samples are dropped, and not trained on.
"""

import argparse
import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator

from tandem import RewardFailure, build_reward

ASCII = [
    (r"\\[dt]?frac\{(\w+)\}\{(\w+)\}|\\[dt]?frac ?(\d) ?(\d+)", r" \1\3/\2\4"),
    (r"\\sqrt\{?(\w+)\}?", r"sqrt(\1)"),
    (r"\\(?:text|mbox)\{ *([^{}]*)\}", r" \1"),
    (r"\^\\circ", " degrees"),
    (r"\\pi", "pi"),
    (r"\\!|\\(?=[$%])", ""),
]
UNICODE = [
    (r"\\sqrt\{?(\w+)\}?", r"√(\1)"),
    (r"\^(?:\{2\}|2(?!\d))", "²"),
    (r"\\pi\b", "π"),
    (r"\\infty\b", "∞"),
    (r"\\cup\b", "∪"),
    (r"\\pm\b", "±"),
    (r"\\in\b", "∈"),
    (r"\^\\circ", "°"),
    (r"-", "−"),
    (r"\\frac\{?1\}?\{?2\}?(?!\d)", "½"),
]


def replaced(text: str, table: list[tuple[str, str]]) -> str:
    """The text after all replacements."""
    for pattern, other in table:
        text = re.sub(pattern, other, text)
    return text


def other_number(gold: str) -> str:
    """A whole number with a point, a fraction as its decimals where these end; anything else with wide spaces."""
    if re.fullmatch(r"-?\d+", gold):
        return f"{int(gold):,}.0"
    if match := re.fullmatch(r"(-?)\\d?frac\{(\d+)\}\{(\d+)\}", gold):
        value = int(match[2]) / int(match[3])
        if value == round(value, 6):
            return f"{match[1]}{value:.10g}"
    return gold.replace(" ", r"\, ")


def rewritten(gold: str) -> list[str]:
    """Ten completions that give this answer."""
    large = gold.replace("\\frac", "\\dfrac").replace("\\left", "").replace("\\right", "")
    if "text" not in gold:
        large = replaced(large, [(r"(?<!\\)[(\[]", r"\\left\g<0>"), (r"(?<!\\)[)\]]", r"\\right\g<0>")])
    return [
        rf"So \boxed{{{gold}}}.",
        f"So it is that.\n#### {gold}",
        f"The answer is ${gold}$.",
        gold,
        f"First 3, then 7.\n\n**Answer:** ${gold}$",
        rf"\[\boxed{{ {gold} }}.\]",
        rf"\boxed{{{large}}}",
        rf"\boxed{{{replaced(gold, ASCII)}}}",
        rf"\boxed{{{replaced(gold, UNICODE)}}}",
        rf"\boxed{{{other_number(gold)}}}",
    ]


def near_misses(gold: str) -> Iterator[str]:
    """Boxed answers that are wrong by a little."""
    yield re.sub(r"\d+", lambda match: str(int(match[0]) + 1), gold, count=1)
    if "." not in gold and gold != "0":
        yield re.sub(r"([1-9])(?!.*\d)", r"\g<1>0", gold, flags=re.DOTALL)
    if re.fullmatch(r"-?[\d.]*[1-9](?:\\(?:sqrt|pi).*)?", gold):
        yield gold[1:] if gold[0] == "-" else f"-{gold}"
    if match := re.fullmatch(r"(?:\\left)?\((.*?),(.*)(?<!\\right)(?:\\right)?\)", gold):
        yield f"({match[2]},{match[1]})"
    if "infty" not in gold and re.fullmatch(r".*[(\[].*,.*\]", gold):
        yield gold[:-1] + ")"
    for old, new in (("cm", "km"), ("cents", "dollars"), ("inches", "feet"), ("degrees", "radians"), ("east", "west")):
        yield gold.replace(old, new)
    yield re.sub(r"_\{?(\d)\}?$", lambda match: f"_{int(match[1]) + 1}", gold)
    yield re.sub(r"\(([A-D])\)", lambda match: f"({chr(ord(match[1]) + 1)})", gold)


async def errors(golds: list[str], show: int) -> None:
    """Judges all and prints the shares."""
    asked = [(gold, text, True, f"way {way}") for gold in golds for way, text in enumerate(rewritten(gold), 1)]
    asked += [
        (gold, rf"\boxed{{{text}}}", False, "near miss")
        for gold in golds
        for text in dict.fromkeys(near_misses(gold))
        if text != gold
    ]
    reward = build_reward("math", timeout_s=30)
    room = asyncio.Semaphore(64)

    async def judge(gold: str, text: str) -> float | None:
        given = {"prompt": "", "completion": text, "prompt_ids": (), "completion_ids": ()}
        async with room:
            try:
                return (await reward(**given, row={"answer": gold})).value
            except RewardFailure:
                return None

    try:
        values = await asyncio.gather(*(judge(gold, text) for gold, text, _, _ in asked))
    finally:
        reward.close()
    for right, name in ((True, "false zeros"), (False, "false ones")):
        both = [(one, value) for one, value in zip(asked, values, strict=True) if one[2] is right]
        wrong = [one for one, value in both if value is not None and value != right]
        failed = sum(value is None for _, value in both)
        print(f"{name}: {len(wrong)} of {len(both)} ({len(wrong) / len(both):.2%}), {failed} failures")
        print("  ", dict(sorted(Counter(one[3] for one in wrong).items())))
        for one in wrong[:show]:
            print("  ", *map(repr, one[:2]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="a file of rows with a column `answer`")
    parser.add_argument("--rows", type=int, help="only the first rows")
    parser.add_argument("--show", type=int, default=0, help="so many errors of each kind")
    arguments = parser.parse_args()
    with open(arguments.data, encoding="utf-8") as lines:
        rows = [json.loads(line)["answer"] for line in lines]
    asyncio.run(errors(rows[: arguments.rows], arguments.show))
