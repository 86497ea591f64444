"""docs/agents_recorder.md: its agent trains, and each row of its table of faults is the subject of a test."""

import ast
import json
import re
from pathlib import Path

from tandem.cli.main import main
from tests.tiny import tiny_model_folder

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/agents_recorder.md").read_text()
TESTS = ("test_recorder_sessions.py", "test_agent_workflow.py")


def test_the_agent_of_the_page_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    (command,) = re.findall(r"^```bash\ntandem (.*)\n```", PAGE, re.M)
    (tmp_path / "my_agent.py").write_text(code)
    keys = f"run.root=runs actor.path={tiny_model_folder(tmp_path)} actor.dtype=float32 rollout.dtype=float32 threads=1"
    keys += " rollout.batch_size=2 rollout.engine.kv_cache_gib=0.05 gconfig.n_samples=2 gconfig.max_new_tokens=8"
    keys += " valid_dataset.path=addition evaluate.every_steps=null total_train_steps=1 tracking.plot_every_steps=null"
    assert main([*command.split(), *keys.split()]) == 0
    (metrics,) = tmp_path.glob("runs/*/*/metrics.jsonl")
    assert json.loads(metrics.read_text().splitlines()[-1])["rollout/recorded/turns"] == 3


def test_each_fault_of_the_table_is_made_by_a_test_that_names_it():
    table = PAGE.partition("| fault |")[2].splitlines()[2:]
    names = [re.findall(r"`(\S+?)`", line.split("|")[-2])[0] if "`at most`" not in line else "at most" for line in table]
    tested = ""
    for name in TESTS:
        text = (ROOT / "tests/rollout" / name).read_text()
        functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and "test_" in node.name]
        lines = text.splitlines()
        for function in functions:
            first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
            tested += "\n".join(lines[first - 1 : function.end_lineno])
    assert len(names) == 24 and [name for name in names if name not in tested] == []
