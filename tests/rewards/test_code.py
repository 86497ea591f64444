"""The reward for code: what it takes for the program, what passes, what fails, and when there is no verdict."""

import asyncio
import contextlib
import json
import math
import os
import signal
import time
from collections import Counter, OrderedDict, namedtuple
from pathlib import Path

import pytest

from tandem.api.failures import RewardFailure, SandboxLost
from tandem.api.sandbox import Outcome, ProgramTests, Sandbox
from tandem.api.services import Services
from tandem.config.data import DatasetConfig
from tandem.config.errors import ConfigError
from tandem.data.files import RawRow
from tandem.data.rows import normalise
from tandem.data.table import Table
from tandem.rewards.build import build_reward
from tandem.rewards.code import CodeReward, find_code, same_output
from tandem.rewards.code_guest import NotLiteral, decode, encode, write
from tandem.sandbox.choose import choose_sandbox
from tests.rewards.hostile_answers import HOSTILE, PROGRAM_TESTS, TESTS, table
from tests.sandbox.machine import descendants

PAGE = Path(__file__).parents[2] / "docs" / "code.md"


@pytest.fixture(scope="module")
def sandbox():
    try:
        pool = choose_sandbox()
    except ConfigError as error:
        pytest.skip(f"no sandbox works on this machine: {error}")
    yield pool
    pool.close()


class Lent(Sandbox):
    """A sandbox that its reward may close and that goes on; the first ``losses`` programs are lost."""

    def __init__(self, sandbox, losses=0):
        self.sandbox, self.losses, self.name = sandbox, losses, sandbox.name

    def lose(self):
        self.losses -= 1
        return self.losses >= 0

    async def run(self, program, limits=None):
        return Outcome("lost", stderr=b"killed") if self.lose() else await self.sandbox.run(program, limits)

    async def start(self, program, limits=None):
        if self.lose():
            raise SandboxLost("killed")
        return await self.sandbox.start(program, limits)

    async def open(self, files=None, limits=None):
        return await self.sandbox.open(files, limits)

    def close(self):
        pass


def judge(sandbox, answer, tests, spec="code(seconds=5)", losses=0):
    """(value, verdict or the reason why there is none)."""
    reward = build_reward(spec, timeout_s=20, services=Services(sandbox=Lent(sandbox, losses)))

    async def both():
        result = await reward(prompt="", completion=answer, prompt_ids=(), completion_ids=(), row={"program_tests": tests})
        return result, await reward.judge(answer, ProgramTests.from_column(tests))

    try:
        return asyncio.run(both())
    except RewardFailure as failure:
        return None, failure


ADD = {"names": ["add"], "cases": ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add('a', 'b') == 'ab'"]}


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("```python\na = 1\n```", "a = 1\n"),
        ("First\n```\na = 1\n```\nthen\n```py\nb = 2\n```\nDone.", "b = 2\n"),
        ("~~~\na = '```'\n~~~", "a = '```'\n"),
        ("````\n```\nin\n```\n````", "```\nin\n```\n"),
        ("```python\na = 1\n```\n```python\ncut of", "a = 1\n"),
        ("```python\na = 1", "a = 1\n"),
        ("def f():\n    return 1", "def f():\n    return 1"),
        ("   ```python\n    return 1\n   ```", "    return 1\n"),
        ("  ```python\n  if a:\n\n      b = 1\n  ```", "if a:\n\n    b = 1\n"),
        ("```\na = '\u2028\x85\x0b\x0c\x1c'\r\nb = 1\n```", "a = '\u2028\x85\x0b\x0c\x1c'\nb = 1\n"),
        ("\ufeff```\na = 1\n```", "a = 1\n"),
        ("```\n\ufeffa = '\ufeff'\n```", "a = '\ufeff'\n"),
        ("\ufeffa = 1", "a = 1"),
        ("```\n\n```", None),
        ("", None),
    ],
)
def test_the_program_is_the_last_whole_block_of_the_answer_or_all_of_it(answer, code):
    assert find_code(answer) == code


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1 2\n3\n\n", "1  2 \n3", True),
        ("1\n2", "1 2", False),
        ("0.3333333333", "0.33333333", True),
        ("0.34", "0.33333333", False),
        ("5.0", "5", True),
        ("1000000000000001", "1000000000000002", False),  # whole numbers are exact
        ("Yes", "YES", False),
        ("nan", "nan.", False),
        ("６", "6.0", False),
        ("1e999", "1.0", False),
        ("1e-7", "0.0", True),  # absolutely
        ("1000000.5", "1000000.0", True),  # relatively
        ("1000000006", "1e9", False),
        ("", "\n", True),
    ],
)
def test_outputs_are_the_same_words_in_the_same_lines_and_decimals_to_a_tolerance(printed, expected, same):
    assert same_output(printed, expected, 1e-6) is same


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 7, -(10**40), 1.5, math.inf, -math.inf, 1e-300, 2 - 3j, "a\ud800\n", b"\x00\xff"),
        [1, (2, [3]), {4: {5}, (6,): frozenset({7})}, ()],
        [1 << 20_000, -(1 << 20_000), (1 << 63) - 1, -(1 << 63)],  # more digits than Python reads
        {"d": 1, "t": {"s": [1]}},
    ],
)
def test_a_literal_travels_as_it_is(value):
    back = decode(json.loads(write({"": encode(value)}))[""])  # as it does between two processes
    assert back == value and type(back) is type(value)


