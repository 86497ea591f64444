"""Chooses a sandbox back end that works on this machine, by running a trial program in it."""

import asyncio
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tandem.api.sandbox import Limits, Outcome, Program, Sandbox
from tandem.config.errors import ConfigError
from tandem.sandbox.jail import Bubblewrap, Jail, Landlock, Unconfined
from tandem.sandbox.pool import SandboxPool

log = logging.getLogger(__name__)

BACK_ENDS: dict[str, Callable[[], Jail]] = {"bubblewrap": Bubblewrap, "landlock": Landlock, "none": Unconfined}
"""The back ends in order of preference; ``none`` is used only if it is named explicitly."""
CHOICES = ("auto", *BACK_ENDS)
COVERED = (("/",), ("/", "tmp"), ("/", "proc"), ("/", "dev"))
"""Paths of folders that bubblewrap replaces by its own, as tuples of their parts."""

NOT_COUNTED = (
    "shared pages released (madvise, munmap) while their mapping exists; the kernel's own memory except page tables"
)
"""Memory that no back end can limit: only root can see how much of this memory a program uses."""

TRIAL = """
import os, socket, subprocess, sys
open("own", "w").write("x")
def must_fail(what, attempt):
    try:
        attempt()
    except OSError:
        return
    sys.exit(what)
secret, parent, processes = sys.stdin.read().split()
must_fail("a file of the machine can be read", lambda: open(secret).read())
must_fail("a file of the machine can be written", lambda: open(secret, "r+"))
must_fail("a socket can be made", lambda: socket.socket())
if os.readlink("/proc/self/ns/pid") == processes:  # elsewhere the number is that of another process
    must_fail("the parent can be signalled", lambda: os.kill(int(parent), 0))
print(subprocess.run(["/bin/sh", "-c", "echo walls"], capture_output=True, text=True, check=True).stdout.strip())
"""


def choose_sandbox(name: str = "auto", *, size: int | None = None, readable: Sequence[str] = ()) -> Sandbox:
    """Opens the sandbox with this name; ``auto``: the first back end that works here, but never ``none``. ``readable``:
    folders of this machine that programs may read in addition to the system's and Python's.

    Raises:
        ConfigError: unknown name, missing folder, or no back end works; the message says why each fails, and what to do.
    """
    if name not in CHOICES:
        raise ConfigError(f"sandbox must be one of {', '.join(CHOICES)}, got {name!r}")
    for folder in readable:
        if not os.path.isabs(folder) or not os.path.isdir(folder):
            raise ConfigError(f"sandbox: readable must be folders of this machine, each with its whole path, got {folder!r}")
        if Path(os.path.normpath(folder)).parts[:2] in COVERED:
            raise ConfigError(
                f"sandbox: readable has {folder!r}, but programs have a /tmp, /proc and /dev of their own; move it"
            )
    if name == "none":
        return SandboxPool(Unconfined(), size)
    problems: list[str] = []
    for each in ("bubblewrap", "landlock") if name == "auto" else (name,):
        jail = BACK_ENDS[each]()
        jail.readable = tuple(os.path.normpath(folder) for folder in readable)
        problem = jail.missing() or try_out(jail)
        if not problem:
            for skipped in problems:
                log.warning("the sandbox is %s, because of %s", each, skipped)
            return SandboxPool(jail, size)
        problems.append(f"{each}: {problem}. It needs: {jail.remedy}")
    raise ConfigError(
        f"sandbox={name}: untrusted code cannot be run safely on this machine:\n- "
        + "\n- ".join(problems)
        + "\nsandbox=none runs it without isolation, with all rights of your user: only for code that you would run yourself"
    )


def with_what_works(size: int | None = None, readable: Sequence[str] = ()) -> Sandbox:
    """Opens a sandbox of the first back end that works on this machine. ``size``: number of workers; null: one per core.
    ``readable``: see `choose_sandbox`."""
    return choose_sandbox(size=size, readable=readable)


def with_bubblewrap(size: int | None = None, readable: Sequence[str] = ()) -> Sandbox:
    """Opens a sandbox that isolates by namespaces. Raises an error that says what is missing. Arguments as for
    `with_what_works`."""
    return choose_sandbox("bubblewrap", size=size, readable=readable)


def with_landlock(size: int | None = None, readable: Sequence[str] = ()) -> Sandbox:
    """Opens a sandbox that isolates by Landlock. Raises an error that says what is missing. Arguments as for
    `with_what_works`."""
    return choose_sandbox("landlock", size=size, readable=readable)


def without_walls(size: int | None = None) -> Sandbox:
    """Opens a sandbox without isolation: only for code that you would run yourself. ``size``: number of workers; null: one
    per core."""
    return choose_sandbox("none", size=size)


def try_out(jail: Jail) -> str:
    """Runs a trial program that tries to break out. Returns the fault of the back end in words; empty if there is none."""

    def trial() -> Outcome:
        pool = SandboxPool(jail, 1)
        with tempfile.NamedTemporaryFile("w") as secret:
            secret.write("secret")
            secret.flush()
            facts = f"{secret.name} {os.getpid()} {os.readlink('/proc/self/ns/pid')}"
            try:
                return asyncio.run(pool.run(Program(source=TRIAL, stdin=facts.encode()), Limits(wall_s=30, cpu_s=30)))
            finally:
                pool.close()

    try:
        with ThreadPoolExecutor(1, f"trial of {jail.name}") as thread:  # in a thread, because this one may run an event loop
            outcome = thread.submit(trial).result()
    except OSError as error:
        return f"a worker cannot be started: {error}"
    if outcome.status == "ok" and outcome.stdout.strip() == b"walls":
        return ""
    words = (outcome.stderr or outcome.stdout).decode(errors="replace").strip()
    return f"a trial program ended as {outcome.status}: {words.splitlines()[-1] if words else 'without a message'}"
