"""What networks and broken servers do to a fleet of attached servers: real sockets, and a proxy before one of them."""

import time

import pytest

from tandem.api.weights import WeightVersion
from tandem.engines.inference.fleet.members import ServerOrigin
from tandem.engines.inference.fleet.pool import Fleet
from tandem.engines.inference.remote.tandem_server import TandemServer
from tests.fleet.fleets import CONFIG, ask, engine, generate, healthy, rows, ruled, same, until
from tests.fleet.proxy import Proxy
from tests.serve.served import ADMIN, Served, update_of
from tests.tiny import tiny_model_folder

RUN = "this-run"
LIMITS = ruled(suspect_after_s=1.5, stall_timeout_s=4, request_timeout_s=20, max_server_retries=5)
DETECTED_S = 20.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("models")
    return [tiny_model_folder(tmp, seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def served(folders):
    with Served(folders[0], roots=[folders[0].parent]) as one, Served(folders[0], roots=[folders[0].parent]) as two:
        yield one, two


class Setting:
    """A fleet of two attached servers, the first of them behind a proxy."""

    def __init__(self, served, proxy, folders, journal):
        self.proxy, self.journal = proxy, journal

        def attach(url):
            return lambda: TandemServer.attach(url, run=RUN, admin_token=ADMIN, request_timeout_s=30)

        servers = [
            ServerOrigin("bad", attach(proxy.url), owned=False),
            ServerOrigin("good", attach(served[1].url), owned=False),
        ]
        self.fleet = Fleet.start(
            servers,
            CONFIG,
            rules=LIMITS,
            capabilities=frozenset({"disk"}),
            version=WeightVersion(0, run=RUN),
            journal=journal,
            first=lambda: update_of(folders[0], 0, RUN),
        )

    def whole(self):
        return until(lambda: healthy(self.fleet) == {"bad", "good"}, 90)

    def noticed_s(self, since):
        """Seconds from a time to the first row of trouble."""

        def trouble():
            return [
                row["time"] - since
                for row in rows(self.journal)
                if row["server"] == "bad" and row["time"] >= since and row["to"] in ("suspect", "fenced")
            ]

        until(trouble)
        return trouble()[0]


@pytest.fixture
def setting(served, folders, tmp_path):
    with Proxy(served[0].port) as proxy:
        one = Setting(served, proxy, folders, tmp_path / "fleet.jsonl")
        one.whole()
        yield one
        proxy.set("pass")
        one.fleet.close()


@pytest.fixture(scope="module")
def expected(folders):
    """What one engine in this process makes of the requests, by version's weights."""
    answers = []
    for folder in folders:
        one = engine(folder)
        answers.append(generate(one, REQUESTS))
        one.close()
    return answers


REQUESTS = [ask(i, tokens=20, prompt=(5, 6 + i % 3)) for i in range(16)]
FAULTS = [
    ("503", 0),
    ("refuse", 0),
    ("cut", 150),
    *[
        pytest.param(mode, argument, marks=[pytest.mark.slow, pytest.mark.invariant])
        for mode, argument in [
            ("malformed", 0),
            ("not_http", 0),
            *[("cut", k) for k in (0, 1, 17, 60, 250, 400)],
            ("silent", 0),
            ("endless", 0),
        ]
    ],
]


@pytest.mark.parametrize(("mode", "argument"), FAULTS)
def test_whatever_a_server_does_to_requests_all_are_answered_once_and_rightly(setting, expected, mode, argument):
    fleet, proxy = setting.fleet, setting.proxy
    began = time.time()
    proxy.set(mode, argument)
    answers = generate(fleet, REQUESTS)
    assert same(answers, expected[0])
    assert proxy.hits > 0
    noticed_s = setting.noticed_s(began)
    assert noticed_s <= DETECTED_S
    print(f"\n{mode} {argument or ''} during generation: noticed {noticed_s:.2f} s, lost 0")


@pytest.mark.parametrize("at", ["prepare", "commit"])
@pytest.mark.parametrize(("mode", "argument"), FAULTS)
def test_whatever_a_server_does_to_an_update_the_others_take_it_and_it_follows(
    setting, folders, expected, mode, argument, at
):
    fleet, proxy = setting.fleet, setting.proxy
    one = update_of(folders[1], 1, RUN)
    proxy.set(mode, argument, at=f"/control/{at}")
    began = time.time()
    fleet.prepare_weights(one)
    assert at == "prepare" or proxy.hits == 0
    fleet.commit_weights(one.version)
    assert proxy.hits > 0 or argument >= 200  # so many bytes may be more than the whole answer: then it strikes a later one
    noticed_s = setting.noticed_s(began)
    assert noticed_s <= DETECTED_S and proxy.hits > 0
    proxy.set("pass")
    setting.whole()
    print(f"\n{mode} {argument or ''} during {at}: noticed {noticed_s:.2f} s, back {time.time() - began:.1f} s")
    answers = generate(fleet, REQUESTS)
    assert same(answers, expected[1])
    assert {version for response in answers for version in response.versions} == {1}


@pytest.mark.slow
@pytest.mark.invariant
def test_a_server_that_flaps_is_tried_less_and_less_often(setting):
    proxy, journal = setting.proxy, setting.journal
    seen = len(rows(journal))
    proxy.set("refuse")
    until(lambda: "bad" not in healthy(setting.fleet))
    time.sleep(4)
    tries = [row for row in rows(journal)[seen:] if row["server"] == "bad"]
    assert len(tries) <= 8


@pytest.mark.slow
@pytest.mark.invariant
def test_a_server_that_comes_and_goes_loses_nothing_is_held_back_and_ends_healthy(setting, expected):
    fleet, proxy, member = setting.fleet, setting.proxy, setting.fleet.roster.members["bad"]
    seen, cycles, began = len(rows(setting.journal)), 6, time.monotonic()
    for _ in range(cycles):
        proxy.set("refuse")
        assert same(generate(fleet, REQUESTS), expected[0])
        until(lambda: member.health.state == "fenced")
        proxy.set("pass")
        assert same(generate(fleet, REQUESTS), expected[0])
        time.sleep(1.0)
    flapped_s = time.monotonic() - began
    back_s = setting.whole()
    assert same(generate(fleet, REQUESTS), expected[0])

    mine = [row["to"] for row in rows(setting.journal)[seen:] if row["server"] == "bad" and row["from"] != row["to"]]
    times = mine.count("healthy")
    assert "fenced" in mine  # it happened
    assert 1 <= times < cycles, "it could be reached six times, and was kept waiting longer each time"
    assert mine[-1] == "healthy" and fleet.roster.members["bad"] is member
    print(f"\n{cycles} outages in {flapped_s:.1f} s: taken back {times} times, {back_s:.1f} s after the last, lost 0")


def test_an_address_that_another_run_took_over_is_refused_until_it_is_given_back(setting, served):
    fleet, bad = setting.fleet, served[0]
    bad.json("POST", "/control/release", {"run": RUN})
    bad.json("POST", "/control/attach", {"run": "another-run"})
    try:
        assert len(generate(fleet, REQUESTS)) == len(REQUESTS)
        until(lambda: any("another-run" in row["why"] for row in rows(setting.journal) if row["server"] == "bad"))
        assert healthy(fleet) == {"good"}
    finally:
        bad.json("POST", "/control/release", {"run": "another-run"})
    setting.whole()


@pytest.mark.slow
@pytest.mark.invariant
def test_a_slow_server_is_noticed_by_its_pace_and_nothing_is_lost(setting, expected):
    fleet, proxy = setting.fleet, setting.proxy
    proxy.set("slow", 0.5)
    for _ in range(2):
        assert same(generate(fleet, REQUESTS), expected[0])
    assert proxy.hits > 0
    assert fleet.roster.members["bad"].token_s > fleet.roster.members["good"].token_s
