"""`allocation` in one word: the keys that it stands for, or a refusal that says what to write."""

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.config.allocation import resolve_allocation
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config, to_yaml

ROWS = "train_dataset.path=addition"


@pytest.mark.parametrize(
    ("text", "backend", "actor", "placement"),
    [
        ("vllm:d4t2+fsdp:d8", "vllm:d4t2", "fsdp:d8", "decoupled"),
        ("vllm:d4|fsdp:d2t2", "vllm:d4", "fsdp:d2t2", "colocate"),
        ("tandem:d1+vllm:d2+deepspeed:zero2:d2", "tandem:d1+vllm:d2", "deepspeed:zero2:d2", "decoupled"),
        ("embedded|fsdp:d2c2", "embedded", "fsdp:d2c2", "colocate"),
    ],
)
def test_an_allocation_stands_for_three_keys(text, backend, actor, placement):
    config = load_config(TrainConfig, None, [ROWS, f"allocation={text}"]).config
    assert (config.rollout.backend, config.actor.backend, config.placement) == (backend, actor, placement)


@pytest.mark.parametrize("text", ["sglang.d4p1t1+d8p1t1", "sglang.d4p1m1+d8p1m1", "sglang:d4+d8"])
def test_the_spelling_of_areal_is_read_and_said(text, caplog):
    with caplog.at_level(logging.WARNING):
        assert resolve_allocation(text)["actor.backend"] == "fsdp:d8"
    assert "read as sglang:d4+fsdp:d8" in caplog.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vllm:d4p2+fsdp:d8", "pipeline parallelism (p)"),
        ("sglang.d4p1t1+d4p2t1", "pipeline parallelism (p)"),
        ("vllm:d4+fsdp:d4e2", "expert parallelism (e)"),
        ("vlm:d4+fsdp:d4", "'vlm' is not a kind of server; did you mean 'vllm'?"),
        ("vllm:d4t2|fsdp:d4", "servers need 4 × 2 (vllm:d4t2) = 8 of them, and fsdp:d4 has 4"),
        ("vllm:d4+fsdp:d4|fsdp:d2", "either devices of their own (+) or the same ones (|)"),
        ("fsdp:d4+vllm:d4", "and then the ranks that train"),
        ("vllm:d4", "not understood"),
    ],
)
def test_what_it_cannot_mean_is_refused_with_the_reason(text, words):
    with pytest.raises(ConfigError) as refused:
        load_config(TrainConfig, None, [ROWS, f"allocation={text}"])
    assert words in str(refused.value)


def test_a_key_beside_it_must_agree():
    words = [ROWS, "allocation=vllm:d1+fsdp:d2", "actor.backend=fsdp:d2"]
    assert load_config(TrainConfig, None, words).config.actor.backend == "fsdp:d2"
    with pytest.raises(ConfigError, match=r"means rollout.backend=vllm:d1, and rollout.backend=embedded stands beside it"):
        load_config(TrainConfig, None, [*words, "rollout.backend=embedded"])


def test_what_a_run_writes_down_is_read_back(tmp_path):
    config = load_config(TrainConfig, None, [ROWS, "allocation=vllm:d2|fsdp:d4"]).config
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert load_config(TrainConfig, file).config == config


PIECES = st.sampled_from(
    ["vllm", "sglang", "fsdp", "deepspeed", "zero2", "embedded", *"dtcperm+|:.@,0123456789", "d4", "d8"]
)


@settings(max_examples=1000, deadline=None)
@given(st.lists(PIECES, max_size=14).map("".join) | st.text(max_size=30))
def test_any_text_is_resolved_or_refused_with_a_sentence(text):
    try:
        said = list(resolve_allocation(text))
    except ConfigError as error:
        said = str(error).split()
    assert said == ["rollout.backend", "actor.backend", "placement"] or len(said) > 5
