"""One tenant's place: its namespaces or folder, one program at a time, and nothing left after each.

Its process forks every program of the tenant and owns all orphans. Where there are namespaces it is pid 1 of one, so one
signal ends all processes at once; elsewhere they fall to it because it is a subreaper.
"""

import contextlib
import json
import os
import select
import signal
import socket
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from tandem.sandbox.guest import kernel, landlock, processes, syscall_filter
from tandem.sandbox.guest.door import Door
from tandem.sandbox.guest.folders import MAX_FILES, is_full, remove
from tandem.sandbox.guest.program import become

LOOK_EVERY_S = 0.02
MESSAGE = 1 << 16
_MIB = 1 << 20
INNER_ID = 1000


@dataclass(frozen=True)
class Walls:
    """The walls of this back end, prepared once."""

    kind: str
    """``bubblewrap``, ``landlock`` or ``none``."""

    readable: tuple[str, ...]
    filter: bytes
    """Compiled; empty for ``none``."""

    reaching: bytes
    """The filter for programs that may reach an address."""

    @property
    def has_namespaces(self) -> bool:
        """True if each session lives in namespaces of its own."""
        return self.kind == "bubblewrap"

    def confine(self, root: str, *, reaches: bool) -> int | None:
        """Walls this process in, for good. ``reaches``: its calls for sockets are held; returns on which listener."""
        if self.kind == "none":
            return None
        kernel.drop_capabilities()
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        if self.kind == "landlock":
            landlock.confine(root, self.readable)
        return syscall_filter.install(self.reaching if reaches else self.filter, reaches=reaches)


