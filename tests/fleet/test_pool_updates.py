"""New weights for a fleet: all its servers switch, or those that cannot are left behind. Engines of this process."""

import pytest

from tandem.api.failures import WeightUpdateFailed
from tests.fleet.fleets import (
    LONG,
    Asking,
    ask,
    generate,
    healthy,
    patient,
    publish,
    reference,
    rows,
    running,
    same,
    slowly,
    until,
    update,
)


def test_all_servers_switch_and_new_tokens_say_so(made, folders):
    fleet, _, _ = made(2)
    report = publish(fleet, folders[1], 1)
    assert set(report) == {"pause_s", "recompute_s"} and fleet.version.number == 1
    requests = [ask(i) for i in range(8)]
    assert same(generate(fleet, requests), reference(folders[1], requests))


def test_requests_that_span_an_update_keep_their_tokens(made, folders):
    fleet, _, _ = made(2)
    with Asking(fleet, [ask(i, tokens=LONG) for i in range(8)]) as asking:
        until(lambda: running(fleet, "s0") and running(fleet, "s1"))
        publish(fleet, folders[1], 1)
        publish(fleet, folders[2], 2)
    versions = [list(response.versions) for response in asking.answers()]
    assert all(found == sorted(found) and len(found) == LONG for found in versions)
    assert any(len(set(found)) > 1 for found in versions)


def test_with_finish_before_update_no_request_spans_one(made, folders):
    fleet, _, _ = made(2, patient(finish_before_update=True))
    with Asking(fleet, [ask(i, tokens=LONG) for i in range(8)]) as asking:
        until(lambda: running(fleet, "s0") and running(fleet, "s1"))
        with Asking(fleet, [ask(i, tokens=20) for i in range(4)]) as later:
            publish(fleet, folders[1], 1)
    assert {frozenset(response.versions) for response in asking.answers()} == {frozenset({0})}
    assert all(len(set(response.versions)) == 1 for response in later.answers())
    assert fleet.statistics()["fleet/interrupted"] == 0


@slowly
def test_an_update_does_not_wait_longer_than_drain_timeout_s_for_running_requests(made, folders):
    fleet, _, engines = made(2, patient(finish_before_update=True, drain_timeout_s=0.2))
    for one in engines.values():
        one.holds = True
    with Asking(fleet, [ask(i) for i in range(4)]) as asking:
        until(lambda: running(fleet, "s0") and running(fleet, "s1"))
        publish(fleet, folders[1], 1)
        for one in engines.values():
            one.holds = False
    assert len(asking.answers()) == 4
    assert fleet.statistics()["fleet/interrupted"] == 4


@pytest.mark.parametrize("phase", ["prepare", "commit"])
def test_a_server_that_fails_an_update_is_fenced_and_comes_back_with_it(made, folders, phase):
    fleet, journal, engines = made(2)
    first = engines["s0"]
    first.refuses = {phase: WeightUpdateFailed("a tensor was mixed up")}
    publish(fleet, folders[1], 1)
    assert fleet.version.number == 1
    until(lambda: healthy(fleet) == {"s0", "s1"} and engines["s0"] is not first)
    assert any("a tensor was mixed up" in row["why"] for row in rows(journal) if row["to"] == "fenced")
    answers = generate(fleet, [ask(i, affinity=str(i)) for i in range(8)])
    assert {version for response in answers for version in response.versions} == {1}


@pytest.mark.parametrize("phase", ["prepare", "commit"])
def test_an_update_that_all_refuse_leaves_the_old_version_and_the_next_one_works(made, folders, phase):
    fleet, _, engines = made(2)
    for one in engines.values():
        one.refuses = {phase: WeightUpdateFailed("wrong digest")}
    with pytest.raises(WeightUpdateFailed, match="wrong digest"):
        publish(fleet, folders[1], 1)
    fleet.discard_weights()
    assert fleet.version.number == 0 and healthy(fleet) == {"s0", "s1"}
    for one in engines.values():
        one.refuses = {}
    publish(fleet, folders[2], 1)
    requests = [ask(i) for i in range(4)]
    assert same(generate(fleet, requests), reference(folders[2], requests))


def test_a_second_update_may_come_before_the_first_was_committed(made, folders):
    fleet, _, _ = made(2)
    fleet.prepare_weights(update(folders[1], 1))
    publish(fleet, folders[2], 1)
    requests = [ask(i) for i in range(4)]
    assert same(generate(fleet, requests), reference(folders[2], requests))
    with pytest.raises(WeightUpdateFailed, match="nothing is prepared"):
        fleet.commit_weights(update(folders[1], 2).version)


def test_an_update_of_an_empty_fleet_is_kept_for_those_that_come(made, folders):
    fleet, _, engines = made(1)
    engines["s0"].inner.close()
    until(lambda: not healthy(fleet))
    publish(fleet, folders[1], 1)
    answers = generate(fleet, [ask(i) for i in range(4)])
    assert same(answers, reference(folders[1], [ask(i) for i in range(4)]))
