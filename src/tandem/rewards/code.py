"""The reward ``code``: the model's code runs in a sandbox, and the verdict is computed outside it.

A whole program runs once for each case, and its output is compared. Functions are judged by a split judge: the answer runs
in one sandbox, the tests in another, and this process relays between them.

    tests ── call ──> judge ── call ──> candidate
    tests <─ value ── judge <─ value ── candidate

The candidate's output is parsed only as the value of the one pending call. It can be a wrong value, but never a verdict. The
tests never run in the candidate's sandbox. They compare plain literals, which have no methods of the candidate's.
"""

import asyncio
import json
import math
import re
import secrets
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Context, Decimal
from pathlib import Path
from typing import Any, Literal

from tandem.api.failures import RewardFailure, SandboxLost, WaitTimeout
from tandem.api.sandbox import (
    COLUMN,
    Limits,
    Outcome,
    Program,
    ProgramTests,
    Sandbox,
    SandboxProcess,
    StdinCase,
    read_program,
)
from tandem.api.workflow import RewardFn, RewardResult
from tandem.config.devices import usable_cores
from tandem.config.errors import ConfigError
from tandem.rewards import code_guest

REASONS = {
    "wrong": "the answer runs, and a test fails",
    "error": "it does not compile, or it raises",
    "timeout": "it does not end in time",
    "memory": "it uses more memory than allowed",
    "processes": "it runs more processes and threads than allowed",
    "files": "it writes more or larger files than allowed",
    "output": "it prints or returns more than allowed",
    "exit": "it ends the process before all tests are done",
    "signal": "it is killed by a signal: its own, or that of a crash",
    "protocol": "it writes to the judge's pipe itself",
    "no_code": "there is no program in the answer",
}
"""The reasons why an answer fails."""


@dataclass(frozen=True)
class Verdict:
    """The judgement of one answer."""

    passed: tuple[bool, ...]
    """For each case, True if it passed."""

    reason: str = ""
    """The reason why the first failed case failed, one of `REASONS`; empty if all passed."""

    detail: str = ""
    """Details of the reason in words."""

    @classmethod
    def of(cls, passed: list[bool], cases: int, reason: str, detail: str = "") -> "Verdict":
        """Makes a verdict in which all cases after ``passed`` fail for a reason."""
        return cls((*passed, *[False] * (cases - len(passed))), reason, detail)


class CannotTell(Exception):
    """Raised if no verdict is possible. Has a failure reason, by which the failed sample is counted, and details. Such a
    sample gets no reward."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


def reason_of(outcome: Outcome) -> str:
    """Returns the reason why an ended program failed.

    Raises:
        SandboxLost: the sandbox failed, not the program.
        CannotTell: the sandbox refused to run it.
    """
    if outcome.status == "lost":
        raise SandboxLost(outcome.words())
    if outcome.status == "refused":
        raise CannotTell("sandbox_refused", outcome.words())
    return "exit" if outcome.status == "ok" else outcome.status


MAX_MESSAGE = 1 << 20
"""Maximum size in bytes of one call or one value."""

CLOSED_S = 0.5
"""Seconds that a process may still run after it closed its output. Then it is killed, and its own exit status is lost."""

ROOM_S = 5.0
"""Seconds by which the sandbox's time limit exceeds the judge's."""


GUEST = Path(code_guest.__file__).read_text()
CANDIDATE, TESTER = f"{GUEST}\nrun_candidate()\n", f"{GUEST}\nrun_tests()\n"
"""The programs of the two sides of the split judge."""


class ProcessEnd(Exception):
    """A process that can send no more messages. ``reason``: one of `REASONS`."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason)
        self.reason, self.detail = reason, detail


