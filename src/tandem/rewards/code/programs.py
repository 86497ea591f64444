"""Judging a program by its output: it sees the input alone, and what it prints is compared here."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from tandem.api.program_tests import StdinCase
from tandem.api.sandbox import Limits, Program, Sandbox
from tandem.rewards.code.output import same_output
from tandem.rewards.code.verdict import Verdict, reason_of

TIMES, ROOM = 16, 1 << 20
"""An output may have so many times the bytes of the expected one, and so many more: a longer one is not compared."""


async def judge_program(
    sandbox: Sandbox,
    code: str,
    cases: Sequence[StdinCase],
    limits: Limits,
    *,
    tolerance: float,
    total_s: float,
    all_or_none: bool,
) -> Verdict:
    """Runs the program once a case. ``total_s``: for all of them. ``all_or_none``: the first failure ends it.

    Raises:
        SandboxLost, CannotTell: as `reason_of`.
    """
    ends = time.monotonic() + total_s
    passed: list[bool] = []
    first = ("", "")
    for number, case in enumerate(cases):
        left_s = ends - time.monotonic()
        if left_s <= 0:
            return Verdict.of(passed, len(cases), *(first if first[0] else ("timeout", f"all cases: {total_s:g} s")))
        bounded = replace(limits, wall_s=min(limits.wall_s, left_s), cpu_s=min(limits.cpu_s, left_s))
        outcome = await sandbox.run(Program(source=code, stdin=case.stdin.encode()), bounded)
        why = "" if outcome.status == "ok" else reason_of(outcome)
        why = "error" if why == "exit" else why
        if not why and len(outcome.stdout) > TIMES * len(case.stdout.encode()) + ROOM:
            why = "output"
        if not why:  # in a thread: a long output must not hold the episodes beside it
            printed = outcome.stdout.decode(errors="replace")
            why = "" if await asyncio.to_thread(same_output, printed, case.stdout, tolerance) else "wrong"
        passed.append(not why)
        if why and not first[0]:
            first = why, f"case {number}: {outcome.stderr.decode(errors='replace')[-300:]}"
        if why and all_or_none:
            break
    return Verdict.of(passed, len(cases), *first)
