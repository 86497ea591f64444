"""Loading a function or class that a user names as ``my_file.py:name``."""

import asyncio
import contextlib
import ctypes
import hashlib
import importlib.util
import inspect
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from tandem.api.failures import UserCodeFailed, described
from tandem.config.errors import ConfigError, TandemError, nearest_names

T = TypeVar("T")

SLOW_S = 30.0
"""Seconds after which a warning says that user code is still loading."""

log = logging.getLogger(__name__)


def is_file_spec(spec: str) -> bool:
    """True if a name has the form ``my_file.py:name``, so that it is not a registered name."""
    return spec.rpartition(":")[0].endswith(".py")


def load_object(spec: str) -> Any:
    """Returns the object ``name`` of the file in ``my_file.py:name``. A process executes each file once.

    The file's folder is appended to ``sys.path``, so the file may import its neighbours as a script may.

    Raises:
        ConfigError: the spec has another form, the file is missing or raises, or it has no such name.
    """
    source, _, name = spec.rpartition(":")
    if not source.endswith(".py") or not name:
        raise ConfigError(f"{spec!r} must have the form my_file.py:name")
    try:
        path = Path(source).expanduser().resolve()
        exists = path.is_file()
    except (OSError, RuntimeError) as error:  # a name too long, or ``~name`` of an unknown user
        raise ConfigError(f"{spec!r}: {source} is not the name of a file: {error}") from error
    if not exists:
        raise ConfigError(f"{spec!r}: there is no file {path}")
    module_name = _module_name(path)
    module = sys.modules.get(module_name)
    if module is None:
        module_spec = importlib.util.spec_from_file_location(module_name, path)
        if module_spec is None or module_spec.loader is None:
            raise ConfigError(f"{spec!r}: {path} cannot be imported as a Python file")
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[module_name] = module
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        try:
            with warn_if_slow(spec):
                in_user_code(spec, module_spec.loader.exec_module, module)
        except BaseException:
            del sys.modules[module_name]
            raise
    if not hasattr(module, name):
        names = [n for n in vars(module) if not n.startswith("_")]
        raise ConfigError(f"{spec!r}: {path.name} has no {name!r}; {nearest_names(name, names)}")
    return getattr(module, name)


def forget(path: Path) -> None:
    """Forgets a file whose contents have changed, so that the next `load_object` executes it again."""
    sys.modules.pop(_module_name(path.resolve()), None)


def _module_name(path: Path) -> str:
    return f"tandem_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"