def test_a_subclass_travels_as_its_base_and_what_is_no_literal_is_named():
    assert decode(encode([Counter("aab"), Pair(1, 2), OrderedDict(a=1)])) == [{"a": 2, "b": 1}, (1, 2), {"a": 1}]
    assert math.isnan(decode(encode(math.nan)))
    for value, name in [(range(3), "range"), ([object()], "object"), ({}.keys(), "dict_keys"), (iter([]), "list_iterator")]:
        with pytest.raises(NotLiteral, match=name):
            encode(value)


@pytest.mark.parametrize("sent", [{"x": 1}, {"t": 5}, {"f": "1"}, {"s": [[1]]}, {"d": [[[], 1]]}, {"t": [], "s": []}, {}])
def test_what_no_literal_is_written_as_is_refused(sent):
    with pytest.raises((ValueError, TypeError, KeyError)):
        decode(sent)


@pytest.mark.parametrize(
    ("column", "says"),
    [
        (None, "must be"),
        ({"cases": []}, "must be"),
        ({"cases": ["assert 1"]}, "no names"),
        ({"names": ["f"], "cases": [{"stdin": "", "stdout": ""}]}, "there are names"),
        ({"names": ["f g"], "cases": ["assert 1"]}, "Python names"),
        ({"cases": [{"stdin": "", "stdout": ""}], "setup": "x"}, "need names"),
        ({"cases": [{"stdin": "", "stdout": ""}], "test": "x"}, "no key 'test'"),
    ],
)
def test_a_column_of_another_form_is_refused_and_says_what_it_should_be(column, says):
    with pytest.raises(ConfigError, match=says):
        ProgramTests.from_column(column)


def test_a_case_format_is_the_same_after_writing_and_reading():
    for column in (ADD, {**ADD, "setup": "import math", "preamble": "x = 1"}, PROGRAM_TESTS):
        assert ProgramTests.from_column(column).as_column() == column


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("code(credit=most)", "credit must be"),
        ("code(seconds=99)", "at most reward_timeout_s"),
        ("code(tolerance=2)", "0…1"),
    ],
)
def test_a_knob_that_cannot_be_is_refused(spec, says, sandbox):
    with pytest.raises(ConfigError, match=says):
        build_reward(spec, timeout_s=20, services=Services(sandbox=Lent(sandbox)))


def test_without_a_sandbox_the_reward_is_refused_and_without_tests_the_row(sandbox):
    with pytest.raises(ConfigError, match="asks for 'sandbox'"):
        build_reward("code", timeout_s=20, services=Services({"sandbox": None}))
    reward = build_reward("0.5*code + length", timeout_s=20, services=Services(sandbox=Lent(sandbox)))
    with pytest.raises(ConfigError, match="program_tests"):
        reward.check_row({"answer": "1"})


