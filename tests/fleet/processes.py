"""A fleet of real server processes, and what the fault table says of a fault that is done to one of them."""

import os
import signal
import time
from collections import Counter
from contextlib import contextmanager

import psutil

from tandem.config.fleet import FleetConfig
from tandem.engines.inference.fleet.members import Rules
from tests.fleet.fleets import engine, fleet_of, generate, healthy, rows, server, until
from tests.zygote import gone

DETECTED_S = 20.0
"""Time in which a fault must be noticed."""

PATIENCE, RULES = FleetConfig(max_restarts=100), Rules(stall_timeout_s=8)
"""Else as it comes."""


class Processes:
    """A fleet of ``count`` processes, and who they are; a context manager that leaves no process behind."""

    def __init__(self, folder, journal, *, count=2, config=PATIENCE, make=engine):
        self.pids, self.journal, self.folder = {}, journal, folder
        self._before = set(psutil.Process().children())

        def maker(name):
            def start():
                one = make(folder, "decoupled")
                self.pids[name] = one.pid
                return one

            return start

        self.names = {f"s{i}" for i in range(count)}
        self.fleet = fleet_of([server(name, maker(name)) for name in sorted(self.names)], config, RULES, journal=journal)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.fleet.close()
        until(lambda: set(psutil.Process().children()) <= self._before, 20)

    def all_healthy(self):
        return until(lambda: healthy(self.fleet) == self.names, 300)

    def kill(self, name, how=signal.SIGKILL):
        os.kill(self.pids[name], how)
        return time.time()


def reference(folder, requests):
    one = engine(folder)
    try:
        return generate(one, requests)
    finally:
        one.close()


class Fault:
    """What the table says of one fault: since it was done."""

    def __init__(self, processes, name):
        self.processes, self.name = processes, name
        self.seen = len(rows(processes.journal))
        self.incarnation = processes.fleet.roster.members[name].health.incarnation
        self.counts = Counter(processes.fleet.roster.counts)
        self.pid = processes.pids[name]
        self.at = time.time()

    def rows(self):
        return [row for row in rows(self.processes.journal)[self.seen :] if row["server"] == self.name]

    def first(self, *states):
        """Seconds from the fault to the first of these states."""
        until(lambda: any(row["to"] in states for row in self.rows()))
        return next(row["time"] for row in self.rows() if row["to"] in states) - self.at

    def count(self, name):
        return self.processes.fleet.roster.counts[name] - self.counts[name]


@contextmanager
def fault(processes, name, what):
    """Afterwards: it happened, it was noticed in time, the server came back by the right way, and its process is gone."""
    one = Fault(processes, name)
    yield one
    noticed = one.first("suspect", "fenced")
    fenced = one.first("fenced")
    processes.all_healthy()
    back = time.time() - one.at
    states = [row["to"] for row in one.rows() if row["from"] != row["to"]]
    assert states[states.index("fenced") :] == ["fenced", "starting", "stale", "healthy"]
    assert processes.fleet.roster.members[name].health.incarnation == one.incarnation + 1
    assert processes.pids[name] != one.pid
    until(lambda: gone(one.pid), 10)
    assert noticed <= DETECTED_S
    print(f"\n{what}: noticed {noticed:.2f} s, fenced {fenced:.2f} s, back {back:.1f} s, moved {one.count('moved')}, lost 0")
