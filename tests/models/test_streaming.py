"""Models that are made without memory and filled in pieces are those that transformers reads."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.config.errors import ConfigError
from tandem.models.load import load_causal_lm, load_scalar_model, open_unfilled, tensors_of
from tests.tiny import KINDS, tiny_model_folder

CPU = torch.device("cpu")


def opened(folder, head="lm"):
    return open_unfilled(folder, CPU, head)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", ["lm", "scalar", "both"])
def test_a_model_that_is_filled_in_pieces_is_the_one_that_is_read_as_a_whole(kind, head, tmp_path):
    folder = tiny_model_folder(tmp_path, kind)
    unfilled = opened(folder, head)
    assert all(parameter.is_meta for parameter in unfilled.model.parameters())
    for layer in unfilled.model.model.model.layers:
        unfilled.fill(layer, None)
    assert unfilled.model.model.get_input_embeddings().weight.is_meta
    unfilled.fill(unfilled.model, None)
    whole = load_scalar_model(folder) if head == "scalar" else load_causal_lm(folder, value_head=head == "both")
    for parts in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(unfilled.model, parts)()), dict(getattr(whole, parts)())
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert unfilled.model.training == whole.training
    assert unfilled.model.config.to_diff_dict() == whole.config.to_diff_dict()
    if head != "scalar":
        assert unfilled.model.model.generation_config.to_diff_dict() == whole.model.generation_config.to_diff_dict()


def test_a_classifier_keeps_its_head_and_a_language_model_begins_with_none(tmp_path):
    folder = tiny_model_folder(tmp_path, "qwen3")
    whole = load_scalar_model(folder)
    torch.nn.init.normal_(whole.model.score.weight)
    whole.model.save_pretrained(tmp_path / "judge")
    unfilled = opened(tmp_path / "judge", "scalar")
    unfilled.fill(unfilled.model, None)
    assert torch.equal(unfilled.model.model.score.weight, whole.model.score.weight)


def test_a_folder_in_several_files_is_read_and_other_names_are_left_to_transformers(tmp_path):
    folder = tiny_model_folder(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    names = list(tensors)
    (folder / "model.safetensors").unlink()
    for number, part in enumerate((names[:5], names[5:])):
        save_file({name: tensors[name] for name in part}, folder / f"{number}.safetensors")
    weight_map = {name: f"{int(i >= 5)}.safetensors" for i, name in enumerate(names)}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    unfilled = opened(folder)
    unfilled.fill(unfilled.model, None)
    assert all(torch.equal(parameter, tensors[name[6:]]) for name, parameter in unfilled.model.named_parameters())

    save_file({f"transformer.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    index.unlink()
    assert opened(folder) is None
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "../elsewhere.safetensors")}))
    with pytest.raises(ConfigError, match="not a file in that folder"):
        tensors_of(folder)
    for wrong in ("{", "[]", "{}"):
        index.write_text(wrong)
        with pytest.raises(ConfigError, match="is damaged"):
            tensors_of(folder)
    index.unlink()
    (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{broken}")
    with pytest.raises(ConfigError, match="cannot be read"):
        tensors_of(folder)
