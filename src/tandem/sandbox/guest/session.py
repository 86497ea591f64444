"""The process of one session: its namespaces or folder, and one program at a time, with a complete cleanup after each.

This process forks every program of the session and adopts all orphans. With namespaces it is pid 1 of its pid namespace, so
one signal kills all processes at once; otherwise it is a subreaper.
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
from tandem.sandbox.guest.folders import MAX_FILES, FolderMeter, remove
from tandem.sandbox.guest.program import become

LOOK_EVERY_S = 0.02
MESSAGE = 1 << 16
_MIB = 1 << 20
INNER_ID = 1000


@dataclass(frozen=True)
class Walls:
    """The restrictions of a back end, prepared once."""

    kind: str
    """``bubblewrap``, ``landlock`` or ``none``."""

    readable: tuple[str, ...]
    filter: bytes
    """The compiled system call filter; empty for ``none``."""

    reaching: bytes
    """The compiled filter for programs that may reach an address."""

    @property
    def has_namespaces(self) -> bool:
        """True if each session has its own namespaces."""
        return self.kind == "bubblewrap"

    def confine(self, root: str, *, reaches: bool) -> int | None:
        """Restricts this process permanently. With ``reaches``, also suspends its socket calls, and returns the listener
        through which these are answered."""
        if self.kind == "none":
            return None
        kernel.drop_capabilities()
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        if self.kind == "landlock":
            landlock.confine(root, self.readable)
        return syscall_filter.install(self.reaching if reaches else self.filter, reaches=reaches)


def enter_namespaces(file_mib: int, user: int, group: int) -> None:
    """Makes this process the owner of its new namespaces, and gives it empty folders of its own."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{INNER_ID} {user} 1"), ("gid_map", f"{INNER_ID} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    size = f"size={file_mib}m,nr_inodes={MAX_FILES},mode=0755"
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, size)
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    os.mkdir("/tmp/.shm")
    kernel.mount("/tmp/.shm", "/dev/shm", "", kernel.MS_BIND)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # programs inside must not inspect this process


