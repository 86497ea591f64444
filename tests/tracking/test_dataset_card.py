"""The records of a run are one table: each line has the columns of the card, and Hugging Face's `datasets` loads the run."""

import importlib.util
import json
import math
import os
import subprocess
import sys

import pytest

from tandem import load_trajectories
from tandem.api.workflow import Dropped, Group
from tandem.tracking.tracker import columns, write_card
from tests.foreign.peers import ENVS
from tests.tracking.test_recorder import CALL, MESSAGES, group, record, sample

HUGE = 2**80
PYTHON = {"int64": int, "float64": float, "string": str, "bool": bool}
OWN = ENVS / "datasets/bin/python"
LOADER = sys.executable if importlib.util.find_spec("datasets") else str(OWN)


@pytest.fixture
def run(tmp_path):
    """Three steps: plain samples whose columns are mostly empty, every column filled, and dropped prompts."""
    record(tmp_path, 1, [group(0, sample(1, rewards={}), sample(0.0, rewards={}))])
    call = {"type": "function", "function": {"name": "power", "arguments": {"base": HUGE, "digits": None}}}
    said = (MESSAGES[0], {"role": "assistant", "content": [{"type": "text", "text": "hm"}], "tool_calls": [CALL, call]})
    full = sample(1.0, messages=said, conversations=(MESSAGES, said), words={"style": "Score: 7"}, answer="7", accuracy=1.0)
    odd = Group((sample(0.5),), 3, data={"answer": {"odd": [1, math.nan]}}, failures=("deadline",))
    record(tmp_path, 2, [group(1, sample(0.0), full, source="sums"), odd])
    dropped = [Dropped("deadline", "late", Group((), 9, data={"messages": [MESSAGES[0]]})), Dropped("filter", "", group(5))]
    record(tmp_path, 10, [group(6)], dropped=dropped)
    write_card(tmp_path)
    return tmp_path


def rows(run):
    """The lines; numbers as `datasets` reads them, to ten digits."""
    lines = [line for step in (1, 2, 10) for line in (run / f"trajectories/step_{step}.jsonl").read_text().splitlines()]
    refuse = lambda name: pytest.fail(f"{name} is no JSON")  # noqa: E731
    return [json.loads(line, parse_constant=refuse, parse_float=lambda text: round(float(text), 10)) for line in lines]


def fits(value, column):
    """True if a column of this type can hold the value."""
    inner = column.get("list")
    if value is None or column.get("dtype") == "json" or inner == "json":
        return value is None or inner is None or isinstance(value, list)
    if inner is not None:
        return isinstance(value, list) and all(
            fits(one, inner if isinstance(inner, dict) else {"dtype": inner}) for one in value
        )
    return type(value) is PYTHON[column["dtype"]]


def test_every_line_has_the_same_columns_and_types(run):
    named = {column["name"]: column for column in columns()}
    for row in rows(run):
        assert row.keys() == named.keys()
        assert [name for name, value in row.items() if not fits(value, named[name])] == []
    (call,) = [one for one in load_trajectories(run, 2) if one.judges]
    assert call.messages[1]["tool_calls"][1]["function"]["arguments"]["base"] == str(HUGE)  # no table holds the number


def test_a_page_that_somebody_wrote_stays_and_an_older_one_of_ours_does_not(run):
    write_card(run, ["train_dataset reads: question"])
    assert "train_dataset reads: question" in (run / "README.md").read_text()
    write_card(run)
    ours = (run / "README.md").read_text()
    for text, left in (("# My run\n", "# My run\n"), (ours.replace("accuracy", "precision"), ours)):
        (run / "README.md").write_text(text)
        write_card(run)
        assert (run / "README.md").read_text() == left


LOAD = """
import json, sys
from datasets import disable_progress_bars, load_dataset
disable_progress_bars()
for row in load_dataset(sys.argv[1], split="train", cache_dir=sys.argv[2]):
    print(json.dumps(row))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists(LOADER), reason="datasets is not there; scripts/foreign_agents.sh makes it")
def test_datasets_loads_a_run_as_one_table(run, tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("cache"))
    quiet = os.environ | {"HF_HOME": cache, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    done = subprocess.run([LOADER, "-c", LOAD, str(run), cache], capture_output=True, text=True, timeout=300, env=quiet)
    assert done.returncode == 0, done.stderr[-3000:]
    loaded = [json.loads(line) for line in done.stdout.splitlines()]
    expected = [row | {"answer": 7 if row["answer"] == "7" else row["answer"]} for row in rows(run)]  # JSON in a text
    assert sorted(loaded, key=lambda row: row["step"]) == expected
