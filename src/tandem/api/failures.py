"""The tree of errors. Failures are values at four boundaries: episode, reward call, request, worker.

TandemError
├── ConfigError (ValueError)            a configuration that cannot work
│   └── WrongWorkflow                   a workflow that no prompt can be run with: ends the run
├── BatchError (ValueError)             a batch that lacks a field or has the wrong shape
├── WaitTimeout (TimeoutError)          a wait that passed its deadline; says what it waited for
├── Stalled (TimeoutError)              nothing was done for too long; ends the run
├── UserCodeFailed (RuntimeError)       a function of the user's, an algorithm's part, that failed in the middle of a run
├── NotWritten (OSError)             a file of the run that the disk refuses; says which, and what to do
├── NoRoom (MemoryError)                memory of a GPU that a server takes again, and others hold
├── NonFinite (ArithmeticError)         loss or gradient not finite too often in a row
├── WeightUpdateFailed (RuntimeError)   an update that no engine took
├── WeightsChanged (RuntimeError)       weights that slept, and whose file has others now
├── DeliveryDisproved (RuntimeError)    trajectories that other weights made than they say
├── RankFailed (RuntimeError)           another rank failed; quotes its error
│   └── WorkerDied                      a worker with models of the run is gone, and their state with it
└── EpisodeFailure                      why an episode was dropped; `reason` is counted in metrics
    ├── DataFailure                     the row or its reward: counted, bounded, never retried
    │   └── RewardFailure               raised, timeout, not_finite, wrong_type
    └── InfrastructureFailure           engine or machine: retried
        ├── EngineDied (RuntimeError)   the inference engine is gone
        ├── SandboxLost (RuntimeError)  a sandbox was killed from outside
        └── ServerFailed                a server did not answer as it should; `status`, `url`
"""

import os
import sysconfig
import traceback

from tandem.config.errors import ConfigError, TandemError, kind_and_text

__all__ = [
    "BROKEN",
    "BatchError",
    "ConfigError",
    "DataFailure",
    "DeliveryDisproved",
    "EngineDied",
    "EpisodeFailure",
    "InfrastructureFailure",
    "NoRoom",
    "NonFinite",
    "NotWritten",
    "RankFailed",
    "RewardFailure",
    "SandboxLost",
    "ServerFailed",
    "Stalled",
    "TandemError",
    "UserCodeFailed",
    "WaitTimeout",
    "WeightUpdateFailed",
    "WeightsChanged",
    "WorkerDied",
    "WrongWorkflow",
    "as_failure",
    "described",
]


class WrongWorkflow(ConfigError):
    """A workflow that returns what nobody can use, whatever the prompt: the run ends, saying what to change."""


class BatchError(TandemError, ValueError):
    """A batch that lacks a field, or whose fields do not fit each other."""


class WaitTimeout(TandemError, TimeoutError):
    """A wait passed its deadline; the message says what it waited for."""

    may_pass = True


class Stalled(TandemError, TimeoutError):
    """Nothing was done for too long; says in which phase, and what it waited for."""

    may_pass = True


class UserCodeFailed(TandemError, RuntimeError):
    """A loss, an advantage, a filter of the user's own that raised or returned what nobody can use; names file and line."""


class NotWritten(TandemError, OSError):
    """A file of the run that the disk refuses; it is as it was before. Names it, and what to do."""


class NoRoom(TandemError, MemoryError):
    """A GPU has less memory free than a server takes again; says how much is missing, who holds it, and what to set."""


class NonFinite(TandemError, ArithmeticError):
    """Too many steps in a row had a loss or gradient that was not finite."""


class WeightUpdateFailed(TandemError, RuntimeError):
    """A weight update that no engine took; all of them still serve the version before."""

    may_pass = True


class WeightsChanged(TandemError, RuntimeError):
    """Weights that slept cannot be had again: the file that they are read from has changed, or is gone."""


