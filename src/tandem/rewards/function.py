"""Functions as rewards: a user's sync function runs in a pool of worker processes, an async function on the event loop.

A worker process lives long. If a call misses its deadline, its worker is killed.
"""

import asyncio
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from numbers import Real
from typing import Any, ClassVar

from tandem.api.failures import RewardFailure, UserCodeFailed, described
from tandem.api.plugins import in_user_code, run_loop, run_user_code
from tandem.api.workflow import GroupReward, RewardFn, RewardResult, Sample
from tandem.config.data import OURS
from tandem.config.devices import usable_cores
from tandem.config.errors import ConfigError
from tandem.rewards.signatures import MEDIA, WHOLE, Arguments, late, read_outcome, words_of
from tandem.workers.process import LOOK_EVERY_S, Silent, Worker, Workers, computes

WORKERS_A_CORE, MOST_WORKERS = 8, 64
"""Bounds of the default number of workers: the maximum per core, and the maximum in total. There may be more than one per
core, because most calls only wait; there is a total, because each worker takes memory."""


def most_workers(samples: int | None = None) -> int:
    """Returns the default number of worker processes. ``samples``: the number of samples that are judged together; None:
    unknown. The result is ``samples``, but at most `WORKERS_A_CORE` per core and `MOST_WORKERS` in total, and never less
    than the number of cores."""
    cores = usable_cores()
    most = min(WORKERS_A_CORE * cores, MOST_WORKERS)
    return max(cores, most if samples is None else min(most, samples))


class WorkerPool(Workers[Worker]):
    """Runs one function, ``spec``, in up to ``size`` worker processes, each started when first needed. ``size`` None:
    `most_workers`.

    As many calls as there are cores run at once. A further call begins, in a further worker if necessary, only while fewer
    calls compute than there are cores. So calls that sleep or wait for a network overlap, while calls that compute neither
    slow each other down nor take the memory of many workers. The time limit of a call starts when a worker takes the call.
    The pool may be used from any event loop.
    """

    failure, closed = RewardFailure, "the reward was closed during the call"
    reasons: ClassVar = {"late": "reward_timeout", "died": "reward_raised", "unsent": "reward_raised"}

    def __init__(self, spec: str, *, name: str, timeout_s: float, size: int | None = None):
        self.spec, self.timeout_s, self.size = spec, timeout_s, size or most_workers()
        self._callers = ThreadPoolExecutor(self.size, thread_name_prefix=f"reward {name}")
        super().__init__(name, partial(Worker, name, "tandem.rewards.worker", spec), self._callers)
        self._cores = usable_cores()
        self._busy: dict[Worker, float] = {}  # the monotonic time when its call began
        self._room, self._look_at = 0, 0.0

    async def call(self, arguments: dict[str, Any]) -> RewardResult:
        """Calls the function with keyword arguments.

        Raises:
            RewardFailure: the function raised an exception, missed its deadline, ended its process, or returned a value that
                is not a reward.
        """
        if self._closed:
            raise RuntimeError(f"reward {self.name} is closed")
        return await asyncio.wrap_future(self._callers.submit(self._call, arguments))

    def _call(self, arguments: dict[str, Any]) -> RewardResult:
        worker = self._take()
        try:
            message = self._sound(worker.ask(arguments, self.timeout_s))
        except Silent as silent:
            is_late = silent.reason == "late" and not self._closed
            raise (late(self.name, self.timeout_s, "killed") if is_late else self._failure(silent)) from silent.__cause__
        finally:
            self._give_back(worker)
        return RewardResult(**{name: message[name] for name in ("value", "rewards", "accuracy", "answer", "extracted")})

    def _has_room(self) -> bool:
        if len(self._busy) < self._cores:
            return True
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            # a call that has just begun counts as computing, because it has not yet reached the point where it waits
            computing = sum(now - began < LOOK_EVERY_S or computes(worker.pid) for worker, began in self._busy.items())
            # if all calls wait, as many again may begin
            self._room = self._cores - computing if computing else len(self._busy)
        return self._room > 0

    def _begin(self, worker: Worker) -> None:
        self._room -= len(self._busy) >= self._cores
        self._busy[worker] = time.monotonic()

    def _end(self, worker: Worker) -> None:
        self._busy.pop(worker, None)
        super()._end(worker)


def require_answer(row: Mapping[str, Any], name: str) -> None:
    """Raises ConfigError if a row has no answer to compare with."""
    if row.get("answer") is None or not str(row["answer"]).strip():
        columns = (column for column in row if column not in ("messages", "answer", *OURS))
        shown = ", ".join(f"{column} (empty)" if row[column] is None else column for column in columns)
        raise ConfigError(
            f"reward {name!r} compares with the row's answer, and there is none: the answer's column is empty in this row, "
            "or has another name, to be given as answer_column (of train_dataset, valid_dataset or an evaluation's data). "
            f"Columns there: {shown}"
        )


