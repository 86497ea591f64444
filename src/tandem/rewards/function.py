"""A function as a reward: a user's sync function in a worker process, an async one in the event loop."""

import asyncio
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from tandem.api.failures import RewardFailure, UserCodeFailed, described
from tandem.api.plugins import in_user_code, run_loop, run_user_code
from tandem.api.samples import Sample
from tandem.api.workflow import GroupReward, RewardFn, RewardResult
from tandem.config.data import OURS
from tandem.config.errors import ConfigError
from tandem.rewards.outcome import MEDIA, WHOLE, Arguments, late, read_outcome, words_of
from tandem.rewards.pool import WorkerPool


def require_answer(row: Mapping[str, Any], name: str) -> None:
    """Raises ConfigError where a row has no answer to compare with."""
    if row.get("answer") is None or not str(row["answer"]).strip():
        there = ", ".join(column for column in row if column not in ("messages", "answer", *OURS))
        raise ConfigError(
            f"reward {name!r} compares with the row's answer, and "
            f"there is none; name its column by answer_column (of train_dataset, valid_dataset or an evaluation's data). "
            f"Columns there: {there}"
        )


class FunctionReward(RewardFn):
    """The common part of both kinds: the arguments are those that the signature asks for."""

    tokenizer: Any = None
    """The policy's, for the completion with special tokens; without one that is the completion."""

    def __init__(self, function: Callable[..., Any], name: str):
        self.name = name
        self.arguments = Arguments(function, name)

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Before training.

        Raises:
            ConfigError: the function needs a column that is not there.
        """
        if missing := self.arguments.missing(row):
            raise ConfigError(missing)

    async def __call__(
        self,
        *,
        prompt: str,
        completion: str,
        prompt_ids: tuple[int, ...],
        completion_ids: tuple[int, ...],
        row: Mapping[str, Any],
    ) -> RewardResult:
        """Implements `RewardFn.__call__`."""
        try:
            self.check_row(row)
        except ConfigError as error:
            raise RewardFailure("reward_raised", str(error)) from error
        given = {
            "prompt": prompt,
            "completion": completion,
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "row": dict(row),
        }
        if WHOLE in self.arguments.names:
            given[WHOLE] = self.tokenizer.decode(list(completion_ids)) if self.tokenizer is not None else completion
        if MEDIA in self.arguments.names and MEDIA not in row:
            from tandem.media.parts import opened  # noqa: PLC0415 — numpy, which a graph is drawn without

            given[MEDIA] = await asyncio.to_thread(opened, row.get("messages") or ())
        return await self._judge(self.arguments.select(given, row))

    @abstractmethod
    async def _judge(self, arguments: dict[str, Any]) -> RewardResult:
        """Calls the function."""


class WorkerReward(FunctionReward):
    """A sync function, named by ``spec``, in worker processes that are killed at the deadline."""

    def __init__(self, function: Callable[..., Any], spec: str, *, name: str, timeout_s: float, workers: int | None = None):
        super().__init__(function, name)
        self.pool = WorkerPool(spec, name=name, timeout_s=timeout_s, size=workers)

    async def _judge(self, arguments: dict[str, Any]) -> RewardResult:
        return await self.pool.call(arguments)

    def close(self) -> None:
        """Kills the workers."""
        self.pool.close()


class DirectReward(FunctionReward):
    """A function of Tandem's own that takes microseconds: called where it stands."""

    def __init__(
        self, function: Callable[..., Any], name: str, *, check: Callable[[Mapping[str, Any], str], object] | None = None
    ):
        """``check(row, name)`` raises ConfigError for a row that the function cannot judge."""
        super().__init__(function, name)
        self.function, self.check = function, check

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Checks the columns, and what the function itself needs."""
        super().check_row(row)
        if self.check is not None:
            self.check(row, self.name)

    async def _judge(self, arguments: dict[str, Any]) -> RewardResult:
        try:
            return read_outcome(self.function(**arguments))
        except RewardFailure:
            raise
        except Exception as error:  # the reward boundary
            raise _raised(self.name, error) from error


class AsyncReward(FunctionReward):
    """An async function, in the event loop. It must not block: only a worker process could be killed."""

    def __init__(self, function: Callable[..., Any], name: str, *, timeout_s: float):
        super().__init__(function, name)
        self.function, self.timeout_s = function, timeout_s
        self._abandoned: set[asyncio.Task[Any]] = set()

    async def _judge(self, arguments: dict[str, Any]) -> RewardResult:
        task = asyncio.ensure_future(self._called(arguments))
        try:
            done, _ = await asyncio.wait({task}, timeout=self.timeout_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            self._abandon(task)  # not awaited: it may refuse to be cancelled
            raise late(self.name, self.timeout_s, "cancelled")
        try:
            return read_outcome(task.result())
        except RewardFailure as failure:
            words = f"{self.name}: {words_of(failure, self.function)}"
            raise RewardFailure(failure.reason, words) from failure
        except BaseException as error:  # the reward boundary: sys.exit() in a reward is a failure of the reward
            raise _raised(self.name, error) from error

    async def _called(self, arguments: dict[str, Any]) -> Any:
        try:
            return await self.function(**arguments)
        except SystemExit as error:  # it would end the event loop too
            raise _raised(self.name, error) from error

    def _abandon(self, task: asyncio.Task[Any]) -> None:
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # read, so that asyncio keeps quiet
        task.cancel()


class OwnReward(AsyncReward):
    """A `RewardFn` that a user wrote, held to the deadline; what it returns is checked as a function's is."""

    def __init__(self, reward: RewardFn, name: str, *, timeout_s: float):
        """``name``: the file and class, for errors."""
        super().__init__(reward.__call__, name, timeout_s=timeout_s)
        self.reward, self.reads_messages = reward, reward.reads_messages

    def check_row(self, row: Mapping[str, Any]) -> None:
        """The reward's own check, where it has one."""
        check = getattr(self.reward, "check_row", None)
        if check is not None:
            in_user_code(self.name, check, row)

    async def __call__(self, **given: Any) -> RewardResult:
        """Implements `RewardFn.__call__`."""
        return await self._judge(given)

    def metrics(self) -> dict[str, float]:
        """Its own counts.

        Raises:
            UserCodeFailed: it raised, or gave something else.
        """
        found = run_user_code(self.name, self.reward.metrics)
        if not isinstance(found, dict) or not all(isinstance(n, str) and isinstance(x, Real) for n, x in found.items()):
            raise UserCodeFailed(f"{self.name!r}: metrics() must give a dict of names and numbers, it gave {found!r:.200}")
        return found

    def close(self) -> None:
        """Closes it."""
        self.reward.close()


