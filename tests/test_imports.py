"""The rooms know the contracts and not each other: the table of the architecture, read from the source."""

import ast
from pathlib import Path

import pytest

import tandem

ROOT = Path(tandem.__file__).parent
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
    "trainers": EVERYTHING - {"cli"},
    "cli": EVERYTHING,
}
WITHOUT_TORCH = ("config",)


def room_of(module):
    """``tandem.engines.train.fsdp`` → ``engines/train``."""
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


def test_no_function_is_longer_than_70_lines():
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {node.end_lineno - node.lineno + 1} lines"
        for path in sorted(ROOT.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno + 1 > 70
    ]
    assert long == []
