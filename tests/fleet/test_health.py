"""The state machine of one server, over any course of events."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engines.inference.fleet.members import SERVING, Health, Rules, ServerState

RULES = Rules(suspect_after_s=4.0, stall_timeout_s=60.0)


def healthy(target=3, now=0.0):
    """A server that came the whole way."""
    return Health.new(now).answers().delivered(target).emptied(target).admitted(now, target)


class Fleet:
    """One server and the fleet's version, with a clock that only grows."""

    def __init__(self):
        self.now, self.target, self.health = 0.0, 0, Health.new(0.0)
        self.forgot = True  # since it was last fenced, weights were not delivered or the cache not emptied
        self.delivered_at = self.emptied_at = None

    def apply(self, name, number):
        before, now = self.health, self.now
        after = {
            "starts": lambda: before.starts(),
            "answers": lambda: before.answers(),
            "delivered": lambda: before.delivered(number),
            "emptied": lambda: before.emptied(number),
            "admitted": lambda: before.admitted(now, self.target),
            "token": lambda: before.token(now, self.target, RULES),
            "fails": lambda: before.fails(now, "x", RULES),
            "dies": lambda: before.fails(now, "x", RULES, fatal=True),
            "ticks": lambda: before.ticks(now, RULES),
            "retires": lambda: before.retires("x"),
            "slept": lambda: before.slept(float(number)),
        }
        if name == "wait":
            self.now += number
        elif name == "commit":
            self.target += 1
            self.health = before.outdated(self.target)
        else:
            self.health = after[name]()
        return before


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "starts",
                "answers",
                "delivered",
                "emptied",
                "admitted",
                "token",
                "token",
                "fails",
                "dies",
                "ticks",
                "wait",
                "wait",
                "commit",
                "slept",
                "retires",
            ]
        ),
        st.integers(0, 5),
    ),
    max_size=60,
)


@given(EVENTS)
def test_nobody_is_healthy_without_current_weights_and_an_empty_cache(events):
    fleet = Fleet()
    for name, number in events:
        before = fleet.apply(name, number)
        after = fleet.health
        if after.state == ServerState.HEALTHY:
            assert after.weights == after.cache == fleet.target
        if after.state == ServerState.HEALTHY and before.state != ServerState.HEALTHY:
            assert before.state in (ServerState.STALE, ServerState.SUSPECT)


@given(EVENTS)
def test_being_fenced_forgets_everything_and_the_way_back_is_a_delivery(events):
    fleet, since = Fleet(), set()
    for name, number in events:
        before = fleet.apply(name, number)
        if fleet.health.state == ServerState.FENCED and before.state != ServerState.FENCED:
            assert (fleet.health.weights, fleet.health.cache) == (None, None)
            assert fleet.health.incarnation == before.incarnation + 1
            since = set()
        since.add(name)
        if fleet.health.state == ServerState.HEALTHY and fleet.health.incarnation:
            assert {"answers", "delivered", "emptied"} <= since


@given(EVENTS)
def test_retired_is_the_end_and_incarnations_only_grow(events):
    fleet = Fleet()
    for name, number in events:
        before = fleet.apply(name, number)
        assert fleet.health.incarnation >= before.incarnation
        if before.state == ServerState.RETIRED:
            assert fleet.health.state == ServerState.RETIRED


@given(EVENTS)
def test_time_alone_never_makes_a_server_better(events):
    fleet = Fleet()
    for name, number in events:
        before = fleet.apply(name, number)
        if name in ("wait", "ticks", "slept") and before.state != fleet.health.state:
            assert (before.state, fleet.health.state) in {
                (ServerState.HEALTHY, ServerState.SUSPECT),
                (ServerState.HEALTHY, ServerState.FENCED),
                (ServerState.SUSPECT, ServerState.FENCED),
            }


def test_a_server_without_a_token_is_suspect_then_fenced():
    one = healthy()
    assert one.ticks(4.0, RULES).state == ServerState.HEALTHY
    assert one.ticks(4.1, RULES).state == ServerState.SUSPECT
    assert one.ticks(4.1, RULES).ticks(60.0, RULES).state == ServerState.SUSPECT
    assert one.ticks(60.1, RULES).state == ServerState.FENCED
    assert "no token for 60.1 s" in one.ticks(60.1, RULES).why


def test_progress_keeps_a_server_healthy_however_long_a_request_takes():
    one = healthy()
    for second in range(1, 1000):
        one = one.token(float(second), 3, RULES).ticks(second + 0.5, RULES)
    assert one.state == ServerState.HEALTHY


def test_a_suspect_needs_several_signs_of_life_in_a_row():
    one = healthy().fails(1.0, "503", RULES)
    assert one.state == ServerState.SUSPECT
    assert one.token(2.0, 3, RULES).state == ServerState.SUSPECT
    assert one.token(2.0, 3, RULES).token(2.1, 3, RULES).state == ServerState.HEALTHY
    flapping = one.token(2.0, 3, RULES).fails(2.1, "503", RULES).token(2.2, 3, RULES)
    assert flapping.state == ServerState.SUSPECT


def test_failures_in_a_row_fence_and_tokens_between_them_do_not():
    one = healthy()
    for second in range(RULES.max_failures):
        assert one.state in SERVING
        one = one.fails(1.0 + second, "503", RULES)
    assert one.state == ServerState.FENCED
    two = healthy()
    for second in range(10):
        two = two.fails(1.0 + second, "503", RULES).token(1.0 + second, 3, RULES)
    assert two.state in SERVING


def test_a_hundred_requests_that_fail_in_one_moment_are_one_failure():
    one = healthy()
    for number in range(100):
        one = one.fails(1.0 + number / 1000, "the connection was cut", RULES)
    assert one.state == ServerState.SUSPECT


@pytest.mark.parametrize("state", [ServerState.HEALTHY, ServerState.SUSPECT])
def test_a_server_that_missed_an_update_is_stale_whatever_it_makes(state):
    one = replace(healthy(), state=state).outdated(4)
    assert one.state == ServerState.STALE
    for _ in range(5):
        one = one.token(2.0, 4, RULES).admitted(2.0, 4)
    assert one.state == ServerState.STALE
    assert one.delivered(4).admitted(2.0, 4).state == ServerState.STALE  # its cache is of version 3
    assert one.delivered(4).emptied(4).admitted(2.0, 4).state == ServerState.HEALTHY


def test_a_suspect_that_holds_other_weights_becomes_stale_not_healthy():
    one = healthy().fails(1.0, "503", RULES)
    assert one.token(2.0, 4, RULES).token(2.0, 4, RULES).state == ServerState.STALE


def test_time_that_nobody_asked_for_tokens_does_not_count():
    assert healthy().slept(100.0).ticks(103.0, RULES).state == ServerState.HEALTHY
