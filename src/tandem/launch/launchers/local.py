"""Starts ranks on this machine, or on several machines if the same command is given on each of them."""

import argparse
import json
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.config.errors import ConfigError
from tandem.launch.launchers import Launcher, LaunchJob, new_attempt, outcome, start_group
from tandem.launch.place import Place

END_S = 40.0
"""Seconds that a group has to end after its launcher has closed its standard input."""


class LocalGroup(Launcher):
    """Starts one group of ranks on this machine."""

    def __init__(self, jobs: Sequence[LaunchJob], options: argparse.Namespace):
        super().__init__(jobs, options)
        (self._job,) = jobs
        self._place = self._placed()
        self._process: subprocess.Popen[bytes] | None = None
        self._attempt: Path | None = None

    @staticmethod
    def add_arguments(parser: Any) -> None:
        parser.add_argument(
            "--machines", type=int, metavar="N", help="number of machines that run this command (default: 1)"
        )
        parser.add_argument("--machine", type=int, metavar="I", help="number of this machine, from 0; machine 0 has rank 0")
        parser.add_argument("--meet", metavar="HOST:PORT", help="address of machine 0 for the others, and a free port there")

    def _placed(self) -> Place | None:
        machines, number, meet = self.options.machines, self.options.machine, self.options.meet
        if machines is None and number is None and meet is None:
            return None
        host, _, port = (meet or "").rpartition(":")
        is_place = re.fullmatch(r"[\w.-]+|\[[\da-fA-F:]+\]", host) and port.isdecimal() and 0 < int(port) < 65536
        if machines is None or number is None or not 0 <= number < machines or not is_place:
            raise ConfigError(
                "several machines need all of --machines N, --machine I (0 to N - 1) and --meet HOST:PORT, for example "
                "--machines 2 --machine 0 --meet host0:29500 on host0 and --machine 1 on the other"
            )
        count, remainder = divmod(self._job.ranks, machines)
        if remainder:
            raise ConfigError(f"{self._job.ranks} ranks (actor.backend) cannot be spread evenly over {machines} machines")
        if self._job.max_restarts:
            raise ConfigError(
                "recover.max_restarts works on one machine, Slurm and Ray: ranks on other machines cannot be restarted here"
            )
        return Place(number * count, count, self._job.ranks, 0, count, host.strip("[]"), int(port))

    def describe(self) -> str:
        place = "all ranks on this machine" if self._place is None else json.dumps(self._place.__dict__)
        return f"{' '.join(self._job.command())}\n{self._job.ranks} rank(s): {place}\nlogs: {self._job.folder}"

    def start(self) -> None:
        if self._place is not None:
            try:
                socket.getaddrinfo(self._place.address, self._place.port)
            except OSError as error:
                raise ConfigError(f"--meet: cannot resolve the host {self._place.address}: {error.strerror}") from error
        self._attempt = new_attempt(self._job)
        variables = self._place.variables() if self._place else {}
        if self._place is not None and self._place.first:
            print(f"Rank 0 prints on {self._place.address}. Logs of the ranks here: {self._attempt}", file=sys.stderr)
        self._process = start_group(self._job.command(), self._attempt, self._place.first if self._place else 0, variables)

    def poll(self) -> int | None:
        code = self._process.poll() if self._process else 0
        return None if code is None else outcome(self._attempt, abs(code))

    def signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def groups(self, job: LaunchJob) -> Sequence[int]:
        return [self._place.first if self._place else 0]

    def attempt(self, job: LaunchJob) -> Path | None:
        return self._attempt

    def close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            try:
                self._process.wait(END_S)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                self._process.kill()


LAUNCHER = LocalGroup
