"""Engines behind vLLM's and SGLang's interfaces: attaching, updates, and how one is left."""

import contextlib
import sys
import threading
import time
from functools import partial

import pytest
import torch

from tandem.api.failures import EngineDied, ServerFailed, WeightUpdateFailed
from tandem.api.requests import LLMRequest
from tandem.api.weights import WeightUpdate, WeightVersion, version_digest
from tandem.config.errors import ConfigError
from tandem.config.rollout import GenerationConfig
from tandem.engines.inference.remote.foreign import in_place
from tandem.engines.inference.remote.foreign.in_server import tandem_vllm_worker
from tandem.engines.inference.remote.foreign.vllm import VllmServer
from tandem.weights.cuda_ipc import CudaIpcChannel
from tandem.weights.shared_memory import SharedMemoryChannel
from tandem.workers.process import Child
from tests.engines_inference.remote.clients import (
    KINDS,
    ask,
    attach,
    expected,
    new_weights,
    next_update,
    update_from_folder,
    update_from_memory,
)
from tests.engines_inference.remote.wire import VllmStandIn
from tests.fleet.fleets import Asking, until


def test_a_server_that_ignores_the_temperature_is_refused_with_the_remedy(kind, folder):
    with (
        kind[1](folder, ignores_temperature=True) as server,
        pytest.raises(ConfigError, match=r"ignore the temp.*(processed|ORIG)"),
    ):
        attach(kind, server, folder)


def test_a_server_without_a_route_is_refused_by_name_and_version(kind, folder):
    missing = "/weight_checker" if kind[0] is VllmServer else "/weights_checker"
    with (
        kind[1](folder, spoils={missing}) as server,
        pytest.raises(ConfigError, match=f"{kind[0].protocol.maker} 0.*{missing}"),
    ):
        attach(kind, server, folder)


def test_a_server_that_counts_no_tokens_is_refused_with_the_remedy(kind, folder):
    remedy = "without --disable-log-stats" if kind[0] is VllmServer else "with --enable-metrics"
    with kind[1](folder, spoils={"/metrics"}) as server, pytest.raises(ConfigError, match=f"no tokens.*{remedy}"):
        attach(kind, server, folder)


def test_the_servers_own_counter_grows_while_a_request_is_under_way(kind, folder):
    with kind[1](folder, token_s=0.01) as server:
        engine = attach(kind, server, folder)
        before = engine.statistics()
        with Asking(engine, [LLMRequest((5, 6), GenerationConfig(max_new_tokens=40))]):
            until(lambda: engine.statistics()["server_tokens"] > before["server_tokens"] + 5)
            assert engine.statistics()["generated_tokens"] == before["generated_tokens"], "no answer is there yet"
        assert engine.statistics()["server_tokens"] == before["server_tokens"] + 40
        engine.close()


def test_a_server_of_another_precision_is_refused(kind, folder):
    with kind[1](folder, dtype="bfloat16") as server, pytest.raises(ConfigError, match="--dtype float32"):
        attach(kind, server, folder)


def test_an_update_in_the_middle_of_a_completion_shows_in_its_versions(kind, folder, tmp_path):
    with kind[1](folder, token_s=0.01) as server:
        engine = attach(kind, server, folder)
        update = update_from_folder(folder, tmp_path / "v1")
        reports = []

        def publish():
            time.sleep(0.15)
            engine.prepare_weights(update)
            reports.append(engine.commit_weights(update.version))

        publisher = threading.Thread(target=publish)
        publisher.start()
        answers = ask(engine, (5, 6), (7, 8), (9, 9), max_new_tokens=40)
        publisher.join()
        verified = engine.statistics()["verified_tensors"]
        engine.close()
    assert server.flushed == 1 and not server.paused
    assert engine.version == update.version and reports[0]["pause_s"] > 0
    assert verified > 5, "fused tensors among them"
    for answer in answers:
        assert set(answer.versions) == {0, 1} and list(answer.versions) == sorted(answer.versions)
        first = answer.versions.index(1)
        rest = expected(server, (*answer.input_ids, *answer.output_ids[:first]), 40 - first)
        assert answer.output_ids[first:] == rest, "these tokens are the new weights'"
        assert len(answer.logprobs) == 40


