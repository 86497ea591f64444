"""Hostile programs in each back end: none escapes, and nothing is left behind. They are the table of docs/sandbox.md."""

import asyncio
import os
import platform
import time

import pytest

from tandem.api.sandbox import Limits, Program
from tandem.config.errors import ConfigError
from tandem.sandbox.choose import choose_sandbox
from tandem.sandbox.pool import GRACE_S
from tests.sandbox.hostile import read_table
from tests.sandbox.machine import Machine, descendants, lives, processes_with

TABLE = read_table()
BACK_ENDS = ("bubblewrap", "landlock")
ENOUGH_S = 60.0
"""Wall time of a program that is ended by something else than its wall time, however busy the machine."""
ids = [f"{each.group}: {each.name}" for each in TABLE]
pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the programs use system calls by their numbers of x86_64"
)


def wall_s(hostile):
    return hostile.wall_s if "timeout" in hostile.ends else ENOUGH_S


@pytest.fixture(
    scope="module",
    params=[BACK_ENDS[0], pytest.param(BACK_ENDS[1], marks=[pytest.mark.slow, pytest.mark.invariant])],
)
def trial(request, tmp_path_factory):
    """All programs in one back end: (outcomes, what is wrong on the machine afterwards)."""
    folder = tmp_path_factory.mktemp("machine")
    os.environ["TANDEM_TEST_SECRET"] = "secret"
    machine = Machine(folder)
    try:
        sandbox = choose_sandbox(request.param)
    except ConfigError as error:
        machine.close()
        pytest.skip(f"{request.param} does not work here: {str(error).splitlines()[1]}")

    async def run_all():
        jobs = [
            sandbox.run(
                Program(source=hostile.source, stdin=machine.facts),
                Limits(wall_s=wall_s(hostile), cpu_s=hostile.wall_s, memory_mib=256, processes=24, file_mib=32),
            )
            for hostile in TABLE
        ]
        return await asyncio.gather(*jobs)

    before = machine.secret.stat()
    outcomes = asyncio.run(run_all())
    workers = {pid for worker in sandbox.pids for pid in {worker} | descendants(worker)}
    wrong = []
    if len(workers) > 4 * len(sandbox.pids):
        wrong.append(f"{len(workers)} processes below {len(sandbox.pids)} workers")
    sandbox.close()
    after = machine.secret.stat()
    if machine.secret.read_text() != "secret" or (before.st_mode, before.st_mtime_ns) != (after.st_mode, after.st_mtime_ns):
        wrong.append("the secret was changed")
    if before.st_nlink != after.st_nlink:
        wrong.append("the secret has another name")
    if machine.victim.poll() is not None or os.getpriority(os.PRIO_PROCESS, machine.victim.pid) != os.getpriority(
        os.PRIO_PROCESS, 0
    ):
        wrong.append("the victim was killed, or is slower")
    if machine.heard:
        wrong.append(f"heard: {machine.heard}")
    until = time.monotonic() + 20.0  # what was killed takes the kernel a moment to end
    while (left := processes_with(machine.mark) + [pid for pid in workers if lives(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    if left:
        wrong.append(f"processes are left: {left}")
    if files := set(os.listdir(folder)) - {"secret", "socket", "datagrams"}:
        wrong.append(f"files are left: {files}")
    machine.close()
    return dict(zip(ids, outcomes, strict=True)), wrong


@pytest.mark.parametrize("hostile", TABLE, ids=ids)
def test_a_hostile_program_gets_nothing(trial, hostile):
    outcome = trial[0][f"{hostile.group}: {hostile.name}"]
    assert b"ESCAPED" not in outcome.stdout, outcome.stdout.decode(errors="replace")
    assert outcome.status in hostile.ends, (outcome.stdout[-300:], outcome.stderr[-600:])
    assert outcome.seconds < wall_s(hostile) + GRACE_S


def test_hostile_programs_leave_nothing_behind_and_reach_nothing(trial):
    assert trial[1] == []


HARMLESS_WITHOUT_WALLS = (
    "files: reading a secret",
    "files: symbolic link",
    "files: home",
    "reaches other processes: environment of the run",
    "reaches other processes: limits of others",
    "the network: TCP",
    "the network: UDP",
    "the network: unix socket",
    "the network: abstract socket",
    "the network: another program's network",
)


@pytest.mark.parametrize("name", HARMLESS_WITHOUT_WALLS)
def test_the_programs_notice_when_there_are_no_walls(name, tmp_path):
    machine, sandbox = Machine(tmp_path), choose_sandbox("none", size=1)
    hostile = TABLE[ids.index(name)]
    outcome = asyncio.run(sandbox.run(Program(source=hostile.source, stdin=machine.facts), Limits(wall_s=ENOUGH_S)))
    sandbox.close()
    machine.close()
    assert b"ESCAPED" in outcome.stdout


def test_there_are_enough_of_them_and_each_has_a_name_of_its_own():
    assert len(TABLE) >= 80 and len(set(ids)) == len(ids)
