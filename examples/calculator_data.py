"""Makes the data of the calculator recipe (docs/recipes/calculator.md): arithmetic that a small model cannot do in its head.

    python examples/calculator_data.py calculator_data

The folder gets rl.jsonl and test.jsonl, with questions and answers, and sft.jsonl: chats that show a call of the calculator.
No expression is in two of them.
"""

import argparse
import json
import random
from pathlib import Path

from tandem import plain_chat, tool_schema

WORDS = ("What is {}?", "Compute {}.", "How much is {}?", "{} = ?")
SHOWN, TESTED = 64, 100


def problem(draw: random.Random) -> dict[str, str]:
    """An expression of two or three numbers, a question about it, and its value."""
    a, b, c = draw.randint(100, 999), draw.randint(11, 99), draw.randint(100, 999)
    expressions = {
        f"{a} * {b}": a * b,
        f"{a} * {b} + {c}": a * b + c,
        f"{a} * {b} - {c}": a * b - c,
        f"({a} + {c}) * {b}": (a + c) * b,
    }
    expression = draw.choice(list(expressions))
    question = draw.choice(WORDS).format(expression)
    return {"question": question, "answer": str(expressions[expression]), "expression": expression}


def shown(row: dict[str, str]) -> dict[str, object]:
    """A chat in which the calculator is called and its result read."""
    call = {"name": "calculator", "arguments": {"expression": row["expression"]}}
    chat = [
        {"role": "user", "content": row["question"]},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "name": "calculator", "content": row["answer"]},
        {"role": "assistant", "content": row["answer"]},
    ]
    return {"messages": plain_chat(chat, [tool_schema("calculator")])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write")
    out = parser.parse_args().out
    draw = random.Random(0)
    rows = list({row["expression"]: row for row in (problem(draw) for _ in range(1200))}.values())
    parts = {
        "sft": [shown(row) for row in rows[:SHOWN]],
        "test": rows[SHOWN : SHOWN + TESTED],
        "rl": rows[SHOWN + TESTED :],
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
        print(f"{out / name}.jsonl: {len(part)} rows")


if __name__ == "__main__":
    main()
