"""Makes tasks of a repository: Python's own module `operator`, which ships its tests, with one line of one function changed.

    python examples/mend_data.py mend

Writes train.jsonl, valid.jsonl (other functions) and shuffled.jsonl: the questions of train.jsonl, each with the files of
another, for the control. A change that the module's tests do not notice is left out.
"""

import ast
import importlib.util
import json
import operator
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TESTS = "test.test_operator.PyOperatorTestCase"
COMPARISONS = ["<", "<=", "==", "!=", ">=", ">", "is", "is not", "in"]
ARITHMETIC = ["+", "-", "*", "/", "//", "%", "**", "<<", ">>", "&", "|", "^", "@"]
FAMILIES = (COMPARISONS, ARITHMETIC, [f"{sign}=" for sign in ARITHMETIC])

QUESTION = "What should the wrong line be?\n\n"
EXAMPLE = 'def half(a):\n    "Same as a // 2."\n    return a * 2'
"""Shown with its answer before each question, so that a small model sees the form."""


def asked(shown: list[str]) -> list[dict[str, str]]:
    """The conversation about a function."""
    texts = [QUESTION + EXAMPLE, "return a // 2", QUESTION + "\n".join(shown)]
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), texts, strict=True)]


def changes(line: str) -> list[str]:
    """The line with another operator of its family, or its operands exchanged."""
    before, _, expression = line.rpartition("return ")
    words = (expression if before or line.startswith("return ") else line).split(" ", 1)
    left, rest = words[0], words[1] if len(words) > 1 else ""
    sign, _, right = rest.rpartition(" ")
    head = "return " if line.startswith("return ") else ""
    family = next((family for family in FAMILIES if sign in family), [])
    made = [f"{head}{left} {other} {right}" for other in family if other != sign]
    return made + ([f"{head}{right} {sign} {left}"] if family else [])


def tasks(source: str) -> list[dict]:
    """Every change of every function of one line."""
    made, lines = [], source.splitlines()
    for function in ast.parse(source).body:
        if not isinstance(function, ast.FunctionDef) or not isinstance(function.body[0], ast.Expr):
            continue
        at = function.body[1].lineno - 1
        if len(function.body) - isinstance(function.body[-1], ast.Return) > 2 or function.body[1].end_lineno != at + 1:
            continue
        for wrong in changes(lines[at].strip()):
            shown = [*lines[function.lineno - 1 : at], f"    {wrong}", *lines[at + 1 : function.end_lineno]]
            text = [*lines[:at], f"    {wrong}  # here", *lines[at + 1 :], ""]
            made.append({"function": function.name, "messages": asked(shown), "wrong": wrong, "path": "operator.py"})
            made[-1] |= {"tests": TESTS, "files": {"operator.py": "\n".join(text)}, "right": lines[at].strip()}
    return made


def fails(task: dict) -> bool:
    """Says whether the tests notice the change."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "operator.py").write_text(task["files"]["operator.py"])
        command = [sys.executable, "-m", "unittest", "-q", TESTS]
        return subprocess.run(command, cwd=folder, capture_output=True, timeout=60).returncode != 0


def main(folder: Path) -> None:
    if importlib.util.find_spec("test.test_operator") is None:
        sys.exit("this Python was installed without its tests; in Debian they are the package libpython3-testsuite")
    every = tasks(Path(operator.__file__).read_text())
    with ThreadPoolExecutor(2) as pool:
        noticed = [task for task, seen in zip(every, pool.map(fails, every), strict=True) if seen]
    chance = random.Random(1)
    names = sorted({task["function"] for task in noticed})
    held = set(chance.sample(names, len(names) // 5))
    train = [task for task in noticed if task["function"] not in held]
    valid = [task for task in noticed if task["function"] in held]
    chance.shuffle(train)
    chance.shuffle(valid)
    others = [train[(i + len(train) // 2) % len(train)] for i in range(len(train))]
    shuffled = [{**other, "messages": task["messages"]} for task, other in zip(train, others, strict=True)]
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("valid", valid), ("shuffled", shuffled)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{name}: {len(rows)} tasks of {len({row['function'] for row in rows})} functions")
    print(f"{len(every) - len(noticed)} of {len(every)} changes are noticed by no test")


main(Path(sys.argv[1]))
