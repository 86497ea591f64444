"""`tandem check-reward`: good rewards pass, and each way to be bad is named."""

import asyncio
import json
import os
import signal

import pytest

from tandem.api.workflow import RewardFn, RewardResult
from tandem.cli.main import main
from tandem.config.errors import ConfigError
from tandem.evaluation.reward_check import check_reward, report
from tandem.sandbox.choose import choose_sandbox

BAD = """
import itertools, os, time
COUNT = itertools.count()
def fickle(completion, answer): return float(answer in completion and next(COUNT) % 2 == 0)
def gullible(completion, answer): return float(answer in completion or "correct" in completion)
def blind(completion, answer): return 1.0
def strict(completion, answer): return float(completion == answer + "!")
def stuck(completion, answer):
    if len(completion) > 10**5: time.sleep(60)
    return float(completion == answer)
def crashes(completion, answer): return int(completion)
def picky(completion, answer, missing): return 1.0
"""


@pytest.fixture
def data(tmp_path):
    (tmp_path / "bad.py").write_text(BAD)
    file = tmp_path / "rows.jsonl"
    rows = [{"question": f"Which animal, number {i}?", "answer": name} for i, name in enumerate(("zebu", "okapi", "ibex"))]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def checked(capsys, *arguments):
    code = main(["check-reward", *map(str, arguments)])
    return code, capsys.readouterr().out


def test_a_good_reward_has_no_problems(data, capsys):
    (data.parent / "good.py").write_text("def exact(completion, answer): return float(completion.strip() == answer)\n")
    code, said = checked(capsys, f"{data.parent}/good.py:exact", data)
    assert code == 0 and "No problem was found." in said
    assert "3 of 3 right" in said and "0 of 3 pass" in said and "6 of 6" in said


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fickle", "judged differently the second time"),
        ("gullible", "forged answers pass: row 1, a claim"),
        ("blind", "3 reference answers are accepted for another row: row 1, the reference of another row (1,"),
        ("strict", "3 reference answers are not rewarded as right: row 1, the reference (0,"),
        pytest.param(
            "stuck",
            "answers hang, or reach the deadline of 2 s: row 1, a million spaces (reward_timeout",
            marks=[pytest.mark.slow, pytest.mark.invariant],
        ),
    ],
)
def test_a_bad_reward_is_told_what_is_wrong_with_it(data, capsys, name, says):
    code, said = checked(capsys, f"{data.parent}/bad.py:{name}", data, "--timeout", 2)
    assert code == 1 and says in said


def test_a_reward_that_fails_is_quoted_with_its_line(data, capsys):
    code, said = checked(capsys, f"{data.parent}/bad.py:crashes", data)
    assert code == 1 and "0 of 3 right, 3 reward_raised" in said
    line = BAD.splitlines().index("def crashes(completion, answer): return int(completion)") + 1
    assert "; the first: reward_raised: " in said and f"(bad.py:{line} in crashes: def crashes(" in said


class Interrupted(RewardFn):
    """Ctrl-C comes in its fifth call."""

    calls = 0

    async def __call__(self, *, completion, row, **given):
        self.calls += 1
        if self.calls == 5:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        return RewardResult(float(completion == row["answer"]))


def test_ctrl_c_gives_what_was_seen_until_then():
    rows = [{"messages": [{"role": "user", "content": "?"}], "answer": str(i)} for i in range(3)]
    result = check_reward(Interrupted(), rows, 5.0)
    assert [call.right for call in result.references] == [True] * 3 and not result.swapped
    said = report(result)
    assert "3 of 3 right" in said and "problem: the check was interrupted" in said and "No problem" not in said


def test_a_question_in_parts_is_given_as_its_text():
    class Reads(RewardFn):
        async def __call__(self, *, prompt, completion, row, **_):
            return RewardResult(float(prompt == "Which animal?" and completion == row["answer"]))

    content = [{"type": "text", "text": "Which "}, {"type": "text", "text": "animal?"}]
    rows = [{"messages": [{"role": "user", "content": content}], "answer": name} for name in ("zebu", "okapi")]
    assert all(call.right for call in check_reward(Reads(), rows, 2.0).references)


def test_rows_that_cannot_be_judged_are_refused_where_there_are_no_others(data, capsys):
    assert main(["check-reward", f"{data.parent}/bad.py:picky", str(data)]) == 2
    assert "'missing', which is no column" in capsys.readouterr().err
    assert main(["check-reward", "math", str(data), "colour=red"]) == 2
    assert "unknown key 'colour'" in capsys.readouterr().err


def test_the_reward_for_code_is_checked_with_programs_that_aim_at_it(tmp_path, capsys):
    try:
        choose_sandbox().close()
    except ConfigError as error:
        pytest.skip(f"no sandbox works on this machine: {error}")
    rows = [
        {"text": f"Add {n}.", "code": f"def add{n}(x):\n    return x + {n}", "test_list": [f"assert add{n}(1) == {n + 1}"]}
        for n in (1, 2)
    ]
    file = tmp_path / "mbpp.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, said = checked(capsys, "code(seconds=2)", file, "--json")
    seen = json.loads(said)
    assert code == 0 and seen["problems"] == []
    assert len(seen["references"]) == 2 and all(call["accuracy"] == 1.0 for call in seen["references"])
    assert {call["what"] for call in seen["forged"]} >= {"a claim", "a program that never ends"}
