"""Small mistakes in Python source, one at a time: what `scripts/mutations.py` lets the tests look for.

A mutant replaces one stretch of the source. Left alone are docstrings, other text, annotations, decorators, assertions,
messages of errors and logs: no formula stands there.
"""

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

ARITHMETIC: dict[type[ast.AST], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "*",
    ast.Pow: "*",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.RShift: "<<",
    ast.LShift: ">>",
    ast.BitXor: "&",
}
COMPARISONS: dict[type[ast.AST], tuple[str, ...]] = {
    ast.Lt: ("<", ">", "<="),
    ast.LtE: ("<=", ">=", "<"),
    ast.Gt: (">", "<", ">="),
    ast.GtE: (">=", "<=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
"""Sign, and what takes its place."""

WITH_TERMS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.BitAnd, ast.BitOr)
REMOVED = frozenset(
    [
        "abs",
        "clamp",
        "clone",
        "contiguous",
        "copy_",
        "cumsum",
        "detach",
        "double",
        "exp",
        "expand",
        "flatten",
        "flip",
        "float",
        "index_add",
        "index_copy",
        "item",
        "log",
        "long",
        "masked_fill",
        "mean",
        "removeprefix",
        "roll",
        "sqrt",
        "square",
        "startswith",
        "strip",
        "sum",
    ]
)
"""Methods whose call becomes the object itself."""

OTHER_NAME = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "minimum": "maximum",
    "maximum": "minimum",
    "amin": "amax",
    "amax": "amin",
    "sum": "mean",
    "mean": "sum",
    "zeros_like": "ones_like",
    "ones_like": "zeros_like",
    "ceil": "floor",
    "floor": "ceil",
    "var": "std",
    "std": "var",
    "sorted": "list",
    "popleft": "pop",
}
LOGS = ("log", "logger", "logging", "warnings")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutant:
    """One replaced stretch of one file."""

    module: str
    """Path below `src/tandem`."""

    line: int
    kind: str
    begin: int
    end: int
    """Bytes of the source that are replaced."""

    before: str
    after: str
    statement: str
    """First line of the statement around it."""

    place: int
    """Bytes from the beginning of that statement."""

    function: str
    """The one around it, "" at module level."""

    @property
    def key(self) -> str:
        """Names it, also after lines elsewhere in the file have changed."""
        text = "\0".join((self.module, self.function, self.kind, self.statement, str(self.place), self.before, self.after))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def applied(self, source: bytes) -> bytes:
        """The source with the mistake in it."""
        return source[: self.begin] + self.after.encode() + source[self.end :]


def mutants(source: bytes, module: str) -> list[Mutant]:
    """All that this page knows, in the order of the source; each gives valid Python."""
    return [one for one in _Maker(source, module).made() if _is_python(one.applied(source))]


def _is_python(source: bytes) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True


