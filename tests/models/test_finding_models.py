"""Finding models, and what is said when something is missing."""

import json
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, MixtralConfig, Qwen3MoeConfig

from tandem.api.shared_files import make_once
from tandem.config.errors import ConfigError
from tandem.config.rollout import RolloutConfig
from tandem.engines.inference.build import build_inference_engine
from tandem.models.architecture import Architecture
from tandem.models.catalog import resolve
from tandem.models.load import load_causal_lm
from tandem.models.tokenizer import check_chat_template, load_tokenizer
from tests.tiny import KINDS, tiny_config, tiny_model_folder, tiny_tokenizer


@pytest.fixture
def folder(tmp_path):
    return tiny_model_folder(tmp_path)


def test_a_folder_is_itself(folder):
    assert resolve(str(folder)) == folder


def test_a_name_that_is_nothing_gets_the_nearest_built_in_one():
    with pytest.raises(ConfigError, match=r"neither a folder nor a hub name.*Did you mean 'smollm2-135m'"):
        resolve("smollm2_135m")


@pytest.mark.parametrize(("missing", "message"), [("config.json", "no config.json"), ("model.safetensors", "no weights")])
def test_an_incomplete_folder_says_what_is_missing(folder, missing, message):
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match=message):
        resolve(str(folder))


def test_a_file_is_not_a_model(folder):
    with pytest.raises(ConfigError, match="is a file; give the folder"):
        resolve(str(folder / "config.json"))


def test_damaged_files_are_named(folder):
    (folder / "config.json").write_text("{broken")
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_causal_lm(folder)
    (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(ConfigError, match=r"the weights in .*model\.safetensors have 10 bytes"):
        load_causal_lm(folder)


def test_weights_that_are_missing_are_not_made_up(folder):
    weights = load_file(folder / "model.safetensors")
    gone = weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 are missing, first 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load_causal_lm(folder)
    assert gone.shape


@pytest.mark.parametrize("kind", ["llama", "smollm"])  # the second has one matrix for both ends: nothing would be missing
def test_a_reward_model_is_no_language_model(tmp_path, kind):
    language_model = tiny_model_folder(tmp_path, kind)
    scores = tmp_path / "scores"
    AutoModelForSequenceClassification.from_pretrained(language_model, num_labels=1).save_pretrained(scores)
    words = "sequence classifier .*such as a reward model.* give the folder of a language model"
    with pytest.raises(ConfigError, match=words):
        load_causal_lm(scores)
    with pytest.raises(ConfigError, match=words):
        build_inference_engine(
            RolloutConfig(), folder=scores, placement="colocate", threads=1, device="cpu", deterministic=False
        )


def test_a_model_without_tokenizer_or_template_says_so(tmp_path):
    bare = tiny_model_folder(tmp_path, tokenizer=False)
    with pytest.raises(ConfigError, match="has no tokenizer"):
        load_tokenizer(bare)
    tiny_tokenizer(chat_template=None).save_pretrained(bare)
    with pytest.raises(ConfigError, match="has no chat template"):
        check_chat_template(load_tokenizer(bare))


def test_a_complete_folder_has_a_tokenizer_with_template(folder):
    tokenizer = load_tokenizer(folder)
    check_chat_template(tokenizer)
    assert tokenizer.decode(tokenizer("héllo 12")["input_ids"]) == "héllo 12"


@pytest.mark.parametrize("config_class", [MixtralConfig, Qwen3MoeConfig])
def test_mixtures_of_experts_are_refused_by_name(config_class):
    with pytest.raises(ConfigError, match=rf"{config_class.model_type}.*mixture of experts.*llama"):
        Architecture.from_config(config_class())


def test_a_rope_that_depends_on_the_length_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"rope type 'dynamic'.*These work: default"):
        load_causal_lm(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_the_facts_agree_with_transformers(kind):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(kind))
    facts, layer = Architecture.from_config(model.config), model.model.layers[0]
    attention = layer.self_attn
    assert facts.query_scale == pytest.approx(attention.scaling)
    assert facts.qkv_bias == (attention.q_proj.bias is not None)
    assert facts.o_bias == (attention.o_proj.bias is not None)
    assert facts.mlp_bias == (layer.mlp.gate_proj.bias is not None)
    assert facts.qk_norm == hasattr(attention, "q_norm")
    assert facts.post_norms == hasattr(layer, "post_feedforward_layernorm")
    assert facts.head_dim == attention.head_dim
    assert facts.num_kv_heads * facts.head_dim == attention.k_proj.out_features
    windows = [getattr(each.self_attn, "sliding_window", None) for each in model.model.layers]
    assert kind == "mistral" or list(facts.sliding_windows) == windows


def test_scaled_rope_frequencies_are_those_of_transformers():
    config = tiny_config(
        "llama",
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    model = AutoModelForCausalLM.from_config(config)
    assert torch.equal(Architecture.from_config(config).rope[0].inv_freq, model.model.rotary_emb.inv_freq)


def test_makers_that_come_together_make_it_once_and_whole(tmp_path):
    made = []

    def make(partial):
        made.append(partial)
        (partial / "file").write_text("whole")

    threads = [threading.Thread(target=make_once, args=(tmp_path / "model", make)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert (tmp_path / "model" / "file").read_text() == "whole"


def test_a_maker_that_failed_leaves_nothing_and_the_next_one_succeeds(tmp_path):
    def fail(partial):
        (partial / "half").write_text("")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        make_once(tmp_path / "model", fail)
    assert not (tmp_path / "model").exists()
    make_once(tmp_path / "model", lambda partial: (partial / "file").write_text(""))
    assert [p.name for p in (tmp_path / "model").iterdir()] == ["file"]


@pytest.mark.slow
def test_the_built_in_model_can_be_made_where_nothing_is_cached(tmp_path, monkeypatch):
    """With nothing but what Tandem declares as its dependencies: the first run of a new user needs it."""
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    folder = resolve("smollm2-135m")
    assert folder.is_relative_to(tmp_path)
    assert (folder / "model.safetensors").stat().st_size > 2e8
