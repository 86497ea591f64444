"""The process that becomes a program: restricts itself, reads the program, and only then runs untrusted code.

The program arrives over a descriptor of its own, so the memory from which later programs are forked never contains it.
"""

import _sitebuiltins
import atexit
import builtins
import codecs
import contextlib
import gc
import io
import json
import linecache
import os
import resource
import shutil
import signal
import socket
import stat
import struct
import sys
import tarfile
import traceback
import types
from typing import Any, NoReturn

from tandem.sandbox.guest import kernel

HEADER = struct.Struct("!Q")
_CONTENT, _REASON = 3, 4  # additional descriptors until untrusted code begins
_MIB = 1 << 20


class Refused(Exception):
    """The program cannot start; the message says why."""


def become(message: dict[str, Any], descriptors: list[int], reason: int, confine: Any, root: str) -> NoReturn:
    """Turns this forked process into the program. ``confine`` restricts it and may return a listener of suspended calls.
    ``reason``: a socket that receives this listener, or an error message if the program cannot start."""
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, int(signal.SIGKILL))
        content, stdin, stdout, stderr = (os.dup2(fd, 20 + i) for i, fd in enumerate(descriptors))
        os.dup2(reason, 24, inheritable=False)
        for target, fd in enumerate((stdin, stdout, stderr)):
            os.dup2(fd, target)
        os.dup2(content, _CONTENT, inheritable=False)
        os.dup2(24, _REASON, inheritable=False)
        kernel.close_from(_REASON + 1)
        work = os.path.join(root, "work")
        os.environ.update(HOME=work, PWD=work, TMPDIR=root)
        _bound(message["limits"])
        listener = confine()
        if listener is not None:
            with socket.socket(fileno=os.dup(_REASON)) as channel:
                socket.send_fds(channel, [b"\0"], [listener])
            os.close(listener)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # makes its own /proc/self readable
        os.chdir(work)
        _begin(message["op"], message["limits"]["file_mib"] * _MIB)
    except BaseException as error:  # boundary: this process must never continue as the session from which it was forked
        text = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}".removesuffix(": ")
        with contextlib.suppress(OSError):
            os.write(_REASON, text.encode(errors="replace")[:4000])
    os._exit(1)


def _bound(limits: dict[str, Any]) -> None:
    """Sets the kernel's limits for this process; each of its children gets the same limits separately."""
    cpu_s = max(1, round(limits["cpu_s"] + 0.5))
    kernel.bound(resource.RLIMIT_DATA, limits["memory_mib"] * _MIB)
    kernel.bound(resource.RLIMIT_CPU, cpu_s)
    kernel.bound(resource.RLIMIT_FSIZE, limits["file_mib"] * _MIB)
    kernel.bound(resource.RLIMIT_NOFILE, limits["descriptors"])
    kernel.bound(resource.RLIMIT_NPROC, limits["tasks"])
    kernel.bound(resource.RLIMIT_CORE, 1)  # with 0, a core would still be piped to the program in core_pattern
    for kind in (resource.RLIMIT_MSGQUEUE, resource.RLIMIT_RTPRIO, resource.RLIMIT_MEMLOCK):
        kernel.bound(kind, 0)
    kernel.bound(resource.RLIMIT_SIGPENDING, 256)


def _begin(operation: str, most_bytes: int) -> None:
    with open(_CONTENT, "rb") as content:
        header = json.loads(content.read(HEADER.unpack(content.read(HEADER.size))[0]))
        for path, size in header["files"]:
            _write(path, content.read(size))
        source = content.read(header["source"]) if header["source"] is not None else None
    os.environ.update(header["environment"])
    if operation == "exec":
        if source is not None:
            os.close(_REASON)
            run_source(source)
        # Python ignores these signals, and an executed program would inherit that
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        try:
            os.execvpe(header["argv"][0], header["argv"], os.environ)
        except OSError as error:
            raise Refused(f"{header['argv'][0]!r} cannot be executed: {error.strerror}") from error
    elif operation == "read":
        _read(header["path"], most_bytes)
    elif operation == "save":
        with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
            archive.add(".")
    elif operation == "restore":
        _restore()
    sys.stdout.flush()
    os._exit(0)


def _write(path: str, data: bytes) -> None:
    folder = os.path.dirname(path)
    if folder:
        os.makedirs(folder, exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)


def _read(path: str, most_bytes: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise Refused(f"{path!r} is not a regular file")
    if os.fstat(descriptor).st_size > most_bytes:
        raise Refused(f"{path!r} is larger than the limit on all files together")
    with open(descriptor, "rb") as file:
        shutil.copyfileobj(file, sys.stdout.buffer)


def _restore() -> None:
    for entry in os.scandir("."):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry)
        else:
            os.unlink(entry)
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        archive.extraction_filter = lambda member, _: member  # safe, because the process is already restricted
        for member in archive:
            if member.isfile() or member.isdir() or member.issym() or member.islnk():
                archive.extract(member, ".")


def run_source(source: bytes) -> NoReturn:
    """Runs a source text as a Python interpreter runs its main program, then ends this process with the same exit code."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "tandem"]:
        del sys.modules[name]
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__="program.py", __builtins__=builtins)
    sys.modules["__main__"] = main
    for name in ("exit", "quit"):  # normally done by the module site, which is not loaded
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    builtins.help = _sitebuiltins._Helper()
    sys.argv[:] = ["program.py"]
    sys.path.insert(0, os.getcwd())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # decoded here, so a coding declaration has no effect
    text = source.removeprefix(codecs.BOM_UTF8).decode(errors="replace")
    linecache.cache["program.py"] = (len(source), None, text.splitlines(keepends=True), "program.py")
    gc.unfreeze()
    stdout = sys.stdout
    code = _run(text, main)
    for finish in (_join_threads, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):
        try:
            finish()
        except BaseException:  # boundary: untrusted code may have replaced or closed anything
            code = code or 120  # Python's own exit code if it cannot flush
    for finish in (main.__dict__.clear, stdout.flush):  # flushes files that were not closed
        with contextlib.suppress(BaseException):  # boundary: untrusted code may have replaced or closed anything
            finish()
    os._exit(code)


def _join_threads() -> None:
    if (threading := sys.modules.get("threading")) is not None:
        threading._shutdown()


def _run(source: str, main: types.ModuleType) -> int:
    try:
        exec(compile(source, "program.py", "exec"), main.__dict__)
    except SystemExit as exit_request:
        if exit_request.code is None or isinstance(exit_request.code, int):
            return (exit_request.code or 0) & 0xFF
        with contextlib.suppress(Exception):  # boundary: untrusted code may have closed it
            print(exit_request.code, file=sys.stderr)
        return 1
    except BaseException as error:  # boundary: the whole untrusted program
        _show(error)
        return 1
    return 0


def _show(error: BaseException) -> None:
    """Prints the error's traceback without the frames of this file."""
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    with contextlib.suppress(BaseException):  # boundary: untrusted code may have replaced or closed anything
        stream = io.StringIO()
        traceback.print_exception(type(error), error, frames, file=stream)
        sys.stderr.write(stream.getvalue())