class _Maker:
    def __init__(self, source: bytes, module: str):
        self.source, self.module = source, module
        self.lines = source.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))

    def made(self) -> Iterator[Mutant]:
        seen = set()
        for kind, node, statement, function, after in self._walk(ast.parse(self.source), None, None):
            begin, end = self._span(node)
            text = self.lines[statement.lineno - 1].decode().strip()
            one = Mutant(
                self.module,
                node.lineno,
                kind,
                begin,
                end,
                self._text(node),
                after,
                text,
                begin - self._span(statement)[0],
                function,
            )
            if after != one.before and (begin, end, after) not in seen:
                seen.add((begin, end, after))
                yield one

    def _span(self, node: Any) -> tuple[int, int]:
        return (
            self.starts[node.lineno - 1] + node.col_offset,
            self.starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def _text(self, node: Any) -> str:
        begin, end = self._span(node)
        return self.source[begin:end].decode()

    def _walk(self, node: ast.AST, statement: Any, function: Function | None) -> Iterator[tuple[str, Any, Any, str, str]]:
        """Kind, node that is replaced, statement and function around it, replacement."""
        if isinstance(node, ast.stmt):
            statement = node
        name = "" if function is None else function.name
        if isinstance(node, (ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom)) or _is_log(node):
            return
        if isinstance(node, ast.Raise):
            yield "statement removed", node, statement, name, "pass"
            return
        yield from ((kind, where, statement, name, after) for kind, where, after in self._of(node, function))
        inner = node if isinstance(node, Function) else function
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "ctx", "bases"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._walk(child, statement, inner)

    def _of(self, node: ast.AST, function: Function | None) -> Iterator[tuple[str, Any, str]]:
        by_type = {
            ast.BinOp: self._arithmetic,
            ast.Compare: self._comparison,
            ast.BoolOp: self._logic,
            ast.UnaryOp: self._sign,
            ast.Constant: self._constant,
            ast.Call: self._call,
        }
        make = by_type.get(type(node))
        if make is not None:
            yield from make(node)
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            yield "condition negated", node.test, f"(not ({self._text(node.test)}))"
        if isinstance(node, ast.comprehension):
            for test in node.ifs:
                yield "condition negated", test, f"(not ({self._text(test)}))"
        if isinstance(node, (ast.Name, ast.Subscript)) and isinstance(node.ctx, ast.Load) and function is not None:
            yield from self._other_tensor(node, function)
        yield from self._removed(node)

    def _arithmetic(self, node: ast.BinOp) -> Iterator[tuple[str, Any, str]]:
        if any(isinstance(side, ast.JoinedStr) or _is_text(side) for side in (node.left, node.right)):
            return
        left, right = self._text(node.left), self._text(node.right)
        if type(node.op) in ARITHMETIC:
            yield "operator", node, f"(({left}) {ARITHMETIC[type(node.op)]} ({right}))"
        if isinstance(node.op, WITH_TERMS):
            yield "term dropped", node, f"({left})"
            yield "term dropped", node, f"({'-' if isinstance(node.op, ast.Sub) else ''}({right}))"

    def _comparison(self, node: ast.Compare) -> Iterator[tuple[str, Any, str]]:
        for i, op in enumerate(node.ops):
            for other in COMPARISONS[type(op)][1:]:
                signs = [COMPARISONS[type(one)][0] for one in node.ops]
                signs[i] = other
                rest = "".join(f" {sign} ({self._text(part)})" for sign, part in zip(signs, node.comparators, strict=True))
                yield "comparison", node, f"(({self._text(node.left)}){rest})"

    def _logic(self, node: ast.BoolOp) -> Iterator[tuple[str, Any, str]]:
        values = [f"({self._text(value)})" for value in node.values]
        word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        yield "and/or", node, f"({f' {other} '.join(values)})"
        for i in range(len(values)):
            rest = values[:i] + values[i + 1 :]
            yield "term dropped", node, f"({f' {word} '.join(rest)})"

    def _sign(self, node: ast.UnaryOp) -> Iterator[tuple[str, Any, str]]:
        yield "sign or not removed", node, f"({self._text(node.operand)})"

    def _constant(self, node: ast.Constant) -> Iterator[tuple[str, Any, str]]:
        value = node.value
        if isinstance(value, bool):
            yield "constant", node, str(not value)
        elif isinstance(value, int):
            yield "constant", node, str(value + 1)
            if value > 0:
                yield "constant", node, str(value - 1)
        elif isinstance(value, float):
            yield "constant", node, str(2 * value if value else 1.0)

    def _call(self, node: ast.Call) -> Iterator[tuple[str, Any, str]]:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("isinstance", "getattr", "hasattr"):
            return
        if name in OTHER_NAME:
            yield "other function", node.func, self._text(node.func)[: -len(name)] + OTHER_NAME[name]
        if isinstance(node.func, ast.Attribute) and name in REMOVED:
            yield "call removed", node, f"({self._text(node.func.value)})"
        if name == "range" and len(node.args) == 1:
            yield "off by one", node.args[0], f"{self._text(node.args[0])} + 1"
        if name == "len":
            yield "off by one", node, f"({self._text(node)} - 1)"
        simple = (ast.Name, ast.Attribute, ast.Subscript)
        for first, second in zip(node.args, node.args[1:], strict=False):
            if isinstance(first, simple) and isinstance(second, simple):
                yield from self._swapped(node, first, second)
        for one, two in zip(node.keywords, node.keywords[1:], strict=False):
            if one.arg and two.arg and isinstance(one.value, simple) and isinstance(two.value, simple):
                yield from self._swapped(node, one.value, two.value)

    def _swapped(self, call: ast.Call, first: Any, second: Any) -> Iterator[tuple[str, Any, str]]:
        base = self._span(call)[0]
        text = self.source[base : self._span(call)[1]]
        (a, b), (c, d) = ((x - base for x in self._span(one)) for one in (first, second))
        yield "arguments swapped", call, (text[:a] + text[c:d] + text[b:c] + text[a:b] + text[d:]).decode()

    def _other_tensor(self, node: ast.Name | ast.Subscript, function: Function) -> Iterator[tuple[str, Any, str]]:
        """Another parameter of the same type, or another key of the same mapping, in place of this one."""
        if isinstance(node, ast.Name):
            given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            types = {one.arg: ast.unparse(one.annotation) for one in given if one.annotation is not None}
            alike = [name for name, kind in types.items() if node.id in types and kind == types[node.id]]
            if len(alike) > 1:
                yield "argument mistaken", node, alike[(alike.index(node.id) + 1) % len(alike)]
        elif _is_text(node.slice):
            held = ast.dump(node.value)
            keys = [
                self._text(other.slice)
                for other in ast.walk(function)
                if isinstance(other, ast.Subscript) and _is_text(other.slice) and ast.dump(other.value) == held
            ]
            others = sorted(set(keys) - {self._text(node.slice)})
            if others:
                yield "argument mistaken", node.slice, others[len(keys) % len(others)]

    def _removed(self, node: ast.AST) -> Iterator[tuple[str, Any, str]]:
        called = isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Await))
        stored = isinstance(node, ast.Assign) and all(isinstance(t, (ast.Attribute, ast.Subscript)) for t in node.targets)
        if called or stored or isinstance(node, (ast.AugAssign, ast.Delete, ast.Break, ast.Continue)):
            yield "statement removed", node, "pass"


def _is_text(node: Any) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_log(node: ast.AST) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    target = node.value.func
    return isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in LOGS