def test_all_or_nothing_and_the_share_of_cases(sandbox):
    numbers_only = "```python\ndef add(a, b):\n    return int(a) + b\n```"
    assert judge(sandbox, "def add(a, b): return a + b", ADD)[0].value == 1.0
    result, verdict = judge(sandbox, numbers_only, ADD)
    assert (result.value, result.accuracy, verdict.passed) == (0.0, 0.0, (True, True, False))
    assert "invalid literal for int" in verdict.detail
    result, verdict = judge(sandbox, numbers_only, ADD, "code(credit=share)")
    assert (result.value, result.accuracy) == (2 / 3, 0.0)


def test_a_program_is_judged_by_what_it_prints_for_each_input(sandbox):
    right = "import sys\nfor line in sys.stdin: print(int(line) * 2.0)"
    assert judge(sandbox, right, PROGRAM_TESTS)[0].value == 1.0
    for before in ("import sys\nout = sys.__stdout__", "import os\nout = os.fdopen(os.dup(1), 'w')", "out = open(1, 'w')"):
        assert judge(sandbox, before + "\nout.write(str(int(input()) * 2))", PROGRAM_TESTS)[0].value == 1.0
    coding = "# coding: utf-7\nprint(int(input()) * 2 if ascii('é') == ascii(chr(233)) else 0)"
    assert judge(sandbox, coding, PROGRAM_TESTS)[0].value == 1.0
    result, verdict = judge(sandbox, "print(abs(int(input())) * 2)", PROGRAM_TESTS, "code(credit=share)")
    assert (result.value, verdict.reason) == (0.5, "wrong")


def test_a_program_that_fails_is_told_by_its_failure(sandbox):
    for answer in ("raise ValueError", "print(2 * int(input()))\nraise ValueError"):
        assert judge(sandbox, answer, PROGRAM_TESTS)[1].reason == "error"


def test_a_function_may_change_its_arguments_in_place(sandbox):
    cases = [
        "a = [3, 1]\nassert order(a) is None\nassert a == [1, 3]",
        "d = {1: [2]}\norder(d)\nassert d == {1: [2], 9: 9}",
        "s = {1}\norder(items=s)\nassert s == {1, 5}",
        "class Own(list): pass\na = Own([3, 1])\norder(a)\nassert a == [1, 3] and type(a) is Own",
    ]
    answer = (
        "def order(items):\n    if isinstance(items, list): items.sort()\n"
        "    elif isinstance(items, dict): items[9] = 9\n    else: items.add(5)"
    )
    assert judge(sandbox, answer, {"names": ["order"], "cases": cases})[0].value == 1.0


def test_the_dicts_of_collections_are_themselves_on_both_sides(sandbox):
    cases = [
        "c = Counter('aab')\nchange(c)\nassert c['new'] == 1 and c.most_common(1) == [('a', 2)]",
        "d = defaultdict(int, a=1)\nchange(d)\nassert d == {'a': 1, 'new': 1} and d['b'] == 0",
        "o = OrderedDict(new=0, b=2)\nassert change(o) == OrderedDict(b=2, new=1) == o",
    ]
    tests = {"names": ["change"], "setup": "from collections import *", "cases": cases}
    answer = "def change(d):\n    d['new'] += 1\n    if hasattr(d, 'move_to_end'): d.move_to_end('new')\n    return d"
    assert judge(sandbox, answer, tests)[0].value == 1.0
    wrong = judge(sandbox, answer.replace("move_to_end('new')", "popitem()"), tests, "code(credit=share)")[1]
    assert wrong.passed == (True, True, False)


def test_errors_reach_the_tests_as_the_built_in_kind_nearest_to_them(sandbox):
    case = "try:\n    f(0)\nexcept ValueError as error:\n    assert 'zero' in str(error)\nelse:\n    assert False"
    tests = {"names": ["f"], "cases": [case]}
    own = "class Zero(ValueError): pass\ndef f(x): raise Zero('zero')"
    assert judge(sandbox, own, tests)[0].value == 1.0
    assert judge(sandbox, "def f(x): raise TypeError('zero')", tests)[0].value == 0.0


