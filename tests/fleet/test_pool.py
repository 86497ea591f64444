"""A fleet as its callers see it: one answer to each request, whatever becomes of servers. Engines of this process."""

import asyncio
import time
from collections import Counter

import pytest

from tandem.api.failures import DataFailure, EngineDied, InfrastructureFailure
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
)


def test_a_fleet_makes_the_tokens_of_one_engine_and_uses_all_its_servers(made, folders):
    fleet, _, engines = made(2)
    requests = [ask(i, prompt=(5, 6 + i % 5), affinity=f"group {i // 4}") for i in range(40)]

    assert same(generate(fleet, requests), reference(folders[0], requests))
    assert min(one.asked for one in engines.values()) >= 12


def test_samples_of_a_group_go_to_one_server(made):
    fleet, _, engines = made(3)
    before = {name: one.asked for name, one in engines.items()}
    generate(fleet, [ask(i, affinity="one group") for i in range(24)])

    assert sorted(one.asked - before[name] >= 24 for name, one in engines.items()) == [False, False, True]


def test_requests_of_a_server_that_dies_are_answered_by_another_with_the_same_tokens(made, folders):
    fleet, journal, engines = made(2)
    requests = [ask(i, tokens=LONG) for i in range(16)]
    with Asking(fleet, requests) as asking:
        until(lambda: running(fleet, "s0") >= 4)
        engines["s0"].inner.close()

    assert same(asking.answers(), reference(folders[0], requests), but=1)
    fenced = [row for row in rows(journal) if row["to"] == "fenced"]
    assert [row["server"] for row in fenced] == ["s0"]
    assert fleet.statistics()["fleet/moved"] >= 4


def test_a_server_of_ours_that_died_is_started_again_with_the_current_weights(made, folders):
    fleet, journal, engines = made(2)
    publish(fleet, folders[1], 1)
    first = engines["s0"]
    first.inner.close()
    until(lambda: healthy(fleet) == {"s0", "s1"} and engines["s0"] is not first)

    assert passed(journal, "s0")[-5:] == ["healthy", "fenced", "starting", "stale", "healthy"]
    answers = generate(fleet, [ask(i, affinity=str(i)) for i in range(12)])
    assert {version for response in answers for version in response.versions} == {1}
    assert same(answers, reference(folders[1], [ask(i) for i in range(12)]))
    assert fleet.statistics()["fleet/restarts"] == 1


@slowly
def test_a_server_that_dies_too_often_is_given_up_for_good(made):
    fleet, journal, engines = made(2, patient(max_restarts=1))
    for _ in range(2):
        until(lambda: healthy(fleet) == {"s0", "s1"})
        engines["s0"].inner.close()
        until(lambda: healthy(fleet) == {"s1"})
    until(lambda: "s0" not in fleet.roster.members)

    assert passed(journal, "s0")[-1] == "retired"
    assert "max_restarts=1" in rows(journal)[-1]["why"]
    assert len(generate(fleet, [ask()])[0].output_ids) == 12


def test_a_server_that_fails_requests_gets_no_more_until_it_makes_tokens_again(made):
    fleet, journal, engines = made(2)
    engines["s0"].fails = True
    answers = generate(fleet, [ask(i, affinity=str(i)) for i in range(8)])
    assert len(answers) == 8
    until(lambda: "suspect" in passed(journal, "s0"))
    assert healthy(fleet) == {"s1"}
    engines["s0"].fails = False
    until(lambda: healthy(fleet) == {"s0", "s1"})


def test_a_request_that_fails_everywhere_ends_with_what_each_server_said(made):
    fleet, _, engines = made(3, rules=ruled(max_server_retries=1))
    for one in engines.values():
        one.fails = True
    with pytest.raises(InfrastructureFailure, match=r"servers_failed.*failed 2 times, at one server after another.*503"):
        generate(fleet, [ask()])


def test_what_is_wrong_with_a_request_is_not_the_servers_fault(made):
    fleet, journal, _ = made(2)
    with pytest.raises(DataFailure, match="prompt_too_long"):
        generate(fleet, [ask(prompt=[5] * 600)])
    assert healthy(fleet) == {"s0", "s1"}
    assert "suspect" not in passed(journal, "s0") + passed(journal, "s1")


