"""What `rollout.backend` and `rollout.fleet` may say."""

from pathlib import Path

import pytest

from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.fleet import Servers, parse_backend
from tandem.config.keys import leaves
from tandem.config.load import describe, load_config, to_yaml


def load(*items):
    return load_config(TrainConfig, None, ["train_dataset.path=addition", *items]).config


@pytest.mark.parametrize(
    ("backend", "servers"),
    [
        ("embedded", None),
        ("embedded:d2", (Servers("embedded", 2),)),
        ("tandem:d16", (Servers("tandem", 16),)),
        ("vllm:d1+sglang:d2", (Servers("vllm", 1), Servers("sglang", 2))),
        ("vllm:d4t2", (Servers("vllm", 4, 2),)),
        ("attached", ()),
    ],
)
def test_backends_name_servers(backend, servers):
    assert parse_backend(backend) == servers
    assert load(f"rollout.backend={backend}").rollout.backend == backend


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (["rollout.backend=warp"], "'warp' is not an inference backend.*embedded"),
        (["rollout.backend=vlm:d1"], "did you mean 'vllm'"),
        (["rollout.backend=vllm"], "say how many servers of vllm, for example vllm:d1"),
        (["rollout.backend=embedded+vllm:d1"], "embedded:d1, or embedded alone"),
        (["rollout.backend=vllm:d0"], "vllm:dN with N at least 1"),
        (["rollout.backend=vllm:d1+attached"], "attached stands alone.*rollout.backend=vllm:d1"),
        (["rollout.backend=attached", "rollout.fleet.servers=[http://x]"], "rollout.fleet.servers: .*KIND=URL"),
        (
            ["rollout.backend=attached", "rollout.fleet.servers=[tandem=http://x, tandem=http://x/]"],
            "names tandem=http://x more than once",
        ),
        (
            ["rollout.backend=embedded:d2", "rollout.fleet.stall_timeout_s=4"],
            "rollout.fleet.stall_timeout_s must be a number, above 4,.* got 4",
        ),
        (["rollout.backend=embedded:d2", "rollout.fleet.max_restarts=-1"], "max_restarts must be .*at least 0"),
        (["rollout.backend=embedded:d2", "deterministic=true"], "deterministic=true contradicts rollout.backend"),
        (["rollout.backend=tandem:d2t2"], "a server of tandem computes on one device; leave t2 out, or use vllm or sglang"),
        (
            ["rollout.backend=vllm:t2"],
            "vllm:dN with N at least 1 servers, for example vllm:d2, or :dNtT for N servers of T GPUs",
        ),
        (["rollout.backend=sglang:d1", "gconfig.min_new_tokens=2"], "min_new_tokens=2 is refused by sglang.*vllm:dN"),
        (
            ["rollout.backend=attached", "rollout.fleet.servers=[sglang=http://x]", "gconfig.min_new_tokens=5"],
            "gconfig.min_new_tokens=5 is refused by sglang",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(items, words):
    with pytest.raises(ConfigError, match=words):
        load(*items)


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (
            ["rollout.backend=embedded", "rollout.fleet.max_restarts=5"],
            "max_restarts=5 is not used because rollout.backend=embedded is one engine",
        ),
        (["rollout.backend=embedded:d2", "rollout.fleet.vllm_python=/x"], "starts no vllm: set it, for example to vllm:d1"),
        (["rollout.backend=embedded:d2", "rollout.fleet.sglang_python=/x"], "starts no sglang: set it"),
        (["rollout.backend=embedded:d2", "rollout.fleet.finish_before_update=true"], "at staleness 0"),
        (
            ["rollout.backend=vllm:d1", "rollout.engine.prefill_chunk_tokens=64"],
            "not used because .* no embedded or tandem: set",
        ),
        (
            ["rollout.backend=sglang:d1", "rollout.engine.keep_kv_on_update=true", "async_training=true"],
            "keep_kv_on_update=true is not used by SGLang",
        ),
        (["rollout.backend=sglang:d1", "rollout.engine.kv_cache_gib=4"], "starts no embedded or tandem or vllm"),
        (
            ["rollout.backend=vllm:d1", "rollout.engine.kv_cache_gib=4", "device=cuda"],
            "by vLLM on a GPU, where .*memory_share",
        ),
        (["rollout.backend=attached", "rollout.engine.kv_cache_gib=4"], "starts no embedded or tandem or vllm"),
        (["rollout.backend=attached", "rollout.engine.threads=2"], "threads=2 is not used because .* starts no"),
        (["rollout.backend=attached", "rollout.fleet.max_restarts=5"], "max_restarts=5 is not used because .* starts no"),
        (["rollout.backend=tandem:d1", "rollout.fleet.memory_share=0.5"], "starts no vllm or sglang: set it"),
        (["rollout.backend=embedded:d2", "rollout.fleet.options.seed=1"], "options=.* starts no tandem or vllm or sglang"),
        (
            ["rollout.backend=sglang:d1", "rollout.fleet.servers=[tandem=http://x]", "rollout.engine.kv_cache_gib=4"],
            "kv_cache_gib=4 is not used because rollout.backend starts no embedded or tandem or vllm",
        ),
    ],
)
def test_a_key_that_nothing_would_read_is_refused(items, words):
    with pytest.raises(ConfigError, match=words):
        load(*items)