class FunctionReward(RewardFn):
    """Base class of function rewards. Calls the function with the arguments that the function's signature names."""

    tokenizer: Any = None
    """The policy's tokenizer, to decode the completion with its special tokens. None: the function gets the completion
    without special tokens."""

    def __init__(self, function: Callable[..., Any], name: str):
        self.name = name
        self.arguments = Arguments(function, name)

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Checks a row before training.

        Raises:
            ConfigError: the function needs a column that the row lacks.
        """
        if missing := self.arguments.missing(row):
            raise ConfigError(missing)

    async def __call__(self, *, row: Mapping[str, Any], **given: Any) -> RewardResult:
        """Implements `RewardFn.__call__`."""
        try:
            self.check_row(row)
        except ConfigError as error:
            raise RewardFailure("row_unfit", str(error)) from error
        values = {**given, "row": dict(row)}
        if WHOLE in self.arguments.names:
            decode = None if self.tokenizer is None else self.tokenizer.decode
            values[WHOLE] = given["completion"] if decode is None else decode(list(given["completion_ids"]))
        if MEDIA in self.arguments.names and MEDIA not in row:
            from tandem.media.parts import opened  # noqa: PLC0415 — imports numpy, which drawing a graph must not need

            values[MEDIA] = await asyncio.to_thread(opened, row.get("messages") or ())
        return await self._judge(self.arguments.select(values, row))

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
    """One of Tandem's own functions. It takes microseconds, so it is called directly, without a worker process."""

    def __init__(
        self, function: Callable[..., Any], name: str, *, check: Callable[[Mapping[str, Any], str], object] | None = None
    ):
        """``check(row, name)``: raises ConfigError for a row that the function cannot judge."""
        super().__init__(function, name)
        self.function, self.check = function, check

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Checks the row's columns, and calls the function's own check."""
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
    """An async function on the event loop. It must not block, because only a worker process can be killed."""

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
            self._abandon(task)  # not awaited, because it may ignore its cancellation
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
        except SystemExit as error:  # SystemExit would end the event loop too
            raise _raised(self.name, error) from error

    def _abandon(self, task: asyncio.Task[Any]) -> None:
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)
        # retrieves the error, so that asyncio does not report it
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        task.cancel()


class OwnReward(AsyncReward):
    """A user's `RewardFn` with a deadline. Its result is checked like a function's."""

    def __init__(self, reward: RewardFn, name: str, *, timeout_s: float):
        """``name``: file and class, for errors."""
        super().__init__(reward.__call__, name, timeout_s=timeout_s)
        self.reward, self.reads_messages = reward, reward.reads_messages

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Calls the reward's own check, if it has one."""
        check = getattr(self.reward, "check_row", None)
        if check is not None:
            in_user_code(self.name, check, row)

    async def __call__(self, **arguments: Any) -> RewardResult:
        """Implements `RewardFn.__call__`."""
        return await self._judge(arguments)

    def metrics(self) -> dict[str, float]:
        """Returns the reward's own metrics.

        Raises:
            UserCodeFailed: the reward's method raised, or returned something else.
        """
        metrics = run_user_code(self.name, self.reward.metrics)
        if not isinstance(metrics, dict) or not all(isinstance(n, str) and isinstance(x, Real) for n, x in metrics.items()):
            raise UserCodeFailed(f"{self.name!r}: metrics() must give a dict of names and numbers, it gave {metrics!r:.200}")
        return metrics

    def close(self) -> None:
        """Closes the reward."""
        self.reward.close()


class OwnGroupReward(GroupReward):
    """A user's `GroupReward` with a deadline. The deadline holds even if the reward blocks, because its event loop runs in a
    separate thread, which is abandoned when a call is late."""

    def __init__(self, reward: GroupReward, name: str, *, timeout_s: float):
        self.reward, self.name, self.timeout_s = reward, name, timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None

    async def compare(self, samples: Sequence[Sample], row: Mapping[str, Any]) -> Sequence[float | RewardResult]:
        """Implements `GroupReward.compare`. Further failures: ``reward_timeout`` and ``reward_raised``."""
        loop = self._loop = self._loop or _loop_aside(self.name)
        call = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._called(samples, row), loop))
        done, _ = await asyncio.wait({call}, timeout=self.timeout_s)
        if not done:
            call.cancel()
            if self._loop is loop:
                self._loop = None  # the next call starts a new thread; calls under way end in this one
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
        """Closes the reward and cancels its running calls."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(_end(cancel=True), self._loop)
            self._loop = None
        self.reward.close()


def _raised(name: str, error: BaseException) -> RewardFailure:
    return RewardFailure("reward_raised", f"{name}: {described(error)}")


def _loop_aside(name: str) -> asyncio.AbstractEventLoop:
    """Starts an event loop in a daemon thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=run_loop, args=(loop,), name=f"reward {name}", daemon=True).start()
    return loop


async def _end(*, cancel: bool = False) -> None:
    """Stops the event loop when its other tasks have ended. ``cancel``: cancels these tasks."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others if cancel else ():
            task.cancel()
        await asyncio.wait(others)
    asyncio.get_running_loop().stop()