def enter_namespaces(file_mib: int, user: int, group: int) -> None:
    """Makes this process, cloned into new namespaces, their owner, with empty files of its own."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{INNER_ID} {user} 1"), ("gid_map", f"{INNER_ID} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    size = f"size={file_mib}m,nr_inodes={MAX_FILES},mode=0755"
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, size)
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    os.mkdir("/tmp/.shm")
    kernel.mount("/tmp/.shm", "/dev/shm", "", kernel.MS_BIND)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # nobody inside may look at this process


class GuestSession:
    """Serves the messages of one tenant until its socket closes."""

    def __init__(self, channel: int, walls: Walls, root: str, woken: int, parent: int):
        self._channel = socket.socket(fileno=channel)
        self._outside: socket.socket | None = None
        self._address = ("", 0)
        self._walls, self._root, self._woken, self._parent = walls, root, woken, parent
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)
        self._poll.register(woken, select.POLLIN)

    def open_door(self, outside: int, address: tuple[str, int]) -> None:
        """Lets its programs reach this address; ``outside`` is where their connections come from."""
        self._outside, self._address = socket.socket(fileno=outside), address
        self._outside.setblocking(False)

    def serve(self) -> NoReturn:
        """Never returns: the process ends with the session."""
        os.mkdir(os.path.join(self._root, "work"))
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        if self._walls.has_namespaces:
            processes.end_with_parent(0, signal.SIGKILL)  # and the kernel kills all others of the namespace
        else:
            signal.signal(signal.SIGTERM, lambda *_: self._end())
            processes.end_with_parent(self._parent, signal.SIGTERM)
        self._send({"ready": True})
        with contextlib.suppress(EOFError):
            while True:
                message, descriptors = self._receive()
                if message["op"] != "kill":  # a kill that came after the end
                    self._send(self._program(message, descriptors))
        self._end()

    def _end(self) -> NoReturn:
        processes.end_all()
        if not self._walls.has_namespaces:
            remove(self._root)
        os._exit(0)

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        data, descriptors, _, _ = socket.recv_fds(self._channel, MESSAGE, 4)
        if not data:
            raise EOFError
        return json.loads(data), descriptors

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the other end has gone: the next receive says so
            self._channel.send(json.dumps(message).encode())

    def _program(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """Forks a program, watches it to its end, and kills what it leaves."""
        limits = message["limits"]
        limits["tasks"] = limits["processes"] + self._other_tasks()
        ours, theirs = socket.socketpair()
        reason, give_reason = ours.detach(), theirs.detach()
        try:
            child = os.fork()
        except OSError as error:
            return {"reason": f"it could not be forked: {error}", "seconds": 0.0}
        if child == 0:
            become(message, descriptors, give_reason, self._confine, self._root)
        for descriptor in (*descriptors, give_reason):
            os.close(descriptor)
        began = time.monotonic()
        try:
            door, first = self._door(reason)
            end = self._watch(child, limits, door)
            return end | {"reason": first + self._text(reason), "seconds": time.monotonic() - began}
        finally:
            processes.end_all()
            os.close(reason)

    def _confine(self) -> int | None:
        return self._walls.confine(self._root, reaches=self._outside is not None)

    def _door(self, reason: int) -> tuple[Door | None, str]:
        """The door of a program that may reach an address, for which its listener is awaited; or why it cannot begin."""
        if self._outside is None:
            return None, ""
        with socket.socket(fileno=os.dup(reason)) as channel:
            words, listeners, _, _ = socket.recv_fds(channel, 4096, 1)
        if not listeners:
            return None, words.decode(errors="replace")
        return Door(listeners[0], self._outside, self._address), ""

    @staticmethod
    def _text(descriptor: int) -> str:
        """The text in the socket; nothing if another process holds its other end."""
        os.set_blocking(descriptor, False)
        try:
            return os.read(descriptor, 4096).decode(errors="replace")
        except BlockingIOError:
            return ""

    def _other_tasks(self) -> int:
        """Processes and threads that the kernel counts for this user beside those of the program."""
        own = os.getuid()
        if self._walls.has_namespaces:
            return 1  # this process: the count begins anew in a user namespace
        if own == 0:
            return 0  # the kernel counts nothing for root
        count = 0
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if name.isdigit() and os.stat(f"/proc/{name}").st_uid == own:
                    count += len(os.listdir(f"/proc/{name}/task"))
        return count

    def _watch(self, child: int, limits: dict[str, Any], door: Door | None) -> dict[str, Any]:
        if door is None:
            return self._look_on(child, limits, None)
        listening = (door.listener, door.outside)
        for descriptor in listening:
            self._poll.register(descriptor, select.POLLIN)
        try:
            return self._look_on(child, limits, door)
        finally:
            for descriptor in listening:
                with contextlib.suppress(KeyError):
                    self._poll.unregister(descriptor)
            door.close()

    def _pass(self, door: Door, events: dict[int, int]) -> None:
        """Lets through what waits at the door."""
        if door.listener in events:
            if events[door.listener] & select.POLLIN:
                door.ask()
            else:
                self._poll.unregister(door.listener)  # nobody is left who could ask
        if door.outside in events and not door.give():
            self._poll.unregister(door.outside)

    def _look_on(self, child: int, limits: dict[str, Any], door: Door | None) -> dict[str, Any]:
        killed = ""
        meter = processes.Meter()
        end = time.monotonic() + limits["wall_s"]
        look = time.monotonic() + LOOK_EVERY_S
        while True:
            events = dict(self._poll.poll(min(LOOK_EVERY_S, max(0.0, end - time.monotonic())) * 1000))
            if self._woken in events:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 4096)
            if self._channel.fileno() in events:
                self._receive()  # a kill; or EOFError, and the session ends
                killed = killed or "asked"
            if time.monotonic() >= end:
                killed = killed or "wall"
            if door is not None:
                self._pass(door, events)
            if time.monotonic() >= look:
                killed = killed or self._excess(limits, meter)
                look = time.monotonic() + LOOK_EVERY_S
            if killed:
                processes.kill_below()
            try:
                while (ended := os.waitpid(-1, 0 if killed else os.WNOHANG))[0]:
                    if ended[0] == child:
                        return {"code": os.waitstatus_to_exitcode(ended[1]), "killed": killed}
            except ChildProcessError:
                return {"code": None, "killed": killed}

    def _excess(self, limits: dict[str, Any], meter: processes.Meter) -> str:
        """The limit that all processes together exceed; nothing if they keep within all."""
        if self._walls.has_namespaces:
            below = {int(name) for name in os.listdir("/proc") if name.isdigit()} - {os.getpid()}
        else:
            below = processes.descendants_of(os.getpid())
        memory, seconds, tasks = meter.usage(below)
        if memory > limits["memory_mib"] * _MIB:
            return "memory"
        if seconds > limits["cpu_s"]:
            return "cpu"
        if tasks > limits["processes"]:
            return "processes"
        if not self._walls.has_namespaces and is_full(self._root, limits["file_mib"] * _MIB, below):
            return "files"
        return ""


def reset_signals() -> None:
    """No handler of the fork server's stays; pid 1 of a namespace ignores what it has no handler for."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)


def wake_on_children() -> int:
    """A descriptor that can be read when a child has ended."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    return woken
