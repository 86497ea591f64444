"""The contract of a sandbox for untrusted code (limits, programs, outcomes, workspaces), and the tests of a program.

The column ``program_tests`` of a row has the tests of a program that the model writes. There are two kinds. A *program*
reads ``stdin``, and its ``stdout`` is compared with the expected one. A *function* is called by test code, which runs in
another process and calls the answer's functions (``names``) through a pipe.
"""

import ast
import ipaddress
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal

from tandem.config.errors import ConfigError

Status = Literal["ok", "exit", "signal", "timeout", "memory", "processes", "files", "output", "refused", "lost"]
"""The ways in which a program ends.

ok: exit code 0. exit: another exit code. signal: killed by a signal that the sandbox did not send. timeout: wall or CPU time
was used up. memory, processes, files, output: killed because it used more than the limit. refused: the program never began,
for example because its command does not exist. lost: the sandbox was killed from outside on every attempt; the program is
not at fault.
"""


@dataclass(frozen=True)
class Limits:
    """Limits for one program and everything that it starts. docs/sandbox.md says which limits each back end enforces."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_mib: int = 512
    processes: int = 32
    """Largest number of processes and threads together."""

    descriptors: int = 256
    """Largest number of open files of each process."""

    output_bytes: int = 1 << 20
    """Largest size of standard output, and also of standard error."""

    file_mib: int = 64
    """Largest total size of all files. If the back end can, it keeps files in memory, in addition to `memory_mib`."""

    address: tuple[str, int] | None = None
    """The only TCP address that programs may connect to: an IPv4 address of this machine's loopback, and a port. None: no
    sockets. Set when a workspace is opened; `Workspace.exec` cannot change it."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "address" and value <= 0:
                raise ConfigError(f"Limits.{name} must be positive, got {value}")
        if self.address is not None:
            check_address(*self.address)


def check_address(host: str, port: int) -> None:
    """Checks that an address is a numeric IPv4 loopback address with a valid port.

    Raises:
        ConfigError: it is another address.
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
    """A program to run: either a command (`argv`) or the text of a Python program (`source`).

    Python source runs in an interpreter forked from a running one, with only the standard library.
    """

    argv: tuple[str, ...] = ()
    source: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Relative path → content of files that are written into the working directory first."""

    stdin: bytes = b""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables in addition to the few that every program has."""

    def __post_init__(self) -> None:
        if bool(self.argv) == (self.source is not None):
            raise ConfigError("a Program has either argv or source, and not both")
        for path in self.files:
            check_path(path)
        for name, value in self.environment.items():
            if not name or "=" in name or "\0" in name + value:
                raise ConfigError(f"a variable of a Program's environment must be a name and a text, got {name!r}")


def check_path(path: str) -> None:
    """Checks that a path is relative and stays below the working directory.

    Raises:
        ConfigError: the path is absolute, contains ``..``, is empty or has a NUL byte.
    """
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path:
        raise ConfigError(f"a path in a sandbox must be relative and stay below the working directory, got {path!r}")


@dataclass(frozen=True)
class Outcome:
    """The result of a program: status, output and time."""

    status: Status
    exit_code: int | None = None
    """The exit code; −n if signal n ended the program; None if it did not run to an end."""

    stdout: bytes = b""
    stderr: bytes = b""
    """Standard error of the program; like ``stdout``, at most `Limits.output_bytes`. If the status is ``refused`` or
    ``lost``, the sandbox's reason instead."""

    seconds: float = 0.0

    def words(self, most: int = 500) -> str:
        """Returns the last ``most`` characters of standard error."""
        return self.stderr.decode(errors="replace")[-most:]


class SandboxProcess(ABC):
    """A running program that the caller exchanges data with over standard input and output."""

    @abstractmethod
    async def send(self, data: bytes, deadline_s: float) -> None:
        """Writes to the program's standard input.

        Raises:
            WaitTimeout: the program did not read all data within ``deadline_s`` seconds.
            BrokenPipeError: the program ended or closed its standard input.
        """

    @abstractmethod
    async def receive(self, max_bytes: int, deadline_s: float) -> bytes:
        """Returns the next 1 to ``max_bytes`` bytes of the program's standard output; ``b""`` at the end.

        Raises:
            WaitTimeout: nothing came within ``deadline_s`` seconds.
        """

    @abstractmethod
    async def close(self, grace_s: float = 0.0) -> Outcome:
        """Ends the program and returns its outcome. After ``grace_s`` seconds the program and all processes that it started
        are killed. Idempotent.

        The outcome has the standard output that was not received, and the whole standard error. Status ``timeout``: the
        program was still running, or its `Limits.wall_s` had passed.
        """


@dataclass(frozen=True)
class Snapshot:
    """A copy of the files of a workspace. The caller holds it, so it outlives the sandbox."""

    archive: bytes


