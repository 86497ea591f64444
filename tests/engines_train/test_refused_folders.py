"""Indices that name files elsewhere, and layouts that are refused under the key where they were written."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.train_engine import CriticConfig, key_of
from tandem.engines.train.named_weights import read_weights
from tandem.engines.train.spread import form_ranks
from tandem.models.context_parallel import refuse_uneven_heads

SHAPES = {"w": torch.Size([2])}


@pytest.fixture
def folder(tmp_path):
    inside = tmp_path / "model"
    inside.mkdir()
    for place in (inside, tmp_path):
        save_file({"w": torch.ones(2)}, place / "part.safetensors")
    return inside


def index(folder, value):
    text = value if isinstance(value, str) else json.dumps(value)
    (folder / "model.safetensors.index.json").write_text(text)


@pytest.mark.parametrize("name", ["../part.safetensors", "{outside}/part.safetensors", "..", "", "config.json", 3, None])
def test_an_index_names_only_files_of_its_own_folder(folder, name):
    name = name.format(outside=folder.parent) if isinstance(name, str) else name
    index(folder, {"weight_map": {"w": name}})
    with pytest.raises(ConfigError, match="which is not a file in that folder"):
        list(read_weights(folder, SHAPES))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": ["w"]}', "\x00"])
def test_an_index_that_is_none_is_named(folder, text):
    index(folder, text)
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json is (damaged|empty)"):
        list(read_weights(folder, SHAPES))


def test_an_index_of_files_that_are_there_is_read_and_a_missing_file_is_named(folder):
    index(folder, {"weight_map": {"w": "part.safetensors"}})
    assert [name for name, _ in read_weights(folder, SHAPES)] == ["w"]
    index(folder, {"weight_map": {"w": "gone.safetensors"}})
    with pytest.raises(ConfigError, match=r"gone\.safetensors is missing, and the index in that folder names it"):
        list(read_weights(folder, SHAPES))


def test_a_layout_is_refused_under_the_key_where_it_was_written():
    config = TrainConfig(critic=CriticConfig(backend="fsdp:d2"))
    assert key_of(config, "critic", "backend") == "critic.backend"
    assert key_of(config, "reference", "backend") == "actor.backend"  # it follows the actor
    with pytest.raises(ConfigError, match=r"^critic\.backend is 'fsdp:d2'"):
        form_ranks("fsdp:d2", None, torch.device("cpu"), "critic.backend")
    with pytest.raises(ConfigError, match=r"^reference\.backend with t3 divides"):
        refuse_uneven_heads(4, 2, 3, "reference.backend")
