"""Several machines: which servers each starts, which ranks generate, and whether one that is cut off is noticed."""

import logging
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace

import pytest
from torch.distributed import TCPStore

from tandem.cli.fleet import last_rows
from tandem.config.arithmetic import generating_ranks, rollout_here
from tandem.config.devices import Machines, machines
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.flow import process
from tandem.flow.conductor import of_all_ranks
from tandem.flow.process import OtherMachines
from tandem.trainers import start
from tandem.view.runs import logs


def config_of(*items):
    return load_config(TrainConfig, None, ["train_dataset.path=addition", "actor.backend=fsdp:d4", *items]).config


def place(monkeypatch, rank, world=4, here=2):
    for name, value in {"RANK": rank, "LOCAL_RANK": rank % here, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": here}.items():
        monkeypatch.setenv(name, str(value))


def test_without_a_launcher_there_is_one_machine(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert machines() == Machines() and machines().folder == "" and machines().firsts == (0,)
    assert generating_ranks(config_of("rollout.backend=tandem:d3")) == (0,)
    assert rollout_here(config_of("rollout.backend=tandem:d3")).backend == "tandem:d3"


@pytest.mark.parametrize(
    ("backend", "ranks", "first", "second"),
    [
        ("tandem:d1", (0,), "tandem:d1", "attached"),
        ("tandem:d2", (0, 2), "tandem:d1", "tandem:d1"),
        ("embedded:d3", (0, 2), "embedded:d2", "embedded:d1"),
        ("vllm:d2t2+sglang:d1", (0, 2), "vllm:d1t2+sglang:d1", "vllm:d1t2"),
        ("attached", (0,), "attached", "attached"),
    ],
)
def test_servers_are_dealt_to_machines_and_the_first_rank_of_each_has_them(backend, ranks, first, second, monkeypatch):
    config = config_of(f"rollout.backend={backend}", "rollout.fleet.servers=[tandem=http://here:8000]")
    for rank, started, attached in ((0, first, 1), (1, first, 1), (2, second, 0), (3, second, 0)):
        place(monkeypatch, rank)
        here = rollout_here(config)
        assert generating_ranks(config) == ranks
        assert (here.backend, len(here.fleet.servers)) == (started, attached if backend != "attached" else 1)


def test_a_weight_channel_of_the_users_keeps_all_servers_beside_rank_0(monkeypatch):
    place(monkeypatch, 2)
    config = config_of("rollout.backend=tandem:d2", "extend.weight_channel=mine.py:Mine")
    assert generating_ranks(config) == (0,) and rollout_here(config).backend == "tandem:d2"


def test_machines_with_unlike_numbers_of_ranks_are_refused(monkeypatch):
    place(monkeypatch, 3)
    assert process.alike_machines(machines())
    monkeypatch.setenv("LOCAL_RANK", "0")  # ranks that are dealt to the machines in turn
    assert not process.alike_machines(machines())
    monkeypatch.setattr(process, "alike_machines", lambda here: False)
    place(monkeypatch, 0, world=1, here=1)
    one = "actor.backend=fsdp:d1"
    with pytest.raises(ConfigError, match="start the same number of ranks on each machine"):
        process.start_process(config_of("rollout.backend=tandem:d1", one))


def test_a_limit_for_silent_machines_is_refused_where_nobody_watches_them(monkeypatch):
    place(monkeypatch, 0, world=1, here=1)
    config = config_of("actor.backend=fsdp:d1")
    config = replace(config, recover=replace(config.recover, cut_off_after_s=20.0))
    with pytest.raises(ConfigError, match="for several machines of `tandem launch`"):
        process.start_process(config)


def test_a_machine_that_does_not_see_the_run_folder_is_named(tmp_path):
    config = config_of(f"run.root={tmp_path}")
    folder = tmp_path / config.experiment_name / config.trial_name
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"id": "one"}')
    start.check_seen(config, "one")
    with pytest.raises(ConfigError, match="does not see the run folder of rank 0"):
        start.check_seen(config, "another", patience_s=0.0)


def test_counts_of_fleets_are_added_and_the_largest_spread_counts():
    found = [(3, {"fleet/servers": 2.0, "fleet/work_spread": 1.0}), (1, {"fleet/servers": 1.0, "fleet/work_spread": 1.5})]
    assert of_all_ranks(found) == {"fleet/servers": 3.0, "fleet/work_spread": 1.5}


def test_servers_of_another_machine_are_listed_with_their_folder(tmp_path):
    row = '{"server": "tandem-0", "to": "healthy", "moved": 0, "why": "", "time": 0}\n'
    for folder in (tmp_path, tmp_path / "machine-1"):
        (folder / "servers-logs").mkdir(parents=True)
        (folder / "servers-logs" / "tandem-0.log").touch()
        (folder / "fleet.jsonl").write_text(row)
    assert list(last_rows(tmp_path)) == ["tandem-0", "machine-1/tandem-0"]
    assert list(logs(tmp_path)) == ["tandem-0", "machine-1/tandem-0"]


def test_a_connection_to_the_store_that_breaks_is_made_again():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    broken = []

    def pass_on(source, target):
        with suppress(OSError):
            while data := source.recv(4096):
                target.sendall(data)

    def connect():
        with suppress(OSError):
            while True:
                pair = between.accept()[0], socket.create_connection(("127.0.0.1", store.port))
                broken.append(pair)
                for source, target in (pair, pair[::-1]):
                    threading.Thread(target=pass_on, args=(source, target), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as between:
        threading.Thread(target=connect, daemon=True).start()
        watching = OtherMachines(Machines(1, 2, 1), "127.0.0.1", between.getsockname()[1], 5.0, every_s=0.02)
        while store.add("machine-1", 0) < 3:
            time.sleep(0.02)
        for pair in list(broken):
            for end in pair:
                end.shutdown(socket.SHUT_RDWR)
        counted = store.add("machine-1", 0)
        while store.add("machine-1", 0) < counted + 5:
            assert watching.words() == {}
            store.add("machine-0", 1)
            time.sleep(0.02)
        assert len(broken) > 1
        watching.close()


def test_a_silent_machine_is_told_of_then_ends_the_run_and_one_that_closed_does_not(caplog):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    watching = OtherMachines(Machines(0, 3, 1), "127.0.0.1", store.port, 1.0, logged_after_s=0.3, every_s=0.02)
    ending = OtherMachines(Machines(1, 3, 1), "127.0.0.1", store.port, None, every_s=0.02)
    ending.close()
    began = counted = time.monotonic()
    while counted - began < 0.6:  # longer than it takes to be told of
        counted = time.monotonic()
        store.add("machine-2", 1)
        assert watching.words() == {}
        time.sleep(0.02)
    with caplog.at_level(logging.WARNING):
        while not (words := watching.words()):
            time.sleep(0.02)
    assert 0.9 < time.monotonic() - counted < 10
    assert words["cut_off"].startswith("machine 2 has been silent for 1 s: it is down, or its network is cut off (recover.")
    assert [record.message for record in caplog.records] == [
        "machine 2 has been silent for 0 s: it is down, or its network is cut off"
    ]
    watching.close()