@pytest.mark.parametrize(
    ("backend", "item"),
    [
        ("sglang:d1", "gconfig.top_p=0.9"),
        ("vllm:d1", "gconfig.top_p=0.9"),
        ("embedded:d1+vllm:d1", "gconfig.top_k=50"),
        ("vllm:d1", "gconfig.min_new_tokens=2"),
        ("embedded:d2", "gconfig.min_new_tokens=2"),
        ("vllm:d1", "rollout.engine.kv_cache_gib=4"),
        ("vllm:d1+embedded:d1", "rollout.engine.prefill_chunk_tokens=64"),
        ("attached", "rollout.engine.max_running=4"),  # the most samples of an evaluation at once
        ("sglang:d1", "rollout.engine.kv_cache_gib=null"),  # the default: it overrules a file
    ],
)
def test_what_some_server_of_the_fleet_reads_is_accepted(backend, item):
    key, _, value = item.partition("=")
    allowed = ["algorithm.allow_truncated_sampling=true"] if key.startswith("gconfig.") else []
    found = load(f"rollout.backend={backend}", item, *allowed)
    assert dict(leaves(found))[key] == (None if value == "null" else float(value))


def test_what_is_used_is_accepted():
    assert load(
        "rollout.backend=vllm:d1+embedded:d1",
        "rollout.fleet.vllm_python=/x",
        "rollout.fleet.servers=[tandem=http://127.0.0.1:8000]",
        "rollout.fleet.token_file=/x",
        "async_training=true",
        "rollout.fleet.finish_before_update=true",
    ).rollout.fleet.finish_before_update


FOR_ANOTHER = {
    "rollout.backend=sglang:d1": "rollout: {engine: {kv_cache_gib: 0.5, prefill_chunk_tokens: 64}}",
    "rollout.backend=attached": "rollout: {engine: {kv_cache_gib: 0.5}}",
    "rollout.backend=embedded": "rollout: {backend: 'vllm:d1', fleet: {vllm_python: /x, max_restarts: 9}}",
    "rollout.backend=embedded:d2": "rollout: {backend: 'vllm:d1', fleet: {vllm_python: /x}}",
}


@pytest.mark.parametrize("choice", FOR_ANOTHER)
def test_what_a_file_says_for_another_backend_than_the_command_is_left_aside(tmp_path, caplog, choice):
    file = tmp_path / "run.yaml"
    file.write_text(f"train_dataset: {{path: addition}}\n{FOR_ANOTHER[choice]}\n")
    resolved = load_config(TrainConfig, file, [choice])

    assert resolved.config == load(choice)
    assert "run.yaml:2 is left aside: with the rollout.backend of the command line" in caplog.text
    assert "# default; run.yaml:2 is for another rollout.backend" in describe(resolved)
    written = tmp_path / "config.yaml"  # what the run writes of itself begins the same run
    written.write_text(to_yaml(resolved.config))
    assert load_config(TrainConfig, written).config == resolved.config


def test_keys_for_another_backend_are_refused_where_both_stand_in_one_place(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("train_dataset: {path: addition}\nrollout: {backend: 'sglang:d1', engine: {kv_cache_gib: 0.5}}\n")
    for items in ([], ["rollout.backend=attached", "rollout.engine.kv_cache_gib=0.25"]):
        with pytest.raises(ConfigError, match=r"kv_cache_gib=0\.2?5 is not used"):
            load_config(TrainConfig, file, items)


@pytest.mark.parametrize("backend", ["attached", "sglang:d1", "vllm:d1", "tandem:d2", "embedded:d1+vllm:d1"])
def test_an_example_can_be_tried_with_any_backend(backend):
    file = Path(__file__).parents[2] / "examples" / "addition_grpo.yaml"
    config = load_config(TrainConfig, file, [f"rollout.backend={backend}"]).config
    kept = "sglang" not in backend and backend != "attached"
    assert config.rollout.engine.kv_cache_gib == (0.5 if kept else None)