def in_user_code(spec: str, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Calls user code at start: a file, or the constructor of a class.

    Raises:
        ConfigError: the code raised anything; the message names the error and its line, ``__cause__`` is the error.
    """
    try:
        return function(*arguments, **named)
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the boundary of a user's code, which may end with sys.exit(main())
        raise ConfigError(f"{spec!r} raised {described(error)}; mend it there") from error


@contextlib.contextmanager
def warn_if_slow(spec: str, slow_s: float = SLOW_S) -> Iterator[None]:
    """Warns while a block of user code is slow at start: after ``slow_s`` seconds, and each time that this time has doubled.
    The warning names the line of the user's file. There is no limit, because the code may download a model."""
    thread, over, file = threading.get_ident(), threading.Event(), Path(spec.rpartition(":")[0]).name

    def tell() -> None:
        began, after_s = time.monotonic(), slow_s
        while not over.wait(began + after_s - time.monotonic()):
            frame = sys._current_frames().get(thread)
            while frame is not None and Path(frame.f_code.co_filename).name != file:
                frame = frame.f_back
            where = "" if frame is None else f", and is in line {frame.f_lineno} of {file}"
            log.warning("%r has taken %g s%s; the start waits for it, and Ctrl-C ends it", spec, after_s, where)
            after_s *= 2

    threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        over.set()


class Interrupted(BaseException):
    """Ends user code that exceeds its time. It is no Exception, so that ``except Exception`` in that code does not catch
    it."""


def interrupt(thread: threading.Thread, error: type[Interrupted] = Interrupted) -> None:
    """Raises ``error`` in another thread, as soon as that thread's current call returns to the interpreter.

    Until then Python 3.11 makes every thread check for the exception at every call. The checks never stop if the other
    thread ends first, and a thread with a profiler (`sys.setprofile`) makes no progress meanwhile. So this function also
    raises an exception in the calling thread, which stops the checks. The other thread checks once more when its present
    call returns and it waits for the interpreter.
    """
    _raise_in(thread.ident or 0, error)
    with contextlib.suppress(_Answered):
        _raise_in(threading.get_ident(), _Answered)
        while True:
            time.sleep(0)


class _Answered(BaseException):
    """The exception that `interrupt` raises in its own thread and catches at once."""


def _raise_in(thread: int, error: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


@contextlib.contextmanager
def own_alarm(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Lends the process's alarm (SIGALRM) to a block, which may set it any number of times; ``handler`` is called when it
    fires. An alarm that was set before (a test's limit, or the user's) continues after the block. Main thread only."""
    left_s, every_s = signal.setitimer(signal.ITIMER_REAL, 0.0)
    before, started = signal.signal(signal.SIGALRM, handler), time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        if left_s:
            signal.setitimer(signal.ITIMER_REAL, max(left_s - (time.monotonic() - started), 1e-3), every_s)


@contextlib.contextmanager
def interrupted_after(spec: str, limit_s: float) -> Iterator[None]:
    """Interrupts a block of user code after ``limit_s`` seconds. Only the main thread has this limit: the system cannot
    interrupt others. A call that holds the interpreter is interrupted when it returns.

    Raises:
        UserCodeFailed: the block took longer than ``limit_s``.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    with own_alarm(late):
        try:
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            try:
                yield
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
        except Interrupted:
            raise UserCodeFailed(
                f"{spec!r} took longer than {limit_s:g} s and was interrupted; mend it there, or give it more time, and "
                "start again. Checkpoints that were saved stay"
            ) from None


def run_user_code(spec: str, function: Callable[..., T], **named: Any) -> T:
    """Calls a user's function in the middle of a run.

    Raises:
        UserCodeFailed: the code raised anything; the message names the error and its line, ``__cause__`` is the error.
    """
    try:
        return function(**named)
    except (TandemError, KeyboardInterrupt, Interrupted):
        raise
    except BaseException as error:  # the boundary of a user's code
        raise UserCodeFailed(
            f"{spec!r} raised {described(error)}; mend it there and start again. Checkpoints that were saved stay"
        ) from error


def check_coroutine(key: str, function: Callable[..., Any], form: str, *given: Any, **named: Any) -> None:
    """Checks that ``function`` is an ``async def`` that takes these arguments. ``key``: the configuration key that names it.
    ``form``: the signature that the message shows.

    Raises:
        ConfigError: the function is not async, or takes other arguments.
    """
    try:
        if not inspect.iscoroutinefunction(inspect.unwrap(function)):
            raise TypeError("the function is not async, or has a `yield`")
        inspect.signature(function).bind(*given, **named)
    except TypeError as error:
        raise ConfigError(f"{key}: write `async def {form}`: {error}") from None


def run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Runs an event loop until it is stopped, and closes it. A coroutine that calls `sys.exit` ends only itself: asyncio
    passes the error to its caller, but also stops the loop, which is started again here. The same holds for an interruption
    that comes too late."""
    try:
        while True:
            with contextlib.suppress(SystemExit, KeyboardInterrupt, Interrupted):
                loop.run_forever()
                return
    finally:
        loop.close()


def ends_the_task(error: BaseException) -> bool:
    """True if a coroutine ended because its task was cancelled or closed, not by an error or a cancellation of its own."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return isinstance(error, GeneratorExit)
