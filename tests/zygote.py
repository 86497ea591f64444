"""Processes that can be killed, many of them, without importing torch in each (one process forks itself for each call), and
the question if one has ended."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tandem.sandbox.guest import kernel

ROOT = Path(__file__).resolve().parents[1]


def gone(process: int | psutil.Process, within_s: float = 0.0) -> bool:
    """Tells if a process has ended, or does so in time. One that ends during the question has ended; so has a zombie."""
    deadline = time.monotonic() + within_s
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
    except psutil.NoSuchProcess:
        pass
    return True


class Zygote:
    """Calls functions of modules in processes of their own; a context manager.

    ``modules`` are imported once. The processes share nothing but the disk with whoever calls.
    """

    def __init__(self, *modules: str):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from tests.zygote import serve; serve({list(modules)!r})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )

    @property
    def pid(self) -> int:
        """Of the process that forks itself."""
        return self._process.pid

    def call(self, function: str, arguments: Sequence[Any], log: Path, kill_after: float | None = None) -> int:
        """Exit status of a process that calls ``module:function``, negative where a signal ended it; what it prints goes to
        ``log``. It has two minutes; after ``kill_after`` seconds it is killed, from outside and wherever it is."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([function, list(arguments), str(log), kill_after]), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def run(self, source: str, *arguments: object, log: Path) -> subprocess.CompletedProcess[str]:
        """The program ``source`` in a process of its own, as after ``python -c``; all that it prints is its ``stdout``."""
        status = self.call("tests.zygote:execute", [source, *map(str, arguments)], log)
        return subprocess.CompletedProcess(["-c", *arguments], status, log.read_text())

    def __enter__(self) -> "Zygote":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)


def serve(modules: Sequence[str]) -> None:
    """The process itself: a line with a call in, a line with an exit status out. It adopts what a killed call leaves."""
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    __import__("warnings").simplefilter("ignore")
    for module in modules:
        __import__(module)
    for line in sys.stdin:
        function, arguments, log, kill_after = json.loads(line)
        child = os.fork()
        if not child:
            _child(function, arguments, log)
        if kill_after is not None:
            _kill(child, time.monotonic() + kill_after)
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass  # orphans that have ended
        print(os.waitstatus_to_exitcode(status), flush=True)


def execute(source: str, *arguments: str) -> None:
    """A program in this process."""
    sys.argv = ["-c", *arguments]
    exec(compile(source, "-c", "exec"), {"__name__": "__main__"})


def _kill(child: int, deadline: float) -> None:
    """At the deadline, unless it has ended by itself."""
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        left = deadline - time.monotonic()
        if left <= 0:
            os.kill(child, signal.SIGKILL)
            return
        time.sleep(min(left, 0.01))


def _child(function: str, arguments: Sequence[Any], log: str) -> None:
    status = 1
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        null = os.open(os.devnull, os.O_RDONLY)
        for here, there in ((null, 0), (out, 1), (out, 2)):
            os.dup2(here, there)
        signal.alarm(120)
        module, _, name = function.partition(":")
        getattr(__import__(module, fromlist=[name]), name)(*arguments)
        status = 0
    except BaseException:  # whoever reads the log wants it
        __import__("traceback").print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
