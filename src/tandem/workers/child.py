"""The worker's side: it serves calls until the run closes its end of the pipe. Imports nothing heavy.

Requests come pickled from the run; answers go back as JSON with the request's token. The run starts a *keeper*, which forks
the worker. When the run closes its end of the pipe, however it ended, or when the worker dies, the keeper ends all that the
worker started: orphans fall to the keeper, so none escapes by detaching.
"""

import contextlib
import importlib
import json
import os
import pickle
import resource
import select
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from tandem.api.failures import described
from tandem.workers.trees import adopt_orphans, children_of, kill_tree

HEADER = struct.Struct("!Q")


def load_function(spec: str) -> Callable[..., Any]:
    """``my_file.py:name`` of the user, or ``package.module:name`` of this package."""
    source, _, name = spec.rpartition(":")
    if source.endswith(".py"):
        from tandem.api.plugins import load_object  # noqa: PLC0415 only for a user's file

        return load_object(spec)
    return getattr(importlib.import_module(source), name)


def _read(descriptor: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(descriptor, min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return data


def _send(descriptor: int, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    data = memoryview(HEADER.pack(len(body)) + body)
    while data:
        data = data[os.write(descriptor, data) :]


def _keep(requests: int, worker: int, woken: int) -> None:
    """Waits for the end of the run or of the worker; then nothing stays, and the worker's exit code is passed on."""
    poll = select.poll()
    poll.register(requests, 0)  # a hang-up is reported always
    poll.register(woken, select.POLLIN)
    code = 0
    while True:
        events = dict(poll.poll())
        if requests in events:
            break
        os.read(woken, 64)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == worker:
                    code = os.waitstatus_to_exitcode(ended[1])
                    poll.unregister(requests)
                    requests = -1
        if requests == -1:
            break
    kill_tree(os.getpid(), root=False)
    os._exit(code if code >= 0 else 128 - code)


def _fork_keeper(requests: int, answers: int) -> None:
    """Returns in the forked worker only."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    worker = os.fork()
    if worker:
        os.close(answers)
        _keep(requests, worker, woken)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.close(woken)
    os.close(wake)
    adopt_orphans()


def _confine() -> None:
    """Arranges that, if memory runs out, it is this process that goes, not the run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("800")
    with contextlib.suppress(OSError, ValueError):
        half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        resource.setrlimit(resource.RLIMIT_DATA, (half, half))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def failure_message(reason: str, error: BaseException, message: str = "") -> dict[str, Any]:
    """Makes a message of what went wrong. ``message``: it in words; by default type, text and place of the error."""
    text = "".join(traceback.format_exception(error))[-8000:]
    return {"failure": reason, "message": message or described(error), "traceback": text}


def _end_leftovers(kept: set[int]) -> None:
    """Ends what the call started and left running; processes from the loading of the file stay."""
    if children_of(os.getpid(), recursive=False) - kept:
        kill_tree(os.getpid(), root=False, spare=set().union(kept, *(children_of(child) for child in kept)))
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


Answering = Callable[[dict[str, Any]], dict[str, Any]]
"""Answers one call; never raises."""


def serve(requests: int, answers: int, load: Callable[[], Answering], *, reason: str, tidy: bool) -> None:
    """Serves until the run closes its end of the pipe. ``load``: makes what answers the calls; ``reason``: what its failure
    is called. ``tidy``: end what a call left running before its answer goes out."""
    _confine()
    os.set_inheritable(requests, False)
    os.set_inheritable(answers, False)
    _fork_keeper(requests, answers)
    worker = os.getpid()
    os.register_at_fork(after_in_child=partial(_close, requests, answers))  # a fork cannot answer
    try:
        answer = load()
    except BaseException as error:  # the worker boundary: a file that cannot be loaded
        _send(answers, failure_message(reason, error))
        return
    _send(answers, {"ready": True})
    kept = children_of(worker)
    while True:
        try:
            token, arguments = pickle.loads(_read(requests, HEADER.unpack(_read(requests, HEADER.size))[0]))
        except EOFError:
            return
        message = answer(arguments)
        if os.getpid() != worker:  # the call forked and both came back
            os._exit(0)
        if tidy:
            _end_leftovers(kept)
        sys.stdout.flush()
        _send(answers, {"token": token, **message})
