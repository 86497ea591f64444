"""The split judge: the answer alone in one sandbox, the tests in another, and this process between them.

    tests ── call ──> judge ── call ──> candidate
    tests <─ value ── judge <─ value ── candidate

What the candidate writes is read as the value of the one call that is open, and as nothing else: it can be wrong, and it
cannot be a verdict. The tests never enter its sandbox; they compare plain literals, whose methods are Python's own.
"""

import asyncio
import json
import secrets
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.api.failures import SandboxLost, WaitTimeout
from tandem.api.program_tests import ProgramTests, read_program
from tandem.api.sandbox import Limits, Outcome, Program, Sandbox, SandboxProcess
from tandem.rewards.code import candidate, literals, tester
from tandem.rewards.code.verdict import CannotTell, Verdict, reason_of

MAX_MESSAGE = 1 << 20
"""Bytes of one call, or of one value."""

CLOSED_S = 0.5
"""Time in which a process that closed its output may end by itself, so that its own end is what is reported."""

ROOM_S = 5.0
"""So much later than the judge the sandbox itself would end a process."""


def program_text(module: Any, main: str) -> str:
    """A side of the judge as the text of a program: `literals`, then the module, then the call of its main function."""
    own = [line for line in Path(module.__file__).read_text().splitlines() if not line.startswith("from tandem.")]
    return "\n".join([Path(literals.__file__).read_text(), *own, f"{main}()", ""])


CANDIDATE = program_text(candidate, "run_candidate")
TESTER = program_text(tester, "run_tests")


class ProcessEnd(Exception):
    """A process that says nothing more; why, as in `REASONS`."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason)
        self.reason, self.detail = reason, detail


class LineProcess:
    """A process that is spoken to in lines of JSON, up to a common deadline."""

    def __init__(self, process: SandboxProcess, ends: float):
        self.process, self.ends = process, ends
        self.rest = b""

    def left_s(self) -> float:
        """Seconds until the deadline.

        Raises:
            ProcessEnd: it has passed.
        """
        left_s = self.ends - time.monotonic()
        if left_s <= 0:
            raise ProcessEnd("timeout")
        return left_s

    async def tell(self, message: dict[str, Any]) -> None:
        """Sends a message.

        Raises:
            ProcessEnd: the process does not read it.
        """
        try:
            await self.process.send(literals.write(message), self.left_s())
        except WaitTimeout:
            raise ProcessEnd("timeout") from None
        except BrokenPipeError:
            raise await self.why() from None

    async def hear(self) -> dict[str, Any]:
        """The next message.

        Raises:
            ProcessEnd: none came, or it is none.
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
            raise ProcessEnd("protocol", "no JSON") from None
        if not isinstance(message, dict):
            raise ProcessEnd("protocol", "no object")
        return message

    async def why(self) -> ProcessEnd:
        """The end of the process; it has closed its output, so it can do no more, whatever else it does."""
        outcome = await self.process.close(min(CLOSED_S, max(0.0, self.ends - time.monotonic())))
        reason = reason_of(outcome)
        if reason == "timeout" and time.monotonic() < self.ends:
            reason = "exit"  # it had closed its output and lived on
        return ProcessEnd(reason, outcome.stderr.decode(errors="replace")[-300:])


class Candidate(LineProcess):
    """The side of the answer: every call has a number that is new and random, and one answer."""

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """The reply to a call: ``value`` or ``error``, and what ``changed``.

        Raises:
            ProcessEnd: it gave none, or something else; or something more, before or after it.
            CannotTell: it returned what is no literal.
        """
        token = secrets.token_hex(8)
        await self.tell(message | {"id": token})
        reply = await self.hear()
        if self.rest or reply.pop("id", None) != token:
            raise ProcessEnd("protocol", "it did not answer the call, once")
        if isinstance(reply.get("not_comparable"), str):
            raise CannotTell("not_comparable", reply["not_comparable"][:300])
        error, changed = reply.get("error"), reply.setdefault("changed", [])
        fine = isinstance(changed, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in changed)
        fine = fine and all(isinstance(key, int | str) for key, _ in changed)
        if set(reply) == {"error", "changed"}:
            fine = fine and isinstance(error, list) and len(error) == 2 and all(isinstance(part, str) for part in error)
        elif set(reply) != {"value", "changed"}:
            fine = False
        if not fine:
            raise ProcessEnd("protocol", "its answer has another form")
        return reply


async def judge_functions(
    sandbox: Sandbox, parts: tuple[str, ...], tests: ProgramTests, limits: Limits, *, all_or_none: bool
) -> Verdict:
    """Runs the tests on the answer; ``parts`` are executed one after the other. `Limits.wall_s` is the time for all of it.

    Raises:
        SandboxLost, CannotTell: as `reason_of`; the tests themselves are broken; a value that is no literal.
    """
    # the deadline is kept here, so that the sandbox's own never ends a process first
    roomy = replace(limits, wall_s=limits.wall_s + ROOM_S, cpu_s=limits.cpu_s + ROOM_S)
    starting = [asyncio.ensure_future(sandbox.start(Program(source=text), roomy)) for text in (CANDIDATE, TESTER)]
    try:
        processes = await asyncio.gather(*starting)
        ends = time.monotonic() + limits.wall_s
        answer, tests_side = Candidate(processes[0], ends), LineProcess(processes[1], ends)
        verdict = await _judge(answer, tests_side, parts, tests, all_or_none)
    finally:  # to its end, though it is cancelled again meanwhile
        outcomes = await asyncio.shield(asyncio.ensure_future(_end(starting)))
    if verdict.reason == "timeout":  # also what a sandbox looks like that is stuck
        for outcome in outcomes:
            if outcome.status == "lost":
                raise SandboxLost(outcome.stderr.decode(errors="replace")[-500:])
    return verdict


async def _end(starting: list[asyncio.Future[SandboxProcess]]) -> list[Outcome]:
    """Ends processes, and those that are only about to begin."""
    for one in starting:
        one.cancel()
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
    """A preamble that can run by itself: the head of a function without a docstring needs a body."""
    try:
        read_program(preamble)
    except SyntaxError:
        return preamble.rstrip() + "\n    pass\n"
    return preamble
