"""A Ray cluster that a run starts. Its head process runs in a separate session, and ends with the run.

`ray.init` alone starts the head in the run's process group. There, a SIGTERM for the run (from `timeout`, or a shell that
closes) would end the head first, and the run could no longer save. So a child process in another session starts the head and
waits on a pipe. When the run closes the pipe or is killed, the child ends the head. If the child is killed, the kernel ends
the processes that it started.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
from typing import Any

from tandem.config.errors import TandemError

AUTHENTICATION = "RAY_AUTH_MODE"
LOOK_S = 0.5
CLOSE_S = 20.0


class Head:
    """The head of a Ray cluster on this machine."""

    def __init__(self, **how: Any):
        """``how``: arguments of `ray.init`.

        Raises:
            TandemError: Ray does not start. Its own messages are on the terminal.
        """
        command = [sys.executable, "-P", "-m", __name__, json.dumps(how)]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._child.stdout is not None, "it is a pipe"
        self._address = self._child.stdout.readline().strip()
        if not self._address:
            self.close()
            raise TandemError("Ray did not start on this machine; the messages of Ray are above")

    def join(self, ray: Any) -> str:
        """Returns the address for `ray.init` in this process, and lets Ray authenticate with the cluster's token."""
        if os.environ.setdefault(AUTHENTICATION, "token") == "token":  # the setting of a cluster that Ray starts
            ray._raylet.Config.initialize("")  # reads the variable again; Ray had read it when it was imported
        return self._address

    def close(self) -> None:
        """Ends the head and waits until it has ended. Idempotent."""
        assert self._child.stdin is not None, "it is a pipe"
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        try:
            self._child.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def guard(how: str) -> None:
    """Runs in the child process: starts the head, prints its address, and ends it when the parent closes the pipe or ends.
    ``how``: arguments of `ray.init` as JSON."""
    parent = os.getppid()
    import ray  # noqa: PLC0415 an extra

    found = ray.init(log_to_driver=False, logging_level="warning", **json.loads(how))
    print(found.address_info["gcs_address"], flush=True)
    # The second condition is for a pipe that a fork of the parent holds open after the parent has ended.
    while not select.select([sys.stdin], [], [], LOOK_S)[0] and os.getppid() == parent:
        pass
    ray.shutdown()


if __name__ == "__main__":
    guard(sys.argv[1])