class OwnGroupReward(GroupReward):
    """A `GroupReward` that a user wrote, held to the deadline of a reward: also where it blocks, for its event loop has a
    thread of its own, which is left to itself when a call is late."""

    def __init__(self, reward: GroupReward, name: str, *, timeout_s: float):
        self.reward, self.name, self.timeout_s = reward, name, timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None

    async def compare(self, samples: Sequence[Sample], row: Mapping[str, Any]) -> Sequence[float | RewardResult]:
        """Implements `GroupReward.compare`. Fails as ``reward_timeout`` or ``reward_raised`` besides."""
        loop = self._loop = self._loop or _loop_aside(self.name)
        call = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._called(samples, row), loop))
        done, _ = await asyncio.wait({call}, timeout=self.timeout_s)
        if not done:
            call.cancel()
            if self._loop is loop:
                self._loop = None  # the next call finds a thread that is free; those under way end in this one
                asyncio.run_coroutine_threadsafe(_end(), loop)
            raise late(self.name, self.timeout_s, "left to itself")
        return call.result()

    async def _called(self, samples: Sequence[Sample], row: Mapping[str, Any]) -> Sequence[float | RewardResult]:
        try:
            return await self.reward.compare(samples, row)
        except RewardFailure:
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # the reward boundary
            raise _raised(self.name, error) from error

    def close(self) -> None:
        """Closes it."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(_end(cancel=True), self._loop)
            self._loop = None
        self.reward.close()


def _raised(name: str, error: BaseException) -> RewardFailure:
    return RewardFailure("reward_raised", f"{name}: {described(error)}")


def _loop_aside(name: str) -> asyncio.AbstractEventLoop:
    """An event loop that runs in a thread, which does not keep the process from ending."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=run_loop, args=(loop,), name=f"reward {name}", daemon=True).start()
    return loop


async def _end(*, cancel: bool = False) -> None:
    """Stops the event loop when its other tasks have ended."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others if cancel else ():
            task.cancel()
        await asyncio.wait(others)
    asyncio.get_running_loop().stop()
