"""The start of a sandbox's process: the command of each back end, and its requirements."""

import json
import os
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """The Python that programs get: the one below the environment that Tandem runs in, without its packages."""
    return Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))


ENVIRONMENT = {
    "PATH": f"{interpreter().parent}:/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same program gives the same answer on every worker
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""All that a program finds in its environment, beside HOME, PWD and TMPDIR."""


def system_paths() -> list[str]:
    """Paths of this machine that every program may read: the system's programs and libraries, and Python."""
    system = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache", "/etc/alternatives"]
    system += ["/etc/ssl/openssl.cnf", "/etc/ssl/certs", "/etc/ssl/cert.pem"]  # clients of HTTP do not start without them
    python = {os.path.realpath(prefix) for prefix in (sys.base_prefix, sys.base_exec_prefix)}
    return system + [path for path in sorted(python) if not path.startswith("/usr/") and path != "/usr"]


@dataclass(frozen=True)
class WorkerStart:
    """The means to start one worker: its command, and a folder that is its own (empty: it needs none)."""

    command: list[str]
    base: str = ""


class Jail(ABC):
    """A way to wall in a worker."""

    name: str
    remedy: str
    """The remedy if it does not work: something to install or to change."""

    readable: tuple[str, ...] = ()
    """Further folders of this machine that programs may read."""

    def paths(self) -> list[str]:
        """All that programs may read of this machine."""
        further = [path for folder in self.readable for path in dict.fromkeys((folder, os.path.realpath(folder)))]
        return [*system_paths(), *further]

    @abstractmethod
    def missing(self) -> str:
        """Why it cannot work here, as far as that can be seen without running it; empty if nothing is missing."""

    @abstractmethod
    def start(self, control: int) -> WorkerStart:
        """Prepares a worker that is asked over the socket ``control``."""

    def python(self, code: Path | str, control: int, **settings: Any) -> list[str]:
        """The command of the fork server, whose code lies in the folder ``code``."""
        settings |= {"walls": self.name, "code": str(code), "control": control, "parent": os.getpid()}
        text = json.dumps({"readable": self.paths(), **settings})
        return [str(interpreter()), "-S", "-s", "-P", "-B", "-X", "utf8", "-c", BOOT, text]
