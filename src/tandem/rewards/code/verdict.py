"""The verdict of a judge of programs, and the cases in which it cannot tell."""

from dataclasses import dataclass

from tandem.api.failures import SandboxLost
from tandem.api.sandbox import Outcome

REASONS = {
    "wrong": "the answer runs, and a test says that it is wrong",
    "error": "it does not compile, or it raises",
    "timeout": "it does not end in time",
    "memory": "it takes more memory than it may",
    "output": "it prints, or returns, more than it may",
    "exit": "it ends the process before all tests are done",
    "signal": "it is killed by a signal, of its own or of a crash",
    "protocol": "it writes to the judge's pipe itself",
    "no_code": "there is no program in the answer",
}
"""Why an answer fails."""


@dataclass(frozen=True)
class Verdict:
    """The judgement of one answer."""

    passed: tuple[bool, ...]
    """One for each case."""

    reason: str = ""
    """Why the first case that failed did: one of `REASONS`; empty if all passed."""

    detail: str = ""
    """The same in words."""

    @classmethod
    def of(cls, passed: list[bool], cases: int, reason: str, detail: str = "") -> "Verdict":
        """After ``passed``, all other cases fail for a reason."""
        return cls((*passed, *[False] * (cases - len(passed))), reason, detail)


class CannotTell(Exception):
    """No verdict: the reason by which the failed sample is counted, and the details. Never a reward."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


def reason_of(outcome: Outcome) -> str:
    """Why a program that has ended failed.

    Raises:
        SandboxLost: it did not fail, its sandbox did.
        CannotTell: the sandbox refused to run it.
    """
    if outcome.status == "lost":
        raise SandboxLost(outcome.stderr.decode(errors="replace")[-500:])
    if outcome.status == "refused":
        raise CannotTell("sandbox_refused", outcome.stderr.decode(errors="replace")[-500:])
    return "exit" if outcome.status == "ok" else outcome.status
