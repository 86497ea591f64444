"""A fleet as its callers see it: one answer to each request, whatever becomes of servers. Engines of this process."""

import asyncio
import time
from collections import Counter

import pytest

from tandem.api.failures import DataFailure, EngineDied, InfrastructureFailure, WeightUpdateFailed
from tandem.api.requests import StopReason
from tandem.config.fleet import parse_address
from tandem.engines.inference.fleet.addresses import add_address, remove_address
from tests.fleet.fleets import (
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
    rows,
    running,
    same,
    server,
    until,
    update,
)
from tests.tiny import tiny_model_folder

LONG = 100


def slowly(test):
    """A test that waits for seconds; CI runs it."""
    return pytest.mark.slow(pytest.mark.invariant(test))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three sets of weights for one architecture: versions 0, 1 and 2."""
    tmp = tmp_path_factory.mktemp("models")
    return [tiny_model_folder(tmp, seed=seed) for seed in range(3)]


@pytest.fixture
def made(folders, tmp_path):
    """``made(2, config)``: a fleet of so many servers, its journal, and the engines as they were made, by name."""
    fleets = []

    def make(count, config=None, **rest):
        engines, journal = {}, tmp_path / "fleet.jsonl"

        def maker(name):
            def start():
                engines[name] = Unwell(engine(folders[0]))
                return engines[name]

            return start

        servers = [server(f"s{i}", maker(f"s{i}"), **rest) for i in range(count)]
        fleet = fleet_of(servers, *([config] if config else []), journal=journal)
        fleets.append(fleet)
        until(lambda: len(healthy(fleet)) == count)
        return fleet, journal, engines

    yield make
    for fleet in fleets:
        fleet.close()
        assert not fleet.roster.members


def reference(folder, requests):
    one = engine(folder)
    try:
        return generate(one, requests)
    finally:
        one.close()


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


def test_a_server_of_ours_that_died_is_started_again_and_brought_to_the_current_weights(made, folders):
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


def test_a_server_that_fails_requests_gets_no_more_of_them_until_it_makes_tokens_again(made):
    fleet, journal, engines = made(2)
    engines["s0"].fails = True
    answers = generate(fleet, [ask(i, affinity=str(i)) for i in range(8)])
    assert len(answers) == 8
    until(lambda: "suspect" in passed(journal, "s0"))
    assert healthy(fleet) == {"s1"}
    engines["s0"].fails = False
    until(lambda: healthy(fleet) == {"s0", "s1"})


def test_a_request_that_fails_everywhere_ends_with_what_each_server_said(made):
    fleet, _, engines = made(3, patient(max_server_retries=1))
    for one in engines.values():
        one.fails = True
    with pytest.raises(InfrastructureFailure, match=r"servers_failed.*failed 2 times.*max_server_retries=1.*503"):
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


class TestUpdates:
    def test_all_servers_switch_and_new_tokens_say_so(self, made, folders):
        fleet, _, _ = made(2)
        report = publish(fleet, folders[1], 1)
        assert set(report) == {"pause_s", "recompute_s"} and fleet.version.number == 1
        requests = [ask(i) for i in range(8)]
        assert same(generate(fleet, requests), reference(folders[1], requests))

    def test_requests_that_span_an_update_keep_their_tokens(self, made, folders):
        fleet, _, _ = made(2)
        with Asking(fleet, [ask(i, tokens=LONG) for i in range(8)]) as asking:
            until(lambda: running(fleet, "s0") and running(fleet, "s1"))
            publish(fleet, folders[1], 1)
            publish(fleet, folders[2], 2)
        versions = [list(response.versions) for response in asking.answers()]
        assert all(found == sorted(found) and len(found) == LONG for found in versions)
        assert any(len(set(found)) > 1 for found in versions)

    def test_with_finish_before_update_no_request_spans_one(self, made, folders):
        fleet, _, _ = made(2, patient(finish_before_update=True))
        with Asking(fleet, [ask(i, tokens=LONG) for i in range(8)]) as asking:
            until(lambda: running(fleet, "s0") and running(fleet, "s1"))
            with Asking(fleet, [ask(i, tokens=20) for i in range(4)]) as later:
                publish(fleet, folders[1], 1)
        assert {frozenset(response.versions) for response in asking.answers()} == {frozenset({0})}
        assert all(len(set(response.versions)) == 1 for response in later.answers())
        assert fleet.statistics()["fleet/interrupted"] == 0

    @slowly
    def test_an_update_does_not_wait_longer_than_drain_timeout_s_for_running_requests(self, made, folders):
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
    def test_a_server_that_fails_an_update_is_fenced_and_comes_back_with_it(self, made, folders, phase):
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
    def test_an_update_that_all_refuse_leaves_all_on_the_old_version_and_the_next_one_works(self, made, folders, phase):
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

    def test_a_second_update_may_come_before_the_first_was_committed(self, made, folders):
        fleet, _, _ = made(2)
        fleet.prepare_weights(update(folders[1], 1))
        publish(fleet, folders[2], 1)
        requests = [ask(i) for i in range(4)]
        assert same(generate(fleet, requests), reference(folders[2], requests))
        with pytest.raises(WeightUpdateFailed, match="nothing is prepared"):
            fleet.commit_weights(update(folders[1], 2).version)

    def test_an_update_of_an_empty_fleet_is_kept_for_those_that_come(self, made, folders):
        fleet, _, engines = made(1)
        engines["s0"].inner.close()
        until(lambda: not healthy(fleet))
        publish(fleet, folders[1], 1)
        answers = generate(fleet, [ask(i) for i in range(4)])
        assert same(answers, reference(folders[1], [ask(i) for i in range(4)]))


class TestComingAndGoing:
    def test_a_server_that_joins_is_brought_to_the_current_weights_before_it_serves(self, made, folders):
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

    def test_a_server_that_leaves_ends_what_it_has(self, made, folders):
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
    def test_a_server_that_leaves_and_does_not_finish_loses_its_requests_to_others(self, made):
        fleet, journal, engines = made(2, patient(drain_timeout_s=0.3, stall_timeout_s=30))
        engines["s0"].holds = True
        with Asking(fleet, [ask(i) for i in range(8)]) as asking:
            until(lambda: running(fleet, "s0") == 4)
            fleet.remove("s0")
            assert len(asking.answers()) == 8
        engines["s0"].holds = False
        assert [row["moved"] for row in rows(journal) if row["to"] == "retired"] == [4]

    @slowly
    def test_servers_of_a_watched_file_join_and_leave_while_requests_run(self, folders, tmp_path):
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

    def test_a_server_of_which_nobody_knows_the_weights_is_given_those_of_the_run(self, folders, tmp_path):
        journal = tmp_path / "fleet.jsonl"
        other = server("other", lambda: engine(folders[2]), owned=False, holds=None)
        fleet = fleet_of([other], journal=journal, first=lambda: update(folders[0], 0))
        try:
            requests = [ask(i) for i in range(4)]
            assert same(generate(fleet, requests), reference(folders[0], requests))
        finally:
            fleet.close()

    def test_an_empty_fleet_is_a_wait_and_then_an_error_that_says_who_is_where(self, made):
        fleet, _, engines = made(1, patient(max_restarts=0, empty_timeout_s=0.5))
        engines["s0"].inner.close()
        began = time.monotonic()
        with pytest.raises(EngineDied, match=r"no server was healthy for 0\.5 s .*empty_timeout_s"):
            generate(fleet, [ask()])
        assert 0.4 < time.monotonic() - began < 5

    def test_requests_wait_while_there_is_no_server_and_are_answered_when_there_is(self, made):
        fleet, _, engines = made(1)
        engines["s0"].inner.close()
        until(lambda: not healthy(fleet))
        assert len(generate(fleet, [ask(i) for i in range(20)])) == 20

    def test_a_deadline_passes_also_while_there_is_no_server(self, made):
        fleet, _, engines = made(1, patient(max_restarts=0))
        engines["s0"].inner.close()
        until(lambda: not healthy(fleet))
        (response,) = generate(fleet, [ask(deadline_s=0.2)])
        assert (response.stop_reason, response.output_ids) == (StopReason.CANCELLED, ())


@slowly
def test_a_request_that_takes_too_long_moves_and_is_cancelled_where_it_was(made):
    fleet, _, engines = made(2, patient(request_timeout_s=0.5, stall_timeout_s=30, suspect_after_s=20))
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
