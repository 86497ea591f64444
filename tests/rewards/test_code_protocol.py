"""What a candidate writes is the value of the one call that is open, or its end; nothing that it writes is a verdict."""

import asyncio
import json
import time

import pytest

from tandem.api.sandbox import Limits, Outcome, ProgramTests, Sandbox, SandboxProcess
from tandem.rewards.code import CANDIDATE, MAX_MESSAGE, Candidate, CannotTell, ProcessEnd, judge_functions


class Spoken(SandboxProcess):
    """A process whose words a test writes: ``says(message)`` gives what it writes when it is sent a message."""

    def __init__(self, says, unasked=b""):
        self.says, self.out = says, unasked

    async def send(self, data, deadline_s):
        self.out += self.says(json.loads(data))

    async def receive(self, max_bytes, deadline_s):
        piece, self.out = self.out[:max_bytes], self.out[max_bytes:]
        return piece

    async def close(self, grace_s=0.0):
        return Outcome("ok")


def line(**message):
    return json.dumps(message).encode() + b"\n"


def ask(says, **process):
    return asyncio.run(Candidate(Spoken(says, **process), time.monotonic() + 20).ask({"name": "f"}))


def answering(**reply):
    """A candidate that answers the call by these fields."""
    return lambda call: line(id=call["id"], **reply)


def test_the_answer_to_a_call_is_a_value_or_an_error_and_what_it_changed():
    for reply in ({"value": [1]}, {"error": ["ValueError", "no"]}, {"value": 1, "changed": [[0, [2]], ["key", 3]]}):
        assert ask(answering(**reply)) == {"changed": [], **reply}


@pytest.mark.parametrize(
    "says",
    [
        lambda call: line(value=1),
        lambda call: line(id=None, value=1),
        lambda call: line(id="0" * 16, value=1),
        lambda call: 2 * line(id=call["id"], value=1),
        lambda call: line(id=call["id"], value=1) + b"more",
        lambda call: line(value=1) + line(id=call["id"], value=1),
        lambda call: b"7\n",
        lambda call: b"{\n",
        lambda call: b"[" * 100_000 + b"\n",
        answering(),
        answering(value=1, error=["ValueError", "no"]),
        answering(value=1, passed=True),
        answering(value=1, changed={"0": 1}),
        answering(value=1, changed=[[0]]),
        answering(value=1, changed=[[0.5, 1]]),
        answering(value=1, changed=[[None, 1]]),
        answering(error="ValueError"),
        answering(error=["ValueError"]),
        answering(error=["ValueError", 7]),
    ],
)
def test_whatever_else_it_writes_ends_it(says):
    with pytest.raises(ProcessEnd) as end:
        ask(says)
    assert end.value.reason == "protocol"


def test_an_answer_that_was_there_before_the_call_is_none():
    with pytest.raises(ProcessEnd, match="protocol"):
        ask(answering(value=1), unasked=line(id="0" * 16, value=1))


def test_a_message_without_end_and_a_closed_output_end_it_too():
    with pytest.raises(ProcessEnd, match="output"):
        ask(lambda call: b" " * (MAX_MESSAGE + 1))
    with pytest.raises(ProcessEnd, match="exit"):
        ask(lambda call: b"")


def test_what_is_no_literal_is_a_failure_and_no_verdict():
    with pytest.raises(CannotTell, match="not_comparable"):
        ask(answering(not_comparable="f returned a generator"))


class Both(Sandbox):
    """A sandbox in which the answer and the tests say what a test writes."""

    def __init__(self, answer, tests):
        self.answer, self.tests = answer, tests

    async def start(self, program, limits=None):
        return Spoken(self.answer if program.source == CANDIDATE else self.tests)

    async def run(self, program, limits=None):
        raise NotImplementedError

    async def open(self, files=None, limits=None):
        raise NotImplementedError

    def close(self):
        pass


def verdict(*words, answer=None):
    """The verdict where the tests' side writes these words at once."""
    sandbox = Both(answer or answering(value=None), lambda message: b"".join(words) if "cases" in message else b"")
    tests = ProgramTests.from_column({"names": ["f"], "cases": ["assert f()"] * 3})
    return asyncio.run(judge_functions(sandbox, ("",), tests, Limits(), all_or_none=False))


def test_a_case_is_passed_if_the_tests_say_so_and_the_first_reason_stands():
    right, wrong = line(case=0, passed=True), line(case=1, passed=False, error="AssertionError")
    assert verdict(right, right, right).passed == (True, True, True)
    ended = verdict(right, wrong)  # and then the tests' output is closed
    assert (ended.passed, ended.reason, ended.detail) == ((True, False, False), "wrong", "case 1: AssertionError")
    assert verdict(right).reason == "exit"
    assert verdict(line(case=0, passed="no", error=""), right, right).passed == (False, True, True)
    broken = verdict(answer=lambda call: line(id=call["id"], error=["SyntaxError", "invalid"]))
    assert (broken.passed, broken.reason, broken.detail) == ((False,) * 3, "error", "SyntaxError: invalid")
