"""A calculator tool. Evaluates the expression's syntax tree and executes no code."""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from tandem.rollout.tools.tool import ToolFailure

MAX_CHARACTERS = 500
MAX_BITS = 4096
"""Maximum size of an integer in bits, intermediate results included."""

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(math, name) for name in ("sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tan", "floor", "ceil")
} | {"abs": abs, "round": round, "min": min, "max": max}
_CONSTANTS = {"pi": math.pi, "e": math.e}
_SPELLINGS = {"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**"}


def calculator(expression: str) -> str:
    """Computes.

    Args:
        expression: such as 12 * (3 + 4.5)
    """
    for written, meant in _SPELLINGS.items():
        expression = expression.replace(written, meant)
    if len(expression) > MAX_CHARACTERS:
        raise ToolFailure(f"the expression is longer than {MAX_CHARACTERS} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        return f"{value:.12g}" if isinstance(value, float) else str(value)
    except (SyntaxError, RecursionError, MemoryError):
        raise ToolFailure(f"this is not an arithmetic expression: {expression}") from None
    except (ArithmeticError, ValueError, TypeError) as error:
        raise ToolFailure(f"{expression} cannot be computed: {error}") from None


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            _check_power(left, right)
        return _bounded(_OPERATORS[type(node.op)](left, right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords:
        return _bounded(_FUNCTIONS[node.func.id](*map(_value, node.args)))
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    raise ToolFailure(f"{ast.unparse(node)[:80]!r} is not arithmetic")


def _check_power(base: Any, power: Any) -> None:
    """Raises `ToolFailure` if an integer power would have more than `MAX_BITS` bits."""
    if isinstance(base, int) and isinstance(power, int) and abs(base).bit_length() * abs(power) > MAX_BITS:
        raise ToolFailure("the result is too large")


def _bounded(value: Any) -> Any:
    if isinstance(value, complex):
        raise ToolFailure("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ToolFailure("the result is too large")
    return value
