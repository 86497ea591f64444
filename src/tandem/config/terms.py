"""Parses and formats names with weights and knobs: ``math + 0.2*length(target_tokens=100)``."""

import ast
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from tandem.config.errors import ConfigError, nearest_names

GRAMMAR = (
    "a name, name(knob=value), a sum such as math + 0.2*format, my_file.py:name, or the folder of a reward model alone; "
    "in a sum that is model(path=FOLDER), quoted if the path has a space or a sign: model(path='a b')"
)

Spec = Annotated[str, "spec"]
"""The type of a key that names a service: text. In YAML the value may also be ``{name: …, knob: …}`` or a list of terms,
which are converted to text (`tandem.config.recipes`)."""

_FILE = re.compile(
    r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|(?P<file>(?<![^\s+*(-])[^\s+*(),='"]+\.py:\w+|(?<![^\s*(])[A-Za-z_]\w*:\w[\w./:]*(?:-[\w./:]+)*)"""
)
"""Matches a user's file or ``name:ID``. Quoted texts match too, without the group ``file``, so that they are skipped."""

_BARE = re.compile(
    r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|(?<=[(,])(?P<knob>\s*\w+\s*=\s*)(?P<value>[^\s'"(),\[\]{}]+)(?=\s*[,)])"""
)
"""Matches a knob with an unquoted value. Quoted texts match too, without the group ``knob``, so that they are skipped."""

_WORDS = {"true": True, "false": False, "null": None}


Normalise = Literal["none", "running", "group"]
_GATE = re.compile(r"\s*([\w./:-]+)\s*(?:>\s*-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)?\s*")


@dataclass(frozen=True)
class Options:
    """The options that every term of a sum may have besides its own knobs; None: not set.

    Example: ``judge(…, normalise=running, clip=[-3, 3], gate='format > 0.5')``
    """

    normalise: Normalise | None = None
    """Subtract the mean and divide by the standard deviation: `running` over all values so far, `group` over the samples of
    the same prompt."""

    clip: tuple[float, float] | None = None
    """Lowest and highest value; applied after `normalise` and before the weight."""

    gate: str | None = None
    """``NAME`` or ``NAME > NUMBER``: the term counts only if the value of the term NAME is above the number (default 0)."""

    @property
    def gate_name(self) -> str | None:
        """Name of the term that opens the gate; None without a gate."""
        return None if self.gate is None else self.gate.partition(">")[0].strip()

    @property
    def gate_above(self) -> float:
        """The number that the value of the gate's term must exceed."""
        return float((self.gate or "").partition(">")[2] or 0.0)


@dataclass(frozen=True)
class Term:
    """A name with its weight and its knobs, such as one term of a reward."""

    name: str
    """Registered name, alone or as ``name:ID``, or ``my_file.py:name``."""

    weight: float = 1.0
    knobs: dict[str, Any] = field(default_factory=dict)
    options: Options = Options()
    """The options, for a term of a reward."""

    @property
    def is_file(self) -> bool:
        """True if the name is a user's file, not a registered name."""
        return self.name.rpartition(":")[0].endswith(".py")

    @property
    def registered(self) -> str:
        """The registered name, without the ID of ``name:ID``."""
        return self.name.partition(":")[0]

    @property
    def spelling(self) -> str:
        """The term as text, without its weight."""
        options = {name: value for name, value in asdict(self.options).items() if value is not None}
        knobs = ", ".join(f"{name}={value!r}" for name, value in (self.knobs | options).items())
        return f"{self.name}({knobs})" if knobs else self.name

    @property
    def arguments(self) -> dict[str, Any]:
        """The term's knobs, and the ``id`` of ``name:ID``."""
        ident = "" if self.is_file else self.name.partition(":")[2]
        return {"id": ident, **self.knobs} if ident else dict(self.knobs)

    @property
    def label(self) -> str:
        """The term's name in metrics: its knob ``name``, or `short_name`."""
        return str(self.knobs.get("name") or self.short_name)

    @property
    def short_name(self) -> str:
        """The name without the file, for metrics."""
        return self.name.rpartition(":")[2]


def read_term(spec: str, key: str) -> Term:
    """Reads a single name with knobs, such as ``multi_turn(max_turns=5)``. ``key``: the configuration key where it was
    written.

    Raises:
        ConfigError: the text cannot be read, or is a sum.
    """
    terms = read_terms(spec, key)
    if len(terms) != 1 or terms[0].weight != 1.0:
        raise ConfigError(f"{key} {spec!r} must be one name, as in name(knob=value) or my_file.py:name")
    return terms[0]


def sum_text(terms: Sequence[Term]) -> str:
    """Formats terms as one text, a sum."""
    return " + ".join(term.spelling if term.weight == 1.0 else f"{term.weight!r}*{term.spelling}" for term in terms)


def spelled(name: str, knobs: Mapping[str, Any], key: str) -> str:
    """Returns the text of a name (which may have knobs already) with further knobs added.

    Raises:
        ConfigError: see `read_term`.
    """
    if not knobs:
        return name
    term = read_term(name, key)
    return replace(term, knobs={**term.knobs, **knobs}).spelling


def read_terms(spec: str, key: str = "reward") -> list[Term]:
    """Reads a sum of names. ``key``: the configuration key where it was written, for errors.

    Example: ``0.7*model(path=runs/helpful/step_20) + 0.3*my_file.py:Polite(path=gpt2)``; the folder of a reward model alone
    means ``model(path=FOLDER)``.

    Raises:
        ConfigError: the text cannot be parsed, a weight is not a number, a name occurs twice, or an option is invalid.
    """
    terms = parse_terms(spec, key)
    if key == "reward":
        terms = [_with_options(term) for term in terms]
        _check_gates(terms)
    names = [term.label for term in terms]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"{key} {spec!r} names a reward twice; add their weights up, or give each model a name of its own: "
            "model(path=…, name=helpful)"
        )
    return terms


def parse_terms(spec: str, key: str = "reward") -> list[Term]:
    """Parses a sum of terms without the checks of `read_terms`: options stay knobs, and names may occur twice.

    Raises:
        ConfigError: the text cannot be parsed, or a weight is not a number.
    """
    text = spec.strip()
    if re.fullmatch(r"[^(*]*\.py:\w+", text) and (not re.search(" [+-] ", text) or _is_file(text.rpartition(":")[0])):
        return [Term(text)]
    if key in ("reward", "partner") and text and _is_file(f"{text}/config.json"):
        return [Term("model", knobs={"path": text})]
    if key in ("reward", "partner") and re.fullmatch(r"[^\s*()]*/[\w.-]+/?", text) and not _is_file(text):
        raise ConfigError(f"{key} {spec!r} looks like the folder of a model, and there is no {text.rstrip('/')}/config.json")
    bare = re.fullmatch(r"(.+)[.:](\w+)", text)  # my_file.py, my_file.name or my_file:name
    if bare and _is_file(f"{bare[1]}.py"):
        file = Path(f"{bare[1]}.py")
        names = re.findall(r"^(?:async )?(?:def|class) ([A-Za-z]\w*)", file.expanduser().read_text("utf-8"), re.M)
        name = bare[2] if bare[2] in names else "".join(names[:1]) or "NAME"
        raise ConfigError(f"{key} {spec!r}: {file} has: {', '.join(names) or 'nothing'}; write {key}={file}:{name}")
    files: list[str] = []

    def name_file(match: re.Match[str]) -> str:
        if match["file"] is None:
            return match[0]
        files.append(match[0])
        return f"_file{len(files) - 1}"

    plain = _BARE.sub(_quoted, _FILE.sub(name_file, text))
    try:
        expression = ast.parse(plain, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{key} {spec!r} cannot be read; it is {GRAMMAR}") from error
    return list(_terms(expression, spec, files, key))


def _with_options(term: Term) -> Term:
    """Moves the knobs that every term takes into the term's options.

    Raises:
        ConfigError: an option has an invalid value.
    """
    knobs, where = dict(term.knobs), f"reward {term.label!r}"
    normalise, clip, gate = (knobs.pop(name, None) for name in ("normalise", "clip", "gate"))
    if normalise not in (None, *get_args(Normalise)):
        raise ConfigError(f"{where}: normalise must be one of {', '.join(get_args(Normalise))}, got {normalise!r}")
    if clip is not None:
        numbers = clip if isinstance(clip, (list, tuple)) else ()
        fine = all(isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x) for x in numbers)
        if len(numbers) != 2 or not fine or not numbers[0] < numbers[1]:
            raise ConfigError(f"{where}: clip must be [low, high], two numbers with low below high, got {clip!r}")
        clip = (float(numbers[0]), float(numbers[1]))
    if gate is not None and (not isinstance(gate, str) or not _GATE.fullmatch(gate)):
        raise ConfigError(f"{where}: gate must be the name of another term, as in gate='format > 0.5', got {gate!r}")
    return replace(term, knobs=knobs, options=Options(None if normalise == "none" else normalise, clip, gate))


def _check_gates(terms: list[Term]) -> None:
    """Checks that each gate names another term of the sum, and that no gates wait for each other.

    Raises:
        ConfigError: a gate is wrong; the message names the nearest term.
    """
    gates = {term.label: term.options.gate_name for term in terms}
    for name, gate in gates.items():
        if gate is None:
            continue
        others = [other for other in gates if other != name]
        if gate not in others:
            near = nearest_names(gate, others) if others else "there is no other term; add one, such as 0*format"
            raise ConfigError(f"reward {name!r}: gate={gates[name]} names no other term of the sum; {near}")
        seen = [name]
        while gate is not None and gate not in seen:
            seen.append(gate)
            gate = gates[gate]
        if gate is not None:
            raise ConfigError(f"the gates of the rewards {' and '.join(map(repr, seen))} wait for each other; drop one")


def _is_file(path: str) -> bool:
    try:
        return Path(path).expanduser().is_file()
    except (OSError, RuntimeError, ValueError):  # a name too long, ``~name`` of an unknown user, a zero byte
        return False


def _quoted(match: re.Match[str]) -> str:
    """Replaces an unquoted value by a Python literal: numbers stay, everything else becomes a string."""
    knob, value = match["knob"], match["value"]
    if value is None:
        return match[0]
    if value in _WORDS:
        return f"{knob}{_WORDS[value]}"
    try:
        ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return f"{knob}{value!r}"
    return match[0]


def _terms(node: ast.expr, spec: str, files: list[str], key: str) -> Iterator[Term]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from _terms(node.left, spec, files, key)
        yield from _terms(node.right, spec, files, key)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        yield from _terms(node.left, spec, files, key)
        for term in _terms(node.right, spec, files, key):
            yield Term(term.name, -term.weight, term.knobs)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        try:
            factor = float(ast.literal_eval(node.left))
            if not math.isfinite(factor):
                raise ValueError(factor)
        except (ValueError, TypeError, OverflowError):
            raise ConfigError(f"{key} {spec!r}: a weight is a finite number before a name; it is {GRAMMAR}") from None
        for term in _terms(node.right, spec, files, key):
            yield Term(term.name, factor * term.weight, term.knobs)
    elif isinstance(node, ast.Name):
        yield Term(_name(node, files))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
        name = _name(node.func, files)
        try:
            knobs = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
        except (ValueError, TypeError):
            raise ConfigError(f"{key} {spec!r}: knobs of {name} must be plain values, as in name(knob=3)") from None
        yield Term(name, knobs=knobs)
    else:
        raise ConfigError(f"{key} {spec!r} cannot be read; it is {GRAMMAR}")


def _name(node: ast.Name, files: list[str]) -> str:
    match = re.fullmatch(r"_file(\d+)", node.id)
    return files[int(match[1])] if match and int(match[1]) < len(files) else node.id
