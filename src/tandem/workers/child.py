"""The code that runs in a worker process: it answers calls until the run closes the socket. Imports no large packages.

The run sends pickled requests. The worker sends answers as JSON, each with the token of its request.
"""

import contextlib
import importlib
import json
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any

from tandem.api.failures import described
from tandem.workers.keeper import adopt_orphans, children_of, kill_below

HEADER = struct.Struct("!Q")


def load_function(spec: str) -> Callable[..., Any]:
    """Loads a function named ``my_file.py:name`` (a user's file) or ``package.module:name`` (an importable module)."""
    source, _, name = spec.rpartition(":")
    if source.endswith(".py"):
        from tandem.api.plugins import load_object  # noqa: PLC0415 needed only for a user's file

        return load_object(spec)
    return getattr(importlib.import_module(source), name)


def own_socket() -> socket.socket:
    """Returns the socket to the parent process, which was passed as standard input. Standard input becomes /dev/null, so
    that nothing else reads from the socket. From here on the process ignores SIGINT, because its parent decides when it
    ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    taken = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return taken


def _read(asked: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = asked.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return data


def _send(asked: socket.socket, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    asked.sendall(HEADER.pack(len(body)) + body)


def _confine() -> None:
    """Makes the kernel end this process, rather than the run, if memory runs out, and limits this process's data to half of
    the machine's memory. Also adopts orphaned descendants."""
    adopt_orphans()
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("800")
    with contextlib.suppress(OSError, ValueError):
        half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        resource.setrlimit(resource.RLIMIT_DATA, (half, half))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def failure_message(reason: str, error: BaseException, message: str = "") -> dict[str, Any]:
    """Returns a failure as a message to the run. ``message``: its description; by default the error's type, text and
    place."""
    text = "".join(traceback.format_exception(error))[-8000:]
    return {"failure": reason, "message": message or described(error), "traceback": text}


def _end_leftovers(spare: set[int]) -> None:
    """Kills processes that a call started and left running. ``spare``: ids of child processes that are not killed."""
    if children_of(os.getpid()) - spare:
        kill_below(spare=spare)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


Answering = Callable[[dict[str, Any]], dict[str, Any]]
"""Type of a function that answers one call: it maps the call's arguments to a message, and never raises."""


def serve(load: Callable[[], Answering], *, reason: str, tidy: bool) -> None:
    """Answers calls until the run closes its end of the socket.

    Args:
        load: loads the worker's code and returns the function that answers calls.
        reason: name of the failure that is sent if ``load`` raises.
        tidy: True to kill processes that a call left running, before its answer is sent.
    """
    asked, worker = own_socket(), os.getpid()
    _confine()
    os.register_at_fork(after_in_child=asked.close)  # only the worker itself may answer
    with contextlib.suppress(EOFError, ConnectionError):  # the run has ended
        try:
            answer = load()
        except BaseException as error:  # the worker boundary: a file that cannot be loaded
            _send(asked, failure_message(reason, error))
            return
        _send(asked, {"ready": True})
        kept = children_of(worker)
        while True:
            token, arguments = pickle.loads(_read(asked, HEADER.unpack(_read(asked, HEADER.size))[0]))
            message = answer(arguments)
            if os.getpid() != worker:  # the call forked, and this is the child, which returned from the call too
                os._exit(0)
            if tidy:
                _end_leftovers(kept)
            sys.stdout.flush()
            _send(asked, {"token": token, **message})
