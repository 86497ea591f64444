"""The control of code_grpo.yaml: the same run, but each question has the tests of another one.

The reward then says nothing about the question, so the accuracy on held-out questions, whose tests are right, does not rise
as in the real run.

    python examples/code_control.py                 # writes runs/code/shuffled.jsonl and trains on it
"""

import json
import random
from pathlib import Path

from tandem import run_script
from tandem.cli.main import main as tandem
from tandem.config.data import DatasetConfig
from tandem.data.dataset import load_dataset

HERE = Path(__file__).parent


def shuffled(size: int, seed: int = 0) -> list[dict[str, object]]:
    """Rows of `functions`, the tests exchanged among them."""
    rows = load_dataset(DatasetConfig(path="functions", size=size), seed=seed).rows
    tests = [row["program_tests"] for row in rows]
    random.Random(seed).shuffle(tests)
    return [{"question": row["question"], "program_tests": other} for row, other in zip(rows, tests, strict=True)]


def main(overrides: list[str]) -> None:
    file = Path("runs/code/shuffled.jsonl")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in shuffled(size=2000)))
    tandem(["train", str(HERE / "code_grpo.yaml"), f"train_dataset.path={file}", "trial_name=control", *overrides])


if __name__ == "__main__":
    run_script(main)
