"""The machine around a sandbox: what a program must not reach, and what must not be left."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
from pathlib import Path


def processes_with(mark: str) -> list[int]:
    """Processes on this machine that have the mark in their command line."""
    left = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in folder.joinpath("cmdline").read_bytes():
                left.append(int(folder.name))
    return left


def lives(pid: int) -> bool:
    """Whether a process is there and is no zombie, which waits for pid 1 of this machine."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid: int) -> set[int]:
    """Processes below one."""
    below: set[int] = set()
    with contextlib.suppress(OSError):  # it ends while it is looked at
        for thread in list(Path(f"/proc/{pid}/task").glob("*/children")):
            below |= {int(child) for child in thread.read_text().split()}
    return below | {grandchild for child in below for grandchild in descendants(child)}


class Machine:
    """What a program must not reach: a secret file, a process, and everything that listens."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.secret = folder / "secret"
        self.secret.write_text("secret")
        self.secret.chmod(0o600)
        self.mark = f"{os.getpid()}987654.{int.from_bytes(os.urandom(3), 'big')}"
        self.old_handler = signal.signal(signal.SIGWINCH, lambda *_: self.heard.append(b"a signal"))
        self.victim = subprocess.Popen(["sleep", "600"])
        self.heard: list[bytes] = []
        tcp = socket.create_server(("127.0.0.1", 0))
        self.port = tcp.getsockname()[1]
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind(("127.0.0.1", self.port))
        self.unix, self.datagrams = str(folder / "socket"), str(folder / "datagrams")
        self.abstract = f"\0tandem-{self.mark}"
        streams = [socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
        for stream, address in zip(streams, (self.unix, self.abstract), strict=True):
            stream.bind(address)
            stream.listen()
        datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        datagrams.bind(self.datagrams)
        self.listeners = [tcp, udp, *streams, datagrams]
        for listener in self.listeners:
            threading.Thread(target=self.listen, args=(listener,), daemon=True).start()

    def listen(self, listener: socket.socket) -> None:
        try:
            if listener.type == socket.SOCK_STREAM:
                listener.accept()[0].close()
                self.heard.append(b"a connection")
            else:
                self.heard.append(listener.recv(100))
        except OSError:
            return

    @property
    def facts(self) -> bytes:
        """What programs are told, to make it easy for them."""
        names = ("mark", "port", "unix", "datagrams", "abstract")
        facts = {name: getattr(self, name) for name in names} | {"secret": str(self.secret), "folder": str(self.folder)}
        return json.dumps(facts | {"victim": self.victim.pid, "parent": os.getpid()}).encode() + b"\n"

    def close(self) -> None:
        signal.signal(signal.SIGWINCH, self.old_handler)
        self.victim.kill()
        self.victim.wait()
        for listener in self.listeners:
            listener.close()
