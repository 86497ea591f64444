"""What the plan knows of a model: its parameters to the last one, and what autograd keeps of it."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tandem.config.errors import ConfigError
from tandem.config.train_engine import LoRAConfig
from tandem.models import cpu_attention
from tandem.models.architecture import SUPPORTED, Architecture
from tandem.models.lora import put_adapters
from tandem.models.packed import PackedCausalLM, TokenLayout
from tandem.models.shape import Shape, adapters_of, read_shape
from tandem.planning import planned_model
from tandem.planning.planned_model import LiveBytes, MicroBatch, PlannedModel, cut_step, kept_by_head, pass_bytes
from tests.tiny import KINDS, tiny_config, tiny_model
from tests.trainers.planning import HAND, LLAMA_8B, SMOLLM2, held

PROMPT, COMPLETION = 40, 56


def test_parameters_by_hand():
    assert HAND.layer == 1160 and HAND.parameters() == 2 * 1160 + 2 * 1000 + 10
    assert HAND.parameters("scalar") == 2 * 1160 + 1000 + 10 + 10 and HAND.parameters("both") == HAND.parameters() + 10
    assert HAND.root() == 2010
    assert SMOLLM2.parameters() == 134_515_008 and LLAMA_8B.parameters() == 8_030_261_248


def test_every_supported_architecture_is_counted_here():
    assert {tiny_config(kind).model_type for kind in KINDS} == set(SUPPORTED)


BIASED = [("llama", {"attention_bias": True, "mlp_bias": True}), ("qwen3", {"attention_bias": True})]


@pytest.mark.parametrize(("kind", "overrides"), [*((kind, {}) for kind in KINDS), *BIASED])
def test_parameters_are_those_of_the_real_model(kind, overrides):
    config = tiny_config(kind, **overrides)
    config.num_labels = 1
    shape = Shape.of(Architecture.from_config(config))

    classifier = AutoModelForSequenceClassification.from_config(config)

    assert list(shape.tensors()) == [p.numel() for p in tiny_model(kind, **overrides).parameters()]
    assert shape.parameters() == sum(shape.tensors())
    assert shape.parameters("scalar") == sum(p.numel() for p in classifier.parameters())


def test_a_shape_is_read_from_config_json_alone(tmp_path):
    tiny_config("qwen3").save_pretrained(tmp_path)

    assert read_shape(str(tmp_path)) == Shape.of(Architecture.from_config(tiny_config("qwen3")))
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_what_is_not_computed_here_has_no_plan(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_shape(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ConfigError, match="gpt2"):
        read_shape(str(tmp_path))


def adapted_model(kind: str, dtype: torch.dtype, modules: tuple[str, ...], **overrides) -> PackedCausalLM:
    """A frozen model with adapters, which compute in its dtype as those in a training engine do."""
    model = PackedCausalLM(tiny_model(kind, dtype=dtype, **overrides))
    put_adapters(model, LoRAConfig(rank=4, target_modules=modules), dtype, seed=0)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def layout_of(model: PackedCausalLM, groups: tuple[tuple[int, int], ...]) -> TokenLayout:
    """The layout of random tokens."""
    generator = torch.Generator().manual_seed(0)
    rows, masks = [], []
    for prompt, count in groups:
        common = torch.randint(3, 500, (prompt,), generator=generator)
        for _ in range(count):
            rows.append(torch.cat([common, torch.randint(3, 500, (COMPLETION,), generator=generator)]))
            masks.append(torch.arange(len(rows[-1])) >= prompt)
    cu_seqlens = torch.tensor([0] + [len(row) for row in rows]).cumsum(0)
    return model.lay_out(torch.cat(rows), cu_seqlens, torch.cat(masks), torch.ones(len(rows)))


def kept_really(model: PackedCausalLM, groups: tuple[tuple[int, int], ...]) -> int:
    """Bytes of all storages that autograd keeps of one forward pass, parameters aside."""
    layout = layout_of(model, groups)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(layout)
    return sum(storage.nbytes() for storage in storages.values())


def kept(model: PlannedModel, groups: tuple[tuple[int, int], ...]) -> int:
    """What the plan says that autograd keeps."""
    batch = MicroBatch(groups, COMPLETION)
    return pass_bytes(model, batch).kept + kept_by_head(model, batch)


GROUPS = pytest.mark.parametrize("groups", [((PROMPT, 1),) * 8, ((PROMPT, 4),) * 2], ids=["alone", "shared"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@GROUPS
@pytest.mark.parametrize("kind", KINDS)
def test_activations_are_what_autograd_keeps(kind, groups, dtype):
    width = 48 if kind == "smollm" else 64
    overrides = {"vocab_size": 512, "hidden_size": width, "intermediate_size": 160, "max_position_embeddings": 1024}
    model = PackedCausalLM(tiny_model(kind, dtype=getattr(torch, dtype), **overrides))
    shape = Shape.of(model.architecture)

    said = kept(held(shape=shape, dtype=dtype, on_cpu=True), groups)

    assert said == pytest.approx(kept_really(model, groups), rel=0.01)


@pytest.mark.parametrize("modules", [("all-linear",), ("q_proj", "v_proj"), ("gate_proj", "o_proj")], ids=str)
@GROUPS
@pytest.mark.parametrize(("kind", "dtype"), [("llama", "float32"), ("qwen3", "bfloat16"), ("gemma3", "bfloat16")])
def test_activations_beside_adapters_are_what_autograd_keeps(kind, dtype, groups, modules):
    overrides = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "max_position_embeddings": 1024}
    model = adapted_model(kind, getattr(torch, dtype), modules, num_hidden_layers=6, layer_types=None, **overrides)
    shape = Shape.of(model.architecture)
    adapters = adapters_of(LoRAConfig(rank=4, target_modules=modules), shape)

    said = kept(held(shape=shape, dtype=dtype, adapters=adapters, on_cpu=True), groups)

    assert said == pytest.approx(kept_really(model, groups), rel=0.01)


def most_really(model: PackedCausalLM, groups: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """Most bytes of tensors that exist at once in the layers: in a pass with gradients, parameters and their gradients
    aside, and in a pass without."""
    layout, live = layout_of(model, groups), LiveBytes()
    live.know(*model.parameters(), *model.buffers())
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    with live:
        with torch.no_grad():
            model.hidden(layout)
        scoring, live.most = live.most, 0
        model.hidden(layout).sum().backward()
    return live.most, scoring


@pytest.mark.parametrize("checkpointing", ["no", "yes", "selective"])
@GROUPS
@pytest.mark.parametrize("head_dim", [32, 16], ids=["compiled kernel", "torch's kernel"])
def test_the_most_bytes_of_a_pass_are_those_of_real_tensors(head_dim, groups, checkpointing):
    if head_dim == 32 and cpu_attention.kernel(torch.float32) is None:
        pytest.skip("no compiler")
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 640, "head_dim": head_dim, "num_hidden_layers": 5}
    model = PackedCausalLM(tiny_model("llama", **sizes, max_position_embeddings=1024))
    planned = held(shape=Shape.of(model.architecture), checkpointing=checkpointing != "no", on_cpu=True)
    planned = replace(planned, config=replace(planned.config, selective_checkpointing=checkpointing == "selective"))
    if checkpointing != "no":
        model.enable_gradient_checkpointing(checkpointing == "selective")

    said = pass_bytes(planned, MicroBatch(groups, COMPLETION))
    training, scoring = most_really(model, groups)

    assert said.kept + said.backward == pytest.approx(training, rel=0.01)
    assert said.scoring == pytest.approx(scoring, rel=0.01)


def test_checkpointing_keeps_the_inputs_of_all_layers():
    models = [held(shape=replace(SMOLLM2, layers=layers), checkpointing=True, on_cpu=True) for layers in (20, 30)]
    few, many = (pass_bytes(model, MicroBatch(((PROMPT, 1),), COMPLETION)) for model in models)

    assert many.kept - few.kept == 10 * 4 * 576 * (PROMPT + COMPLETION)
    assert many.backward == few.backward > 4 * 4 * 1536 * (PROMPT + COMPLETION), "one whole layer at a time"


def test_a_gpus_kernel_copies_shared_prompts_and_makes_no_sums_of_gradients():
    batch = MicroBatch(((PROMPT, 4),) * 2, COMPLETION)
    cpu, gpu = (pass_bytes(held(shape=SMOLLM2, dtype="bfloat16", on_cpu=cpu), batch) for cpu in (True, False))

    assert cpu.kept < gpu.kept
    wide = Shape("llama", layers=1, hidden=32, intermediate=32, heads=8, kv_heads=2, head_dim=32, vocab=10, context=512)
    alone = MicroBatch(((PROMPT, 1),) * 6, COMPLETION)
    cpu, gpu = (pass_bytes(held(shape=wide, dtype="bfloat16", on_cpu=cpu), alone).backward for cpu in (True, False))
    assert cpu - gpu >= 4 * wide.query * alone.tokens


def test_the_head_holds_a_chunk_of_logits_whatever_the_batch():
    short, long = MicroBatch(((8, 1),), 10), MicroBatch(((8, 1),), 10_000)
    model = held(shape=SMOLLM2, chunk_tokens=1024)

    logits, gradient = planned_model.head_bytes(model, long, backward=True)
    assert logits == 8 * 1024 * 49152 and gradient == 4 * 49152 * 576
    assert planned_model.head_bytes(model, short, backward=True)[0] == 8 * 10 * 49152
    assert planned_model.head_bytes(model, long, backward=False) == (8 * 1024 * 49152, 0)


def test_compiled_kernels_hold_logits_of_four_chunks_as_they_are_stored():
    middle, long = (MicroBatch(((8, 1),), tokens) for tokens in (3000, 10_000))
    model = held(shape=SMOLLM2, chunk_tokens=1024, dtype="bfloat16", on_cpu=True)

    assert planned_model.head_bytes(model, middle, backward=True) == (2 * 3000 * 49152, 2 * 49152 * 576)
    assert planned_model.head_bytes(model, long, backward=True) == (2 * 4096 * 49152, 6 * 49152 * 576)
    assert planned_model.head_bytes(model, long, backward=False)[0] == 2 * 4096 * 49152


def test_micro_batches_are_cut_by_the_engines_own_rule():
    step = cut_step(4, 3, 10, 5, most=50)

    assert step.count == 2 and step.largest.tokens == 50
    assert step.largest.groups == ((10, 3), (10, 3)) and step.largest.predicted == 30


def test_a_very_large_batch_is_cut_in_part():
    whole, part = cut_step(5000, 4, 10, 5, most=300), cut_step(100_000, 4, 10, 5, most=300)

    assert part == whole and part.largest.tokens <= 300


def test_prompts_that_are_hardly_shared_are_computed_with_each_sequence():
    assert not MicroBatch(((1, 2),), 100).shared and MicroBatch(((1, 2),), 100).tokens == 202
    assert MicroBatch(((100, 2),), 10).shared and MicroBatch(((100, 2),), 10).tokens == 120