def test_running_requests_of_vllm_keep_keys_and_values_over_an_update_if_asked(folder, tmp_path):
    with VllmStandIn(folder, token_s=0.01) as server:
        engine = attach(KINDS["vllm"], server, folder)
        ask(engine)
        assert not server.requests[-1]["alone"]
        engine.keep_kv()
        update, before = update_from_folder(folder, tmp_path / "v1"), server.made
        with Asking(engine, [LLMRequest((5, 6), GenerationConfig(max_new_tokens=40))]) as asking:
            until(lambda: server.made > before)
            engine.prepare_weights(update)
            engine.commit_weights(update.version)
        (answer,) = asking.answers()
        engine.close()
    assert server.flushed == 0 and set(answer.versions) == {0, 1}
    assert server.requests[-1]["alone"], "else it could begin with keys and values of older weights"


def test_weights_that_a_server_cannot_read_are_refused_and_it_serves_what_it_served(kind, folder):
    with kind[1](folder) as server:
        engine = attach(kind, server, folder)
        before = server.seed
        with pytest.raises(WeightUpdateFailed, match=r"reads weights from a folder, got .*; deliver them with DiskChannel"):
            engine.prepare_weights(update_from_memory(folder, 1))
        assert server.seed == before and set(ask(engine).versions) == {0}
        engine.close()


def test_a_vllm_server_with_our_worker_reads_shared_memory_itself(folder):
    tensors, _, _ = new_weights(folder, 1)
    channel = SharedMemoryChannel()
    with VllmStandIn(folder) as server:
        server.extension = "tandem_vllm_worker.TandemWorker"
        engine = attach(KINDS["vllm"], server, folder)
        assert engine.capabilities == {"in_place", "shared_memory"}
        delivery = channel.put(tensors.items(), torch.float32)
        version = WeightVersion(1, version_digest(delivery.digests), "run")
        engine.prepare_weights(WeightUpdate(version, delivery.source, delivery.digests))
        before = server.seed
        engine.commit_weights(version)
        assert server.seed != before and set(ask(engine).versions) == {1}
        engine.close()
    channel.close()


def test_tensors_are_read_on_the_cpu_only_for_updates_whose_checksums_are_compared(kind, folder, monkeypatch):
    read = []
    monkeypatch.setattr(
        in_place, "tensor_bytes", lambda tensor, inner=in_place.tensor_bytes: read.append(1) or inner(tensor)
    )
    with kind[1](folder) as server:
        engine, seen = attach(kind, server, folder), []
        engine.updates.verify_budget_s, engine.updates.verify_every = -1.0, 3
        for number in (1, 2, 3):
            update = next_update(folder, number, shift=float(number))
            engine.prepare_weights(update)
            engine.commit_weights(update.version)
            seen.append((bool(read), engine.statistics()["verified_tensors"] > 5))
        assert seen == [(False, False), (False, False), (True, True)]
        engine.close()


def test_a_vllm_server_opens_memory_that_it_shares_with_the_trainer(folder):
    tensors, _, _ = new_weights(folder, 1)
    channel = CudaIpcChannel("cpu", bucket_bytes=4096)
    with VllmStandIn(folder) as server:
        server.extension = "tandem_vllm_worker.TandemWorker"
        engine = attach(KINDS["vllm"], server, folder).take_by_handles("cpu")
        assert engine.capabilities == {"in_place", "ipc"}
        for number in (1, 2):
            delivery = channel.put(((name, tensor + number) for name, tensor in tensors.items()), torch.float32)
            version = WeightVersion(number, version_digest(delivery.digests), "run")
            engine.prepare_weights(WeightUpdate(version, delivery.source, delivery.digests))
            before = server.seed
            engine.commit_weights(version)
            assert server.seed != before and set(ask(engine).versions) == {number}
        channel.close()
        with pytest.raises(WeightUpdateFailed, match="given back: a newer update is on its way"):
            engine.prepare_weights(WeightUpdate(version, delivery.source, delivery.digests))
        engine.close()


def test_a_server_on_another_gpu_is_refused_handles_of_memory_by_name(folder):
    with VllmStandIn(folder) as server:
        server.extension, server.gpu = "tandem_vllm_worker.TandemWorker", "1f2e"
        engine = attach(KINDS["vllm"], server, folder)
        with pytest.raises(ConfigError, match=r"computes on GPU 1f2e, and the weights lie on GPU cpu, .*: by folders"):
            engine.take_by_handles("cpu")
        assert engine.capabilities == {"in_place", "shared_memory"}
        engine.close()


