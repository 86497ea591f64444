"""The reward ``code``: what a model wrote is run in a sandbox and tested there."""

import asyncio
import math
import re
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from tandem.api.failures import RewardFailure, SandboxLost
from tandem.api.program_tests import COLUMN, ProgramTests, StdinCase
from tandem.api.sandbox import Limits, Sandbox
from tandem.api.workflow import RewardFn, RewardResult
from tandem.config.cores import usable_cores
from tandem.config.errors import ConfigError
from tandem.rewards.code.extraction import find_code
from tandem.rewards.code.functions import complete, judge_functions
from tandem.rewards.code.programs import judge_program
from tandem.rewards.code.verdict import REASONS, CannotTell, Verdict

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
