"""Mends a package: shows the model the function whose tests fail, puts its line there, and lets the tests judge.

A program like any other: it knows nothing of Tandem but the variables that it is started with. It ends with exit code 0 if
the package's own tests pass, so the run takes `reward_from=exit`.
"""

import ast
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

MAY_BE_THERE = (ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.Name, ast.BinOp, ast.UnaryOp, ast.Compare)
MAY_BE_THERE += (ast.Return, ast.AugAssign, ast.Subscript)


def ask(messages: list) -> str:
    """The model's reply."""
    body = {"model": "policy", "messages": messages}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def is_plain(line: str) -> bool:
    """Says whether a line assigns or returns the arguments with operators between them. Anything else, a call for
    example, could end the tests before they have judged."""
    try:
        body = ast.parse(f"def f(a, b):\n    {line}").body[0].body
    except (SyntaxError, ValueError, RecursionError):
        return False
    return len(body) == 1 and all(
        isinstance(node, MAY_BE_THERE) and getattr(node, "id", "a") in ("a", "b") for node in ast.walk(body[0])
    )


def main() -> int:
    row = json.loads(Path(os.environ["TANDEM_ROW"]).read_text())
    reply = ask(row["messages"])
    lines = [line for line in reply.strip().splitlines() if not line.startswith("```")]
    line = lines[0].strip() if lines else ""
    print(line)
    if not is_plain(line):
        return 1
    file = Path(row["path"])
    file.write_text(file.read_text().replace(f"{row['wrong']}  # here", line))
    return subprocess.run([sys.executable, "-m", "unittest", "-q", row["tests"]], capture_output=True).returncode


sys.exit(main())
