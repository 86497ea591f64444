"""Keys and values in a shell script that starts a training: ``key=value`` and ``--key value``, its variables put in."""

import ast
import operator
import re
import shlex
from collections.abc import Callable
from typing import Any

_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^{}$]*))?\}|\$(\w+)")
_SUM = re.compile(r"\$\(\(([^$]*?)\)\)")
_SET = re.compile(r"(?:export |local |declare )?([A-Za-z_]\w*)=(.*)", re.S)
_KEY = re.compile(r"\+{0,2}([a-z_]\w*(?:\.\w+)+)=(.*)", re.S)
_OPTION = re.compile(r"--([a-z]\w*)(?:=(.*))?", re.S)
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv},
}


def script_values(text: str) -> dict[str, str]:
    """Key → value, as text. A variable that the script does not set stays as it is, ``$HOME``; an indented
    line, of an `if` or a `case`, sets only what nothing has set before: of several branches the first counts."""
    variables: dict[str, str] = {}
    found: dict[str, str] = {}
    for line in text.replace("\\\n", " ").splitlines():
        line = _expanded(line, variables)
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quote that ends on another line
            words = [word.strip("\"'") for word in line.split()]
        setting = _SET.fullmatch(" ".join(words))
        one = len(words) <= 1 + line.lstrip().startswith("export ")
        if setting and one and not (line[:1].isspace() and variables.get(setting[1])):
            variables[setting[1]] = setting[2]
        _collect(words, found)
    return found


def _collect(words: list[str], found: dict[str, str]) -> None:
    options = False
    for i, word in enumerate(words):
        if match := _KEY.fullmatch(word.lstrip("(").rstrip(")") if word.count("(") != word.count(")") else word):
            found[match[1]] = match[2]
        elif options and (match := _OPTION.fullmatch(word)):
            behind = words[i + 1 :]
            end = next((j for j, other in enumerate(behind) if other.startswith("--")), len(behind))
            values = [value.rstrip(",") for value in behind[:end]]
            name, on = (match[1][3:], "false") if match[1].startswith("no_") else (match[1], "true")
            found[name] = match[2] or (values[0] if len(values) == 1 else f"[{', '.join(values)}]" if values else on)
        options = options or word.endswith(".py") or word in ("grpo", "sft", "dpo", "rloo") or ".scripts." in word


def _expanded(line: str, variables: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        known = variables.get(match[1] or match[3])
        return (match[0] if known is None else known) if match[2] is None else known or match[2]

    for _ in range(4):  # a default may hold a variable, as deep as anybody nests them
        line = _VARIABLE.sub(value, line)
    while match := _SUM.search(line):
        names = re.sub(r"[A-Za-z_]\w*", lambda m: variables.get(m[0], m[0]), match[1])
        result = _computed(names)
        line = line[: match.start()] + (f"${{{names}}}" if result is None else str(result)) + line[match.end() :]
    return line


def _computed(text: str) -> int | None:
    def of(node: Any) -> int | None:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = of(node.left), of(node.right)
            known = left is not None and right is not None and (right or not isinstance(node.op, ast.Div))
            return _OPERATORS[type(node.op)](left, right) if known and left is not None and right is not None else None
        return None

    try:
        return of(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError:
        return None
