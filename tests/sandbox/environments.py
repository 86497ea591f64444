"""Machines on which a sandbox is chosen, as far as this one can pretend to be them: the second table of docs/sandbox.md.
The third is of real docker."""

import ctypes
import json
import os
import struct
import sys
from dataclasses import dataclass

from tandem.sandbox.guest import kernel
from tandem.sandbox.guest.syscall_filter import install

DOCKER_CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31)
"""What root has in a container of docker by default; CAP_SYS_ADMIN is not among them."""


@dataclass(frozen=True)
class Environment:
    """A kind of machine. ``root``: who starts Tandem. ``denied``: what the container's or kernel's rules refuse.
    ``first``: it is the first process of a container, number 1."""

    name: str
    chosen: str
    root: bool = True
    capabilities: tuple[int, ...] | None = None
    namespaces: bool = True
    nested: bool = True
    landlock: bool = True
    bwrap: bool = True
    first: bool = False


ENVIRONMENTS = [
    Environment("a laptop or server, unprivileged user", "bubblewrap", root=False),
    Environment("the same, bubblewrap not installed", "landlock", root=False, bwrap=False),
    Environment("root, or a privileged container", "bubblewrap"),
    Environment(
        "a container of docker, root, default rules", "landlock", capabilities=DOCKER_CAPABILITIES, namespaces=False
    ),
    Environment("a container of docker, another user, default rules", "landlock", root=False, namespaces=False),
    Environment("a container of docker without any capability, root", "landlock", capabilities=(), namespaces=False),
    Environment("the first process of a container that may make user namespaces", "bubblewrap", root=False, first=True),
    Environment("a cluster node without user namespaces", "landlock", root=False, nested=False),
    Environment("root where nobody may make user namespaces", "landlock", nested=False),
    Environment("no user namespaces and no Landlock", "refused", root=False, namespaces=False, landlock=False),
    Environment("the same, root", "refused", capabilities=DOCKER_CAPABILITIES, namespaces=False, landlock=False),
]

DOCKER = {
    "": "landlock",
    "--user 65534": "landlock",
    "--cap-drop ALL": "landlock",
    "--user 65534 --cap-drop ALL --security-opt no-new-privileges --read-only --tmpfs /tmp": "landlock",
    "--security-opt seccomp=unconfined": "landlock",
    "--user 65534 --security-opt seccomp=unconfined": "landlock",
    "--user 65534 --security-opt seccomp=unconfined --security-opt systempaths=unconfined": "bubblewrap",
    "--cap-add SYS_ADMIN --cap-add NET_ADMIN --security-opt seccomp=unconfined --security-opt systempaths=unconfined": (
        "bubblewrap"
    ),
}
"""Options of a real ``docker run``, and what is chosen there."""


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def rules(namespaces: bool, nested: bool, landlock: bool) -> bytes:
    """A filter like a container's: no call that makes namespaces or mounts, or only no user namespace, or no Landlock."""
    load, equal, any_bit, answer, allow, refuse = 0x20, 0x15, 0x45, 0x06, 0x7FFF0000, 0x00050001
    lines = [_line(load, 0)]
    if not landlock:
        lines += [_line(equal, 444, 0, 1), _line(answer, 0x00050000 | 38)]
    if not (namespaces and nested):
        lines += [_line(equal, 435, 0, 1), _line(answer, 0x00050000 | 38)]  # clone3
        flags = 0x7E020000 if not namespaces else kernel.CLONE_NEWUSER
        for number in (56, 272):  # clone, unshare
            lines += [_line(equal, number, 0, 4), _line(load, 16), _line(any_bit, flags, 0, 1)]
            lines += [_line(answer, refuse), _line(answer, allow)]
        if not namespaces:
            for number in (165, 166, 308):  # mount, umount2, setns
                lines += [_line(equal, number, 0, 1), _line(answer, refuse)]
    return b"".join([*lines, _line(answer, allow)])


def enter(environment: Environment) -> None:
    """Becomes a process of such a machine, as far as that goes, for good."""
    if environment.capabilities is not None:
        for number in range(64):
            if number not in environment.capabilities:
                ctypes.CDLL(None).prctl(24, number, 0, 0, 0)
        wanted = sum(1 << number for number in environment.capabilities)
        header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(wanted, wanted, 0, 0, 0, 0)
        kernel.syscall(126, ctypes.byref(header), ctypes.byref(sets))
    if not environment.root:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
    if not (environment.namespaces and environment.nested and environment.landlock):
        install(rules(environment.namespaces, environment.nested, environment.landlock))


def main(settings: dict[str, object]) -> None:
    """Chooses in the environment of this name, in a process of its own; prints JSON."""
    environment = next(each for each in ENVIRONMENTS if each.name == settings["name"])
    enter(environment)
    from tandem.config.errors import ConfigError  # noqa: PLC0415 after the change of user
    from tandem.sandbox.choose import choose_sandbox  # noqa: PLC0415

    try:
        sandbox = choose_sandbox("auto", size=1)
    except ConfigError as error:
        print(json.dumps({"chosen": "refused", "words": str(error)}))
        return
    print(json.dumps({"chosen": sandbox.name, "words": ""}))
    sandbox.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
