"""The fault table: real server processes that are killed, stopped and resumed, at every stage of their work.

Each row asserts that the fault really happened, that nothing was lost and nothing came twice, how soon it was noticed, and
that no process is left. The times are printed with ``-s``; docs/fleet.md quotes them.
"""

import os
import signal
import threading
import time

import psutil
import pytest

from tandem.config.fleet import FleetConfig
from tests.fleet.fleets import (
    Asking,
    ask,
    engine,
    fleet_of,
    generate,
    healthy,
    passed,
    publish,
    running,
    same,
    server,
    until,
    update,
)
from tests.fleet.processes import RULES, Processes, fault, reference
from tests.tiny import tiny_model_folder

pytestmark = [pytest.mark.slow, pytest.mark.invariant]

LONG = 400


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("models")
    return [tiny_model_folder(tmp, seed=seed) for seed in range(6)]


@pytest.fixture(scope="module")
def processes(folders, tmp_path_factory):
    with Processes(folders[0], tmp_path_factory.mktemp("run") / "fleet.jsonl") as one:
        yield one


@pytest.fixture
def fleet(processes):
    """All healthy, whatever was done before."""
    processes.all_healthy()
    return processes.fleet


def test_killed_while_idle(processes, fleet):
    with fault(processes, "s0", "kill −9 while idle"):
        processes.kill("s0")
    assert len(generate(fleet, [ask(i, affinity=str(i)) for i in range(8)])) == 8


def test_killed_while_generating(processes, fleet, folders):
    number = fleet.version.number + 1
    publish(fleet, folders[1], number)
    requests = [ask(i, tokens=LONG) for i in range(16)]
    with fault(processes, "s0", "kill −9 while generating") as one, Asking(fleet, requests) as asking:
        until(lambda: running(fleet, "s0") == 8)
        processes.kill("s0")
        answers = asking.answers()
        assert len(answers) == len(requests)
        assert one.count("moved") == 8
    assert same(answers, reference(folders[1], requests), but=2)
    assert {version for response in answers for version in response.versions} == {number}


@pytest.mark.parametrize(("phase", "word"), [("prepare", "preparing"), ("commit", "committing")])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_killed_or_stopped_during_an_update(processes, fleet, folders, phase, word, how):
    number = fleet.version.number + 1
    member = fleet.roster.members["s1"]
    inner = member.engine
    reached = threading.Event()

    class Hurt:
        """The engine, whose process is killed or stopped as it is asked for this phase."""

        def __getattr__(self, name):
            if name == f"{phase}_weights":
                processes.kill("s1", how)
                reached.set()
            return getattr(inner, name)

    with fault(processes, "s1", f"{how.name} while {word}"):
        member.engine = Hurt()
        with Asking(fleet, [ask(i, tokens=LONG) for i in range(8)]) as asking:
            began = time.monotonic()
            publish(fleet, folders[2], number)
            passed_s = time.monotonic() - began
            assert len(asking.answers()) == 8
        assert reached.is_set()
        print(f"\nthe update took {passed_s:.1f} s")
        assert passed_s <= 40
    assert fleet.version.number == number
    answers = generate(fleet, [ask(i, affinity=str(i)) for i in range(8)])
    assert {version for response in answers for version in response.versions} == {number}
    assert same(answers, reference(folders[2], [ask(i) for i in range(8)]))


def test_stopped_while_generating(processes, fleet):
    requests = [ask(i, tokens=LONG) for i in range(16)]
    with fault(processes, "s0", "SIGSTOP while generating") as one, Asking(fleet, requests) as asking:
        until(lambda: running(fleet, "s0") == 8)
        processes.kill("s0", signal.SIGSTOP)
        assert len(asking.answers()) == len(requests)
        assert one.count("moved") == 8
        assert [row["to"] for row in one.rows()][:2] == ["suspect", "fenced"]


def test_two_updates_in_a_row_while_a_server_restarts(processes, fleet, folders):
    number = fleet.version.number
    with fault(processes, "s0", "two updates in a row during a restart"), Asking(fleet, [ask(tokens=LONG)]):
        processes.kill("s0")
        fleet.prepare_weights(update(folders[4], number + 1))
        publish(fleet, folders[4], number + 1)
        publish(fleet, folders[5], number + 2)
    answers = generate(fleet, [ask(i, affinity=str(i)) for i in range(8)])
    assert {version for response in answers for version in response.versions} == {number + 2}
    assert same(answers, reference(folders[5], [ask(i) for i in range(8)]))


def test_the_whole_fleet_gone_and_back(processes, fleet):
    requests = [ask(i, tokens=LONG) for i in range(16)]
    with (
        fault(processes, "s0", "whole fleet, server 0"),
        fault(processes, "s1", "whole fleet, server 1"),
        Asking(fleet, requests) as asking,
    ):
        until(lambda: running(fleet, "s0") == running(fleet, "s1") == 8)
        processes.kill("s0")
        processes.kill("s1")
        until(lambda: not healthy(fleet))
        assert len(asking.answers()) == len(requests)


def test_a_zombie_of_somebody_else_is_not_killed_and_its_late_answers_are_dropped(folders, tmp_path):
    ours, theirs = engine(folders[0], "decoupled"), engine(folders[0], "decoupled")
    journal = tmp_path / "fleet.jsonl"
    servers = [server("ours", lambda: ours, owned=False), server("theirs", lambda: theirs, owned=False)]
    fleet = fleet_of(servers, FleetConfig(), RULES, journal=journal)
    try:
        until(lambda: healthy(fleet) == {"ours", "theirs"})
        requests = [ask(i, tokens=LONG) for i in range(16)]
        with Asking(fleet, requests) as asking:
            until(lambda: running(fleet, "theirs") == 8)
            os.kill(theirs.pid, signal.SIGSTOP)
            answers = asking.answers()
            assert passed(journal, "theirs")[-2:] == ["suspect", "fenced"]
            publish(fleet, folders[1], 1)
            os.kill(theirs.pid, signal.SIGCONT)
            until(lambda: healthy(fleet) == {"ours", "theirs"})
            late = fleet.roster.counts["late_answers"]
        assert same(answers, reference(folders[0], requests), but=2)
        after = generate(fleet, [ask(i, affinity=str(i)) for i in range(8)])
        assert {version for response in after for version in response.versions} == {1}
        assert passed(journal, "theirs")[-3:] == ["fenced", "stale", "healthy"]
        print(f"\nSIGSTOP, SIGCONT of a zombie: {late} late answers thrown away")
    finally:
        os.kill(theirs.pid, signal.SIGCONT)
        fleet.close()
    assert not psutil.pid_exists(ours.pid) and not psutil.pid_exists(theirs.pid)