class LineProcess:
    """A process with which the judge exchanges lines of JSON until a common deadline."""

    def __init__(self, process: SandboxProcess, ends: float):
        self.process, self.ends = process, ends
        self.rest = b""

    def left_s(self) -> float:
        """Returns the seconds until the deadline.

        Raises:
            ProcessEnd: the deadline has passed.
        """
        left_s = self.ends - time.monotonic()
        if left_s <= 0:
            raise ProcessEnd("timeout")
        return left_s

    async def tell(self, message: dict[str, Any]) -> None:
        """Sends a message.

        Raises:
            ProcessEnd: the process does not read the message.
        """
        try:
            await self.process.send(code_guest.write(message), self.left_s())
        except WaitTimeout:
            raise ProcessEnd("timeout") from None
        except BrokenPipeError:
            raise await self.why() from None

    async def hear(self) -> dict[str, Any]:
        """Receives the next message.

        Raises:
            ProcessEnd: there is no further message, or it is malformed.
        """
        while b"\n" not in self.rest:
            if len(self.rest) > MAX_MESSAGE:
                raise ProcessEnd("output", f"a message of more than {MAX_MESSAGE} bytes")
            try:
                piece = await self.process.receive(1 << 16, self.left_s())
            except WaitTimeout:
                raise ProcessEnd("timeout") from None
            if not piece:
                raise await self.why()
            self.rest += piece
        line, _, self.rest = self.rest.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise ProcessEnd("protocol", "not JSON") from None
        if not isinstance(message, dict):
            raise ProcessEnd("protocol", "not an object")
        return message

    async def why(self) -> ProcessEnd:
        """Ends the process and returns the reason of its end. Called when the process has closed its output."""
        outcome = await self.process.close(min(CLOSED_S, max(0.0, self.ends - time.monotonic())))
        reason = reason_of(outcome)
        if reason == "timeout" and time.monotonic() < self.ends:
            reason = "exit"  # the process closed its output and kept running
        return ProcessEnd(reason, outcome.words(300))


