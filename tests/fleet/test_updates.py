"""Updates to members that change meanwhile, and to servers that cannot take any."""

import threading

from tandem.api.failures import WeightUpdateFailed
from tandem.api.requests import LLMResponse, StopReason
from tandem.api.weights import WeightVersion
from tandem.engines.inference.fleet.members import ServerOrigin
from tandem.engines.inference.fleet.pool import Fleet
from tandem.engines.inference.fleet.roster import Roster
from tandem.engines.inference.fleet.updates import Updates
from tests.fleet.fleets import CONFIG, RULES, rows, until


def test_nothing_is_waited_for_of_a_member_whose_engine_is_gone_or_another_by_now():
    roster = Roster(CONFIG, RULES, WeightVersion(0), None)
    gone, another = (roster.add(ServerOrigin(name, lambda: None, owned=True)) for name in ("gone", "another"))
    another.engine = object()
    starts = {gone: gone.health.incarnation, another: another.health.incarnation - 1}
    done, asked = [], []
    thread = threading.Thread(
        target=lambda: done.append(Updates(roster).everywhere("commit", starts, asked.append)), daemon=True
    )
    thread.start()
    thread.join(60)
    assert (done, asked) == ([{}], [])
    assert not gone.switching and not another.switching


class Reader:
    """The side of an engine that takes weights: what it can, and what it says to an update."""

    def __init__(self, capabilities, refusal=None):
        self.capabilities, self.refusal, self.closed = frozenset(capabilities), refusal, False

    async def agenerate(self, request):
        return LLMResponse(request.input_ids, (5,), (-1.0,), (0,), StopReason.LENGTH, 1.0)

    def flush(self):
        pass

    def discard_weights(self):
        pass

    def prepare_weights(self, update):
        raise self.refusal

    def close(self):
        self.closed = True


def fleet_with(engine, journal):
    return Fleet.start(
        [ServerOrigin("one", lambda: engine, owned=False)],
        CONFIG,
        rules=RULES,
        capabilities=frozenset({"disk"}),
        version=WeightVersion(0),
        journal=journal,
        first=lambda: None,
    )


def test_a_server_that_reads_no_folders_is_told_so_and_let_go(tmp_path):
    engine = Reader({"staged"})
    fleet = fleet_with(engine, tmp_path / "fleet.jsonl")
    until(lambda: engine.closed, 10)
    (row,) = [row for row in rows(tmp_path / "fleet.jsonl") if row["to"] == "retired"]
    assert "--weights-root" in row["why"]
    fleet.close()


def test_why_a_server_cannot_take_the_weights_is_in_its_health_and_in_the_journal(tmp_path):
    engine = Reader({"disk"}, WeightUpdateFailed("tensor 'norm' has other bytes\nmore"))
    fleet = fleet_with(engine, tmp_path / "fleet.jsonl")
    until(lambda: any("'norm' has other bytes" in row["why"] for row in rows(tmp_path / "fleet.jsonl")), 10)
    assert fleet.roster.members["one"].health.why == "it could not take the weights yet: tensor 'norm' has other bytes"
    assert "'norm' has other bytes" in fleet.roster.explain()
    fleet.close()
