"""The fork server: a Python that is already warm, from which each session is forked. It never sees what a program is.

Started with one argument, JSON: ``control`` (descriptor of a socket), ``walls``, ``readable``, ``base`` (folder of the
sessions; empty where there are namespaces) and ``user`` (whom to become; -1: stay).
"""

import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
from typing import Any, NoReturn

from tandem.sandbox.guest import kernel, processes, syscall_filter
from tandem.sandbox.guest.folders import remove
from tandem.sandbox.guest.session import MESSAGE, GuestSession, Walls, enter_namespaces, reset_signals, wake_on_children

WARM = (
    "abc array bisect cmath collections collections.abc contextlib copy datetime decimal enum fractions functools heapq io "
    "itertools json linecache math numbers operator random re string time traceback types typing"
)
"""Modules of the standard library that a program finds already imported: the usual ones, as each makes every fork dearer.
Without ``threading``, whose work after a fork costs more than to import it where it is needed."""

_NAMESPACES = kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC


class GuestServer:
    """Forks a session for each message, until the socket closes."""

    def __init__(self, settings: dict[str, Any]):
        self._control = socket.socket(fileno=settings["control"])
        kind = settings["walls"]
        compiled = b"" if kind == "none" else syscall_filter.compile_filter(by_landlock=kind == "landlock")
        reaching = b"" if kind == "none" else syscall_filter.compile_filter(by_landlock=kind == "landlock", reaches=True)
        self._walls = Walls(kind, tuple(settings["readable"]), compiled, reaching)
        self._base, self._parent = settings["base"], settings["parent"]
        self._user, self._group = os.getuid(), os.getgid()
        self._folders: dict[int, str] = {}
        self._sessions = 0

    def serve(self) -> NoReturn:
        """Ends when nobody can ask any more, or the parent has died; then nothing is left."""
        woken = wake_on_children()
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        if not self._walls.has_namespaces:  # bubblewrap sees to it where there are
            signal.signal(signal.SIGTERM, lambda *_: self.end())
            processes.end_with_parent(self._parent, signal.SIGTERM)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(woken, select.POLLIN)
        while True:
            events = dict(poll.poll())
            if woken in events:
                with contextlib.suppress(BlockingIOError):
                    os.read(woken, 4096)
                self._reap()
            if self._control.fileno() in events:
                data, descriptors, _, _ = socket.recv_fds(self._control, MESSAGE, 2)
                if not data:
                    break
                self._fork(json.loads(data), descriptors)
        self.end()

    def end(self) -> NoReturn:
        """Leaves nothing."""
        processes.end_all()
        if self._base:
            remove(self._base)
        os._exit(0)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                if folder := self._folders.pop(pid, ""):
                    processes.kill_below(spare=self._folders)  # what a session that was killed has left
                    remove(folder)

    def _fork(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Makes a session. ``descriptors``: its channel, and the socket of its door if its programs may reach an address."""
        self._sessions += 1
        parent = os.getpid()
        root = "/tmp" if self._walls.has_namespaces else os.path.join(self._base, str(self._sessions))
        if not self._walls.has_namespaces:
            os.mkdir(root, 0o700)
        try:
            child = kernel.clone(_NAMESPACES if self._walls.has_namespaces else 0)
        except OSError as error:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptors[0])) as answers:
                answers.send(json.dumps({"error": str(error)}).encode())
            child = -1
        if child == 0:
            self._become_session(message, descriptors, root, parent)
        for descriptor in descriptors:
            os.close(descriptor)
        if child < 0:
            return
        if not self._walls.has_namespaces:
            self._folders[child] = root

    def _become_session(self, message: dict[str, Any], descriptors: list[int], root: str, parent: int) -> NoReturn:
        channel = descriptors[0]
        try:
            reset_signals()
            self._control.detach()
            above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10) for descriptor in descriptors]
            channel, *outside = (os.dup2(descriptor, 3 + i, inheritable=False) for i, descriptor in enumerate(above))
            kernel.close_from(3 + len(descriptors))
            if self._walls.has_namespaces:
                enter_namespaces(message["file_mib"], self._user, self._group)
            session = GuestSession(channel, self._walls, root, wake_on_children(), parent)
            if outside:
                session.open_door(outside[0], tuple(message["address"]))
            session.serve()
        except BaseException as error:  # boundary: this process may never go on as the server that it was forked from
            with contextlib.suppress(OSError):
                os.write(channel, json.dumps({"error": str(error)}).encode())
        os._exit(1)


def main(settings: dict[str, Any]) -> None:
    """Becomes an ordinary user for good, warms up and serves."""
    if settings["user"] >= 0:
        if settings["walls"] == "bubblewrap":
            # bubblewrap has covered parts of the one that is there, and a session may mount its own only below a whole one
            kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
        os.setgroups([])
        os.setresgid(*[settings["user"]] * 3)
        os.setresuid(*[settings["user"]] * 3)
    if settings["walls"] != "none":
        kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # who has changed users may not write /proc/self without it
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends when its socket closes
    for name in WARM.split():
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, all of it
    GuestServer(settings).serve()
