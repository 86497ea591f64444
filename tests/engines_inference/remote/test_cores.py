"""Servers of one run compute on cores of their own, as long as there are enough."""

import json
import os
import sys
from dataclasses import replace

import pytest
import torch

from tandem.api.weights import WeightVersion
from tandem.config.rollout import EmbeddedEngineConfig
from tandem.engines.inference.remote.foreign.server import IN_SERVER
from tandem.engines.inference.remote.foreign.vllm import VllmServer
from tandem.engines.inference.remote.launch import Cores, Keeping
from tests.engines_inference.remote.clients import ask
from tests.engines_inference.remote.test_keys import MAKERS
from tests.engines_inference.remote.test_launch import until
from tests.engines_inference.remote.wire import VllmStandIn

DOOR = """
import sys
sys.path[:0] = sys.argv[2:]
from door import Door
from tandem_key import RequireKey

door = Door()
door.add_middleware(RequireKey)
door.serve(int(sys.argv[1]))
"""


def cores(count):
    return Cores(lambda: range(count))


def test_servers_share_no_core_while_there_are_free_ones():
    four = cores(4)
    assert [four.take(1) for _ in range(5)] == [(0,), (1,), (2,), (3,), (0,)]
    three = cores(3)
    assert [three.take(2) for _ in range(3)] == [(0, 1), (0, 2), (1, 2)]
    assert three.take(None) == three.take(3) == three.take(9) == (0, 1, 2)


@pytest.mark.parametrize("order", [("new", "hung"), ("hung", "new")])
def test_a_server_beside_one_that_is_taken_over_gets_other_cores(tmp_path, order):
    for name, words in {
        "kept": {"cores": [1]},
        "hung": {"cores": [2]},
        "older": {},
        "odd": {"cores": "x"},
        "list": [],
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(words))
    (tmp_path / "torn.json").write_text('{"cor')
    some = cores(4)
    found = {name: some.take(1, tmp_path / f"{name}.json") for name in order}  # `kept` is taken over, and takes none
    assert list(found.values()) == [(0,), (2,)] and some.take(1) == (3,)
    assert some.take(1, tmp_path / "new.json") == found["new"]  # started again by the same process


def test_a_server_that_was_kept_by_this_process_counts_once(tmp_path):
    some = cores(2)
    assert some.take(1, tmp_path / "one.json") == (0,)
    (tmp_path / "one.json").write_text('{"cores": [0]}')
    assert [some.take(1, tmp_path / f"{name}.json") for name in ("two", "three")] == [(1,), (0,)]


def test_a_server_that_is_kept_says_which_cores_it_has_and_is_taken_over_with_them(folder, tmp_path, monkeypatch):
    read, write = os.pipe()
    place = Keeping(tmp_path / "kept", read).place("vllm-0")
    words = {"python": sys.executable, "log_file": tmp_path / "log", "dtype": torch.float32, "version": WeightVersion(0)}
    with VllmStandIn(folder) as server:
        monkeypatch.setenv("STAND_IN", server.url)

        class Forwarded(VllmServer):
            """A process that passes on what the stand-in in this one answers."""

            @classmethod
            def command(cls, terms, port):
                started.append((terms.cpus, port))
                return [terms.python, "-c", DOOR, str(port), str(MAKERS), str(IN_SERVER)], {}

        def start(threads):
            return Forwarded.start(folder, settings=replace(EmbeddedEngineConfig(), threads=threads), place=place, **words)

        started = []
        first = start(threads=1)
        ((none, zero), (cores, port)) = started
        assert (none, zero) == ((), 0) and len(cores) == 1 and first.url.endswith(f":{port}")
        record = json.loads(place.file.read_text())
        assert record["cores"] == list(cores) and record["pid"] == first.process.pid
        first.let_go()
        second = start(threads=1)
        assert second.process.taken_over and second.process.pid == record["pid"] and len(started) == 3
        assert len(ask(second).output_ids) > 0
        second.process.close()
        until(lambda: not first.process.alive and not place.file.exists())
        second.close()
    for end in (read, write):
        os.close(end)
