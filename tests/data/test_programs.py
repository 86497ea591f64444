"""Data sets of programs: four layouts of columns, one case format."""

import base64
import json
import pickle
import zlib

import pytest

from tandem.api.sandbox import ProgramTests, StdinCase
from tandem.config.data import DatasetConfig
from tandem.config.errors import ConfigError
from tandem.data.files import RawRow
from tandem.data.rows import normalise
from tandem.data.table import Table

HUMANEVAL = {
    "task_id": "t/0",
    "prompt": 'from math import pi\n\ndef two():\n    """2"""\n',
    "canonical_solution": "    return 2\n",
    "test": "def check(candidate):\n    assert candidate() == 2",
    "entry_point": "two",
}
MBPP = {
    "task_id": 1,
    "text": "Write a function to add.",
    "code": "import math\r\nPI = 3\r\ndef add(a, b):\r\n  return a + b\r\ndef helper(): pass",
    "test_list": ["assert add(1, 2) == 3", "assert math.isclose(add(1, 1), PI - 1)"],
    "test_setup_code": "",
    "challenge_test_list": [],
}
PRINTS = {"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", ["7"]]}
APPS = {"problem_id": 0, "question": "Add.", "solutions": json.dumps(["print(sum(map(int, input().split())))"])}
CASE = {"input": "[1, 2]\n5", "output": "[1, 2, 5]", "testtype": "functional"}
LCB = {
    "question_content": "Append.",
    "starter_code": "class Solution:\n    def append(self, a, b):\n        ",
    "public_test_cases": json.dumps([CASE]),
    "private_test_cases": json.dumps([CASE]),
    "metadata": json.dumps({"func_name": "append"}),
}


def read(columns, **config):
    row = normalise(Table([RawRow(columns, "file:1")], DatasetConfig(**config)), source="x")[0]
    tests = row["program_tests"]
    return row, None if tests is None else ProgramTests.from_column(tests)


def question(row):
    return row["messages"][-1]["content"]


def test_humaneval_is_one_check_and_its_prompt_is_what_answer_and_tests_count_on():
    row, tests = read(HUMANEVAL)
    assert tests.names == ("two",) and tests.preamble == HUMANEVAL["prompt"] and tests.cases[0].endswith("check(two)")
    assert HUMANEVAL["prompt"].strip() in question(row) and "candidate" not in question(row)
    assert row["answer"] == f"```python\n{HUMANEVAL['prompt']}    return 2\n\n```"


def test_mbpp_shows_its_first_assertion_and_hides_the_others():
    row, tests = read(MBPP)
    assert tests.cases == tuple(MBPP["test_list"]) and tests.names == ("add", "PI") and tests.setup == "import math"
    assert MBPP["test_list"][0] in question(row) and MBPP["test_list"][1] not in question(row)


def test_apps_has_programs_and_functions_and_rows_without_tests():
    row, tests = read(APPS | {"input_output": json.dumps(PRINTS)})
    assert tests.cases == (StdinCase("1 2\n", "3\n"), StdinCase("3\n4", "7")) and "standard input" in question(row)
    called = {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}
    row, tests = read(APPS | {"input_output": json.dumps(called), "starter_code": "def add(a, b):"})
    assert tests.names == ("add",) and "add(*[1, 2])" in tests.cases[0] and "def add(a, b):" in question(row)
    assert read(APPS | {"input_output": ""})[1] is None


def test_livecodebench_has_public_and_packed_hidden_tests_and_loads_no_pickle():
    row, tests = read(LCB)
    assert tests.names == ("append",) and len(tests.cases) == 2 and "append(*[[1, 2], 5])" in tests.cases[0]
    assert "class Solution" in question(row)
    hidden = [{"input": "1", "output": "2", "testtype": "stdin"}]
    packed = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(hidden)))).decode()
    programs = {"public_test_cases": "[]", "private_test_cases": packed, "metadata": "{}"}
    assert read(LCB | programs)[1].cases == (StdinCase("1", "2"),)
    hostile = base64.b64encode(zlib.compress(pickle.dumps((print, "a", "b")))).decode()
    with pytest.raises(ConfigError, match=r"file:1.*livecodebench"):
        read(LCB | {"private_test_cases": hostile})


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (MBPP | {"test_list": "assert"}, "test_list"),
        (MBPP | {"code": "def ("}, "not valid Python"),
        (APPS | {"input_output": "{"}, "apps"),
        (HUMANEVAL | {"entry_point": 3}, "entry_point"),
    ],
)
def test_a_row_of_another_form_is_refused_with_its_place(columns, says):
    with pytest.raises(ConfigError, match=rf"file:1.*{says}"):
        read(columns)


def test_your_own_columns_and_your_own_cases_come_first():
    row, _ = read(MBPP | {"mine": "Please add."}, prompt_column="mine")
    assert question(row) == "Please add."
    own = {"names": ["add"], "cases": ["assert add(1, 1) == 2"]}
    assert read(MBPP | {"program_tests": own, "question": "Add."})[1].cases == ("assert add(1, 1) == 2",)
