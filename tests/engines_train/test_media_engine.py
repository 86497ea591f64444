"""The training engine with a model that sees: splits, ranks, frozen towers, folders, adapters."""

import os
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoModelForMultimodalLM, AutoProcessor

from tandem.api.batch import pack
from tandem.api.media import encode
from tandem.config.errors import ConfigError
from tandem.config.train_engine import LoRAConfig, OptimizerConfig, TrainEngineConfig, parse_layout
from tandem.engines.train.engine import SpreadEngine
from tandem.engines.train.spread import check_train_engine
from tandem.flow.planned_models import Resident
from tandem.flow.sleep_plan import footprint
from tandem.media import store
from tandem.models.hardware import hardware
from tandem.models.lora import MergedWeights
from tandem.models.shape import read_shape
from tandem.models.tokenizer import load_tokenizer, save_tokenizer
from tests.engines_train.steps import weighted_nll
from tests.ranks import alone_and_on_two
from tests.tiny import tiny_model_folder
from tests.tiny_media import FAMILIES, picture, sound, tiny_idefics3, tiny_media_model, tiny_qwen_audio, tiny_qwen_vl


@pytest.fixture(autouse=True)
def media_store(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_MEDIA", str(tmp_path / "media"))


def media_batch(folder, prompts=None):
    """Two samples of a prompt with a picture, one of another picture, one with two, and one of text alone."""
    tokenizer = load_tokenizer(folder)
    a, b = (sound(seed) if tokenizer.media.kinds == ("audio",) else picture(seed, 20, 10 + seed) for seed in (0, 1))
    prompts = prompts or [
        ("What is @ this?", " cat", [a]),
        ("What is @ this?", " a dog", [a]),
        ("What is @ this?", " cat", [b]),
        ("@ or @?", " both of them", [b, a]),
        ("No picture:", " seven", []),
    ]
    generator, rows = torch.Generator().manual_seed(0), []
    for text, answer, media in prompts:
        text = text.replace("@", tokenizer.media.marker(tokenizer.media.kinds[0]))
        ids, numbers = encode(tokenizer, text + answer, media)
        length, own = len(ids), len(encode(tokenizer, text, media).ids)
        rows.append(
            {
                "input_ids": torch.tensor(ids),
                "media": torch.tensor(numbers),
                "loss_mask": torch.arange(length) >= own,
                "advantages": torch.randn(length, generator=generator),
                "temperature": torch.tensor(1.0),
            }
        )
    batch = pack(rows)
    batch["loss_weights"] = batch["loss_mask"].float() / len(batch["loss_mask"])
    return batch


def config_of(folder, **settings):
    options = OptimizerConfig(lr=1e-2, max_grad_norm=None, eps=1e-3)  # a gradient of nearly 0 has no direction
    return replace(TrainEngineConfig(path=str(folder), dtype="float32", optimizer=options), **settings)


def stepped(folder, media, ranks, **settings):
    os.environ["TANDEM_MEDIA"] = str(media)
    engine = SpreadEngine(config_of(folder, backend=f"fsdp:d{ranks}", **settings), 10)
    start = {name: tensor.clone() for name, tensor in engine.weights()}
    batch = media_batch(folder)
    metrics = [engine.train_batch(batch, weighted_nll) for _ in range(2)]
    # of two ranks one has no picture at all then
    one = store.medium(int(batch["media"].min()))
    few = [("What is @ this?", " cat", [one]), ("No picture:", " it is five", [])]
    metrics.append(engine.train_batch(media_batch(folder, few), weighted_nll))
    metrics.append(engine.train_batch(media_batch(folder, few[1:]), weighted_nll))
    return {
        "start": start,
        "weights": dict(engine.weights()),
        "logprobs": engine.forward(batch).logprobs,
        "loss": torch.tensor([one["loss"] for one in metrics]),
    }


def check_equal(found, wanted):
    """The weights relative to the step."""
    start = {name: tensor for name, tensor in found["start"].items() if name in found["weights"]}
    moved = torch.cat([(wanted["weights"][name] - start[name]).flatten() for name in start])
    apart = torch.cat([(wanted["weights"][name] - found["weights"][name]).flatten() for name in start])
    assert moved.norm() > 0.1 and apart.norm() <= 1e-2 * moved.norm()
    torch.testing.assert_close(found["loss"], wanted["loss"], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found["logprobs"], wanted["logprobs"], atol=2e-3, rtol=1e-3)
    assert found["weights"].keys() == wanted["weights"].keys()


@pytest.mark.parametrize("freeze", [(), ("vision",), ("vision", "connector")])
def test_a_step_is_the_same_split_and_on_two_ranks(tmp_path, freeze):
    folder, media = tiny_idefics3(tmp_path), tmp_path / "media"
    whole, on_two = alone_and_on_two(_of, folder, media, freeze, out=tmp_path)
    split = stepped(folder, media, 1, freeze=freeze, max_tokens_per_micro_batch=60)
    for found in (split, *on_two):
        check_equal(found, whole)
    towers = [name for name in whole["weights"] if "vision_model" in name]
    assert bool(towers) == ("vision" not in freeze)


def _of(folder, media, freeze, ranks):
    return stepped(folder, media, ranks, freeze=freeze)


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "idefics3"])
def test_other_families_step_the_same_split_and_on_two_ranks_and_are_saved_whole(tmp_path, kind):
    folder = tiny_media_model(tmp_path, kind)
    whole, on_two = alone_and_on_two(_of, folder, tmp_path / "media", (), out=tmp_path)
    split = stepped(folder, tmp_path / "media", 1, max_tokens_per_micro_batch=60)
    for found in (split, *on_two):
        check_equal(found, whole)
    engine = SpreadEngine(config_of(folder), 10)
    engine.save(tmp_path / "saved")
    save_tokenizer(load_tokenizer(folder), tmp_path / "saved")
    again, batch = SpreadEngine(config_of(tmp_path / "saved"), 10), media_batch(folder)
    assert torch.equal(again.forward(batch).logprobs, engine.forward(batch).logprobs)
    theirs = dict(AutoModelForMultimodalLM.from_pretrained(tmp_path / "saved").named_parameters())
    for name, tensor in engine.model.model.named_parameters():
        assert torch.equal(tensor, theirs[name]), name


