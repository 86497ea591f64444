"""Fleets of engines of this process."""

import pytest

from tests.fleet.fleets import (
    CONFIG,
    RULES,
    Unwell,
    engine,
    fleet_of,
    healthy,
    server,
    until,
)
from tests.tiny import tiny_model_folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three sets of weights for one architecture: versions 0, 1 and 2."""
    tmp = tmp_path_factory.mktemp("models")
    return [tiny_model_folder(tmp, seed=seed) for seed in range(3)]


@pytest.fixture
def made(folders, tmp_path):
    """``made(2, config, rules)``: a fleet of so many servers, its journal, and the engines as they were made, by name."""
    fleets = []

    def make(count, config=CONFIG, rules=RULES, **rest):
        engines, journal = {}, tmp_path / "fleet.jsonl"

        def maker(name):
            def start():
                engines[name] = Unwell(engine(folders[0]))
                return engines[name]

            return start

        servers = [server(f"s{i}", maker(f"s{i}"), **rest) for i in range(count)]
        fleet = fleet_of(servers, config, rules, journal=journal)
        fleets.append(fleet)
        until(lambda: len(healthy(fleet)) == count)
        return fleet, journal, engines

    yield make
    for fleet in fleets:
        fleet.close()
        assert not fleet.roster.members
