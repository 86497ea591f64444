"""Adapters: what is trained, what stays, and that merged, applied, saved and opened by peft are one model."""

import itertools
import json
import shutil

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModelForSequenceClassification
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tandem.api.weights import Adapter
from tandem.config.errors import ConfigError
from tandem.models.lora import MergedWeights
from tandem.roles.reference import Reference
from tandem.state.tree import read_tree
from tests.engines_train.adapters import LAYOUTS, adapter_of, lora_on, some_adapter, steps_of_layouts, trained
from tests.engines_train.layouts import loss_with_scores
from tests.engines_train.steps import distance, engine_on, random_batch, weighted_nll, weights_of
from tests.ranks import alone_and_on_two
from tests.tiny import tiny_model_folder

BATCH = random_batch((6, 11, 3, 8), seed=5)
PER_LAYER = {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32)}
PER_LAYER |= {"gate_proj": (64, 32), "up_proj": (64, 32), "down_proj": (32, 64)}
"""[out, in] of the tiny llama's matrices."""


@pytest.fixture(autouse=True)
def one_thread():
    """With two the sum of a matrix product and its adapter's rounds otherwise."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("model"))


def scores(model, batch=BATCH):
    """Log-probabilities of a Hugging Face model at the batch's temperatures, ``[T]``, 0 where nothing is asked."""
    bounds, found = batch["cu_seqlens"].tolist(), torch.zeros(len(batch["input_ids"]))
    for i, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        ids = batch["input_ids"][start:end]
        with torch.no_grad():
            logits = model(ids[None]).logits[0].float() / batch["temperature"][i]
        found[start + 1 : end] = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
    return found * batch["loss_mask"]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_before_the_first_step_the_model_is_its_base_to_the_bit_at_any_rank(kind, dtype, tmp_path):
    folder = tiny_model_folder(tmp_path, kind)
    base, adapted = engine_on(folder, dtype=dtype, max_tokens=20), lora_on(folder, dtype=dtype, rank=32)
    assert torch.equal(adapted.forward(BATCH).logprobs, base.forward(BATCH).logprobs)
    for name, tensor in adapted.weights(torch.bfloat16):
        assert torch.equal(tensor, dict(base.weights(torch.bfloat16))[name])


def test_only_adapters_are_trained_and_have_masters_moments_and_gradients(folder):
    engine = lora_on(folder, dtype="bfloat16")
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters() if "lora_" not in name}
    trained(engine)
    state = engine.state_dict()
    numbers = 2 * sum(4 * (out + inputs) for out, inputs in PER_LAYER.values())

    assert sum(tensor.numel() for tensor in state["masters"].values()) == numbers
    assert all("lora_" in name and tensor.dtype == torch.float32 for name, tensor in state["masters"].items())
    assert state["optimizer"]["moments"].keys() == state["masters"].keys()
    assert all(torch.equal(p, before[name]) for name, p in engine.model.named_parameters() if name in before)
    assert all(p.dtype == torch.bfloat16 and p.grad is None for p in engine.holder.frozen.values())
    assert all(bool(tensor.any()) for tensor in adapter_of(engine).values())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3"])
def test_the_merged_model_computes_what_the_adapters_do(kind, tmp_path):
    folder = tiny_model_folder(tmp_path, kind)
    engine = trained(lora_on(folder, alpha=3.0))
    engine.save(tmp_path / "saved")
    applied = engine.forward(BATCH).logprobs
    merged = engine_on(tmp_path / "saved").forward(BATCH).logprobs
    torch.testing.assert_close(merged, applied, atol=2e-5, rtol=1e-5)
    assert (applied - engine_on(folder).forward(BATCH).logprobs).abs().max() > 0.1
    assert engine.adapter.terms == Adapter(3.0 / 4, torch.float32), "an engine that takes the adapter alone scales it so"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers by an old name