class DeliveryDisproved(TandemError, RuntimeError):
    """Trajectories were not made by the weights, temperature or tokens that they are stamped with; names a missing update or
    the version that made them, where one fits."""


class RankFailed(TandemError, RuntimeError):
    """Another rank of this run failed, so this one cannot go on; the message has the other's error."""

    may_pass = True


class WorkerDied(RankFailed):
    """A process that has models of this run is gone. `tandem train` goes on from the newest checkpoint, with another one in
    its place, as often as ``recover.max_restarts`` says."""


class EpisodeFailure(TandemError):
    """An episode that gave no group; `reason` is a short word that metrics count by.

    Raise it in a workflow to drop the prompt: ``raise DataFailure("prompt_too_long", "2100 tokens, context 2048")``.
    """

    def __init__(self, reason: str, message: str = ""):
        super().__init__(f"{reason}: {message}" if message else reason)
        self.reason = reason
        self.words = message
        """The message without the reason; for a group that lost its samples, that of the first of them."""

        self.num_left = 0
        """Samples of the group that had not failed. 0 too where the group failed as a whole."""

        self.failed_samples: tuple[str, ...] = ()
        """Reasons of single samples that had failed before; their group, which would have listed them, was never made."""
        self.completion_text = ""
        """The reply that could not be judged; empty if there is none."""


BROKEN = {f"reward_{what}" for what in ("raised", "timeout", "not_finite", "wrong_type")}
BROKEN |= {"workflow_raised", "agent_raised", "agent_raised_on_cut_reply", "environment_raised"}
"""Reasons that are a mistake in a user's code or in what it was given, and neither a server's fault nor a choice."""


class DataFailure(EpisodeFailure):
    """The row or its reward is at fault: running it again would not help."""


class RewardFailure(DataFailure):
    """A reward that raised, ran past its deadline, was not finite or had the wrong type."""


class InfrastructureFailure(EpisodeFailure):
    """An engine or a machine is at fault: the episode is run again, up to `rollout.max_retries`."""

    may_pass = True


class EngineDied(InfrastructureFailure, RuntimeError):
    """The inference engine's process is gone."""

    def __init__(self, message: str = ""):
        super().__init__("engine_died", message)
        self.message = message

    def __reduce__(self) -> tuple[type["EngineDied"], tuple[str]]:
        """Pickled as it was made: by its message alone."""
        return type(self), (self.message,)


class SandboxLost(InfrastructureFailure, RuntimeError):
    """A sandbox was killed from outside, or could not be made; it says nothing about the program inside."""

    def __init__(self, message: str = ""):
        super().__init__("sandbox_lost", message)
        self.message = message

    def __reduce__(self) -> tuple[type["SandboxLost"], tuple[str]]:
        """Pickled as it was made: by its message alone."""
        return type(self), (self.message,)


class ServerFailed(InfrastructureFailure):
    """A server refused the connection, cut it, was too slow, or answered what is no answer."""

    def __init__(self, message: str = "", *, url: str = "", status: int | None = None):
        super().__init__("server", message)
        self.url = url
        self.status = status
        """HTTP status; None where no whole answer came."""


LIBRARIES = ("<", os.path.dirname(os.path.dirname(__file__)), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))


def described(error: BaseException) -> str:
    """An error of a user's code in words: its type, its text, and the last line of no library on the way there:
    ``ValueError: bad (my.py:7 in reward: return int(completion))``."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(LIBRARIES)]
    place = "".join(f" ({os.path.basename(f.filename)}:{f.lineno} in {f.name}: {f.line or '':.80})" for f in frames[-1:])
    return kind_and_text(error) + place


def as_failure(error: BaseException) -> EpisodeFailure:
    """The episode boundary: any error as a failure with a reason, its cause kept."""
    if isinstance(error, EpisodeFailure):
        return error
    failure = DataFailure("workflow_raised", described(error))
    failure.__cause__ = error
    return failure