class Candidate(LineProcess):
    """The process that runs the answer. Each call to it has a new random number and gets exactly one reply."""

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Makes a call. Returns the reply: ``value`` or ``error``, and the arguments that it ``changed``.

        Raises:
            ProcessEnd: the candidate sent no reply, a malformed one, or more than one message.
            CannotTell: the candidate returned a value that is not a literal.
        """
        token = secrets.token_hex(8)
        await self.tell(message | {"id": token})
        reply = await self.hear()
        if self.rest or reply.pop("id", None) != token:
            raise ProcessEnd("protocol", "it did not send exactly one answer to the call")
        if isinstance(reply.get("not_comparable"), str):
            raise CannotTell("not_comparable", reply["not_comparable"][:300])
        error, changed = reply.get("error"), reply.setdefault("changed", [])
        valid = isinstance(changed, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in changed)
        valid = valid and all(isinstance(key, int | str) for key, _ in changed)
        if set(reply) == {"error", "changed"}:
            valid = valid and isinstance(error, list) and len(error) == 2 and all(isinstance(part, str) for part in error)
        elif set(reply) != {"value", "changed"}:
            valid = False
        if not valid:
            raise ProcessEnd("protocol", "the process sent a malformed answer")
        return reply


async def judge_functions(
    sandbox: Sandbox, parts: tuple[str, ...], tests: ProgramTests, limits: Limits, *, all_or_none: bool
) -> Verdict:
    """Runs the tests on the answer. ``parts``: the answer's code, executed in order. `Limits.wall_s` limits the whole
    judgement.

    Raises:
        SandboxLost, CannotTell: see `reason_of`. CannotTell also if the tests themselves are broken, or a value is not a
            literal.
    """
    # this process keeps the deadline; the sandboxes' own limits are later, so that they never end a process first
    roomy = replace(limits, wall_s=limits.wall_s + ROOM_S, cpu_s=limits.cpu_s + ROOM_S)
    starting = [asyncio.ensure_future(sandbox.start(Program(source=text), roomy)) for text in (CANDIDATE, TESTER)]
    try:
        processes = await asyncio.gather(*starting)
        ends = time.monotonic() + limits.wall_s
        answer, tests_side = Candidate(processes[0], ends), LineProcess(processes[1], ends)
        verdict = await _judge(answer, tests_side, parts, tests, all_or_none)
    finally:  # shielded, so that a second cancellation does not interrupt it
        outcomes = await asyncio.shield(asyncio.ensure_future(_end(starting)))
    if verdict.reason == "timeout":  # a stuck sandbox also looks like a time-out
        for outcome in outcomes:
            if outcome.status == "lost":
                raise SandboxLost(outcome.words())
    return verdict


async def _end(starting: Sequence[asyncio.Future[SandboxProcess]]) -> list[Outcome]:
    """Ends the processes, including those that are still starting."""
    for future in starting:
        future.cancel()
    done = await asyncio.gather(*starting, return_exceptions=True)
    return await asyncio.gather(*(process.close() for process in done if isinstance(process, SandboxProcess)))


async def _judge(
    answer: Candidate, side: LineProcess, parts: tuple[str, ...], tests: ProgramTests, all_or_none: bool
) -> Verdict:
    passed: list[bool] = []
    first = ("", "")
    total = len(tests.cases)
    try:
        await side.tell(
            {"names": tests.names, "preamble": complete(tests.preamble), "setup": tests.setup, "cases": tests.cases}
        )
        loaded = await answer.ask({"parts": parts})
        if "error" in loaded:
            return Verdict.of([], total, "error", ": ".join(loaded["error"]))
        while len(passed) < total:
            message = await side.hear()
            if "call" in message:
                call = {"name": message["call"], "args": message["args"], "kwargs": message["kwargs"]}
                await side.tell(await answer.ask(call))
            elif "case" in message:
                passed.append(message["passed"] is True)
                if not passed[-1] and not first[0]:
                    first = "wrong", f"case {message['case']}: {message['error']}"
                if not passed[-1] and all_or_none:
                    break
            elif "not_comparable" in message:
                raise CannotTell("not_comparable", message["not_comparable"])
            else:
                raise CannotTell("tests_broken", str(message.get("broken")))
    except ProcessEnd as ended:
        first = first if first[0] else (ended.reason, ended.detail)
    return Verdict.of(passed, total, *first)


def complete(preamble: str) -> str:
    """Returns a preamble that compiles by itself: if it ends with the head of a function, ``pass`` is added as the body."""
    try:
        read_program(preamble)
    except SyntaxError:
        return preamble.rstrip() + "\n    pass\n"
    return preamble


DECIMAL = re.compile(r"[-+]?(?=\.?\d)\d{0,400}((?:\.\d{0,400})?(?:[eE][-+]?\d{1,3})?)", re.ASCII)
"""Pattern of a decimal number; its group is the part behind the integer digits. Longer numbers are compared as text, to
limit the time."""

EXACT = Context(prec=50)


def same_output(printed: str, expected: str, tolerance: float) -> bool:
    """True if both outputs have the same lines with the same words.

    Spaces between words and at the ends of lines, and empty lines at the end, are ignored. Two words are the same if they
    are equal, or if both are decimal numbers, at least one has a point or an exponent, and they differ by at most
    ``tolerance`` (absolute, or relative to the expected number). If one of them is an integer, both must also round to the
    same integer: 1e9 is not 1000000006.
    """
    printed, expected = printed.rstrip(), expected.rstrip()
    if printed.count("\n") != expected.count("\n"):
        return False
    for line, wanted in zip(printed.split("\n"), expected.split("\n"), strict=True):
        expected_words = wanted.split()
        words = line.split(None, len(expected_words) + 1)  # limits the work for very long lines
        if len(words) != len(expected_words) or not all(map(_same, words, expected_words, [tolerance] * len(words))):
            return False
    return True


def _same(word: str, expected: str, tolerance: float) -> bool:
    if word == expected:
        return True
    number, other = DECIMAL.fullmatch(word), DECIMAL.fullmatch(expected)
    if not (number and other and (number[1] or other[1])):
        return False
    value, target = Decimal(word), Decimal(expected)  # a float has only 16 digits and ends at 1e308
    if not (number[1] and other[1]) and value.to_integral_value() != target.to_integral_value():
        return False
    difference = EXACT.abs(EXACT.subtract(value, target))
    return difference <= EXACT.multiply(Decimal(tolerance), max(Decimal(1), EXACT.abs(target)))


TIMES, ROOM = 16, 1 << 20
"""An output of more than (`TIMES` × the expected bytes + `ROOM`) bytes is not compared; its case fails."""


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
    """Runs the program once for each case. ``total_s``: time in seconds for all cases. ``all_or_none``: stop at the first
    failure.

    Raises:
        SandboxLost, CannotTell: see `reason_of`.
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
        reason = "" if outcome.status == "ok" else reason_of(outcome)
        reason = "error" if reason == "exit" else reason
        if not reason and len(outcome.stdout) > TIMES * len(case.stdout.encode()) + ROOM:
            reason = "output"
        if not reason:  # in a thread, because comparing a long output would delay other episodes
            printed = outcome.stdout.decode(errors="replace")
            reason = "" if await asyncio.to_thread(same_output, printed, case.stdout, tolerance) else "wrong"
        passed.append(not reason)
        if reason and not first[0]:
            first = reason, f"case {number}: {outcome.words(300)}"
        if reason and all_or_none:
            break
    return Verdict.of(passed, len(cases), *first)


