"""`rollout.backend=auto`: which engine generates, as a table, and why."""

import pytest

from tandem.config.allocation import BackendMachine, choose_backend
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config, plain_data
from tandem.config.preference import DistillConfig
from tandem.config.resume import differences
from tests.config.loading import DATA, assert_refused, load

BOTH = ("vllm", "sglang")
BESIDE = ["async_training=true", "algorithm.correction.weight=truncate"]

# overrides, GPUs, ranks, installed → backend, words of the reason
TABLE = [
    ([], 0, 1, (), "embedded", "there is no GPU"),
    ([], 0, 1, BOTH, "embedded", "there is no GPU"),
    ([], 1, 1, (), "embedded", "neither vLLM nor SGLang is installed"),
    ([], 1, 1, ("vllm",), "vllm:d1", "vllm is installed"),
    ([], 1, 1, ("sglang",), "sglang:d1", "sglang is installed"),
    ([], 1, 1, BOTH, "vllm:d1", "vllm is installed"),
    (["actor.backend=fsdp:d8"], 8, 8, BOTH, "vllm:d8", "vllm is installed"),
    (BESIDE, 1, 1, BOTH, "embedded", "training has all 1 GPUs"),
    ([*BESIDE, "actor.backend=fsdp:d4"], 8, 4, BOTH, "vllm:d4", "vllm is installed"),
    (["deterministic=true"], 1, 1, BOTH, "embedded", "deterministic=true contradicts"),
    (["memory_limit_gib=4"], 1, 1, BOTH, "embedded", "memory_limit_gib=4"),
    ([*BESIDE, "rollout.weights.channel=collective"], 2, 1, BOTH, "vllm:d1", "vllm is installed"),
    (["rollout.engine.kv_cache_gib=4"], 1, 1, BOTH, "embedded", "kv_cache_gib=4 is not used by vLLM on a GPU"),
    (["rollout.engine.prefill_chunk_tokens=64"], 1, 1, BOTH, "embedded", "prefill_chunk_tokens=64 is not used because"),
    (["rollout.fleet.vllm_python=/x"], 1, 1, BOTH, "vllm:d1", "vllm is installed"),
    (
        ["gconfig.min_new_tokens=2", "algorithm.allow_truncated_sampling=true"],
        1,
        1,
        ("sglang",),
        "embedded",
        "min_new_tokens=2 is refused by sglang",
    ),
]


@pytest.mark.parametrize(("overrides", "gpus", "ranks", "installed", "backend", "words"), TABLE)
def test_the_engine_and_its_reason(overrides, gpus, ranks, installed, backend, words):
    choice = choose_backend(load(*overrides), BackendMachine(gpus, ranks, installed))
    assert choice.backend == backend
    assert words in choice.reason
    load(*overrides, f"rollout.backend={backend}", *(["rollout.fleet.vllm_python=null"] if backend == "embedded" else []))


def test_a_run_that_goes_on_generates_as_it_began():
    assert choose_backend(load(), BackendMachine(1, 1, BOTH), before="embedded") == ("embedded", "as the run began")
    assert choose_backend(load(), BackendMachine(), before="vllm:d2").backend == "vllm:d2"
    began = plain_data(load("rollout.backend=vllm:d2"))
    assert not list(differences(began, plain_data(load()), plain_data(TrainConfig())))


def test_distillation_is_decided_alike():
    config = load_config(DistillConfig, None, [DATA, "teacher.path=/teacher"]).config
    assert choose_backend(config, BackendMachine(2, 2, BOTH)).backend == "vllm:d2"


def test_a_setting_of_servers_that_nobody_may_start_is_refused():
    assert_refused(["rollout.fleet.servers=[vllm=http://x]"], ["rollout.backend=auto starts a server only where a GPU is"])