def test_a_solution_class_a_whole_function_and_the_rest_of_one_are_all_answers(sandbox):
    head = {"names": ["add"], "cases": ["assert add(1, 2) == 3"], "preamble": "from math import inf\ndef add(a, b):\n"}
    for answer in ("    return min(a + b, inf)", "def add(a, b): return min(a + b, inf)"):
        assert judge(sandbox, answer, head)[0].value == 1.0
    assert judge(sandbox, "class Solution:\n    def add(self, a, b): return a + b", ADD)[0].value == 1.0


def test_helpers_of_the_tests_are_their_own_and_not_those_of_the_answer(sandbox):
    helper = "def twice(x):\n    return 2 * x\n\ndef half(x):\n    '''Half of x.'''\n"
    tests = {"names": ["half"], "cases": ["assert half(twice(7)) == 7"], "preamble": helper}
    assert judge(sandbox, "def half(x): return x // 2", tests)[0].value == 1.0
    assert judge(sandbox, "def twice(x): return x\ndef half(x): return x", tests)[0].value == 0.0


def test_a_value_that_cannot_be_compared_is_a_failure_and_never_a_reward(sandbox):
    assert judge(sandbox, "def add(a, b): return iter([a, b])", ADD)[1].reason == "not_comparable"
    objects = {"names": ["f"], "cases": ["assert f(object()) == 1"]}
    assert judge(sandbox, "def f(x): return 1", objects)[1].reason == "not_comparable"


def test_tests_that_are_broken_themselves_are_a_failure(sandbox):
    for tests in ({**ADD, "setup": "import no_such_module"}, {**ADD, "cases": ["assert add(1, 2 == 3"]}):
        assert judge(sandbox, "def add(a, b): return a + b", tests)[1].reason == "tests_broken"


def test_an_answer_that_breaks_the_setup_is_wrong_and_the_tests_are_not_broken(sandbox):
    tests = {"names": ["make"], "setup": "first = make(1)[0]", "cases": ["assert first == 1", "assert make(2) == [2]"]}
    assert judge(sandbox, "def make(x): return [x]", tests)[0].value == 1.0
    for answer in ("def make(x): raise ValueError(x)", "def make(x): return 7", "def other(): pass"):
        result, verdict = judge(sandbox, answer, tests, "code(credit=share)")
        assert (result.value, verdict.passed, verdict.reason) == (0.0, (False, False), "wrong")


def test_an_answer_cannot_end_a_loop_of_the_tests_before_its_time(sandbox):
    over = ["for x, y in zip(map(f, [1, 2]), [2, 4]): assert x == y", "assert all(map(f, [1, 2]))"]
    for case in over:
        tests = {"names": ["f"], "cases": [case]}
        assert judge(sandbox, "def f(x): return 2 * x", tests)[0].value == 1.0
        for kind in ("StopIteration", "StopAsyncIteration"):
            assert judge(sandbox, f"def f(x): raise {kind}", tests)[0].value == 0.0


def test_output_without_end_is_compared_as_fast_as_what_is_expected():
    for flood in (
        "1" * 16_000 + "x",
        "ab " * 5_000_000,
        "\n" * 10_000_000 + "x",
        " " * 15_000_000 + "x",
        "1 2\n" + "3 4\n" * 3_000_000,
    ):
        began = time.thread_time()
        assert not same_output(flood, "1 2\n3 4\n", 1e-6)
        assert time.thread_time() - began < 0.25


def test_long_outputs_are_bounded_and_compared_beside_the_loop(sandbox):
    lines = 20_000
    tests = {"cases": [{"stdin": "", "stdout": "1.0\n" * lines}]}
    gaps = []

    async def watched(answer):
        async def tick():
            while True:
                began = time.monotonic()
                await asyncio.sleep(0)
                gaps.append(time.monotonic() - began)

        ticking = asyncio.create_task(tick())
        reward = build_reward("code(seconds=5)", timeout_s=8, services=Services(sandbox=Lent(sandbox)))
        try:
            return (await reward.judge(answer, ProgramTests.from_column(tests))).reason
        finally:
            ticking.cancel()

    assert asyncio.run(watched(f"print('1.00\\n' * {lines})")) == ""
    assert max(gaps) < 0.15
    assert asyncio.run(watched(f"print('1.0' + '0' * 3_000_000 + '\\n1.0' * {lines - 1})")) == "output"
    told = f"import sys\nsys.stderr.write('x' * 3_000_000)\nprint('1.0\\n' * {lines})"  # what else it says is not judged
    assert asyncio.run(watched(told)) == ""


