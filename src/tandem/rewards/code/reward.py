"""The reward ``code``: what a model wrote is run in a sandbox and tested there."""

import asyncio
import math
import re
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Context, Decimal
from typing import Any, Literal

from tandem.api.failures import RewardFailure, SandboxLost
from tandem.api.program_tests import COLUMN, ProgramTests, StdinCase
from tandem.api.sandbox import Limits, Program, Sandbox
from tandem.api.workflow import RewardFn, RewardResult
from tandem.config.cores import usable_cores
from tandem.config.errors import ConfigError
from tandem.rewards.code.functions import complete, judge_functions
from tandem.rewards.code.verdict import REASONS, CannotTell, Verdict, reason_of

DECIMAL = re.compile(r"[-+]?(?=\.?\d)\d{0,400}((?:\.\d{0,400})?(?:[eE][-+]?\d{1,3})?)", re.ASCII)
"""A number and what is behind its whole part. Longer ones are texts, so that no program makes the comparison slow."""

EXACT = Context(prec=50)


def same_output(printed: str, expected: str, tolerance: float) -> bool:
    """True if the outputs have the same lines of the same words.

    Spaces between words, at the ends of lines, and empty lines at the end do not count. Two words are the same if their
    letters are; or if both are decimal numbers, at least one is written with a point or an exponent, and they differ by at
    most ``tolerance``, absolutely or relative to the expected one. Where one is written as a whole number, both must be
    nearest to the same whole number besides: 1e9 is not 1000000006.
    """
    printed, expected = printed.rstrip(), expected.rstrip()
    if printed.count("\n") != expected.count("\n"):
        return False
    for line, wanted in zip(printed.split("\n"), expected.split("\n"), strict=True):
        others = wanted.split()
        words = line.split(None, len(others) + 1)  # a flood is not split to its end
        if len(words) != len(others) or not all(map(_same, words, others, [tolerance] * len(words))):
            return False
    return True


def _same(word: str, expected: str, tolerance: float) -> bool:
    if word == expected:
        return True
    one, other = DECIMAL.fullmatch(word), DECIMAL.fullmatch(expected)
    if not (one and other and (one[1] or other[1])):
        return False
    value, target = Decimal(word), Decimal(expected)  # a float has 16 digits, and none above 1e308
    if not (one[1] and other[1]) and value.to_integral_value() != target.to_integral_value():
        return False
    difference = EXACT.abs(EXACT.subtract(value, target))
    return difference <= EXACT.multiply(Decimal(tolerance), max(Decimal(1), EXACT.abs(target)))


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


FENCE = re.compile(r"([ ]{0,3})(`{3,}|~{3,})([^`\n]*)$")
MARK = "\ufeff"
"""A byte order mark, which Python refuses in a text."""


def find_code(answer: str) -> str | None:
    """The last fenced block of the answer; None if there is no text to run.

    A block that the answer's end cuts off counts if no other is there. Without any fence, the whole answer is the program.
    Lines end where they do for Python. Where the first begins below its fence, all lose the blanks that the fence has.
    """
    answer = answer.removeprefix(MARK)
    closed: list[str] | None = None
    inside: list[str] | None = None
    opening = ""
    for line in re.split(r"\r\n?|\n", answer):
        fence = FENCE.match(line)
        if inside is None and fence:
            opening, inside = fence[2], [fence[1]]
        elif inside is not None and fence and fence[2].startswith(opening) and not fence[3].strip():
            closed, inside = inside, None
        elif inside is not None:
            inside.append(line)
    block = closed if closed is not None else inside
    code, indent = answer, ""
    if block is not None:
        indent, *lines = block
        code = "\n".join([*lines, ""])
    if re.match(rf"(?:[ \t]*\n)*{indent}\S", code):
        code = re.sub(rf"^ {{0,{len(indent)}}}", "", code, flags=re.MULTILINE)
    code = code.removeprefix(MARK)
    return code if code.strip() else None


ATTEMPTS = 3
"""Number of times that a judgement is begun whose sandbox is lost."""

LOST_S = 60.0
"""So long a sandbox that starts slowly, or says nothing any more, may take to be noticed, besides the judging itself."""


