"""What networks and broken servers do to a fleet of attached servers: real sockets, and a proxy before one of them."""

import time

import pytest

from tandem.api.weights import WeightVersion
from tandem.engines.inference.fleet.members import Server
from tandem.engines.inference.fleet.pool import Fleet
from tandem.engines.inference.remote.tandem_server import TandemServer
from tests.fleet.fleets import Asking, ask, engine, generate, healthy, patient, rows, running, same, until
from tests.fleet.proxy import Proxy
from tests.serve.served import ADMIN, Served, update_of
from tests.tiny import tiny_model_folder

RUN = "this-run"
CONFIG = patient(suspect_after_s=1.5, stall_timeout_s=4, request_timeout_s=20, max_server_retries=5)
DETECTED_S = 5.0


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

        servers = [Server("bad", attach(proxy.url), owned=False), Server("good", attach(served[1].url), owned=False)]
        self.fleet = Fleet.start(
            servers,
            CONFIG,
            capabilities=frozenset({"disk"}),
            version=WeightVersion(0, run=RUN),
            journal=journal,
            first=lambda: update_of(folders[0], 0, RUN),
        )

    def whole(self):
        until(lambda: healthy(self.fleet) == {"bad", "good"}, 90)

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


@pytest.fixture(scope="module")
def module_setting(served, folders, tmp_path_factory):
    with Proxy(served[0].port) as proxy:
        one = Setting(served, proxy, folders, tmp_path_factory.mktemp("run") / "fleet.jsonl")
        yield one
        proxy.set("pass")
        one.fleet.close()


@pytest.fixture
def setting(module_setting):
    module_setting.whole()
    yield module_setting
    module_setting.proxy.set("pass")


@pytest.fixture(scope="module")
def expected(folders):
    """What one engine in this process makes of the requests, by version's weights."""
    answers = []
    for folder in folders:
        one = engine(folder)
        answers.append(generate(one, REQUESTS))
        one.close()
    return answers


REQUESTS = [ask(i, tokens=20, prompt=(5, 6 + i % 3), affinity=str(i // 2)) for i in range(16)]
FAULTS = [
    ("503", 0),
    ("malformed", 0),
    ("not_http", 0),
    ("refuse", 0),
    *[("cut", k) for k in (0, 1, 17, 150, 400)],
    pytest.param("silent", 0, marks=pytest.mark.slow),
    pytest.param("endless", 0, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("mode", "argument"), FAULTS)
def test_whatever_a_server_does_to_requests_all_are_answered_once_and_rightly(setting, expected, mode, argument):
    fleet, proxy = setting.fleet, setting.proxy
    which = fleet.version.number % 3
    began = time.time()
    proxy.set(mode, argument)
    answers = generate(fleet, REQUESTS)
    assert same(answers, expected[which])
    assert proxy.hits > 0
    noticed_s = setting.noticed_s(began)
    assert noticed_s <= DETECTED_S
    print(f"\n{mode} {argument or ''} during generation: noticed {noticed_s:.2f} s, lost 0")


@pytest.mark.parametrize(
    ("mode", "argument"), [("503", 0), ("malformed", 0), ("refuse", 0), *[("cut", k) for k in (0, 1, 17, 150)]]
)
def test_whatever_a_server_does_to_an_update_the_others_take_it_and_it_comes_back_with_it(
    setting, folders, expected, mode, argument
):
    fleet, proxy = setting.fleet, setting.proxy
    number = fleet.version.number + 1
    which = number % 3
    one = update_of(folders[which], number, RUN)
    proxy.set(mode, argument)
    began = time.time()
    fleet.prepare_weights(one)
    fleet.commit_weights(one.version)
    assert proxy.hits > 0
    assert setting.noticed_s(began) <= DETECTED_S
    proxy.set("pass")
    setting.whole()
    answers = generate(fleet, REQUESTS)
    assert same(answers, expected[which])
    assert {version for response in answers for version in response.versions} == {number}


def test_a_server_that_flaps_is_tried_less_and_less_often(setting):
    proxy, journal = setting.proxy, setting.journal
    seen = len(rows(journal))
    proxy.set("refuse")
    until(lambda: "bad" not in healthy(setting.fleet))
    time.sleep(4)
    tries = [row for row in rows(journal)[seen:] if row["server"] == "bad"]
    assert len(tries) <= 8


@pytest.mark.slow
def test_an_address_that_another_run_took_over_is_refused(setting, served, folders):
    fleet = setting.fleet
    bad = served[0]
    bad.json("POST", "/control/release", {"run": RUN})
    bad.json("POST", "/control/attach", {"run": "another-run"})
    try:
        answers = generate(fleet, REQUESTS)
        assert len(answers) == len(REQUESTS)
        until(lambda: "bad" not in healthy(fleet))
        assert any("another-run" in row["why"] for row in rows(setting.journal) if row["server"] == "bad")
    finally:
        bad.json("POST", "/control/release", {"run": "another-run"})


def test_a_slow_server_is_given_less_and_nothing_is_lost(setting, expected):
    fleet, proxy = setting.fleet, setting.proxy
    proxy.set("slow", 0.3)
    which = fleet.version.number % 3
    for _ in range(3):
        assert same(generate(fleet, REQUESTS), expected[which])
    assert proxy.hits > 0
    until(lambda: fleet.roster.members["bad"].token_s > 2 * fleet.roster.members["good"].token_s)
    fleet.roster.set_paces()
    with Asking(fleet, [ask(i, tokens=200) for i in range(30)]) as asking:
        until(lambda: running(fleet, "good") + running(fleet, "bad") == 30)
        shares = running(fleet, "good"), running(fleet, "bad")
        assert len(asking.answers()) == 30
    assert shares[0] > shares[1]
