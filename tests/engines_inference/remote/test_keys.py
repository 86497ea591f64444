"""Servers that a run starts answer nobody who has not their key, and nobody else of the machine gets to see it."""

import json
import os
import sys
from pathlib import Path

import psutil
import pytest
import torch

from tandem.api.failures import ServerFailed
from tandem.api.weights import WeightVersion
from tandem.config.errors import ConfigError
from tandem.engines.inference.remote.foreign.in_server.tandem_key import KEY_VARIABLE
from tandem.engines.inference.remote.launch import Keeping
from tandem.protocol.client import HttpClient
from tests.engines_inference.remote.clients import ask, update_from_folder
from tests.engines_inference.remote.test_launch import until

MAKERS = Path(__file__).with_name("makers")


@pytest.fixture
def start(kind, folder, tmp_path, monkeypatch):
    """Starts a server of its maker, whose environment has a door before a stand-in instead; and ends what is left."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={MAKERS}:$PYTHONPATH exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("VLLM_API_KEY", "the user's own")
    engines = []
    with kind[1](folder) as server:
        monkeypatch.setenv("STAND_IN", server.url)

        def run(**options):
            words = {
                "python": str(python),
                "log_file": tmp_path / "log",
                "dtype": torch.float32,
                "version": WeightVersion(0),
            }
            engines.append(kind[0].start(folder, **words, startup_timeout_s=60, **options))
            return engines[-1]

        yield run
        for engine in engines:
            engine.close()


def statuses(url, token, paths):
    client = HttpClient(url, token=token)
    found = []
    for path in paths:
        with pytest.raises(ServerFailed) as failure:
            client.call(path, deadline_s=10)
        found.append(failure.value.status)
    client.close()
    return found


def test_a_server_that_a_run_starts_answers_only_to_its_key(kind, start, folder, tmp_path):
    engine = start()
    paths = ["/openapi.json", "/metrics", *sorted(kind[0].protocol.routes)]
    assert statuses(engine.url, None, paths) == statuses(engine.url, "another", paths) == [401] * len(paths)
    assert statuses(engine.url, "the user's own", paths[:1]) == [401]

    assert ask(engine).output_ids
    update = update_from_folder(folder, tmp_path / "v1")
    engine.prepare_weights(update)
    engine.commit_weights(update.version)
    assert set(ask(engine).versions) == {1} and engine.statistics()["server_tokens"] > 0


def test_the_key_is_in_no_log_and_among_no_words_of_a_process(start, tmp_path):
    engine = start()
    server = psutil.Process(engine.process.pid)
    key = server.environ()[KEY_VARIABLE]
    assert len(key) > 30
    for process in (server, *server.parents()):
        assert not any(key in word for word in process.cmdline())
    assert not any(key in file.read_text() for file in tmp_path.rglob("*") if file.is_file())


def test_each_server_has_a_key_of_its_own(start):
    first, second = (psutil.Process(start().process.pid).environ()[KEY_VARIABLE] for _ in range(2))
    assert first != second


def test_a_server_that_leaves_a_route_open_is_refused_and_ended(kind, start, monkeypatch):
    hole = sorted(kind[0].protocol.routes)[0]
    monkeypatch.setenv("HOLE", hole)
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(ConfigError, match=rf"{kind[0].protocol.maker}.* answers {hole} without the key"):
        start()
    assert not set(psutil.Process().children(recursive=True)) - before


def test_a_server_that_is_kept_keeps_its_key(start, tmp_path):
    read, write = os.pipe()
    place = Keeping(tmp_path / "kept", read).place("server-0")
    first = start(place=place)
    assert place.file.stat().st_mode & 0o077 == 0
    key = json.loads(place.file.read_text())["key"]
    first.let_go()

    second = start(place=place)
    assert second.process.taken_over and second.process.pid == first.process.pid
    assert psutil.Process(second.process.pid).environ()[KEY_VARIABLE] == key
    assert ask(second).output_ids
    second.process.close()
    until(lambda: not first.process.alive)
    for end in (read, write):
        os.close(end)
