"""The fork server: a Python process with modules already imported, which forks a process for each session.

The sessions receive and run the programs, so the server itself never handles a program. Its parent is a keeper
(`tandem.workers.keeper`), which ends it with the run. Its standard input is the socket for requests. Its settings, one JSON
argument:

- ``walls``: name of the back end (``bubblewrap``, ``landlock`` or ``none``).
- ``readable``: paths of this machine that programs may read.
- ``base``: folder for the files of the sessions; empty for a back end with namespaces.
- ``user``: user id to change to; -1: none.
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
"""Standard library modules that are imported before the fork. Only common ones, because each makes every fork slower.
``threading`` is missing, because its work after each fork takes longer than importing it when needed."""

_NAMESPACES = kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC


class GuestServer:
    """Forks a session for each message until the socket is closed."""

    def __init__(self, settings: dict[str, Any], parent: int):
        """``parent``: process id of the keeper."""
        self._control = socket.socket(fileno=os.dup(0))
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        kind = settings["walls"]
        compiled = b"" if kind == "none" else syscall_filter.compile_filter(by_landlock=kind == "landlock")
        reaching = b"" if kind == "none" else syscall_filter.compile_filter(by_landlock=kind == "landlock", reaches=True)
        self._walls = Walls(kind, tuple(settings["readable"]), compiled, reaching)
        self._base, self._parent = settings["base"], parent
        self._user, self._group = os.getuid(), os.getgid()
        self._folders: dict[int, str] = {}
        self._sessions = 0

    def serve(self) -> NoReturn:
        """Serves until the socket is closed or the parent has died; then kills all sessions and ends this process."""
        woken = wake_on_children()
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        if not self._walls.has_namespaces:  # with namespaces, bubblewrap does this
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
        """Kills all descendants, removes the sessions' folder, and ends this process."""
        processes.end_all()
        if self._base:
            remove(self._base)
        os._exit(0)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                if folder := self._folders.pop(pid, ""):
                    processes.kill_below(spare=self._folders)  # processes that a killed session has left
                    remove(folder)

    def _fork(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Starts a session. ``descriptors``: the socket to the session and, if its programs may reach an address, the socket
        over which connections to that address arrive."""
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
        if child > 0 and not self._walls.has_namespaces:
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
        except BaseException as error:  # boundary: this process must never continue as the server from which it was forked
            with contextlib.suppress(OSError):
                os.write(channel, json.dumps({"error": str(error)}).encode())
        os._exit(1)


def main(settings: dict[str, Any]) -> None:
    """The main function: changes permanently to the user in the settings, gives up capabilities, imports modules, and
    serves."""
    parent = os.getppid()
    os.chdir("/")
    if settings["user"] >= 0:
        if settings["walls"] == "bubblewrap":
            # bubblewrap's /proc is partly covered; a session may mount its own only if it sees a complete one
            kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
        os.setgroups([])
        os.setresgid(*[settings["user"]] * 3)
        os.setresuid(*[settings["user"]] * 3)
    if settings["walls"] != "none":
        kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # needed to write /proc/self after a change of user
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the server ends when its socket is closed
    for name in WARM.split():
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a garbage collection in a child would write to, and so copy, all these pages
    GuestServer(settings, parent).serve()
