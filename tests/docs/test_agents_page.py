"""docs/agents.md: every command of its walk from a tool to a foreign program trains, on the files that the pages show."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from tandem.cli.main import main
from tandem.config.errors import ConfigError
from tandem.sandbox.choose import choose_sandbox
from tests.tiny import tiny_model_folder

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
COMMANDS = re.findall(r"^```\n(tandem train .*?)\n```", (DOCS / "agents.md").read_text(), re.M | re.S)
SOLVE = """
import json, os, sys, urllib.request
asked = {"model": "policy", "messages": [{"role": "user", "content": sys.argv[1]}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
address = os.environ["OPENAI_BASE_URL"].rstrip("/") + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(address, json.dumps(asked).encode(), headers)).read()
"""
KEYS = """
actor: {path: MODEL, dtype: float32}
train_dataset: {path: addition}
evaluate: {every_steps: null}
threads: 1
total_train_steps: 1
rollout: {batch_size: 2, dtype: float32, engine: {kv_cache_gib: 0.05}}
gconfig: {n_samples: 2, max_new_tokens: 8}
tracking: {plot_every_steps: null}
"""


def shown(page, name):
    """The file of this name that a page shows."""
    blocks = re.findall(r"^```python3?\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)
    (text,) = [block for block in blocks if re.match(rf"# (?:agent/)?{name}\b", block)]
    return text


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The files of a reader who followed the pages, and a program of somebody else."""
    for page, name in [
        ("agents.md", "my_tools.py"),
        ("agents_tools.md", "my_shop.py"),
        ("agents_environments.md", "my_game.py"),
        ("agents.md", "my_agent.py"),
        ("agents.md", "my_solver.py"),
        ("agents_programs.md", "play.py"),
    ]:
        (tmp_path / name).write_text(shown(page, name))
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent/play.py").write_text(shown("agents_programs.md", "play.py"))
    (tmp_path / "agent/solve.py").write_text(SOLVE)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "my_run.yaml").write_text(
        KEYS.replace("MODEL", str(tiny_model_folder(tmp_path, max_position_embeddings=4096)))
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.invariant
@pytest.mark.parametrize("command", COMMANDS, ids=["function", "state", "game", "coroutine", "loop", "program", "foreign"])
def test_each_command_of_the_walk_trains_a_step(command, folder):
    words = shlex.split(
        command.replace("\\\n", " ").replace("examples/number_game.yaml", "my_run.yaml workflow=environment")
    )
    if "workflow=program" in words:
        try:
            choose_sandbox(size=1).close()
        except ConfigError as error:
            pytest.skip(str(error).splitlines()[-1])
    words += ["workflow_args.action=number"] if "workflow=environment" in words else ["reward=exact_number"]
    # The interpreter's own folder: a virtual environment may lie in /tmp, which programs have for themselves.
    python = Path(sys.base_prefix)
    words = [
        word.replace("/opt/agent/bin/python", f"{python}/bin/python3").replace("/opt/agent", str(python)) for word in words
    ]
    assert main([*words[1:], "run.root=runs"]) == 0
    (metrics,) = folder.glob("runs/*/*/metrics.jsonl")
    assert json.loads(metrics.read_text().splitlines()[-1])["episodes/trained"] == 2
