"""The data of a small judge that compares (docs/recipes/a_judge_that_compares.md), the truth, and two controls.

    python examples/judge_data.py judge_data evaluations/judge_answers     # from answers that a model wrote

A judgement quotes the end of each of two replies, says if that reply is finished, and then which one is better. Half of the
questions have the guard of judge_compare.txt, half are bare. In judge_data/test.jsonl each pair stands in both orders;
judge_data/pairs.jsonl has a better and a worse reply in each row. Both are made of answers to other questions.
A judge that knows nothing learns from judge_data/shuffled.jsonl: the prompts and quotes of train.jsonl, with the conclusions
and the verdict of another row.
"""

import argparse
import json
import random
import re
from pathlib import Path
from string import Template

from tandem import GroupReward

TEMPLATES = [
    Template(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    for name in ("judge_compare.txt", "judge_compare_bare.txt")
]
QUESTION = "Which reply is finished?"
KINDS = ("breaks off", "finished")
TRAINED, HELD_OUT = 480, 60
LONGEST, QUOTED = 24, 2


def finished(completion: str) -> dict[str, float]:
    """The truth, which no judge of a run reads: 1 for a reply that ends where a sentence ends. `accuracy` shows it where its
    weight is 0."""
    ends = float(kind(completion))
    return {"finished": ends, "accuracy": ends}


def kind(text: str) -> int:
    """The place of a reply in `KINDS`."""
    return int(re.search(r"[.!?][\"')*]*$", text.strip()) is not None)


def agrees(completion: str, answer: str) -> dict[str, float]:
    """If a judge's last line is the right verdict."""
    lines = completion.strip().splitlines()
    right = float(bool(lines) and lines[-1].strip() == answer)
    return {"agrees": right, "accuracy": right}


class Lots(GroupReward):
    """A control: each sample meets the next one of its group as `compare` lets them meet, and lots decide who wins."""

    async def compare(self, samples, row):
        draw = random.Random("\n".join(sample.completion_text for sample in samples))
        won = [draw.choice((0.0, 0.5, 1.0)) for _ in samples]
        return [(mine + 1.0 - before) / 2 for before, mine in zip([won[-1], *won], won, strict=False)]


def replies_of(answers: list[str], draw: random.Random) -> list[list[str]]:
    """Replies of each kind: the answers, their first sentences, and what is left if they are cut at a word."""
    found: set[str] = set()
    for answer in map(str.strip, answers):
        sentences = re.findall(r"[^.!?]+[.!?]+", answer)
        cut = re.match(rf"(?:\s*\S+){{1,{draw.randint(2, LONGEST)}}}", answer)
        found |= {answer, cut[0] if cut else "", "".join(sentences[:1]).strip(), "".join(sentences[:2]).strip()}
    kinds: list[list[str]] = [[], []]
    for text in sorted(found):
        if 2 <= len(text.split()) <= LONGEST:
            kinds[kind(text)].append(text)
    return kinds


def judged(replies: tuple[str, str], kinds: tuple[int, int], draw: random.Random) -> dict[str, str]:
    """A row: what the judge is asked about two replies, what it should write, and its last line."""
    a, b = kinds
    verdict = f"Verdict: {'A' if a > b else 'B' if b > a else 'tie'}"
    fields = {"mark": f"=== {draw.randbytes(8).hex()} ===", "question": QUESTION}
    asked = draw.choice(TEMPLATES).substitute(reply_A=replies[0], reply_B=replies[1], **fields)
    quoted = [" ".join(text.split()[-QUOTED:]) for text in replies]
    ends = [f"{name}: … {end} ({KINDS[its]})" for name, end, its in zip("AB", quoted, kinds, strict=True)]
    return {"prompt": asked, "completion": "\n".join([*ends, verdict]), "question": asked, "answer": verdict}


def pairs(kinds: list[list[str]], count: int, draw: random.Random) -> list[tuple[str, str]]:
    """Pairs of replies; each combination of kinds is as likely as any other."""
    return [(draw.choice(draw.choice(kinds)), draw.choice(draw.choice(kinds))) for _ in range(count)]


def write(file: Path, rows: list[dict[str, str]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{file}: {len(rows)} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to write")
    parser.add_argument("answers", type=Path, help="folder of the evaluation that asked the questions")
    options = parser.parse_args()
    samples = [json.loads(line) for line in (options.answers / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    draw = random.Random(0)
    questions = sorted({sample["row"] for sample in samples})
    held_out = set(draw.sample(questions, len(questions) // 5))  # no reply to these is in the training data
    known = pairs(replies_of([s["text"] for s in samples if s["row"] not in held_out], draw), TRAINED, draw)
    right = [(kind(a), kind(b)) for a, b in known]
    for name, kinds in (("train", right), ("shuffled", draw.sample(right, len(right)))):
        again = random.Random(1)  # the same prompts in both files
        write(options.folder / f"{name}.jsonl", [judged(pair, its, again) for pair, its in zip(known, kinds, strict=True)])
    hidden = replies_of([s["text"] for s in samples if s["row"] in held_out], draw)
    new = pairs(hidden, HELD_OUT, draw)
    both = [judged(pair, (kind(pair[0]), kind(pair[1])), draw) for a, b in new for pair in ((a, b), (b, a))]
    write(options.folder / "test.jsonl", both)
    unequal = [{"better": draw.choice(hidden[1]), "worse": draw.choice(hidden[0])} for _ in range(HELD_OUT)]
    write(options.folder / "pairs.jsonl", unequal)


if __name__ == "__main__":
    main()