class CodeReward(RewardFn):
    """1 if the program passes all of the row's tests, else 0; with ``credit=share`` the share of the cases that it passes.

    ``seconds``: time for one case of a program, and for all calls of a function together (default: two thirds of
    ``timeout_s``, which is the time for everything). ``patience_s``: time for an answer with all tries in other sandboxes
    where one is lost (default: three times ``timeout_s``, and a minute). ``tolerance``: of decimal numbers in a program's
    output. ``at_once``: answers that are judged at the same time (default: a core each).
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        sandbox: Sandbox,
        credit: Literal["all", "share"] = "all",
        seconds: float | None = None,
        tolerance: float = 1e-6,
        memory_mib: int = 512,
        at_once: int | None = None,
        patience_s: float | None = None,
    ):
        seconds = timeout_s * 2 / 3 if seconds is None else seconds
        if not 0 < seconds <= timeout_s:
            raise ConfigError(
                f"reward 'code': seconds must lie above 0 and be at most reward_timeout_s ({timeout_s:g}), got {seconds!r}"
            )
        patience_s = ATTEMPTS * timeout_s + LOST_S if patience_s is None else patience_s
        if not timeout_s <= patience_s < math.inf:
            raise ConfigError(
                f"reward 'code': patience_s must be a number from reward_timeout_s ({timeout_s:g}) on, got {patience_s!r}"
            )
        if not 0 <= tolerance < 1:
            raise ConfigError(f"reward 'code': tolerance must lie in 0…1, got {tolerance!r}")
        if at_once is not None and at_once < 1:
            raise ConfigError(f"reward 'code': at_once must be at least 1, got {at_once}")
        self.sandbox, self.timeout_s, self.tolerance, self.patience_s = sandbox, timeout_s, tolerance, patience_s
        self.all_or_none = credit == "all"
        self.limits = Limits(wall_s=seconds, cpu_s=seconds, memory_mib=memory_mib, output_bytes=1 << 24)
        self.at_once = at_once or usable_cores()
        # a semaphore belongs to one event loop, and a reward to none
        self._places: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()
        self._counts: Counter[str] = Counter()

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raises ConfigError where the row has no tests."""
        if row.get(COLUMN) is None:
            raise ConfigError(
                f"reward 'code' needs tests, and the row has no column {COLUMN!r}; it is made of the columns of HumanEval, "
                f"MBPP, LiveCodeBench and APPS, or you write it (docs/code.md). Columns there: {', '.join(row)}"
            )
        ProgramTests.from_column(row[COLUMN])

    async def __call__(
        self,
        *,
        prompt: str,
        completion: str,
        prompt_ids: tuple[int, ...],
        completion_ids: tuple[int, ...],
        row: Mapping[str, Any],
    ) -> RewardResult:
        """Judges an answer, as `RewardFn` says; other failures: ``sandbox_lost``, ``sandbox_refused``, ``not_comparable``,
        ``tests_broken``."""
        try:
            self.check_row(row)
        except ConfigError as error:
            raise RewardFailure("reward_raised", str(error)) from error
        verdict = await self.judge(completion, ProgramTests.from_column(row[COLUMN]))
        share = sum(verdict.passed) / len(verdict.passed)
        right = float(all(verdict.passed))
        self._counts.update(answers=1, passed=sum(verdict.passed), cases=len(verdict.passed))
        self._counts[verdict.reason] += 1
        return RewardResult(right if self.all_or_none else share, accuracy=right)

    async def judge(self, completion: str, tests: ProgramTests) -> Verdict:
        """The verdict on an answer.

        Raises:
            RewardFailure: there is none.
        """
        code = find_code(completion)
        if code is None:
            return Verdict.of([], len(tests.cases), "no_code")
        loop = asyncio.get_running_loop()
        places = self._places.setdefault(loop, asyncio.Semaphore(self.at_once))
        async with places:
            losses: list[str] = []
            try:
                async with asyncio.timeout(self.patience_s) as patience:
                    return await self._judge_again(code, tests, losses)
            except TimeoutError as error:
                if not patience.expired():
                    raise
                lost = f"; sandboxes lost before: {', '.join(losses)}" if losses else ""
                raise RewardFailure("sandbox_lost", f"no verdict within patience_s={self.patience_s:g}{lost}") from error
            except CannotTell as error:
                raise RewardFailure(error.reason, error.detail) from error

    async def _judge_again(self, code: str, tests: ProgramTests, losses: list[str]) -> Verdict:
        """Judges, in another sandbox if one is lost; ``losses`` gets the reasons."""
        for _ in range(ATTEMPTS):
            try:
                return await self._judge(code, tests)
            except SandboxLost as error:
                losses.append(error.message)
                self._counts["retried"] += 1
        raise RewardFailure("sandbox_lost", f"{ATTEMPTS} sandboxes in a row were lost: {losses[-1]}")

    async def _judge(self, code: str, tests: ProgramTests) -> Verdict:
        programs = [case for case in tests.cases if isinstance(case, StdinCase)]
        if programs:
            return await judge_program(
                self.sandbox,
                code,
                programs,
                self.limits,
                tolerance=self.tolerance,
                total_s=self.timeout_s,
                all_or_none=self.all_or_none,
            )
        parts = with_preamble(code, tests)
        return await judge_functions(self.sandbox, parts, tests, self.limits, all_or_none=self.all_or_none)

    def metrics(self) -> dict[str, float]:
        """Metrics of the answers judged since the last call: share of passed cases, of each reason to fail, and of
        retries."""
        counts, self._counts = self._counts, Counter()
        if not counts["answers"]:
            return {}
        shares = {f"code/{reason}": counts[reason] / counts["answers"] for reason in (*REASONS, "retried")}
        return {"code/passed_cases": counts["passed"] / counts["cases"]} | shares

    def close(self) -> None:
        """Closes the sandbox."""
        self.sandbox.close()


def with_preamble(code: str, tests: ProgramTests) -> tuple[str, ...]:
    """The texts to execute: the preamble and then the code; one text if the code only goes on where the preamble ends."""
    if not tests.preamble:
        return (code,)
    names = "|".join((*tests.names, "Solution"))
    is_whole = re.search(rf"^(?:(?:async\s+)?def|class)\s+(?:{names})\b|^(?:{names})\s*=", code, re.MULTILINE)
    return (complete(tests.preamble), code) if is_whole else (tests.preamble + code,)
