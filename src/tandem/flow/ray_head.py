"""A Ray cluster that a run starts. Its head process runs in a separate session, and ends with the run.

`ray.init` alone starts the head in the run's process group. There, a SIGTERM for the run (from `timeout`, or a shell that
closes) would end the head first, and the run could no longer save. So a `Child` starts the head, and ends it at SIGTERM.
"""

import json
import os
import signal
import sys
from typing import Any

from tandem.config.errors import TandemError
from tandem.workers.child import own_socket
from tandem.workers.process import Child

AUTHENTICATION = "RAY_AUTH_MODE"
CLOSE_S = 20.0


class Head:
    """The head of a Ray cluster on this machine."""

    def __init__(self, **how: Any):
        """``how``: arguments of `ray.init`.

        Raises:
            TandemError: Ray does not start. Its own messages are on the terminal.
        """
        command = [sys.executable, "-P", "-m", __name__, json.dumps(how)]
        child, connection = Child.over_socket(command, environment=os.environ, grace_s=CLOSE_S, orderly=True)
        self.close = child.close
        with connection, connection.makefile() as words:
            self._address = words.readline().strip()
        if not self._address:
            self.close()
            raise TandemError("Ray did not start on this machine; the messages of Ray are above")

    def join(self, ray: Any) -> str:
        """Returns the address for `ray.init` in this process, and lets Ray authenticate with the cluster's token."""
        if os.environ.setdefault(AUTHENTICATION, "token") == "token":  # the setting of a cluster that Ray starts
            ray._raylet.Config.initialize("")  # reads the variable again; Ray had read it when it was imported
        return self._address


def guard(how: str) -> None:
    """Runs in the child process: starts the head, sends its address, and ends it at SIGTERM. ``how``: arguments of
    `ray.init` as JSON."""
    with own_socket() as asked:
        import ray  # noqa: PLC0415 an extra

        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ray's workers inherit it, and `ray.cancel` interrupts by it
        context = ray.init(log_to_driver=False, logging_level="warning", **json.loads(how))
        asked.sendall(f"{context.address_info['gcs_address']}\n".encode())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # at its exit, Ray ends the head
    signal.pause()


if __name__ == "__main__":
    guard(sys.argv[1])
