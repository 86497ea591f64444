"""A sandbox that is killed from outside, and a parent that is: no false outcome, and nothing that lives on."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tandem.api.failures import SandboxLost
from tandem.api.sandbox import Limits, Program
from tandem.config.errors import ConfigError
from tandem.sandbox.choose import choose_sandbox
from tests.sandbox.machine import descendants, lives, processes_with

WAIT = Program(source="import time\nprint(1, flush=True)\ntime.sleep(2)\nprint(2)")


def mark():
    """A number that no other process has in its command line."""
    return f"{os.getpid()}123456.{int.from_bytes(os.urandom(4), 'big')}"


def until(condition, timeout_s=60):
    """Waits until it is true."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.05)
    return condition()


@pytest.fixture(params=["bubblewrap", "landlock"])
def name(request):
    """A back end that works here."""
    try:
        choose_sandbox(request.param, size=1).close()
    except ConfigError as error:
        pytest.skip(f"{request.param} does not work here: {str(error).splitlines()[1]}")
    return request.param


def innermost(sandbox):
    """All processes of the sandbox, those of its programs first."""
    return sorted({pid for worker in sandbox.pids for pid in {worker} | descendants(worker)}, reverse=True)


@pytest.mark.parametrize("whom", ["the worker", "its keeper", "everything"])
def test_a_program_whose_sandbox_is_killed_runs_again_on_another_worker(name, whom):
    sandbox = choose_sandbox(name, size=2)

    async def run():
        task = asyncio.create_task(
            sandbox.run(Program(source="import time\nprint(1, flush=True)\ntime.sleep(1)\nprint(2)"), Limits(wall_s=30))
        )
        await asyncio.sleep(0.5)
        worker = sandbox.pids[0]
        victims = {"the worker": [worker], "its keeper": [psutil.Process(worker).ppid()]}
        for pid in victims.get(whom) or innermost(sandbox)[::-1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return await task

    outcome = asyncio.run(run())
    sandbox.close()
    assert (outcome.status, outcome.stdout) == ("ok", b"1\n2\n")


def test_a_program_that_is_lost_each_time_ends_as_lost_and_never_as_a_result(name):
    sandbox = choose_sandbox(name, size=2)

    async def run():
        task = asyncio.create_task(sandbox.run(Program(source="import time\ntime.sleep(60)"), Limits(wall_s=60)))
        while not task.done():
            await asyncio.sleep(0.3)
            for pid in sandbox.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return await task, await sandbox.run(Program(source="print(1)"))

    lost, after = asyncio.run(run())
    sandbox.close()
    assert (lost.status, lost.exit_code) == ("lost", None)
    assert after.stdout == b"1\n"


def test_speaking_and_workspaces_say_that_they_are_lost(name):
    sandbox = choose_sandbox(name, size=1)

    async def run():
        process = await sandbox.start(WAIT)
        space = await sandbox.open({"a": b"1"})
        snapshot = await space.snapshot()
        pids = innermost(sandbox)
        os.kill(sandbox.pids[0], signal.SIGKILL)
        until(lambda: not any(map(lives, pids)))
        with pytest.raises(SandboxLost):
            await space.exec(Program(source="print(1)"))
        again = await sandbox.open()
        await again.restore(snapshot)
        content = await again.read("a")
        for each in (space, again):
            await each.close()
        return (await process.close()).status, content

    assert asyncio.run(run()) == ("lost", b"1")
    sandbox.close()


LEAVES = """
import os
for _ in range(2):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", MARK])
        os._exit(0)
print("ready", flush=True)
import time
time.sleep(60)
"""


@pytest.mark.parametrize("depth", ["keeper", "outermost", "innermost"])
def test_nothing_outlives_a_killed_worker(name, depth):
    sandbox = choose_sandbox(name, size=1)
    number = mark()

    async def run():
        process = await sandbox.start(Program(source=f"MARK = {number!r}\n" + LEAVES), Limits(wall_s=60))
        assert await process.receive(100, 30) == b"ready\n"
        assert until(lambda: len(processes_with(number)) == 2)
        # the process that serves sessions, or the one that serves programs: not the program, which is at the end
        pids = sorted(pid for pid in innermost(sandbox) if lives(pid) and pid not in processes_with(number))
        depths = {"keeper": psutil.Process(pids[0]).ppid(), "outermost": pids[0], "innermost": pids[-2]}
        os.kill(depths[depth], signal.SIGKILL)
        until(lambda: not processes_with(number))
        return await process.close()

    outcome = asyncio.run(run())
    assert outcome.status == "lost"
    assert processes_with(number) == []
    sandbox.close()


def test_a_worker_outlives_the_thread_that_started_it(name):
    sandbox = choose_sandbox(name, size=1)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: asyncio.run(sandbox.run(Program(source="print(1)")))).result()
        before = sandbox.pids
    outcome = asyncio.run(sandbox.run(Program(source="import time\ntime.sleep(0.5)")))
    assert outcome.status == "ok" and sandbox.pids == before
    sandbox.close()


PARENT = """
import asyncio, json, os, sys, threading, time
from tandem.api.sandbox import Limits, Program
from tandem.sandbox.choose import choose_sandbox
from tests.sandbox.test_lost import LEAVES, innermost
name, mark = sys.argv[1:]

async def main():
    sandbox = choose_sandbox(name, size=2)
    programs = [await sandbox.start(Program(source=f"MARK = {mark!r}\\n" + LEAVES), Limits(wall_s=60)) for _ in range(2)]
    for program in programs:
        await program.receive(100, 30)
    if (child := os.fork()) == 0:  # it that holds copies of all descriptors, as a data loader does
        time.sleep(60)
        os._exit(0)
    print(json.dumps([child, *innermost(sandbox)]), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("worker", ["sound", pytest.param("stopped", marks=pytest.mark.slow)])
def test_nothing_outlives_a_parent_that_is_killed_and_no_file_of_it_stays(name, worker, tmp_path):
    number = mark()
    source = Path(__file__).parents[2]
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(source), *sys.path])}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, name, number], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None
    child, *pids = json.loads(parent.stdout.readline())
    keepers = {process.pid for process in psutil.Process(parent.pid).children()} - {child}
    assert len(keepers) == 2
    assert len(pids) >= 4
    if worker == "stopped":  # it can do nothing any more, so its keeper must; its files stay
        os.kill(min(pids), signal.SIGSTOP)
    parent.kill()
    parent.wait()
    parent.stdout.close()

    def left():
        files = os.listdir(tmp_path) if worker == "sound" else []
        return [pid for pid in {*pids, *keepers} if lives(pid)], set(processes_with(number)) - {child}, files

    until(lambda: not any(left()))
    what = left()
    os.kill(child, signal.SIGKILL)
    assert not any(what), what