def test_a_process_group_stays_up_between_updates_and_is_left_at_the_end(kind, folder, monkeypatch):
    monkeypatch.setattr("tandem.engines.inference.remote.foreign.sglang.BUCKET_BYTES", 4096)
    tensors, _, _ = new_weights(folder, 1)
    channel, groups = SharedMemoryChannel(), []
    with kind[1](folder) as server:
        server.extension = "tandem_vllm_worker.TandemWorker"
        engine = attach(kind, server, folder).take_by_group()
        assert engine.capabilities == {"in_place", "shared_memory"}
        groups.append(group_of(server))
        for number in (1, 2):
            delivery = channel.put(((name, tensor + number) for name, tensor in tensors.items()), torch.float32)
            version = WeightVersion(number, version_digest(delivery.digests), "run")
            engine.prepare_weights(WeightUpdate(version, delivery.source, delivery.digests))
            before = server.seed
            engine.commit_weights(version)
            groups.append(group_of(server))
            assert server.seed != before and set(ask(engine).versions) == {number}
        assert server.flushed == 2
        assert groups[0] is groups[1] is groups[2] is not None, "it is made at the start"
        groups.clear()
        engine.close()
        assert group_of(server) is None
    channel.close()


def group_of(server):
    return server.worker.tandem_group if isinstance(server, VllmStandIn) else server.group


def test_a_server_with_another_nccl_is_refused_at_the_start(folder, monkeypatch):
    versions = iter(["2.27.5", "2.26.2"])
    monkeypatch.setattr(tandem_vllm_worker, "version_of", lambda backend: next(versions))
    with VllmStandIn(folder) as server:
        server.extension = "tandem_vllm_worker.TandemWorker"
        engine = attach(KINDS["vllm"], server, folder)
        with pytest.raises(ConfigError, match=r"does not join .* 2\.2.* 2\.2.*: install the same version"):
            engine.take_by_group()
        engine.close()


def test_a_vllm_server_without_our_extension_cannot_join_a_group(folder):
    with VllmStandIn(folder) as server:
        engine = attach(KINDS["vllm"], server, folder)
        for take in (engine.take_by_group, partial(engine.take_by_handles, "cpu")):
            with pytest.raises(ConfigError, match="without Tandem's worker extension; let the run start it"):
                take()
        engine.close()


def test_an_update_whose_bytes_changed_on_the_way_never_reaches_the_server(kind, folder):
    with kind[1](folder) as server:
        engine = attach(kind, server, folder)
        update = next_update(folder)
        name = min(update.digests)
        digests = {**update.digests, name: "0" * 64}
        version = WeightVersion(1, version_digest(digests), "run")
        with pytest.raises(WeightUpdateFailed, match=name):
            engine.prepare_weights(WeightUpdate(version, update.source, digests))
        with pytest.raises(WeightUpdateFailed, match="nothing is prepared"):
            engine.commit_weights(version)
        assert ask(engine).versions == (0,) * 8 and not server.paused
        engine.close()


@pytest.mark.parametrize("lie", ["load", "reload"])
def test_a_server_that_did_not_take_the_weights_is_paused_until_they_are_delivered(kind, folder, lie):
    with kind[1](folder) as server:
        engine = attach(kind, server, folder)
        update = next_update(folder)
        engine.prepare_weights(update)
        server.spoils.add(lie)
        with pytest.raises(ServerFailed, match="checksum" if lie == "load" else "no such folder"):
            engine.commit_weights(update.version)
        assert server.paused
        with pytest.raises(ServerFailed, match="deliver weights again"):
            engine.resume()
        server.spoils.clear()
        engine.prepare_weights(update)
        engine.commit_weights(update.version)
        assert not server.paused and set(ask(engine).versions) == {1}
        engine.close()


def test_an_attached_server_goes_on_when_its_client_leaves(kind, folder):
    with kind[1](folder) as server:
        engine = attach(kind, server, folder)
        engine.pause()
        assert server.paused
        engine.close()
        engine.close()
        assert not server.paused
        with pytest.raises(EngineDied):
            ask(engine)
        again = attach(kind, server, folder)
        assert set(ask(again).versions) == {0}
        again.close()


@contextlib.contextmanager
def hanging_commit(kind, server, folder):
    """An engine whose server hangs in an update, and what came of that once the block ended."""
    engine, errors = attach(kind, server, folder), []
    update = next_update(folder)
    engine.prepare_weights(update)
    server.spoils.add("hang")

    def commit():
        with pytest.raises((EngineDied, ServerFailed)) as failure:
            engine.commit_weights(update.version)
        errors.append(failure.value)

    thread = threading.Thread(target=commit)
    thread.start()
    until(lambda: server.hung)
    yield engine, errors
    thread.join(40)
    assert errors