@slowly
def test_the_late_answer_of_a_server_that_was_given_up_is_recognised_and_thrown_away(folders, tmp_path):
    engines, journal = [Unwell(engine(folders[0])) for _ in range(2)], tmp_path / "fleet.jsonl"
    fleet = fleet_of([server(f"s{i}", lambda one=one: one, owned=False) for i, one in enumerate(engines)], journal=journal)
    requests = [ask(i, tokens=30) for i in range(10)]
    try:
        until(lambda: healthy(fleet) == {"s0", "s1"})
        engines[0].holds = True
        with Asking(fleet, requests) as asking:
            until(lambda: running(fleet, "s0") == 5)
            assert same(asking.answers(), reference(folders[0], requests))
            assert passed(journal, "s0")[-2:] == ["suspect", "fenced"]
            publish(fleet, folders[1], 1)  # without it
            engines[0].holds = False
            until(lambda: fleet.statistics()["fleet/late_answers"] == 5)
        until(lambda: healthy(fleet) == {"s0", "s1"})
        assert [row["moved"] for row in rows(journal) if row["to"] == "fenced" and row["from"] != "fenced"] == [5]
        after = generate(fleet, [ask(i, affinity=str(i)) for i in range(10)])
        assert same(after, reference(folders[1], [ask(i) for i in range(10)]))
    finally:
        fleet.close()


@slowly
def test_a_request_that_takes_too_long_moves_and_is_cancelled_where_it_was(made):
    fleet, _, engines = made(2, rules=ruled(request_timeout_s=0.5, stall_timeout_s=30, suspect_after_s=20))
    engines["s0"].holds = True
    answers = generate(fleet, [ask(i) for i in range(4)])
    assert len(answers) == 4
    engines["s0"].holds = False
    assert fleet.statistics()["fleet/moved"] >= 1
    assert running(fleet, "s0") == 0


def test_a_server_that_takes_longer_for_its_tokens_is_given_less(made):
    fleet, _, _ = made(2)
    for name, token_s in (("s0", 0.01), ("s1", 0.085)):
        fleet.roster.members[name].token_s = token_s
    fleet.roster.set_paces()
    for _ in range(90):
        fleet.roster.router.choose(10)
    work = fleet.roster.router.work()
    assert work["s0"] == 8 * work["s1"]


def test_a_cancelled_caller_frees_its_request(made):
    fleet, _, engines = made(2)

    async def give_up():
        tasks = [asyncio.ensure_future(fleet.agenerate(ask(i, tokens=LONG))) for i in range(8)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(give_up())
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    assert fleet.roster.requests() == 0
    until(lambda: all(one.statistics()["running"] == 0 for one in engines.values()))
    assert Counter(fleet.roster.router.work().values()) == {0: 2}


def test_pause_and_sleep_reach_all_servers_and_nobody_is_suspected_meanwhile(made):
    fleet, journal, engines = made(2)
    fleet.pause()
    counters = [one.statistics()["generated_tokens"] for one in engines.values()]
    time.sleep(1.5)
    assert [one.statistics()["generated_tokens"] for one in engines.values()] == counters
    fleet.resume()
    fleet.sleep(("kv_cache",))
    fleet.wake(("kv_cache",))
    assert len(generate(fleet, [ask()])[0].output_ids) == 12
    assert "suspect" not in passed(journal, "s0") + passed(journal, "s1")


def test_statistics_are_sums_and_count_servers_that_are_gone(made):
    fleet, _, engines = made(2)
    generate(fleet, [ask(i, affinity=str(i)) for i in range(8)])
    before = fleet.statistics()
    assert before["generated_tokens"] >= 8 * 12 and before["fleet/healthy"] == before["fleet/servers"] == 2
    engines["s0"].inner.close()
    until(lambda: healthy(fleet) == {"s1"})
    assert fleet.statistics()["generated_tokens"] >= before["generated_tokens"]
    assert fleet.statistics()["fleet/fenced"] == 1


def test_closing_fails_whoever_waits_and_all_who_come_later(made):
    fleet, _, _ = made(1)
    with Asking(fleet, [ask(tokens=400)]) as asking:
        until(lambda: running(fleet, "s0"))
        fleet.close()
        fleet.close()
        with pytest.raises(EngineDied, match="closed"):
            asking.answers()
    with pytest.raises(EngineDied, match="closed"):
        generate(fleet, [ask()])
    with pytest.raises(EngineDied, match="closed"):
        fleet.pause()


def test_a_fleet_of_which_a_server_cannot_be_started_is_an_error_and_leaves_nothing(folders):
    good = []

    def fine():
        good.append(engine(folders[0]))
        return good[0]

    def broken():
        raise EngineDied("no such model")

    with pytest.raises(EngineDied, match="no such model"):
        fleet_of([server("a", fine), server("b", broken)])
    if good:
        with pytest.raises(EngineDied):
            good[0].statistics()