class GuestSession:
    """Serves the messages of one session until its socket is closed."""

    def __init__(self, channel: int, walls: Walls, root: str, woken: int, parent: int):
        self._channel = socket.socket(fileno=channel)
        self._outside: socket.socket | None = None
        self._address = ("", 0)
        self._walls, self._root, self._woken, self._parent = walls, root, woken, parent
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)
        self._poll.register(woken, select.POLLIN)

    def open_door(self, outside: int, address: tuple[str, int]) -> None:
        """Allows the session's programs to reach this address. ``outside``: the socket over which connections arrive."""
        self._outside, self._address = socket.socket(fileno=outside), address
        self._outside.setblocking(False)

    def serve(self) -> NoReturn:
        """Serves messages. Never returns, because the process ends with the session."""
        os.mkdir(os.path.join(self._root, "work"))
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        if self._walls.has_namespaces:
            processes.end_with_parent(0, signal.SIGKILL)  # the kernel then kills all other processes of the namespace
        else:
            signal.signal(signal.SIGTERM, lambda *_: self._end())
            processes.end_with_parent(self._parent, signal.SIGTERM)
        self._send({"ready": True})
        with contextlib.suppress(EOFError):
            while True:
                message, descriptors = self._receive()
                if message["op"] != "kill":  # otherwise a kill that came after the program's end
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
        with contextlib.suppress(OSError):  # if the other end is closed, the next receive reports it
            self._channel.send(json.dumps(message).encode())

    def _program(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """Forks a program, watches it until its end, and kills the processes that it left. Returns its outcome."""
        limits = message["limits"]
        limits["tasks"] = limits["processes"] + self._other_tasks()
        receiver, sender = socket.socketpair()
        reason, reason_sender = receiver.detach(), sender.detach()
        try:
            child = os.fork()
        except OSError as error:
            return {"reason": f"it could not be forked: {error}", "seconds": 0.0}
        if child == 0:
            become(message, descriptors, reason_sender, self._confine, self._root)
        for descriptor in (*descriptors, reason_sender):
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
        """Waits for the listener of a program that may reach an address. Returns (door, ""), or (None, the reason why the
        program cannot start)."""
        if self._outside is None:
            return None, ""
        with socket.socket(fileno=os.dup(reason)) as channel:
            message, listeners, _, _ = socket.recv_fds(channel, 4096, 1)
        if not listeners:
            return None, message.decode(errors="replace")
        return Door(listeners[0], self._outside, self._address), ""

    @staticmethod
    def _text(descriptor: int) -> str:
        """Returns the text that is waiting in the socket; empty if there is none yet, because another process holds the
        other end open."""
        os.set_blocking(descriptor, False)
        try:
            return os.read(descriptor, 4096).decode(errors="replace")
        except BlockingIOError:
            return ""

    def _other_tasks(self) -> int:
        """Returns the number of tasks that the kernel counts for this user in addition to the program's."""
        user_id = os.getuid()
        if self._walls.has_namespaces:
            return 1  # this process only, because a user namespace counts separately
        if user_id == 0:
            return 0  # the kernel does not limit root
        count = 0
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if name.isdigit() and os.stat(f"/proc/{name}").st_uid == user_id:
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
        """Handles the events of the door: suspended calls of the program, and connections from outside."""
        if door.listener in events:
            if events[door.listener] & select.POLLIN:
                door.ask()
            else:
                self._poll.unregister(door.listener)  # no process is left that could call
        if door.outside in events and not door.give():
            self._poll.unregister(door.outside)

    def _look_on(self, child: int, limits: dict[str, Any], door: Door | None) -> dict[str, Any]:
        killed = ""
        meter = processes.Meter()
        folder = None if self._walls.has_namespaces else FolderMeter(self._root, limits["file_mib"] * _MIB)
        end = time.monotonic() + limits["wall_s"]
        look = time.monotonic() + LOOK_EVERY_S
        while True:
            events = dict(self._poll.poll(min(LOOK_EVERY_S, max(0.0, end - time.monotonic())) * 1000))
            if self._woken in events:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 4096)
            if self._channel.fileno() in events:
                self._receive()  # a kill, or EOFError, which ends the session
                killed = killed or "timeout"
            if time.monotonic() >= end:
                killed = killed or "timeout"
            if door is not None:
                self._pass(door, events)
            if time.monotonic() >= look:
                killed = killed or self._excess(limits, meter, folder)
                look = time.monotonic() + LOOK_EVERY_S
            if killed:
                processes.kill_below()
            try:
                while (ended := os.waitpid(-1, 0 if killed else os.WNOHANG))[0]:
                    if ended[0] == child:
                        return {"code": os.waitstatus_to_exitcode(ended[1]), "killed": killed}
            except ChildProcessError:
                return {"code": None, "killed": killed}

    def _excess(self, limits: dict[str, Any], meter: processes.Meter, folder: FolderMeter | None) -> str:
        """Returns the status of a program whose processes together exceed a limit; empty if they exceed none."""
        if self._walls.has_namespaces:
            below = {int(name) for name in os.listdir("/proc") if name.isdigit()} - {os.getpid()}
        else:
            below = processes.descendants_of(os.getpid())
        memory, seconds, tasks = meter.usage(below)
        if memory > limits["memory_mib"] * _MIB:
            return "memory"
        if seconds > limits["cpu_s"]:
            return "timeout"
        if tasks > limits["processes"]:
            return "processes"
        if folder is not None and folder.is_full(below):
            return "files"
        return ""


def reset_signals() -> None:
    """Removes the fork server's signal handlers; pid 1 of a namespace ignores signals without a handler."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)


def wake_on_children() -> int:
    """Returns a descriptor that becomes readable when a child has ended."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    return woken