def test_a_judgement_that_is_cancelled_twice_leaves_nothing(sandbox):
    reward = CodeReward(timeout_s=6, seconds=4, sandbox=sandbox)
    tests = ProgramTests.from_column(ADD)

    async def cancel(number):
        task = asyncio.ensure_future(reward.judge("import time\ndef add(a, b): time.sleep(60)", tests))
        await asyncio.sleep(0.003 * number)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task

    async def all_of_them():
        await reward.judge("def add(a, b): return a + b", tests)
        before = len(os.listdir("/proc/self/fd"))
        await asyncio.gather(*map(cancel, range(30)))
        deadline = time.monotonic() + 30
        while (after := len(os.listdir("/proc/self/fd"))) > before and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        return before, after

    before, after = asyncio.run(all_of_them())
    assert after <= before


@pytest.mark.slow
@pytest.mark.invariant
@pytest.mark.timeout(200)
def test_a_sandbox_that_is_stuck_is_lost_and_the_answer_judged_in_another():
    try:
        pool = choose_sandbox(size=2)
    except ConfigError as error:
        pytest.skip(f"no sandbox works on this machine: {error}")
    tests = ProgramTests.from_column(ADD)
    with contextlib.closing(pool):
        reward = CodeReward(timeout_s=9, seconds=6, sandbox=pool, at_once=1)

        async def both():
            first = await reward.judge("def add(a, b): return a + b", tests)
            os.kill(pool.pids[0], signal.SIGSTOP)
            for pid in descendants(pool.pids[0]):
                with contextlib.suppress(ProcessLookupError):  # one of the first program's, which was ending
                    os.kill(pid, signal.SIGSTOP)
            return first, await reward.judge("def add(a, b): return a + b", tests)

        assert [verdict.passed for verdict in asyncio.run(both())] == [(True,) * 3] * 2


@pytest.mark.parametrize("tests", [ADD, PROGRAM_TESTS])
def test_a_lost_sandbox_is_tried_again_and_is_never_a_reward(sandbox, tests):
    answer = "def add(a, b): return a + b" if tests is ADD else "print(2 * int(input()))"
    assert judge(sandbox, answer, tests, losses=2)[0].value == 1.0
    assert judge(sandbox, answer, tests, losses=99)[1].reason == "sandbox_lost"


class SlowlyLost(Lent):
    """A sandbox in which each program is lost, and this is noticed after a second only."""

    async def run(self, program, limits=None):
        await asyncio.sleep(1.0)
        return Outcome("lost", stderr=b"silent")

    async def start(self, program, limits=None):
        process = await self.sandbox.start(program, limits)
        try:
            await asyncio.sleep(1.0)
        finally:
            await process.close()
        raise SandboxLost("silent")


@pytest.mark.parametrize("tests", [ADD, PROGRAM_TESTS])
def test_an_answer_whose_sandboxes_are_lost_repeatedly_fails_when_the_patience_ends(sandbox, tests):
    reward = CodeReward(timeout_s=1, sandbox=SlowlyLost(sandbox), at_once=2, patience_s=1.5)

    async def all_of_them():
        tests_ = ProgramTests.from_column(tests)
        return await asyncio.gather(*(reward.judge("print(1)", tests_) for _ in range(4)), return_exceptions=True)

    began = time.monotonic()
    failures = asyncio.run(all_of_them())
    assert {failure.reason for failure in failures} == {"sandbox_lost"} and time.monotonic() - began < 30
    assert "no verdict within patience_s=1.5; sandboxes lost before: silent" in str(failures[0])
    assert CodeReward(timeout_s=8, sandbox=Lent(sandbox)).patience_s == 3 * 8 + 60, "the time for all tries"
    with pytest.raises(ConfigError, match="patience_s must be a number from reward_timeout_s"):
        CodeReward(timeout_s=8, sandbox=Lent(sandbox), patience_s=5)


