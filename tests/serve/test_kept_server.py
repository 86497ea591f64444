"""A `tandem serve` of the run's own that goes on while its client's place is taken by another: what it had is gone first."""

import asyncio
import contextlib
import os
import threading
from functools import partial

import psutil
import pytest
import torch

from tandem.api.failures import EngineDied
from tandem.api.requests import NoiseKey
from tandem.api.weights import WeightVersion
from tandem.config.fleet import FleetConfig
from tandem.config.rollout import EmbeddedEngineConfig
from tandem.engines.inference.build import folder_update
from tandem.engines.inference.fleet.members import ServerOrigin
from tandem.engines.inference.fleet.pool import Fleet
from tandem.engines.inference.remote.launch import Keeping
from tandem.engines.inference.remote.tandem_server import start_tandem_server
from tests.serve.served import one_by_one, request_of, update_of
from tests.tiny import tiny_model_folder

pytestmark = [pytest.mark.slow, pytest.mark.invariant]


@pytest.fixture
def start(folder, tmp_path):
    """Starts one, or takes over the one that is kept."""
    read, write = os.pipe()
    place = Keeping(tmp_path / "kept", read).place("tandem-0")

    def run(max_running=8):
        return start_tandem_server(
            folder,
            EmbeddedEngineConfig(threads=1, kv_cache_gib=0.05, max_running=max_running),
            torch.float32,
            "cpu",
            run="r",
            log_file=tmp_path / "log",
            weights_roots=[tmp_path / "weights"],
            startup_timeout_s=120,
            place=place,
        )

    (tmp_path / "weights").mkdir()
    yield run
    os.close(read)
    os.close(write)


@contextlib.contextmanager
def asked_for_long_answers(server, count):
    """Requests that are under way in the block, and that nobody waits for when it ends."""

    async def ask():
        requests = [request_of([5, 6 + i], max_new_tokens=400, min_new_tokens=400) for i in range(count)]
        return await asyncio.gather(*(server.agenerate(request) for request in requests), return_exceptions=True)

    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.extend(asyncio.run(ask())))
    thread.start()
    while server.under_way() < count:
        assert thread.is_alive(), outcomes
    yield
    thread.join(30)
    assert len(outcomes) == count and all(isinstance(outcome, EngineDied) for outcome in outcomes)


def test_a_server_that_is_taken_over_has_delivered_weights_and_no_old_requests(start, folder, tmp_path):
    request = request_of([5, 6], NoiseKey(3))
    first = start()
    (answer,) = one_by_one(first, [request])
    later = update_of(tiny_model_folder(tmp_path / "weights" / "later", seed=3), 4)
    first.prepare_weights(later)
    first.commit_weights(later.version)
    assert one_by_one(first, [request])[0].output_ids != answer.output_ids
    with asked_for_long_answers(first, 3):
        first.pause()  # as by a run that dies in the middle of an update
        first.let_go()

    second = start()
    assert second.process.taken_over and second.process.pid == first.process.pid
    assert (second.under_way(), second.version.number) == (0, 4)
    second.let_go()

    version = WeightVersion(0, run="r")
    fleet = Fleet.start(
        [ServerOrigin("tandem-0", start, owned=True, holds=0)],
        FleetConfig(),
        capabilities=frozenset({"disk"}),
        version=version,
        first=partial(folder_update, folder, version),
    )
    (again,) = one_by_one(fleet, [request])
    assert again.output_ids == answer.output_ids and set(again.versions) == {0}
    fleet.close()
    assert first.process.alive, "the end of the fleet is not the end of a server that is kept"

    other = start(max_running=7)
    assert not other.process.taken_over and not first.process.alive and not psutil.pid_exists(first.process.pid)
    other.close()
    assert not other.process.alive and not list((tmp_path / "kept").iterdir())
