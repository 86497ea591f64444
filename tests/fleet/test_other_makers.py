"""Servers of other makers in a fleet: stand-ins that speak their protocols."""

import contextlib
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.api.weights import WeightVersion
from tandem.api.workflow import RolloutWorkflow
from tandem.config.rollout import GenerationConfig, RolloutConfig
from tandem.engines.inference.build import ServerTerms, build_fleet
from tandem.engines.inference.fleet.addresses import JOURNAL_NAME
from tandem.evaluation.asking import Ask, AskingTerms, ask
from tandem.rollout.event_loop import BackgroundLoop
from tests.engines_inference.remote.wire import SGLangStandIn, VllmStandIn
from tests.fleet.fleets import RULES, generate, healthy, patient, publish, rows, ruled, until
from tests.serve.served import request_of
from tests.tiny import tiny_model_folder

KINDS = {"vllm": VllmStandIn, "sglang": SGLangStandIn}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("models")
    return [tiny_model_folder(tmp, seed=seed) for seed in range(2)]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def fleet_of(servers, folder, run_folder, gconfig=None, wait=True, rules=RULES):
    """A fleet that is attached to the servers of a list of (kind, stand-in), as a run makes it."""
    config = patient(servers=tuple(f"{kind}={server.url}" for kind, server in servers))
    rollout = RolloutConfig(backend="attached", fleet=config)
    terms = ServerTerms(rollout, rollout.engine, folder, torch.float32, "cpu", False, WeightVersion(0, run="r"), run_folder)
    fleet = build_fleet(replace(terms, gconfig=gconfig), (), rules)
    until(lambda: not wait or len(healthy(fleet)) == len(servers), 60)
    return fleet


@pytest.mark.slow
@pytest.mark.invariant
def test_a_busy_server_is_never_suspected(kind, folders, tmp_path):
    with KINDS[kind](folders[0], token_s=0.1, slots=2) as server:
        fleet = fleet_of([(kind, server)], folders[0], tmp_path, rules=ruled(suspect_after_s=1.5, stall_timeout_s=2.0))
        answers = generate(fleet, [request_of((5, 6, i), max_new_tokens=25) for i in range(3, 7)])  # twice 2.5 s
        fleet.close()
    assert all(len(answer.output_ids) == 25 for answer in answers)
    assert not {row["to"] for row in rows(tmp_path / JOURNAL_NAME)} & {"suspect", "fenced"}


def test_a_server_of_another_precision_than_the_files_joins_with_the_first_weights(kind, folders, tmp_path):
    half = tmp_path / "half"
    shutil.copytree(folders[0], half)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(half / "model.safetensors").items()}
    save_file(tensors, half / "model.safetensors", metadata={"format": "pt"})
    with KINDS[kind](half) as server:
        fleet = fleet_of([(kind, server)], half, tmp_path)
        (member,) = fleet.roster.members.values()
        assert member.engine.statistics()["verified_tensors"] == len(server.held)
        fleet.close()
    assert not any(row["to"] == "fenced" for row in rows(tmp_path / JOURNAL_NAME))


def test_a_server_whose_checksums_cannot_be_compared_joins_with_weights_it_had(folders, tmp_path):
    with SGLangStandIn(folders[0]) as server:
        server.device = "cuda"
        fleet = fleet_of([("sglang", server)], folders[0], tmp_path)
        publish(fleet, folders[1], 1)
        server.spoils.add("load")
        publish(fleet, folders[0], 2)
        fleet.close()
    fenced = [row["why"] for row in rows(tmp_path / JOURNAL_NAME) if row["to"] == "fenced"]
    assert "the same as before" in fenced[0], "with version 1 known, version 2 must change something"


def test_a_server_that_cannot_sample_what_the_run_needs_does_not_join(folders, tmp_path):
    gconfig = GenerationConfig(top_k=50)
    with VllmStandIn(folders[0]) as one, SGLangStandIn(folders[0]) as two:
        fleet = fleet_of([("vllm", one), ("sglang", two)], folders[0], tmp_path, gconfig, wait=False)
        until(lambda: list(fleet.roster.members) == [f"sglang={two.url}"] and healthy(fleet))
        fleet.close()
    retired = [row["why"] for row in rows(tmp_path / JOURNAL_NAME) if row["to"] == "retired"]
    assert "vLLM 0.32.0" in retired[0] and "top_k=50" in retired[0]


def test_an_evaluation_samples_as_the_server_can(kind, folders, tmp_path):
    drawn = []

    class Draws(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            drawn.append(await engine.agenerate(request_of((5, 6), top_p=0.9, min_new_tokens=3)))

    with KINDS[kind](folders[0]) as server:
        fleet = fleet_of([(kind, server)], folders[0], tmp_path)
        with contextlib.closing(BackgroundLoop()) as loop:
            (answer,) = ask(fleet, loop, Draws(), [Ask("rows", 0, 0, {})], AskingTerms())
        fleet.close()
    assert answer.failed == "workflow_returned_none" and len(drawn[0].output_ids) >= 3


def test_two_makers_in_one_fleet_serve_the_same_update(folders, tmp_path):
    with VllmStandIn(folders[0]) as one, SGLangStandIn(folders[0]) as two:
        fleet = fleet_of([("vllm", one), ("sglang", two)], folders[0], tmp_path)
        before = generate(fleet, [request_of((5, 6, i)) for i in range(3, 11)])
        publish(fleet, folders[1], 1)
        after = generate(fleet, [request_of((5, 6, i)) for i in range(3, 11)])
        assert healthy(fleet) == set(fleet.roster.members) and len(healthy(fleet)) == 2
        fleet.close()
    assert {v for answer in before for v in answer.versions} == {0}
    assert {v for answer in after for v in answer.versions} == {1}
    assert one.seed == two.seed and all(len(server.requests) > 4 for server in (one, two)), "both had their part"
