"""The rooms know the contracts and not each other: the table of the architecture, read from the source."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import tandem
from tests.syntax import nodes_of, tree_of, trees  # noqa: F401 the fixture is for all tests here

ROOT = Path(tandem.__file__).parent
EXAMPLES = Path(__file__).parents[1] / "examples"
EVERYTHING = {path.name for path in ROOT.iterdir() if path.is_dir()}
MAY_IMPORT = {
    "config": set(),
    "api": {"config"},
    "media": {"api", "config"},
    "protocol": {"api", "config", "media"},
    "workers": {"api", "config"},
    "algorithms": {"api", "config"},
    "models": {"api", "config", "media"},
    "engines/train": {"api", "config", "media", "models"},
    "engines/inference": {"api", "config", "media", "models", "protocol", "workers"},
    "roles": {"api", "config", "algorithms"},
    "rollout": {"api", "config", "media", "protocol", "workers"},
    "rewards": {"api", "config", "media", "models", "protocol", "workers"},
    "sandbox": {"api", "config", "workers"},
    "data": {"api", "config", "media"},
    "weights": {"api", "config"},
    "state": {"api", "config"},
    "tracking": {"api", "config"},
    "launch": {"config", "workers"},
    "view": {"api", "config", "media", "models", "protocol", "state", "tracking"},
    "proof": {"api", "config", "media", "algorithms", "models", "engines", "roles", "weights", "state"},
    "flow": EVERYTHING - {"view", "lifecycle", "evaluation", "trainers", "planning", "cli"},
    "lifecycle": EVERYTHING - {"view", "evaluation", "trainers", "planning", "cli"},
    "evaluation": EVERYTHING - {"view", "lifecycle", "trainers", "planning", "cli"},
    "planning": EVERYTHING - {"view", "trainers", "cli"},
    "trainers": EVERYTHING - {"view", "cli"},
    "cli": EVERYTHING,
}
WITHOUT_TORCH = ("config", "launch", "media", "sandbox", "view", "workers")


def room_of(module):
    """``tandem.engines.train.engine`` → ``engines/train``."""
    parts = module.split(".")[1:]
    return "/".join(parts[: 2 if parts[0] == "engines" else 1])


def imports(path):
    """(module, line) of every import, those inside functions included."""
    for node in nodes_of(path):
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
        f"{path.relative_to(ROOT)}:{line}"
        for path in (ROOT / room).rglob("*.py")
        for module, line in imports(path)
        if module.split(".")[0] in ("torch", "transformers", "tensordict")
    ]
    assert wrong == []


BROAD = {"Exception", "BaseException"}


def names(node):
    """Names of the exceptions that an ``except`` or a `suppress` takes; a bare ``except:`` takes all there are."""
    if node is None:
        return {"BaseException"}
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    return {part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "") for part in parts}


def tidies_up(handler):
    """True of a handler that lets go of what was opened and raises the same error again, whatever way it goes."""
    ways_out = (ast.Return, ast.Break, ast.Continue)
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None and not any(isinstance(n, ways_out) for n in ast.walk(handler))


def broad_handlers(nodes):
    """Lines on which an error of any kind ends, by ``except`` or by `contextlib.suppress`."""
    for node in nodes:
        if isinstance(node, ast.ExceptHandler):
            taken = set() if tidies_up(node) else names(node.type)
        elif isinstance(node, ast.Call) and names(node.func) == {"suppress"}:
            taken = set().union(*map(names, node.args))
        else:
            continue
        if taken & BROAD:
            yield node.lineno


@pytest.mark.parametrize(
    "handler", ["except:", "except Exception:", "except (OSError, Exception) as error:", "except BaseException:"]
)
def test_an_except_that_takes_everything_is_seen_in_every_form(handler):
    def seen(text):
        return list(broad_handlers(ast.walk(ast.parse(text))))

    assert seen(f"try:\n    work()\n{handler}\n    pass") == [3]
    assert seen(f"try:\n    work()\n{handler}\n    close()\n    raise") == []
    assert seen(f"for x in y:\n  try:\n    work()\n  {handler}\n    if x: break\n    raise") == [4]
    assert seen("with contextlib.suppress(Exception):\n    work()") == [1]


def test_a_broad_except_stands_at_a_boundary_and_says_which():
    """Episode, reward call, request, worker; the file of a user; a sink."""
    texts = {path: path.read_text() for path in sorted(ROOT.rglob("*.py"))}
    found = [(path, line) for path in texts for line in broad_handlers(nodes_of(path))]
    lines = [f"{path.relative_to(ROOT)}:{line}: {texts[path].splitlines()[line - 1].strip()}" for path, line in found]
    assert lines and [line for line in lines if "boundary" not in line] == []


def sources():
    """What people read: the package and the examples, whose product is the loop that they show."""
    return [*sorted(ROOT.rglob("*.py")), *sorted(EXAMPLES.glob("*.py"))]


def shown(path):
    """Where a file lies, from the folder above its tree: many files share a name."""
    return str(path.relative_to(next(root.parent for root in (ROOT, EXAMPLES) if path.is_relative_to(root))))


def test_no_function_is_longer_than_70_lines():
    long = [
        f"{shown(path)}:{node.lineno} {node.name}: {node.end_lineno - node.lineno + 1} lines"
        for path in sources()
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno + 1 > 70
    ]
    assert long == []


def test_no_file_is_longer_than_600_lines():
    lengths = {shown(path): len(path.read_text().splitlines()) for path in sources()}
    assert len(lengths) == len(sources())  # no file hides behind another of its name
    assert {name: lines for name, lines in lengths.items() if lines > 600} == {}, "a second idea has moved in: split it"


MOVES = {"offload", "onload", "sleep", "wake"}
MOVING = ("flow/residency.py", "engines/")
"""Who calls them: the residency, and engines among their own parts."""


def moves(tree):
    """Lines on which a resident is told to sleep or to wake. What passes the call on, in a method of that name, only stands
    for the resident; `asyncio` and `time` sleep too."""
    within = [("", tree)]
    while within:
        function, node = within.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        called = node.func if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
        if called and called.attr in MOVES - {function} and ast.unparse(called.value) not in ("asyncio", "time"):
            yield node.lineno
        within += [(function, child) for child in ast.iter_child_nodes(node)]


def test_only_the_residency_puts_models_to_sleep_and_wakes_them():
    assert [*moves(ast.parse("def rest(self):\n    time.sleep(1)\n    self.engine.sleep(('kv_cache',))"))] == [3]
    calls = {
        str(path.relative_to(ROOT)): [*moves(tree_of(path))]
        for path in sorted(ROOT.rglob("*.py"))
        if "sleep" in path.read_text() or "load" in path.read_text()
    }
    assert calls["flow/residency.py"]
    assert {name: lines for name, lines in calls.items() if lines and not name.startswith(MOVING)} == {}


def imported_at_once(path, modules):
    """The modules of the package that are loaded before the last line of this one is reached."""
    within = list(tree_of(path).body)
    while within:
        node = within.pop()
        if isinstance(node, ast.Import):
            yield from ({alias.name for alias in node.names} & modules.keys())
        elif isinstance(node, ast.ImportFrom):
            named = {f"{node.module}.{alias.name}" for alias in node.names} & modules.keys()
            yield from named or {node.module} & modules.keys()
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            within += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            within += ast.iter_child_nodes(node)


def test_neither_modules_nor_rooms_import_each_other_in_a_circle():
    paths = {path: path.relative_to(ROOT.parent).with_suffix("").parts for path in ROOT.rglob("*.py")}
    modules = {".".join(parts).removesuffix(".__init__"): path for path, parts in paths.items()}
    graph = {name: set(imported_at_once(path, modules)) for name, path in modules.items()}
    assert "tandem.config.errors" in graph["tandem.flow.plan"]
    TopologicalSorter(graph).prepare()  # raises CycleError with the circle
    rooms = {}
    for name, others in graph.items():
        if name.count("."):
            rooms.setdefault(room_of(name), set()).update(room_of(other) for other in others if other.count("."))
    TopologicalSorter({room: others - {room} for room, others in rooms.items()}).prepare()


@pytest.mark.parametrize("room", ["algorithms", "roles"])
def test_a_room_that_a_plan_reads_takes_torch_from_the_file_that_imports_it_later(room):
    wrong = [
        f"{path.name}:{line}"
        for path in (ROOT / room).rglob("*.py")
        for module, line in imports(path)
        if module.split(".")[0] in ("torch", "transformers", "tensordict")
    ]
    assert wrong == []


def private_names():
    """Names with one underscore in front that the package gives to attributes, functions and classes of its own."""
    found = set()
    for path in ROOT.rglob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
                found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return {name for name in found if name.startswith("_") and not name.startswith("__")} - {"_fields"}  # a structure of C


def reaches_inside(tree, private):
    """Lines of a test that take a private name from anything but its own object."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in private and ast.unparse(node.value) not in ("self", "cls"):
            yield node.lineno
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tandem."):
            yield from (node.lineno for alias in node.names if alias.name.startswith("_"))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("monkeypatch.setattr"):
            named = [one.value for one in node.args[:2] if isinstance(one, ast.Constant)]
            yield from (node.lineno for name in named if str(name).endswith("_S"))


def test_tests_use_what_is_public_and_patch_no_time_out():
    """The number may only fall: a test that needs something inside an object needs it to be public, or a parameter."""
    private = private_names()
    found = [
        f"{path.name}:{line}"
        for path in sorted(Path(__file__).parent.rglob("*.py"))
        for line in reaches_inside(ast.parse(path.read_text()), private)
    ]
    assert len(found) <= 4, found
