"""Chooses rows of GSM8K for a laptop: the shortest ones, without the calculator's marks, in a folder of three splits.

    python examples/gsm8k_short.py GSM8K_FOLDER OUT_FOLDER

GSM8K_FOLDER holds train.jsonl and test.jsonl (https://github.com/openai/grade-school-math). OUT_FOLDER gets

- sft.jsonl: 2,500 of the 3,000 shortest training rows, to imitate,
- rl.jsonl: the other 500, to learn from by reward,
- test.jsonl: the first 400 test rows, whatever their length.

Short rows are the easy ones, and on a CPU every token counts. `<<48/2=24>>` in a solution is a call of a calculator that the
model does not have.
"""

import argparse
import json
import random
import re
from pathlib import Path

CALL = re.compile(r"<<[^>]*>>")
SHORTEST, IMITATED, TESTED = 3000, 2500, 400


def read(file: Path) -> list[dict[str, str]]:
    """Rows with question and answer, the answers without the calculator's marks."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [{"question": row["question"], "answer": CALL.sub("", row["answer"])} for row in rows]


def choose(train: list[dict[str, str]]) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Rows to imitate and rows for reinforcement learning: none is in both."""
    short = sorted(train, key=lambda row: len(row["question"]) + len(row["answer"]))[:SHORTEST]
    random.Random(0).shuffle(short)
    return short[:IMITATED], short[IMITATED:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gsm8k", type=Path, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("out", type=Path, help="folder to write")
    options = parser.parse_args()
    if missing := [name for name in ("train.jsonl", "test.jsonl") if not (options.gsm8k / name).is_file()]:
        parser.error(f"{options.gsm8k} has no {' and no '.join(missing)}: give a folder with GSM8K's two files")
    imitated, judged = choose(read(options.gsm8k / "train.jsonl"))
    test = read(options.gsm8k / "test.jsonl")[:TESTED]
    options.out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("sft", imitated), ("rl", judged), ("test", test)):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (options.out / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{options.out / name}.jsonl: {len(rows)} rows")


if __name__ == "__main__":
    main()
