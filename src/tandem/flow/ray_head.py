"""A Ray that a run starts: its head lives in a session apart, and ends with the run, whatever becomes of that.

`ray.init` alone starts the head in the run's process group. There a TERM that is meant for the run (`timeout`, a shell that
closes) ends it first, and the run could no longer save. So a child in another session starts it, and waits on a pipe: when
the run closes that, or is killed, the child ends the head; and where the child is killed, the kernel ends what it started.
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
    """The head of a cluster on this machine."""

    def __init__(self, **how: Any):
        """``how``: arguments of `ray.init`.

        Raises:
            TandemError: Ray does not start; what it said is on the terminal.
        """
        command = [sys.executable, "-P", "-m", __name__, json.dumps(how)]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._child.stdout is not None, "it is a pipe"
        self._address = self._child.stdout.readline().strip()
        if not self._address:
            self.close()
            raise TandemError("Ray did not start on this machine; its own words stand above")

    def join(self, ray: Any) -> str:
        """The address for `ray.init` here, which from now on shows the cluster's token."""
        if os.environ.setdefault(AUTHENTICATION, "token") == "token":  # as Ray sets it for a cluster that it starts
            ray._raylet.Config.initialize("")  # it has read the variable when it was imported
        return self._address

    def close(self) -> None:
        """Ends it, and waits until it has ended. Idempotent."""
        assert self._child.stdin is not None, "it is a pipe"
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        try:
            self._child.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def guard(how: str) -> None:
    """The child: starts the head, says its address, and ends it when the parent closes the pipe or is gone."""
    parent = os.getppid()
    import ray  # noqa: PLC0415 an extra

    found = ray.init(log_to_driver=False, logging_level="warning", **json.loads(how))
    print(found.address_info["gcs_address"], flush=True)
    # The second look is for a pipe that a fork of the parent holds open.
    while not select.select([sys.stdin], [], [], LOOK_S)[0] and os.getppid() == parent:
        pass
    ray.shutdown()


if __name__ == "__main__":
    guard(sys.argv[1])