def test_a_connection_that_is_let_go_hangs_in_no_update_and_leaves_the_server_alone(kind, folder):
    with kind[1](folder) as server:
        with hanging_commit(kind, server, folder) as (engine, errors):
            before = server.changes, time.monotonic()
            engine.let_go()
            assert time.monotonic() - before[1] < 30
        assert isinstance(errors[0], EngineDied)
        assert server.paused and server.changes == before[0], "it is not resumed: a newer client may be changing it"


def test_an_attached_server_that_hangs_in_an_update_is_left_in_bounded_time(kind, folder):
    with kind[1](folder) as server, hanging_commit(kind, server, folder) as (engine, _):
        began = time.monotonic()
        engine.close(patience_s=0.3)
        assert time.monotonic() - began < 30


def test_a_server_of_ours_that_hangs_in_an_update_is_ended_at_once(kind, folder, tmp_path):
    with kind[1](folder) as server, hanging_commit(kind, server, folder) as (engine, _):
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        engine.process = Child.start(command, log_file=tmp_path / "log")
        began = time.monotonic()
        engine.close()
        assert time.monotonic() - began < 30 and not engine.process.alive


def test_a_pause_outlasts_an_update(kind, folder):
    with kind[1](folder) as server:
        engine = attach(kind, server, folder)
        engine.pause()
        update = next_update(folder)
        engine.prepare_weights(update)
        engine.commit_weights(update.version)
        assert server.paused
        engine.resume()
        assert not server.paused and set(ask(engine).versions) == {1}
        engine.close()


def test_tokens_of_weights_that_this_run_did_not_deliver_are_refused(kind, folder):
    with kind[1](folder) as server:
        engine = attach(kind, server, folder)
        server.label = "default"  # restarted
        with pytest.raises(ServerFailed, match="restarted"):
            ask(engine)
        other = attach(kind, server, folder)  # another run at the same address
        with pytest.raises(ServerFailed, match="another run uses it"):
            ask(engine)
        assert set(ask(other).versions) == {0}
        engine.close()
        other.close()


def test_whoever_only_asks_a_server_changes_nothing_for_its_owner(kind, folder, tmp_path):
    with kind[1](folder) as server:
        owner = attach(kind, server, folder)
        update = update_from_folder(folder, tmp_path / "v7", number=7)
        owner.prepare_weights(update)
        owner.commit_weights(update.version)
        label, changes = server.label, server.changes
        guest = attach(kind, server, folder, take=False)
        assert (guest.version.number, set(ask(guest).versions)) == (7, {7})
        for refused in (lambda: guest.prepare_weights(update), guest.pause, lambda: guest.commit_weights(update.version)):
            with pytest.raises(ServerFailed, match="belongs to another client"):
                refused()
        guest.close()
        assert (server.label, server.changes) == (label, changes) and set(ask(owner).versions) == {7}
        owner.pause()
        if kind[0] is VllmServer:  # the other one does not say
            with pytest.raises(ServerFailed, match="is paused"):
                attach(kind, server, folder, take=False)
        assert server.paused
        owner.close()


def test_a_guest_gives_weights_of_no_owner_the_number_that_it_expects(kind, folder):
    with kind[1](folder) as server:
        guest = kind[0].attach(server.url, folder=folder, dtype=torch.float32, version=WeightVersion(5), take=False)
        assert set(ask(guest).versions) == {5} and server.label == "default"
        guest.close()


def test_a_server_that_is_taken_over_ends_what_it_had_and_goes_on_whatever_it_was_at(kind, folder, tmp_path):
    with kind[1](folder, token_s=0.01) as server:
        gone = attach(kind, server, folder)
        update = update_from_folder(folder, tmp_path / "v7", number=7)
        gone.prepare_weights(update)
        gone.commit_weights(update.version)

        def nobody_waits_for_this():
            with pytest.raises(EngineDied):
                ask(gone, max_new_tokens=50)

        thread = threading.Thread(target=nobody_waits_for_this)
        thread.start()
        until(lambda: server.running)
        gone.pause()
        gone.let_go()
        thread.join(60)
        assert server.running and server.paused, "the server does not notice that its client is gone"
        process = Child.start([sys.executable, "-c", "import time; time.sleep(60)"], log_file=tmp_path / "log")
        engine = kind[0].attach_kept(
            {"url": server.url, "key": "k"}, process, lambda url, token: attach(kind, server, folder, token=token)
        )
        until(lambda: not server.running)
        assert not server.paused and server.aborted
        assert set(ask(engine).versions) == {0}, "a name of this client's own, until weights are delivered"
        engine.close()
        assert not process.alive
