"""Walls of Landlock, a filter of system calls and limits: for machines on which nobody may make namespaces."""

import os
import tempfile
from pathlib import Path

from tandem.sandbox.bubblewrap import ORDINARY_USER
from tandem.sandbox.guest import landlock
from tandem.sandbox.guest.syscall_filter import is_known
from tandem.sandbox.jail import HERE, Jail, WorkerStart

PREFIX = "tandem-sandbox-"
_CHANGE_OF_USER = 1 << 0 | 1 << 1 | 1 << 6 | 1 << 7
"""CAP_CHOWN, CAP_DAC_OVERRIDE (to remove the other user's files), CAP_SETGID and CAP_SETUID."""


def is_open_to_all(path: str) -> bool:
    """True if every user may enter a folder and all that are above it."""
    place = Path(os.path.realpath(path))
    return all(folder.stat().st_mode & 0o001 for folder in (place, *place.parents))


def may_become_another() -> bool:
    """True if this process is root and has what a change of user needs; a container may have taken that away."""
    status = Path("/proc/self/status").read_text()
    rights = int(status.partition("CapEff:")[2].split()[0], 16)
    return os.getuid() == 0 and rights & _CHANGE_OF_USER == _CHANGE_OF_USER


def make_base(user: int) -> str:
    """A folder for the sessions of one worker; its owner is ``user`` unless that is negative."""
    base = tempfile.mkdtemp(prefix=PREFIX)
    if user >= 0:
        os.chown(base, user, user)
    return base


class Landlock(Jail):
    """Needs Linux 6.12 or newer with Landlock switched on, and nothing to install."""

    name = "landlock"
    remedy = f"a kernel of Linux 6.12 or newer with Landlock (version {landlock.LEAST_VERSION} of its interface) switched on"

    def missing(self) -> str:
        """A kernel that has it, or this kind of machine."""
        if not is_known():
            return "its filter of system calls knows x86_64 and aarch64 only"
        version = landlock.version()
        if version >= landlock.LEAST_VERSION:
            return ""
        return f"the kernel's Landlock is version {version}; {landlock.LEAST_VERSION} is the first that holds back signals"

    def start(self, control: int) -> WorkerStart:
        """A worker that is no root, if the Python it needs can be read by somebody else."""
        may_change = may_become_another() and all(is_open_to_all(path) for path in self.paths() if os.path.isdir(path))
        user = ORDINARY_USER + control % 1_000 + 1_000 * (os.getpid() % 10_000) if may_change else -1
        base = make_base(user)
        return WorkerStart(self.python(HERE, control, base=base, user=user), base)


class Unconfined(Jail):
    """No wall at all: a program may read, write, send and kill whatever its user may. Limits and the final kill hold."""

    name = "none"
    remedy = ""

    def missing(self) -> str:
        """Nothing."""
        return ""

    def start(self, control: int) -> WorkerStart:
        """A worker that is whoever starts it."""
        base = make_base(-1)
        return WorkerStart(self.python(HERE, control, base=base, user=-1), base)
