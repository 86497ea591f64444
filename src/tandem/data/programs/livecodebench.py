"""LiveCodeBench (arXiv:2403.07974): contest problems with public and hidden tests, of a program or of a ``Solution``."""

import base64
import json
import pickletools
import zlib
from typing import Any

from tandem.api.program_tests import ProgramTests, StdinCase
from tandem.data.programs.layout import FUNCTION, PROGRAM, SAME, Columns, ProgramLayout, call_test, read_json, text

MOST_BYTES = 1 << 28
"""Largest tests of one problem, unpacked."""


def tests(columns: Columns) -> ProgramTests | None:
    """The public cases and the hidden ones."""
    cases = [*(read_json(columns, "public_test_cases") or ()), *private_cases(columns["private_test_cases"])]
    name = function_name(columns)
    if not cases:
        return None
    if name is None:
        return ProgramTests(tuple(StdinCase(case["input"], case["output"]) for case in cases))
    calls = [
        call_test(name, [json.loads(line) for line in case["input"].split("\n") if line], [json.loads(case["output"])])
        for case in cases
    ]
    return ProgramTests(tuple(calls), (name,), setup=SAME)


def private_cases(packed: Any) -> list[dict[str, Any]]:
    """The hidden cases: JSON, or JSON in a pickled text, zipped, in base 64. No pickle is loaded: its text is read."""
    if not isinstance(packed, str) or not packed.strip():
        return list(packed or ())
    if packed.lstrip().startswith("["):
        return list(json.loads(packed))
    unzip = zlib.decompressobj()
    pickled = unzip.decompress(base64.b64decode(packed), MOST_BYTES)
    texts = [argument for _, argument, _ in pickletools.genops(pickled) if isinstance(argument, str | bytes)]
    if len(texts) != 1:
        raise ValueError("column 'private_test_cases' must hold one pickled text")
    return list(json.loads(texts[0]))


def function_name(columns: Columns) -> str | None:
    """The method of ``Solution`` that is called; None for programs."""
    name = (read_json(columns, "metadata") or {}).get("func_name")
    return None if name is None else str(name)


def question(columns: Columns) -> str:
    """The statement, the code to begin with if there is some, and the form of the answer."""
    starter = columns.get("starter_code") or ""
    begin = f"\n\nBegin with this code:\n\n```python\n{starter.rstrip()}\n```" if starter.strip() else ""
    return text(columns, "question_content").strip() + begin + (FUNCTION if function_name(columns) else PROGRAM)


LIVECODEBENCH = ProgramLayout(
    name="livecodebench",
    columns=("question_content", "public_test_cases", "private_test_cases"),
    question=question,
    tests=tests,
    reference=lambda columns: None,
)
