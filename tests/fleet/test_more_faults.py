"""More rows of the fault table: half a fleet at once, a server that comes and goes, and memory that really runs out."""

import resource
import time
from dataclasses import replace

import psutil
import pytest
import torch

from tandem.api.requests import LLMRequest, NoiseKey
from tandem.api.weights import WeightVersion
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig, RolloutConfig
from tandem.engines.inference.build import build_inference_engine, folder_update
from tandem.engines.inference.fleet.members import ServerOrigin
from tandem.engines.inference.fleet.pool import Fleet
from tandem.engines.inference.remote.tandem_server import start_tandem_server
from tests.fleet.fleets import Asking, ask, generate, healthy, passed, publish, rows, running, same, until
from tests.fleet.processes import PATIENCE, RULES, Processes, fault, reference
from tests.fleet.training import engines
from tests.tiny import tiny_model_folder
from tests.zygote import gone

pytestmark = pytest.mark.slow

LONG = 400


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("models")
    return [tiny_model_folder(tmp, seed=seed) for seed in range(3)]


@pytest.mark.invariant
def test_half_of_the_fleet_at_once(folders, tmp_path):
    requests = [ask(i, tokens=LONG) for i in range(32)]
    with Processes(folders[0], tmp_path / "fleet.jsonl", count=4) as processes:
        fleet = processes.fleet
        processes.all_healthy()
        with fault(processes, "s0", "half the fleet, server 0") as one, fault(processes, "s1", "half the fleet, server 1"):
            with Asking(fleet, requests) as asking:
                until(lambda: running(fleet, "s0") == running(fleet, "s1") == 8)
                processes.kill("s0")
                processes.kill("s1")
                answers = asking.answers()
            assert one.count("moved") >= 16  # some twice: to the other one before its end was noticed
            assert healthy(fleet) == {"s2", "s3"}
            publish(fleet, folders[1], 1)  # the half that is left takes it, the other catches up
        after = generate(fleet, [ask(i, affinity=str(i)) for i in range(16)])
    assert same(answers, reference(folders[0], requests), but=3)
    assert same(after, reference(folders[1], [ask(i) for i in range(16)]))
    assert {version for response in after for version in response.versions} == {1}


def test_a_server_that_dies_again_and_again_is_retired_when_its_budget_is_spent(folders, tmp_path):
    requests = [ask(i, tokens=LONG) for i in range(8)]
    journal, seen = tmp_path / "fleet.jsonl", []
    with Processes(folders[0], journal, config=replace(PATIENCE, max_restarts=2)) as processes:
        fleet = processes.fleet
        for _ in range(3):
            processes.all_healthy()
            seen.append(processes.pids["s0"])
            with Asking(fleet, requests) as asking:
                until(lambda: running(fleet, "s0") == 4)
                at = processes.kill("s0")
                answers = asking.answers()
            assert same(answers, reference(folders[0], requests), but=1)
        until(lambda: passed(journal, "s0")[-1] == "retired")
        retired_s = time.time() - at
        assert passed(journal, "s0").count("healthy") == 3 and fleet.roster.counts["restarts"] == 2
        assert "max_restarts=2" in rows(journal)[-1]["why"]
        publish(fleet, folders[1], 1)  # the run goes on with the other
        (after,) = generate(fleet, [ask()])
        assert set(after.versions) == {1} and set(fleet.roster.members) == {"s1"}
    assert len(set(seen)) == 3 and all(gone(pid) for pid in seen)
    moved = sum(row["moved"] for row in rows(journal) if row["server"] == "s0")
    assert moved == 12
    print(f"\nkilled three times, max_restarts=2: retired {retired_s:.1f} s after the third, moved {moved}, lost 0")


# ------------------------------------------------------------------ memory