def test_the_same_answer_gets_the_same_verdict_though_the_tests_draw_numbers(sandbox):
    tests = {"names": ["f"], "cases": ["import random\nassert f(random.random()) < 0.5"] * 8}
    seen = [judge(sandbox, "def f(x): return x", tests, "code(credit=share)")[1].passed for _ in range(2)]
    assert seen[0] == seen[1] and 0 < sum(seen[0]) < 8


def test_the_reward_counts_why_answers_fail(sandbox):
    reward = build_reward("code(credit=share, seconds=1)", timeout_s=20, services=Services(sandbox=Lent(sandbox, 1)))

    async def ask():
        for answer in (
            "def add(a, b): return a + b",
            "def add(a, b): return 0",
            "def add(a, b):\n    while 1: pass",
            "```\n```",
        ):
            await reward(prompt="", completion=answer, prompt_ids=(), completion_ids=(), row={"program_tests": ADD})

    asyncio.run(ask())
    seen = reward.metrics()
    assert {name: value for name, value in seen.items() if value} == {
        "code/passed_cases": 3 / 12,
        "code/wrong": 0.25,
        "code/timeout": 0.25,
        "code/no_code": 0.25,
        "code/retried": 0.25,
    }
    assert reward.metrics() == {}


@pytest.mark.skipif("sys.platform != 'linux'")
@pytest.mark.parametrize(
    "answers",
    [
        pytest.param(HOSTILE[::6], id="some"),
        pytest.param(HOSTILE, id="all", marks=[pytest.mark.slow, pytest.mark.invariant]),
    ],
)
def test_no_hostile_answer_gets_through(sandbox, answers):
    reward = build_reward("code(credit=share, seconds=2)", timeout_s=4, services=Services(sandbox=Lent(sandbox)))

    async def attack(one):
        tests = ProgramTests.from_column(PROGRAM_TESTS if one.is_program else TESTS)
        try:
            verdict = await reward.judge(f"```python\n{one.code}\n```", tests)
        except RewardFailure as failure:
            return failure.reason
        return "through" if any(verdict.passed) else verdict.reason

    async def attack_all():
        return await asyncio.gather(*map(attack, answers))

    seen = asyncio.run(attack_all())
    assert len(HOSTILE) >= 70
    assert [(one.what, reason) for one, reason in zip(answers, seen, strict=True) if reason not in one.outcome] == []


def test_the_table_of_hostile_answers_is_the_one_in_the_documents():
    assert table() in PAGE.read_text()


LEETCODE = {
    "question_content": "Halve the numbers.",
    "starter_code": "class Solution:\n    def halve(self, numbers):\n        ",
    "public_test_cases": '[{"input": "[1, 2]", "output": "[0.5, 1]", "testtype": "functional"}]',
    "private_test_cases": '[{"input": "[3]", "output": "[1.5]", "testtype": "functional"}]',
    "metadata": '{"func_name": "halve"}',
}
CONTEST = {
    "question": "Reverse a list.",
    "solutions": '["def turn(x): return x[::-1]"]',
    "input_output": '{"fn_name": "turn", "inputs": [[[1, 2]], [[true, null]]], "outputs": [[[2, 1]], [null, true]]}',
}


@pytest.mark.parametrize(
    ("columns", "right", "wrong"),
    [
        (
            LEETCODE,
            "class Solution:\n    def halve(self, n): return tuple(x / 2 for x in n)",
            "def halve(n): return [0.5, 1]",
        ),
        (CONTEST, "def turn(x): return x[::-1]", "def turn(x): return [2, 1]"),
    ],
)
def test_calls_that_are_written_as_json_are_judged_with_lists_and_tuples_alike(sandbox, columns, right, wrong):
    row = normalise(Table([RawRow(columns, "file:1")], DatasetConfig()), source="x")[0]
    assert judge(sandbox, right, row["program_tests"])[0].value == 1.0
    result, verdict = judge(sandbox, wrong, row["program_tests"])
    assert (result.value, verdict.passed) == (0.0, (True, False))
