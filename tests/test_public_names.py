"""`from tandem import …` gives what a script needs, loads it when it is asked for, and says what was meant."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tandem

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def imports(source: str) -> list[tuple[str, str]]:
    """(module, name) of every import; the name is empty where a module is imported whole."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(str(node.module), alias.name) for alias in node.names]
    return found


def in_a_new_process(lines: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("name", tandem.__all__)
def test_each_public_name_is_an_object_that_says_what_it_is(name):
    value = getattr(tandem, name)
    assert value.__name__ == name and (value.__doc__ or "").strip()
    assert value.__module__.startswith("tandem.")


def test_one_list_of_names_holds_for_scripts_for_editors_and_for_loading():
    source = ast.parse(Path(tandem.__file__).read_text())
    (block,) = [node for node in source.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    typed = {alias.name: node.module for node in block.body for alias in node.names}
    assert {name: tandem.home_of(name) for name in tandem.__all__} == typed
    assert sorted(typed) == sorted(tandem.__all__) and len(set(tandem.__all__)) == len(tandem.__all__)
    assert set(tandem.__all__) <= set(dir(tandem))


def test_importing_tandem_loads_no_torch_and_the_settings_are_there_when_a_name_does():
    done = in_a_new_process(
        "import os, sys, tandem\n"
        "heavy = {'torch', 'transformers', 'tensordict', 'numpy', 'yaml'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "from tandem import Actor, ConfigError, load_config, plan_run\n"
        "assert 'torch' not in sys.modules\n"
        "from tandem import ChatWorkflow\n"
        "from tandem.config import libraries\n"
        "assert 'torch' in sys.modules and not libraries.torch_came_first\n"
        "assert all(name in os.environ for name in libraries.SETTINGS)\n"
        "from tandem import flow\n"
    )
    assert done.returncode == 0, done.stderr


def test_a_name_that_is_not_there_fails_with_the_nearest_one():
    with pytest.raises(AttributeError, match="no public name 'PhaseTime'; did you mean 'PhaseTimer'"):
        _ = tandem.PhaseTime
    with pytest.raises(ImportError, match="no public name 'open_trainig'; did you mean 'open_training'"):
        from tandem import open_trainig  # noqa: F401, PLC0415
    assert not hasattr(tandem, "quux") and not hasattr(tandem, "__wrapped__")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_imports_only_public_names_model_makers_and_the_standard_library(example):
    others = {"torch", "transformers", "tokenizers", *sys.stdlib_module_names}
    for module, name in imports(example.read_text()):
        public = module == "tandem" and name in tandem.__all__
        assert public or module.split(".")[0] in others, f"{example.name} imports {module} {name}"


def test_the_table_of_public_names_in_the_documentation_is_complete():
    page = (ROOT / "docs/concepts.md").read_text().split("## Public names")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(tandem.__all__)


def test_a_third_of_the_first_example_is_its_loop_in_the_order_of_the_field():
    source = (ROOT / "examples/addition_grpo.py").read_text()
    (loop,) = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.For)]
    lines = source.splitlines()
    assert (loop.end_lineno - loop.lineno + 1) * 3 >= len(lines)
    calls = (
        "prepare_batch",
        "verify_if_due",
        "compute_proximal",
        "compute_advantages",
        "ppo_update",
        "publish",
        "end_step",
        "evaluate_if_due",
        "log",
        "save_if_due",
    )
    text = "\n".join(lines[loop.lineno - 1 : loop.end_lineno])
    assert re.findall(rf"\.({'|'.join(calls)})\(", text) == list(calls)