def test_a_saved_folder_opens_in_transformers_with_its_frozen_tower(tmp_path):
    folder, saved = tiny_idefics3(tmp_path), tmp_path / "saved"
    engine = SpreadEngine(config_of(folder, freeze=("vision",)), 10)
    batch = media_batch(folder)
    engine.train_batch(batch, weighted_nll)
    engine.save(saved)
    save_tokenizer(load_tokenizer(folder), saved)

    theirs = AutoModelForImageTextToText.from_pretrained(saved)
    assert type(AutoProcessor.from_pretrained(saved)).__name__ == "Idefics3Processor"
    whole = {name.removeprefix("model."): tensor for name, tensor in engine.model.named_parameters()}
    for name, tensor in theirs.named_parameters():
        assert torch.equal(tensor, whole[name]), name
    again = SpreadEngine(config_of(saved), 10)
    assert torch.equal(again.forward(batch).logprobs, engine.forward(batch).logprobs)
    assert load_tokenizer(saved).media.count(picture(0)) == load_tokenizer(folder).media.count(picture(0))


@pytest.mark.parametrize("make", [tiny_idefics3, tiny_qwen_audio])
def test_a_frozen_tower_before_a_trained_connector_computes_each_medium_once(tmp_path, make):
    folder = make(tmp_path)
    tower = next(iter(load_tokenizer(folder).media.towers))
    engine, other = (SpreadEngine(config_of(folder, freeze=freeze), 10) for freeze in ((tower,), ()))
    batch = media_batch(folder)
    torch.testing.assert_close(engine.forward(batch).logprobs, other.forward(batch).logprobs, atol=1e-5, rtol=1e-5)
    before = {name: tensor.clone() for name, tensor in engine.weights()}
    for _ in range(2):
        engine.train_batch(batch, weighted_nll)
    assert engine.model.media.computed == 2
    moved = {name for name, tensor in engine.weights() if not torch.equal(tensor, before[name])}
    assert {name for name in before if name.startswith(engine.model.media.family.connector)} <= moved


def test_a_frozen_tower_has_no_masters_and_computes_each_picture_once(tmp_path):
    folder = tiny_idefics3(tmp_path)
    engine = SpreadEngine(config_of(folder, freeze=("vision", "connector")), 10)
    batch = media_batch(folder)
    for _ in range(3):
        engine.forward(batch)
        engine.train_batch(batch, weighted_nll)
    assert engine.model.media.computed == 2
    assert not any("vision" in name or "connector" in name for name in engine.holder.masters)
    assert not any("vision" in name or "connector" in name for name, _ in engine.weights())
    before = engine.forward(batch).logprobs
    with engine.using([(name, tensor.clone()) for name, tensor in engine.weights()]):
        assert torch.equal(engine.forward(batch).logprobs, before)

    other = SpreadEngine(config_of(folder, freeze=("vision", "connector")), 10)
    other.load_state_dict(engine.state_dict())
    assert torch.equal(other.forward(batch).logprobs, before)


