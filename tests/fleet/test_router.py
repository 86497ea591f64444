"""Where requests go, over any course of events."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engines.inference.fleet.members import Router, work_of

NAMES = ("a", "b", "c", "d")
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("join", "leave", "ask", "ask", "ask", "end")),
        st.integers(0, 3),  # which server, or which affinity
        st.integers(1, 50),  # work
        st.booleans(),  # with affinity
    ),
    max_size=120,
)


@given(EVENTS)
def test_requests_go_to_servers_that_are_there_and_every_lease_is_accounted_for(events):
    router, there, leases = Router(), set(), []
    for what, which, work, affine in events:
        name = NAMES[which]
        if what == "join":
            router.add(name)
            there.add(name)
        elif what == "leave":
            router.remove(name)
            there.discard(name)
        elif what == "end" and leases:
            router.end(leases.pop(which % len(leases)))
        elif what == "ask":
            lease = router.choose(work, f"group {which}" if affine else None)
            assert (lease is None) == (not there)
            if lease is not None:
                assert lease.server in there
                leases.append(lease)
        assert set(router) == there
    live = Counter(dict.fromkeys(there, 0))
    for lease in leases:
        if lease.place.live:
            live[lease.server] += lease.work
    assert dict(router.work()) == dict(live)


@given(EVENTS)
def test_an_affinity_stays_with_its_server_while_that_is_there(events):
    router, homes = Router(), {}
    for what, which, work, _ in events:
        name = NAMES[which]
        if what == "join":
            router.add(name)
        elif what == "leave":
            router.remove(name)
            homes = {key: home for key, home in homes.items() if home != name}
        elif what == "ask":
            lease = router.choose(work, f"group {which}")
            if lease is not None:
                assert homes.setdefault(which, lease.server) == lease.server


@given(st.lists(st.lists(st.integers(1, 100), min_size=1, max_size=8), min_size=1, max_size=40), st.integers(1, 4))
def test_no_server_is_ahead_of_another_by_more_than_the_largest_group(groups, servers):
    router = Router()
    for name in NAMES[:servers]:
        router.add(name)
    for number, samples in enumerate(groups):
        for work in samples:
            router.choose(work, str(number))
    work = router.work().values()
    assert max(work) - min(work) <= max(map(sum, groups))
    assert sum(work) == sum(map(sum, groups))


@settings(max_examples=50)
@given(EVENTS)
def test_a_request_without_a_prefix_goes_to_a_server_with_the_least_work(events):
    router, leases = Router(), []
    for name in NAMES:
        router.add(name)
    for what, which, work, _ in events:
        if what == "end" and leases:
            router.end(leases.pop(which % len(leases)))
        elif what == "ask":
            least = min(router.work().values())
            lease = router.choose(work)
            assert router.work()[lease.server] == least + work
            leases.append(lease)


def test_equal_servers_take_turns():
    router = Router()
    for name in NAMES:
        router.add(name)
    taken = Counter()
    for _ in range(40):
        lease = router.choose(1)
        taken[lease.server] += 1
        router.end(lease)
    assert taken == Counter(dict.fromkeys(NAMES, 10))


def test_servers_to_avoid_are_avoided_also_by_an_affinity_and_come_back_after():
    router = Router()
    router.add("a")
    router.add("b")
    home = router.choose(1, "chat").server
    other = router.choose(1, "chat", avoid=(home,)).server
    assert other != home
    assert router.choose(1, "chat").server == other  # the prefix is there now
    assert router.choose(1, "chat", avoid=("a", "b")) is None
    assert {router.choose(1).server, router.choose(1).server} == {"a", "b"}


def test_a_slow_server_is_given_less():
    router = Router()
    router.add("fast")
    router.add("slow")
    router.set_pace("slow", 8.0)
    for _ in range(90):
        router.choose(10)
    assert router.work()["fast"] == 8 * router.work()["slow"]


def test_what_is_remembered_stays_bounded():
    router = Router(max_affinities=10)
    router.add("a")
    for i in range(10_000):
        router.end(router.choose(1, f"chat {i}"))
    assert len(router.affinities) == 10


def test_a_server_that_comes_back_begins_without_the_work_that_it_lost():
    router = Router()
    router.add("a")
    lost = router.choose(100)
    router.remove("a")
    router.add("a")
    assert router.work() == {"a": 0}
    router.end(lost)
    assert router.work() == {"a": 0}


def test_work_counts_new_tokens_and_a_little_of_the_prompt():
    assert work_of(0, 100) == 101
    assert work_of(1600, 100) == 201