FENCE = re.compile(r"([ ]{0,3})(`{3,}|~{3,})([^`\n]*)$")
MARK = "\ufeff"
"""A byte order mark, which Python rejects within a program text."""


def find_code(answer: str) -> str | None:
    """Returns the program in an answer: the last fenced block with a closing fence. None if the program has no text.

    If no block has a closing fence, the program is the block that the end of the answer cuts off; without any fence, it is
    the whole answer. A line ends with ``\\n``, ``\\r`` or ``\\r\\n``. If the first line of text has the indentation of its
    fence, as many leading spaces are removed from all lines.
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
"""Number of sandboxes in which a judgement is tried if sandboxes are lost."""

LOST_S = 60.0
"""Additional seconds before a sandbox that starts slowly or stops answering counts as lost."""


class CodeReward(RewardFn):
    """1 if the program passes all of the row's tests, else 0; with ``credit=share`` the share of passed cases.

    ``seconds``: time in seconds for one case of a program, or for all calls of a function together (default: two thirds of
    ``timeout_s``, which limits the whole judgement). ``patience_s``: time in seconds for an answer including retries in
    other sandboxes if one is lost (default: three times ``timeout_s`` plus a minute). ``tolerance``: allowed difference of
    decimal numbers in a program's output, absolute or relative. ``at_once``: number of answers judged concurrently (default:
    the number of cores).
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
        # a semaphore belongs to one event loop, but a reward may be used on several
        self._places: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()
        self._counts: Counter[str] = Counter()

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raises ConfigError if the row has no tests."""
        if row.get(COLUMN) is None:
            raise ConfigError(
                f"reward 'code' needs tests, and the row has no column {COLUMN!r}; Tandem creates it for HumanEval, "
                "MBPP, LiveCodeBench and APPS, and for other data you write it (docs/code.md). Columns there: "
                f"{', '.join(row)}"
            )
        ProgramTests.from_column(row[COLUMN])

    async def __call__(self, *, completion: str, row: Mapping[str, Any], **_: Any) -> RewardResult:
        """Judges an answer, see `RewardFn`. Further failures: ``sandbox_lost``, ``sandbox_refused``, ``not_comparable``,
        ``tests_broken``."""
        try:
            self.check_row(row)
        except ConfigError as error:
            raise RewardFailure("row_unfit", str(error)) from error
        verdict = await self.judge(completion, ProgramTests.from_column(row[COLUMN]))
        share = sum(verdict.passed) / len(verdict.passed)
        right = float(all(verdict.passed))
        self._counts.update(answers=1, passed=sum(verdict.passed), cases=len(verdict.passed))
        self._counts[verdict.reason] += 1
        return RewardResult(right if self.all_or_none else share, accuracy=right)

    async def judge(self, completion: str, tests: ProgramTests) -> Verdict:
        """Returns the verdict on an answer.

        Raises:
            RewardFailure: no verdict is possible.
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
        """Judges an answer, and retries in another sandbox if one is lost. Appends the reasons of the losses to
        ``losses``."""
        for _ in range(ATTEMPTS):
            try:
                return await self._judge(code, tests)
            except SandboxLost as error:
                losses.append(error.words)
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
        """Returns metrics of the answers since the last call: the shares of passed cases, of each failure reason, and of
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
    """Returns the program texts to run: the preamble and the code. If the code continues a function of the preamble, both
    are joined into one text."""
    if not tests.preamble:
        return (code,)
    names = "|".join((*tests.names, "Solution"))
    is_whole = re.search(rf"^(?:(?:async\s+)?def|class)\s+(?:{names})\b|^(?:{names})\s*=", code, re.MULTILINE)
    return (complete(tests.preamble), code) if is_whole else (tests.preamble + code,)