class Workspace(ABC):
    """A working directory that persists between programs, for agents. Processes do not persist: `exec` kills those that a
    program leaves behind.

    All methods but `close` raise `SandboxLost` if the sandbox was killed from outside. The files of the workspace are then
    gone: open another workspace and `restore` a snapshot.
    """

    @abstractmethod
    async def exec(self, program: Program, limits: Limits | None = None) -> Outcome:
        """Runs a program in the working directory. ``limits`` replace those of the workspace, except for ``file_mib``."""

    @abstractmethod
    async def read(self, path: str) -> bytes:
        """Returns the content of a file.

        Raises:
            OSError: the file does not exist, is not a regular file, or is larger than the limit of files.
        """

    @abstractmethod
    async def write(self, path: str, data: bytes) -> None:
        """Writes a file, and creates the folders above it."""

    @abstractmethod
    async def snapshot(self) -> Snapshot:
        """Returns a copy of all files of the working directory."""

    @abstractmethod
    async def restore(self, snapshot: Snapshot) -> None:
        """Replaces all files of the working directory by those of a snapshot."""

    @abstractmethod
    async def close(self) -> None:
        """Ends the workspace and deletes its files. Idempotent."""


class Sandbox(ABC):
    """Runs untrusted programs. Not bound to an event loop."""

    name: str
    """The back end: ``bubblewrap``, ``landlock`` or ``none``."""

    @abstractmethod
    async def run(self, program: Program, limits: Limits | None = None) -> Outcome:
        """Runs a program to its end. If the sandbox is killed from outside, the program is retried on another worker."""

    @abstractmethod
    async def start(self, program: Program, limits: Limits | None = None) -> SandboxProcess:
        """Starts a program to exchange data with; `Program.stdin` is sent first.

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
        """Kills all running programs; idempotent."""


COLUMN = "program_tests"
FORMAT = (
    '{"cases": [{"stdin": "1 2\\n", "stdout": "3\\n"}]}, or '
    '{"names": ["add"], "cases": ["assert add(1, 2) == 3"], "setup": "…", "preamble": "…"}'
)


def read_program(code: str) -> ast.Module:
    r"""Parses code from a data set and silences Python's warnings, such as that for the escape ``\w`` in a plain string.

    Raises:
        SyntaxError: the code is not Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(code)


@dataclass(frozen=True)
class StdinCase:
    """One test of a program: it is given ``stdin`` and must write ``stdout``."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class ProgramTests:
    """The tests of one row.

    Example: ``ProgramTests(("assert add(1, 2) == 3",), names=("add",))``
    """

    cases: tuple[StdinCase | str, ...]
    """All of one kind: `StdinCase`, or test code that raises if the answer is wrong."""

    names: tuple[str, ...] = ()
    """Functions of the answer that the test code calls; empty for programs."""

    setup: str = ""
    """Code that runs before the test code, in the same process; the answer never sees this code."""

    preamble: str = ""
    """Code that the question shows and that the answer may use: imports, helpers, the head of a function."""

    def as_column(self) -> dict[str, Any]:
        """Returns the tests as plain data, which `from_column` reads."""
        cases = [case if isinstance(case, str) else {"stdin": case.stdin, "stdout": case.stdout} for case in self.cases]
        rest = {"names": list(self.names), "setup": self.setup, "preamble": self.preamble}
        return {"cases": cases} | {name: value for name, value in rest.items() if value}

    @classmethod
    def from_column(cls, value: Any) -> "ProgramTests":
        """Reads the value of the column.

        Raises:
            ConfigError: the value has another form, mixes both kinds of tests, or has no case; the message shows the form.
        """
        if not isinstance(value, Mapping) or not isinstance(value.get("cases"), list | tuple) or not value["cases"]:
            raise ConfigError(f"column {COLUMN!r} must be {FORMAT}; got {value!r:.120}")
        unknown = sorted(set(value) - {"cases", "names", "setup", "preamble"})
        if unknown:
            raise ConfigError(f"column {COLUMN!r} has no key {unknown[0]!r}; it is {FORMAT}")
        names, setup, preamble = value.get("names") or (), value.get("setup") or "", value.get("preamble") or ""
        if not all(isinstance(name, str) and name.isidentifier() for name in names):
            raise ConfigError(f"column {COLUMN!r}: names must be a list of Python names, got {names!r:.120}")
        if not isinstance(setup, str) or not isinstance(preamble, str):
            raise ConfigError(f"column {COLUMN!r}: setup and preamble must be text")
        cases = tuple(_case(case, bool(names)) for case in value["cases"])
        if not names and (setup or preamble):
            raise ConfigError(f"column {COLUMN!r}: setup and preamble need names, the functions that the tests call")
        return cls(cases, tuple(names), setup, preamble)


def _case(case: Any, calls: bool) -> StdinCase | str:
    if calls and isinstance(case, str):
        return case
    if not calls and isinstance(case, Mapping):
        given, printed = case.get("stdin", ""), case.get("stdout")
        if isinstance(given, str) and isinstance(printed, str):
            return StdinCase(given, printed)
    wanted = "a text of test code, because there are names" if calls else "{stdin, stdout}, because there are no names"
    raise ConfigError(f"column {COLUMN!r}: a case must be {wanted}; got {case!r:.120}")