def test_peft_opens_the_adapter_and_computes_the_same(folder, tmp_path):
    engine = trained(lora_on(folder, target_modules=("q_proj", "self_attn.v_proj", "down_proj"), alpha=5.0))
    engine.save(tmp_path / "saved")
    theirs = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "saved/adapter").eval()
    applied = engine.forward(BATCH).logprobs
    torch.testing.assert_close(scores(theirs), applied, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(scores(theirs.merge_and_unload()), applied, atol=2e-5, rtol=1e-5)
    settings = json.loads((tmp_path / "saved/adapter/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(folder) and settings["r"] == 4
    assert len(load_file(tmp_path / "saved/adapter/adapter_model.safetensors")) == 2 * 2 * 3


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers by an old name
def test_peft_opens_the_adapter_of_a_scalar_model_with_its_head(folder, tmp_path):
    engine = lora_on(folder, head="scalar")
    ends = BATCH["cu_seqlens"][1:] - 1
    for _ in range(3):
        engine.train_batch(BATCH, lambda outputs, view: ((outputs.scores - 1) ** 2, {}))
    engine.save(tmp_path / "saved")
    base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    base.config.pad_token_id = None
    theirs = PeftModelForSequenceClassification.from_pretrained(base, tmp_path / "saved/adapter").eval()
    bounds = BATCH["cu_seqlens"].tolist()
    with torch.no_grad():
        found = [
            float(theirs(BATCH["input_ids"][start:end][None]).logits[0, 0])
            for start, end in zip(bounds, bounds[1:], strict=False)
        ]
    ours = engine.forward(BATCH).scores[ends]
    assert ours.abs().min() > 0.01
    torch.testing.assert_close(torch.tensor(found), ours, atol=2e-5, rtol=1e-5)


def test_what_is_saved_is_loaded_again_and_merges_to_what_lies_beside_it(folder, tmp_path):
    engine = trained(lora_on(folder, head="both"))
    engine.train_batch(BATCH, loss_with_scores)
    engine.save(tmp_path / "saved")
    fresh = lora_on(folder, head="both")
    fresh.load(tmp_path / "saved")
    assert torch.equal(fresh.forward(BATCH).logprobs, engine.forward(BATCH).logprobs)
    scores = engine.forward(BATCH).scores
    assert scores.any() and torch.equal(fresh.forward(BATCH).scores, scores)
    merged, beside = MergedWeights(tmp_path / "saved/adapter"), load_file(tmp_path / "saved/model.safetensors")
    assert set(merged) == beside.keys() and all(torch.equal(merged[name], beside[name]) for name in beside)
    with pytest.raises(ConfigError, match="cannot be copied into this model"):
        lora_on(folder, rank=2).load(tmp_path / "saved")


def test_another_base_is_refused_where_the_run_goes_on_and_where_it_is_merged(tmp_path):
    base, other = tiny_model_folder(tmp_path / "base"), tiny_model_folder(tmp_path / "other", "qwen2")
    engine = trained(lora_on(base), steps=1)
    engine.save(tmp_path / "saved")
    state = engine.state_dict()
    lora_on(base).load_state_dict(state)
    path = base / "model.safetensors"
    tensors = {name: tensor + 1e-3 for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    for refused in (lambda: lora_on(base).load_state_dict(state), lambda: MergedWeights(tmp_path / "saved/adapter")):
        with pytest.raises(ConfigError, match="are not those that training began with"):
            refused()
    assert engine_on(other).state_dict()["base"] is None


def test_an_adapter_is_merged_again_into_the_base_as_training_rounded_it(folder, tmp_path):
    engine = trained(lora_on(folder, dtype="bfloat16"))
    engine.save(tmp_path / "saved")
    merged, beside = MergedWeights(tmp_path / "saved/adapter"), load_file(tmp_path / "saved/model.safetensors")
    assert all(torch.equal(merged[name].bfloat16(), beside[name]) for name in beside)
    exact = dict(engine.weights())
    assert all(torch.equal(merged[name], exact[name].float()) for name in beside)


def test_what_rounding_leaves_of_an_adapter_is_seen_in_the_first_and_the_last_layer(folder):
    engine = lora_on(folder)
    tensors = some_adapter(engine)
    for there in ("layers.0.self_attn.q_proj.", "layers.1.mlp.down_proj."):
        engine.load_weights((name, tensor if there in name else 0 * tensor) for name, tensor in tensors.items())
        assert engine.adapter.surviving(torch.float32) == pytest.approx(1.0)
    engine.load_weights((name, 0 * tensor) for name, tensor in tensors.items())
    assert engine.adapter.surviving(torch.float32) is None


def test_deepspeed_is_refused_in_scripts_too(folder):
    with pytest.raises(ConfigError, match=r"lora does not go with actor.backend=deepspeed:zero2:d1: DeepSpeed has no"):
        lora_on(folder, backend="deepspeed:zero2:d1")


def test_the_reference_of_an_adapter_is_its_base_in_the_same_engine(folder):
    engine = trained(lora_on(folder))
    reference = Reference(engine, base=True)
    applied = engine.forward(BATCH).logprobs
    assert torch.equal(reference.compute_logprobs(BATCH)["reference_logprobs"], engine_on(folder).forward(BATCH).logprobs)
    assert torch.equal(engine.forward(BATCH).logprobs, applied) and not torch.equal(
        applied, reference.compute_logprobs(BATCH)["reference_logprobs"]
    )
    with pytest.raises(ConfigError, match="has no adapter; set"):
        Reference(engine_on(folder), base=True)
    with pytest.raises(ConfigError, match="an engine of its own"):
        Reference(engine, base=True, refresh_every_steps=1)


def test_for_a_moment_it_computes_with_other_weights_or_another_adapter(folder):
    engine = trained(lora_on(folder))
    own = engine.forward(BATCH).logprobs
    other = engine_on(folder)
    other.train_batch(BATCH, weighted_nll)
    weights = weights_of(other)
    with engine.using(weights.items()):
        assert torch.equal(engine.forward(BATCH).logprobs, other.forward(BATCH).logprobs)
        assert all(torch.equal(tensor, weights[name]) for name, tensor in engine.weights())
    assert torch.equal(engine.forward(BATCH).logprobs, own)
    second = lora_on(folder)
    second.load_weights(some_adapter(second).items())
    with engine.using(some_adapter(second).items()):
        assert torch.equal(engine.forward(BATCH).logprobs, second.forward(BATCH).logprobs)
    assert torch.equal(engine.forward(BATCH).logprobs, own)
    with pytest.raises(ConfigError, match="keeps its base"):
        engine.load_weights(weights_of(other).items())


def test_recomputing_activations_changes_nothing(folder):
    plain, lean = (trained(lora_on(folder, checkpointing=on)) for on in (False, True))
    assert distance(adapter_of(plain), adapter_of(lean)) <= 1e-5 * distance(adapter_of(plain), adapter_of(lora_on(folder)))


def test_dropout_is_in_training_passes_alone(folder):
    plain, dropping = lora_on(folder), lora_on(folder, dropout=0.5)
    tensors = some_adapter(plain)
    for engine in (plain, dropping):
        engine.load_weights(tensors.items())
    assert torch.equal(dropping.forward(BATCH).logprobs, plain.forward(BATCH).logprobs)
    one, other = (engine.train_batch(BATCH, weighted_nll)["loss"] for engine in (plain, dropping))
    assert one != other


def test_matrices_are_named_by_the_ends_of_their_names_and_others_are_refused(folder):
    names = set(adapter_of(lora_on(folder, target_modules=("mlp.up_proj",))))
    assert names == {f"model.layers.{i}.mlp.up_proj.lora_{x}.weight" for i in (0, 1) for x in "AB"}
    with pytest.raises(ConfigError, match=r"'c_attn', which no matrix .* there are mlp\.down_proj, mlp\.gate_proj"):
        lora_on(folder, target_modules=("q_proj", "c_attn"))


def test_the_first_values_follow_the_seed_and_differ_between_matrices(folder):
    one, other = adapter_of(lora_on(folder)), adapter_of(lora_on(folder))
    assert distance(one, other) == 0
    first, second = (one[f"model.layers.0.self_attn.{name}_proj.lora_A.weight"] for name in "kv")
    assert not torch.equal(first, second) and 0.9 * 32**-0.5 < first.abs().max() <= 32**-0.5


def test_a_late_save_is_not_merged_into_a_base_that_has_changed(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    engine = lora_on(copy)
    write = engine.late_writer(engine.state_dict())
    write(tmp_path / "saved")
    assert (tmp_path / "saved/model.safetensors").is_file()
    file = copy / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert engine.late_writer(engine.state_dict()) is None


SLOW = [pytest.mark.slow, pytest.mark.invariant]


@pytest.fixture(scope="module", params=[pytest.param(name, marks=SLOW) for name in LAYOUTS])
def layouts(request, folder, tmp_path_factory):
    """(layouts, what one process found, what each of two ranks found, where they saved)."""
    out, chosen = tmp_path_factory.mktemp("layouts"), LAYOUTS[request.param]
    return chosen, *alone_and_on_two(steps_of_layouts, folder, chosen, out, out=out), out


def test_a_step_under_every_layout_is_that_of_one_process(layouts):
    chosen, alone, ranks, _ = layouts
    for layout, rank in itertools.product(chosen, ranks):
        rough, found = "bfloat16" in layout, rank[layout]
        one, tolerance = alone["d1 bfloat16" if rough else "d1"], 0.1 if rough else 1e-3
        assert distance(one["first"], found["first"]) == 0
        assert found["gradients"].keys() == one["gradients"].keys()
        for name, gradient in one["gradients"].items():
            assert gradient.norm() > 0
            assert (found["gradients"][name] - gradient).norm() <= tolerance * gradient.norm(), (layout, name)
        moved = distance(one["after"], one["first"])
        assert distance(one["after"], found["after"]) <= tolerance * moved
        for ours, theirs in zip(one["metrics"], found["metrics"], strict=True):
            assert theirs == pytest.approx(ours, rel=max(tolerance, 1e-3))
        limit = {"atol": 1e-3, "rtol": 1e-3} if not rough else {"atol": 0.3, "rtol": 0.1}
        torch.testing.assert_close(found["outputs"], one["outputs"], **limit)
        torch.testing.assert_close(found["base"], one["base"], **limit)


def test_on_ranks_what_is_saved_is_whole_and_a_state_goes_on_to_the_bit(layouts):
    chosen, _, ranks, out = layouts
    for layout, rank in itertools.product(chosen, ranks):
        found, saved = rank[layout], out / layout.replace(" ", "")
        assert distance(found["next"], found["resumed"]) == 0 and distance(found["next"], found["after"]) > 0
        model = dict(AutoModelForCausalLM.from_pretrained(saved).named_parameters())
        assert distance({n: t.to(model[n].dtype) for n, t in found["merged"].items()}, model) == 0
        state = read_tree(saved.with_name(f"{saved.name}-state"))
        assert all("lora_" in name or name == "value.weight" for name in state["masters"])


def test_each_of_two_ranks_has_half_of_the_frozen_base_in_the_computations_dtype(layouts, folder):
    chosen, _, ranks, _ = layouts
    whole = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    for layout, rank in itertools.product(chosen, ranks):
        share = whole * (2 if "bfloat16" in layout else 4) * (1 if "r2" in layout else 0.5)
        assert share <= rank[layout]["bytes"] <= share + 4 * 64


def test_matrices_that_are_cut_are_refused(layouts):
    for rank in layouts[2]:
        assert "t cuts every matrix" in rank["refused"]
