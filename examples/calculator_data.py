"""Makes the folder `calculator_data`: arithmetic that a small model cannot do in its head, and a few calls to imitate.

    python examples/calculator_data.py calculator_data

`rl.jsonl` and `test.jsonl` have questions with answers; no question is in both. `sft.jsonl` shows how a tool is called and its result read, in
chats as the model's template writes them.
"""

import json
import random
import sys
from pathlib import Path

from tandem.protocol.tool_calls import CallReader
from tandem.rollout.tools.calculator import calculator
from tandem.rollout.tools.tool import schema_of

WORDS = ("What is {}?", "Compute {}.", "How much is {}?", "{} = ?")


def question(draw: random.Random) -> tuple[str, str]:
    """An expression of two or three numbers, and its value."""
    a, b, c = draw.randint(100, 999), draw.randint(11, 99), draw.randint(100, 999)
    expression = draw.choice([f"{a} * {b}", f"{a} * {b} + {c}", f"{a} * {b} - {c}", f"({a} + {c}) * {b}"])
    return expression, calculator(expression)


def main(folder: str) -> None:
    draw = random.Random(0)
    asked = {question(draw) for _ in range(3000)}
    rows = [{"question": draw.choice(WORDS).format(e), "answer": a, "expression": e} for e, a in sorted(asked)]
    draw.shuffle(rows)
    parts = {"test": rows[:100], "sft": rows[100:400], "rl": rows[400:2400]}
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        lines = [json.dumps(row) for row in part]
        (Path(folder) / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