BIG = {
    "hidden_size": 512,
    "intermediate_size": 3072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
"""4 KiB of keys and values a token, and 47 MiB of weights: more than a process has lying about."""

MIB = 1 << 20
ROOMY = EmbeddedEngineConfig(max_running=16, kv_cache_gib=0.5, threads=1)


def big_engine(folder, placement="colocate"):
    rollout = RolloutConfig(dtype="float32", engine=ROOMY)
    return build_inference_engine(rollout, folder=folder, placement=placement, threads=1, device="cpu", deterministic=False)


def limit_memory(pid, spare_mib):
    """From now on the process gets no more memory than it has, and so much: `mmap` and `brk` fail beyond."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (psutil.Process(pid).memory_info().vms + spare_mib * MIB, hard))


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("big")
    return [tiny_model_folder(tmp, seed=seed, **BIG) for seed in range(2)]


@pytest.fixture(scope="module")
def tight(big, tmp_path_factory):
    with Processes(big[0], tmp_path_factory.mktemp("run") / "fleet.jsonl", make=big_engine) as processes:
        yield processes


def why_fenced(one):
    return next(row["why"] for row in one.rows() if row["to"] == "fenced")


needs_prlimit = pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits of another process are Linux's")


@pytest.mark.invariant
@needs_prlimit
def test_memory_that_runs_out_during_a_request(tight, big):
    """Each request reserves room for 1,900 tokens and ends after few: eight of them are 64 MiB and more in one go."""
    tight.all_healthy()
    gconfig = GenerationConfig(max_new_tokens=1900, stop_token_ids=tuple(range(8, 304, 16)))
    requests = [LLMRequest((5, 17, 60), gconfig, NoiseKey(seed=4, sample=i)) for i in range(32)]
    with fault(tight, "s0", "memory limit during a request") as one:
        limit_memory(tight.pids["s0"], 0)
        answers = generate(tight.fleet, requests)
        assert one.count("moved") == 16
        assert "memory" in why_fenced(one).lower(), why_fenced(one)
    engine = big_engine(big[0])
    assert same(answers, generate(engine, requests), but=1)
    engine.close()


@pytest.mark.invariant
@needs_prlimit
def test_memory_that_runs_out_while_an_update_is_prepared(tight, big):
    tight.all_healthy()
    fleet, number = tight.fleet, tight.fleet.version.number + 1
    with (
        fault(tight, "s1", "memory limit while preparing") as one,
        Asking(fleet, [ask(i, tokens=LONG) for i in range(8)]) as asking,
    ):
        until(lambda: running(fleet, "s1") == 4)
        limit_memory(tight.pids["s1"], 28)  # room for the stack of a thread, and not for 47 MiB of weights
        publish(fleet, big[1], number)
        assert len(asking.answers()) == 8
        assert f"version {number} was not prepared" in why_fenced(one) and "memory" in why_fenced(one).lower()
    answers = generate(fleet, [ask(i, affinity=str(i)) for i in range(8)])
    assert {version for response in answers for version in response.versions} == {number}
    engine = big_engine(big[1])
    assert same(answers, generate(engine, [ask(i) for i in range(8)]))
    engine.close()


@needs_prlimit
def test_somebody_elses_server_without_room_for_an_update_is_held_back_until_it_has(big, tmp_path):
    version, before = WeightVersion(0, run="r"), {one.pid for one in engines()}
    served = start_tandem_server(
        big[0],
        ROOMY,
        torch.float32,
        "cpu",
        run="r",
        log_file=tmp_path / "serve.log",
        weights_roots=[big[0].parent],
    )
    new = [one for one in engines() if one.pid not in before]
    (pid,) = (one.pid for one in new if "tandem.engines.inference.child" in one.cmdline())
    servers = [
        ServerOrigin("limited", lambda: served, owned=False),
        ServerOrigin("roomy", lambda: big_engine(big[0], "decoupled"), owned=True, holds=0),
    ]
    fleet = Fleet.start(
        servers,
        PATIENCE,
        rules=RULES,
        capabilities=frozenset({"disk"}),
        version=version,
        journal=tmp_path / "fleet.jsonl",
        first=lambda: folder_update(big[0], version),
    )
    try:
        until(lambda: healthy(fleet) == {"limited", "roomy"})
        limit_memory(pid, 16)
        one = folder_update(big[1], replace(version, number=1))
        fleet.prepare_weights(one)
        fleet.commit_weights(one.version)
        time.sleep(3)  # it is tried again, and refuses again
        (after,) = generate(fleet, [ask()])
        assert healthy(fleet) == {"roomy"} and set(after.versions) == {1}
        why = [row["why"] for row in rows(tmp_path / "fleet.jsonl") if row["server"] == "limited"]
        assert any("memory" in words for words in why), why
        resource.prlimit(pid, resource.RLIMIT_AS, resource.prlimit(pid, resource.RLIMIT_AS)[1:] * 2)
        back_s = until(lambda: healthy(fleet) == {"limited", "roomy"})
        answers = generate(fleet, [ask(i, affinity=str(i)) for i in range(8)])
        assert {version for response in answers for version in response.versions} == {1}
        assert psutil.pid_exists(pid)  # not ours to end
        print(f"\nmemory limit of an attached server while preparing: back {back_s:.1f} s after the limit was lifted")
    finally:
        fleet.close()
    assert {one.pid for one in engines()} <= before