@pytest.mark.parametrize("make", [tiny_qwen_vl, tiny_qwen_audio])
def test_adapters_of_a_folder_with_older_names_are_merged_from_its_files(tmp_path, make):
    folder, saved = make(tmp_path), tmp_path / "saved"
    engine = SpreadEngine(config_of(folder, lora=LoRAConfig(rank=2)), 10)
    engine.train_batch(media_batch(folder), weighted_nll)
    engine.save(saved)
    wanted = load_file(saved / "model.safetensors")
    write = engine.late_writer(engine.state_dict())
    assert write is not None, "files are read under the names of the model"
    write(tmp_path / "late")
    merged, late = MergedWeights(saved / "adapter"), load_file(tmp_path / "late/model.safetensors")
    assert merged.keys() == late.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(late[name], tensor) and torch.equal(merged[name], tensor), name


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers by an old name
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sees", [False, True], ids=["language model", "towers too"])
def test_adapters_are_trained_where_they_are_named_and_open_in_peft(tmp_path, family, sees):
    folder, saved = tiny_media_model(tmp_path, family), tmp_path / "saved"
    facts = load_tokenizer(folder).media
    lora = LoRAConfig(rank=2, alpha=8.0, towers=tuple(facts.towers) if sees else ())
    engine = SpreadEngine(config_of(folder, lora=lora), 10)
    batch = media_batch(folder)
    before = engine.forward(batch).logprobs
    engine.train_batch(batch, weighted_nll)
    wanted = engine.forward(batch).logprobs
    inside = [name.removeprefix("model.").startswith(facts.text_prefix + "layers.") for name in engine.holder.masters]
    assert any(inside) and all(inside) != sees and (wanted - before).abs().max() > 1e-3
    resident = Resident("actor", engine.config, trained=True)
    found = footprint(resident, read_shape(str(folder)), hardware("cpu"))
    assert found.masters == sum(master.numel() for master in engine.holder.masters.values())
    engine.save(saved)
    save_tokenizer(load_tokenizer(folder), saved)

    merged = SpreadEngine(config_of(saved), 10)
    torch.testing.assert_close(merged.forward(batch).logprobs, wanted, atol=1e-5, rtol=1e-5)
    base = AutoModelForMultimodalLM.from_pretrained(folder)
    beside = PeftModel.from_pretrained(base, saved / "adapter").merge_and_unload()
    for (name, one), other in zip(beside.named_parameters(), merged.model.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6, msg=name)
    with engine.adapter.set_aside():
        torch.testing.assert_close(engine.forward(batch).logprobs, before, atol=1e-5, rtol=1e-5)


def test_adapters_of_towers_step_the_same_on_two_ranks(tmp_path):
    folder = tiny_idefics3(tmp_path)
    whole, on_two = alone_and_on_two(_adapted, folder, tmp_path / "media", out=tmp_path)
    for found in on_two:
        check_equal(found, whole)


def _adapted(folder, media, ranks):
    torch.manual_seed(0)  # adapters begin with numbers that follow from it
    return stepped(folder, media, ranks, lora=LoRAConfig(rank=2, alpha=8.0, towers=("vision", "connector")))


@pytest.mark.parametrize("freeze", [(), ("vision",)])
def test_the_memory_of_towers_is_counted_as_it_is_held(tmp_path, freeze):
    config = config_of(tiny_idefics3(tmp_path), dtype="bfloat16", freeze=freeze)
    engine = SpreadEngine(config, 10)
    resident = Resident("actor", config, trained=True)
    found = footprint(resident, read_shape(config.path), hardware("cpu"))
    assert found.weight_bytes + found.rounded_bytes == engine.num_bytes()["parameters"]
    assert found.masters == sum(master.numel() for master in engine.holder.masters.values())


def test_a_value_head_reads_states_that_have_seen_the_picture(tmp_path):
    folder = tiny_idefics3(tmp_path)
    engine = SpreadEngine(config_of(folder), 10, head="both")
    with torch.no_grad():
        engine.model.value.weight.normal_()
    prompts = [("What is @ this?", " cat", [picture(seed)]) for seed in (0, 1)]
    first, other = engine.forward(media_batch(folder, prompts)).scores.chunk(2)
    assert (first - other).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("settings", "head", "words"),
    [
        ({"freeze": ("eyes",)}, "lm", "freeze has 'eyes', .*has the parts vision, connector"),
        ({"lora": LoRAConfig(rank=2, towers=("ears",))}, "lm", "lora.towers has 'ears', .*has the parts vision, connector"),
        ({"backend": "fsdp:d1t2"}, "lm", "does not divide its towers: use fsdp:d2"),
    ],
)
def test_what_a_media_model_does_not_do_is_refused(tmp_path, settings, head, words):
    folder = tiny_idefics3(tmp_path)
    config = config_of(folder, **settings)
    layout = parse_layout(config.backend, "actor.backend")
    with pytest.raises(ConfigError, match=words):
        check_train_engine(config, folder, layout, torch.device("cpu"), torch.float32, head, "actor.backend")


def test_freezing_a_part_of_a_text_model_is_refused(tmp_path):
    config = config_of(tiny_model_folder(tmp_path), freeze=("vision",))
    with pytest.raises(ConfigError, match=r"actor\.freeze has 'vision', and .* reads text alone"):
        SpreadEngine(config, 1)
