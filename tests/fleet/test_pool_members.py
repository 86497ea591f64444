"""Servers that join a fleet and leave it while it works. Engines of this process."""

import contextlib
import threading
import time

import pytest

from tandem.api.failures import EngineDied
from tandem.api.requests import StopReason
from tandem.config.fleet import parse_address
from tandem.engines.inference.fleet.addresses import add_address, remove_address
from tests.fleet.fleets import (
    LONG,
    Asking,
    Unwell,
    ask,
    engine,
    fleet_of,
    generate,
    healthy,
    passed,
    patient,
    publish,
    reference,
    rows,
    ruled,
    running,
    same,
    server,
    slowly,
    until,
    update,
)


def test_a_server_that_joins_is_brought_to_the_current_weights_before_it_serves(made, folders):
    fleet, journal, _ = made(1)
    publish(fleet, folders[1], 1)
    late = Unwell(engine(folders[0]))
    with Asking(fleet, [ask(i, tokens=LONG, affinity=str(i)) for i in range(8)]):
        fleet.add(server("late", lambda: late, owned=False, holds=None))
        until(lambda: healthy(fleet) == {"s0", "late"})
        answers = generate(fleet, [ask(i, affinity=f"new {i}") for i in range(20)])
    assert passed(journal, "late") == ["starting", "stale", "healthy"]
    assert late.asked > 5  # probes and requests
    assert {version for response in answers for version in response.versions} == {1}


def test_a_server_that_leaves_ends_what_it_has(made, folders):
    fleet, journal, engines = made(2)
    requests = [ask(i, tokens=LONG) for i in range(12)]
    with Asking(fleet, requests) as asking:
        until(lambda: running(fleet, "s0") >= 4)
        fleet.remove("s0")
        assert healthy(fleet) == {"s1"}
    assert same(asking.answers(), reference(folders[0], requests), but=1)
    until(lambda: "s0" not in fleet.roster.members)
    assert passed(journal, "s0")[-1] == "retired"
    assert sum(row["moved"] for row in rows(journal)) == 0
    with pytest.raises(EngineDied):
        engines["s0"].inner.statistics()  # it was closed


@slowly
def test_a_server_that_leaves_and_does_not_finish_loses_its_requests_to_others(made):
    fleet, journal, engines = made(2, patient(drain_timeout_s=0.3), ruled(stall_timeout_s=30))
    engines["s0"].holds = True
    with Asking(fleet, [ask(i) for i in range(8)]) as asking:
        until(lambda: running(fleet, "s0") == 4)
        fleet.remove("s0")
        assert len(asking.answers()) == 8
    engines["s0"].holds = False
    assert [row["moved"] for row in rows(journal) if row["to"] == "retired"] == [4]


@slowly
def test_servers_of_a_watched_file_join_and_leave_while_requests_run(folders, tmp_path):
    watched, engines = tmp_path / "servers", {}

    def attach(kind, url):
        engines[url] = Unwell(engine(folders[0]))
        return server(f"{kind}={url}", lambda: engines[url], owned=False, holds=None)

    one, two = parse_address("tandem=http://a:1"), parse_address("vllm=http://b:1")
    add_address(watched, one)
    fleet = fleet_of([], watched=watched, attach=attach, first=lambda: update(folders[0], 0))
    try:
        until(lambda: healthy(fleet) == {str(one)})
        publish(fleet, folders[1], 1)
        with Asking(fleet, [ask(i, tokens=LONG, affinity=str(i)) for i in range(8)]) as asking:
            add_address(watched, two)
            until(lambda: healthy(fleet) == {str(one), str(two)})
            after = generate(fleet, [ask(i, affinity=f"new {i}") for i in range(8)])
            remove_address(watched, one.url)
            until(lambda: healthy(fleet) == {str(two)})
            assert len(asking.answers()) == 8
        until(lambda: set(fleet.roster.members) == {str(two)})
        assert same(after, reference(folders[1], [ask(i) for i in range(8)]))
        watched.write_text("nonsense\n" + watched.read_text())
        time.sleep(1.2)
        assert healthy(fleet) == {str(two)}
    finally:
        fleet.close()


def test_a_server_of_which_nobody_knows_the_weights_is_given_those_of_the_run(folders, tmp_path):
    journal = tmp_path / "fleet.jsonl"
    other = server("other", lambda: engine(folders[2]), owned=False, holds=None)
    fleet = fleet_of([other], journal=journal, first=lambda: update(folders[0], 0))
    try:
        requests = [ask(i) for i in range(4)]
        assert same(generate(fleet, requests), reference(folders[0], requests))
    finally:
        fleet.close()


def test_an_empty_fleet_is_a_wait_and_then_an_error_that_says_who_is_where(made):
    fleet, _, engines = made(1, patient(max_restarts=0), ruled(empty_timeout_s=0.5))
    engines["s0"].inner.close()
    began = time.monotonic()
    with pytest.raises(EngineDied, match=r"no server was healthy for 0\.5 s .*startup_timeout_s"):
        generate(fleet, [ask()])
    assert 0.4 < time.monotonic() - began < 60


def test_requests_wait_while_there_is_no_server_and_are_answered_when_there_is(made):
    fleet, _, engines = made(1)
    engines["s0"].inner.close()
    until(lambda: not healthy(fleet))
    assert len(generate(fleet, [ask(i) for i in range(20)])) == 20


def test_a_deadline_passes_also_while_there_is_no_server(made):
    fleet, _, engines = made(1, patient(max_restarts=0))
    engines["s0"].inner.close()
    until(lambda: not healthy(fleet))
    (response,) = generate(fleet, [ask(deadline_s=0.2)])
    assert (response.stop_reason, response.output_ids) == (StopReason.CANCELLED, ())


class Sleeper(Unwell):
    """It says when it was put to sleep."""

    def __init__(self, inner):
        super().__init__(inner)
        self.slept = []

    def sleep(self, parts):
        self.slept.append(parts)
        self.inner.sleep(parts)


def test_a_server_that_comes_back_is_waited_for_and_sleeps_with_the_others(folders):
    ready, made = threading.Event(), {"s0": [], "s1": []}

    def maker(name):
        def start():
            if made[name]:
                ready.wait(60)
            made[name].append(Sleeper(engine(folders[0])))
            return made[name][-1]

        return start

    fleet = fleet_of([server(name, maker(name)) for name in made])
    with contextlib.closing(fleet):
        until(lambda: healthy(fleet) == {"s0", "s1"})
        member = fleet.roster.members["s0"]
        fleet.roster.fence(member, member.health.incarnation, "it died")
        until(lambda: member.health.state == "starting")
        sleeping = threading.Thread(target=fleet.sleep, args=(("kv_cache",),))
        sleeping.start()
        sleeping.join(0.5)
        assert sleeping.is_alive() and not made["s1"][0].slept
        ready.set()
        sleeping.join(60)
        assert made["s0"][1].slept == made["s1"][0].slept == [("kv_cache",)]


def test_a_server_that_died_starts_again_only_while_servers_are_awake(folders):
    made = []

    def start():
        made.append(engine(folders[0]))
        return made[-1]

    fleet = fleet_of([server("s0", start)])
    with contextlib.closing(fleet):
        until(lambda: healthy(fleet) == {"s0"})
        fleet.sleep(("kv_cache",))
        member = fleet.roster.members["s0"]
        fleet.roster.fence(member, member.health.incarnation, "it died")
        time.sleep(1.0)
        assert len(made) == 1, "its GPU is the trainer's now"
        fleet.wake(("kv_cache",))
        until(lambda: healthy(fleet) == {"s0"})
        assert len(made) == 2
