"""The rooms know the contracts and not each other: the table of the architecture, read from the source."""

import ast
from pathlib import Path

import pytest

import tandem

ROOT = Path(tandem.__file__).parent
EXAMPLES = Path(__file__).parents[1] / "examples"
EVERYTHING = {path.name for path in ROOT.iterdir() if path.is_dir()}
MAY_IMPORT = {
    "config": set(),
    "api": {"config"},
    "algorithms": {"api", "config"},
    "models": {"api", "config"},
    "engines/train": {"api", "config", "models"},
    "engines/inference": {"api", "config", "models"},
    "roles": {"api", "config", "algorithms"},
    "rollout": {"api", "config"},
    "rewards": {"api", "config", "models"},
    "data": {"api", "config"},
    "weights": {"api", "config"},
    "state": {"api", "config"},
    "tracking": {"api", "config"},
    "launch": {"config"},
    "proof": {"api", "config", "algorithms", "models", "engines", "roles", "weights", "state"},
    "flow": EVERYTHING - {"lifecycle", "evaluation", "trainers", "planning", "cli"},
    "lifecycle": EVERYTHING - {"evaluation", "trainers", "planning", "cli"},
    "evaluation": EVERYTHING - {"lifecycle", "trainers", "planning", "cli"},
    "trainers": EVERYTHING - {"planning", "cli"},
    "planning": EVERYTHING - {"cli"},
    "cli": EVERYTHING,
}
WITHOUT_TORCH = ("config", "launch")


def room_of(module):
    """``tandem.engines.train.engine`` → ``engines/train``."""
    parts = module.split(".")[1:]
    return "/".join(parts[: 2 if parts[0] == "engines" else 1])


def imports(path):
    """(module, line) of every import, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            named = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "tandem" else [node.module]
            yield from ((name, node.lineno) for name in named)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_the_table_allows(room):
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sorted((ROOT / room).rglob("*.py"))
        for module, line in imports(path)
        if module.startswith("tandem.") and module != "tandem.__version__"
        if room_of(module) not in MAY_IMPORT[room] | {room} and room_of(module).split("/")[0] not in MAY_IMPORT[room]
    ]
    assert wrong == []


def test_every_room_is_in_the_table():
    rooms = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"} - {"engines"}
    assert rooms <= set(MAY_IMPORT), "add it to the table here and in the architecture, or merge it into a room"
    assert "utils" not in {path.stem for path in ROOT.rglob("*")}


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_configuration_never_imports_torch(room):
    wrong = [
        f"{path.name}:{line}"
        for path in (ROOT / room).rglob("*.py")
        for module, line in imports(path)
        if module.split(".")[0] in ("torch", "transformers", "tensordict")
    ]
    assert wrong == []


def test_a_broad_except_stands_at_a_boundary_and_says_which():
    """Episode, reward call, request, worker; the file of a user; a sink."""
    lines = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted(ROOT.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "except Exception" in line
    ]
    assert lines and [line for line in lines if "boundary" not in line] == []


def sources():
    """What people read: the package and the examples, whose product is the loop that they show."""
    return [*sorted(ROOT.rglob("*.py")), *sorted(EXAMPLES.glob("*.py"))]


def test_no_function_is_longer_than_70_lines():
    long = [
        f"{path.name}:{node.lineno} {node.name}: {node.end_lineno - node.lineno + 1} lines"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno + 1 > 70
    ]
    assert long == []


def test_no_file_is_much_longer_than_350_lines():
    lengths = {path.name: len(path.read_text().splitlines()) for path in sources()}
    assert {name: lines for name, lines in lengths.items() if lines > 365} == {}, "a second idea has moved in: split it"


def test_the_room_of_algorithms_takes_torch_from_one_file_that_imports_it_when_it_is_used():
    wrong = [
        f"{path.name}:{line}"
        for path in (ROOT / "algorithms").rglob("*.py")
        for module, line in imports(path)
        if module.split(".")[0] in ("torch", "transformers", "tensordict") and path.name != "lazy_torch.py"
    ]
    assert wrong == []
