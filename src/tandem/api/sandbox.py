"""Running code that nobody trusts: what a caller gives, what it gets back, and the contract of a sandbox."""

import ipaddress
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal

from tandem.config.errors import ConfigError

Status = Literal["ok", "exit", "signal", "timeout", "memory", "output", "refused", "lost"]
"""The ways in which a program ends.

ok: exit code 0. exit: another exit code. signal: killed by a signal that the sandbox did not send. timeout: wall or CPU time
was used up. memory, output: more than the limit. refused: it never began, for example because the command to execute is not
there. lost: the sandbox was killed from outside on every attempt; says nothing about the program.
"""


@dataclass(frozen=True)
class Limits:
    """Bounds of one program and everything that it starts. What each back end promises of them is in docs/sandbox.md."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_mib: int = 512
    processes: int = 32
    """Processes and threads together."""

    descriptors: int = 256
    """Open files of each process."""

    output_bytes: int = 1 << 20
    """Limit of standard output and of standard error, each."""

    file_mib: int = 64
    """All files together; they lie in memory where the back end can do that, beside `memory_mib`."""

    address: tuple[str, int] | None = None
    """The one TCP address that programs may connect to: an IPv4 address of this machine's loopback, and a port. None: no
    sockets. A workspace is opened with it; `Workspace.exec` cannot change it."""

    def __post_init__(self) -> None:
        for name in ("wall_s", "cpu_s", "memory_mib", "processes", "descriptors", "output_bytes", "file_mib"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"Limits.{name} must be positive, got {getattr(self, name)}")
        if self.address is not None:
            check_address(*self.address)


def check_address(host: str, port: int) -> None:
    """Accepts an IPv4 address of the loopback, written in numbers, with a port.

    Raises:
        ConfigError: it is something else.
    """
    try:
        is_loopback = ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback or not 0 < port < 1 << 16:
        raise ConfigError(
            f'Limits.address must be an address such as ("127.0.0.1", 8000) of this machine, got {host}:{port}'
        )


@dataclass(frozen=True)
class Program:
    """A command (`argv`) or the text of a Python program (`source`); one of the two.

    Python source runs in a forked interpreter that is already warm, with the standard library and nothing else.
    """

    argv: tuple[str, ...] = ()
    source: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files to write into the working directory first, by relative path."""

    stdin: bytes = b""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables beside the few that every program finds."""

    def __post_init__(self) -> None:
        if bool(self.argv) == (self.source is not None):
            raise ConfigError("a Program has either argv or source, and not both")
        for path in self.files:
            check_path(path)
        for name, value in self.environment.items():
            if not name or "=" in name or "\0" in name + value:
                raise ConfigError(f"a variable of a Program's environment must be a name and a text, got {name!r}")


def check_path(path: str) -> None:
    """Accepts a relative path that stays below the working directory.

    Raises:
        ConfigError: it is absolute, climbs with ``..``, is empty or has a NUL byte.
    """
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path:
        raise ConfigError(f"a path in a sandbox must be relative and stay below the working directory, got {path!r}")


@dataclass(frozen=True)
class Outcome:
    """The end of a program: status, output and time."""

    status: Status
    exit_code: int | None = None
    """The exit code; minus the number of the signal that ended it; None if it never ran to an end."""

    stdout: bytes = b""
    stderr: bytes = b""
    """At most `Limits.output_bytes` of each. For ``refused`` and ``lost``, stderr has the sandbox's own reason."""

    seconds: float = 0.0


class SandboxProcess(ABC):
    """A program that runs and is spoken to over its standard input and output."""

    @abstractmethod
    async def send(self, data: bytes, deadline_s: float) -> None:
        """Writes to its standard input.

        Raises:
            WaitTimeout: it did not read all of it within ``deadline_s`` seconds.
            BrokenPipeError: it ended or closed its standard input.
        """

    @abstractmethod
    async def receive(self, max_bytes: int, deadline_s: float) -> bytes:
        """The next bytes of its standard output, at least one and at most ``max_bytes``; ``b""`` at the end.

        Raises:
            WaitTimeout: nothing came within ``deadline_s`` seconds.
        """

    @abstractmethod
    async def close(self, grace_s: float = 0.0) -> Outcome:
        """Says how it ended. If it does not end by itself within ``grace_s`` seconds, it is killed with all that it started.
        Twice is fine.

        The outcome has the standard output that nobody received, and the standard error from the beginning.
        ``timeout``: it was still running, or its `Limits.wall_s` had passed.
        """


@dataclass(frozen=True)
class Snapshot:
    """The files of a workspace at one moment. Held by the caller, so it outlives the sandbox that made it."""

    archive: bytes


class Workspace(ABC):
    """A working directory that stays between programs, for agents. Processes do not stay: each `exec` ends with a kill.

    All methods but `close` raise `SandboxLost` if the sandbox was killed from outside: its files are gone, so nothing can be
    retried here. Open another one and `restore` a snapshot.
    """

    @abstractmethod
    async def exec(self, program: Program, limits: Limits | None = None) -> Outcome:
        """Runs a program in the working directory; ``limits``: other than those of the workspace. ``file_mib`` stays."""

    @abstractmethod
    async def read(self, path: str) -> bytes:
        """The content of a file.

        Raises:
            OSError: it is not there, or no regular file, or larger than the limit of files.
        """

    @abstractmethod
    async def write(self, path: str, data: bytes) -> None:
        """Writes a file, and the folders above it."""

    @abstractmethod
    async def snapshot(self) -> Snapshot:
        """All files of the working directory."""

    @abstractmethod
    async def restore(self, snapshot: Snapshot) -> None:
        """Replaces all files of the working directory."""

    @abstractmethod
    async def close(self) -> None:
        """Ends it; nothing stays. Idempotent."""


class Sandbox(ABC):
    """Runs programs that nobody trusts. Bound to no event loop."""

    name: str
    """The back end: ``bubblewrap``, ``landlock`` or ``none``."""

    @abstractmethod
    async def run(self, program: Program, limits: Limits | None = None) -> Outcome:
        """Runs a program to its end. A sandbox that was killed from outside is tried again on another worker."""

    @abstractmethod
    async def start(self, program: Program, limits: Limits | None = None) -> SandboxProcess:
        """Begins a program to speak with; `Program.stdin` is sent first.

        Raises:
            SandboxLost: the sandbox was killed from outside before it began.
        """

    @abstractmethod
    async def open(self, files: Mapping[str, bytes] | None = None, limits: Limits | None = None) -> Workspace:
        """Makes a workspace with these files.

        Raises:
            SandboxLost: the sandbox was killed from outside before it began.
        """

    @abstractmethod
    def close(self) -> None:
        """Kills all that runs; idempotent."""
