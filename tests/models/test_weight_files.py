"""The files that hold a model's weights, and what a start says of a folder in which they are not whole."""

import json
import re
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tandem.api.weights import INDEX, SINGLE, FolderSource, stored_entries
from tandem.config.errors import ConfigError
from tandem.config.rollout import RolloutConfig
from tandem.engines.inference.check import check_inference_engine
from tandem.models.catalog import resolve
from tandem.models.load import load_causal_lm, load_scalar_model, tensors_of
from tandem.models.stored import stored_tensors
from tandem.models.tokenizer import check_vocabulary, load_tokenizer
from tests.tiny import tiny_model_folder

SHARDS = ("part-1.safetensors", "part-2.safetensors")


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """A model in two files, with an index."""
    folder = tiny_model_folder(tmp_path_factory.mktemp("clean"))
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    places = {name: SHARDS[number % 2] for number, name in enumerate(sorted(tensors))}
    for shard in SHARDS:
        save_file({name: tensors[name] for name in tensors if places[name] == shard}, folder / shard, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


@pytest.fixture
def folder(clean, tmp_path):
    return shutil.copytree(clean, tmp_path / "model")


def test_all_readers_read_the_files_of_the_index_and_no_others(folder):
    expected = {name: tensor for shard in SHARDS for name, tensor in load_file(folder / shard).items()}
    save_file({"layers.0.attention.wq.weight": torch.zeros(2, 2)}, folder / "consolidated.safetensors")
    save_file({name: tensor + 1 for name, tensor in expected.items()}, folder / SINGLE, {"format": "pt"})  # an old copy

    check_inference_engine(RolloutConfig(), resolve(folder), "cpu")
    load_causal_lm(folder, device="meta")
    model = load_causal_lm(folder).model
    model.save_pretrained(folder.parent / "saved")
    assert load_causal_lm(folder.parent / "saved")  # what was read says nothing about what is written
    for found in (
        model.state_dict(),
        dict(FolderSource(folder).tensors()),
        {n: t[:] for n, t in tensors_of(folder).items()},
    ):
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert stored_tensors(folder).keys() == expected.keys()


def lfs(path):
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")


def cut(path):
    path.write_bytes(path.read_bytes()[:-4])


def doubled(path):
    save_file(load_file(path.with_name(SHARDS[1])), path)


def renamed(path):
    tensors = load_file(path)
    tensors["other"] = tensors.pop(min(tensors))
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (Path.unlink, "is missing, and the index in that folder names it"),
        (lambda path: path.write_bytes(b""), "is empty: download it anew"),
        (cut, r"have [\d,]+ bytes, and by the file's own header they have [\d,]+: it is cut off"),
        (lambda path: path.write_bytes(b"<html>404</html>"), "the weights in .* cannot be read"),
        (lfs, "a pointer of git-lfs to it: run `git lfs pull`"),
        (doubled, "both hold"),
        (renamed, "says that part-1.safetensors holds .* does not"),
    ],
)
def test_a_file_that_is_not_whole_is_named(folder, harm, words):
    harm(folder / SHARDS[0])
    with pytest.raises(ConfigError, match=words) as refused:
        resolve(folder)
    assert str(folder / SHARDS[0]) in str(refused.value)


def test_a_missing_shard_beside_a_whole_model_may_mean_an_old_index(folder):
    (folder / SHARDS[0]).rename(folder / SINGLE)
    with pytest.raises(ConfigError, match=r"download it, or remove the index if model\.safetensors is the model"):
        resolve(folder)


def test_weights_of_other_names_alone_are_no_model(folder):
    (folder / INDEX).unlink()
    with pytest.raises(ConfigError, match=r"no weights.*not belong to the model by name: part-1\.safetensors, part-2"):
        resolve(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"intermediate_size": 128},
            r"down_proj.* \[32, 64\], expected \[32, 128\]|_proj\.weight must be .*128.*, got",
        ),
        ({"num_hidden_layers": 3}, "9 are missing, first 'model.layers.2|9 of 30 tensors are missing"),
    ],
)
def test_a_configuration_of_another_model_is_refused_from_the_headers(folder, change, words):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    for check in (
        lambda: load_causal_lm(folder, device="meta"),
        lambda: load_scalar_model(folder, device="meta"),
        lambda: check_inference_engine(RolloutConfig(), folder, "cpu"),
    ):
        with pytest.raises(ConfigError, match=words) as refused:
            check()
        assert str(folder) in str(refused.value)


def test_of_a_large_file_only_the_header_is_read(tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [1 << 28], "data_offsets": [0, 1 << 30]}}).encode()
    with (tmp_path / SINGLE).open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + (1 << 30))

    def bytes_read():
        return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])

    before = bytes_read()
    assert stored_entries(tmp_path)["w"].shape == (1 << 28,)
    assert bytes_read() - before < 1 << 20


# ---------------------------------------------------------------------- folders of other kinds


def test_an_adapter_alone_is_named_with_its_base(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "owner/base"}))
    with pytest.raises(ConfigError, match=r"holds an adapter .* of owner/base, and no model.*merge_and_unload"):
        resolve(tmp_path)


def test_the_folder_of_a_run_is_answered_with_its_newest_checkpoint(tmp_path):
    for step in (9, 10, 11):
        (tmp_path / f"checkpoints/step_{step}").mkdir(parents=True)
    for step in (9, 10):
        (tmp_path / f"checkpoints/step_{step}/config.json").write_text("{}")  # the third was not finished
    with pytest.raises(ConfigError, match=r"it is a run: give its newest checkpoint, .*/checkpoints/step_10$"):
        resolve(tmp_path)


# ---------------------------------------------------------------------- tokenizers


def with_tokens(folder, *tokens):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    return tokenizer


def test_a_token_without_an_embedding_is_refused_where_it_is_used(folder):
    with_tokens(folder, *(f"<|x{number}|>" for number in range(6))).save_pretrained(folder)  # 306 of 304
    tokenizer = load_tokenizer(folder)
    fine = {"tandem.where": "rows.jsonl:1", "messages": [{"role": "user", "content": "<|x3|>"}]}  # token 303
    check_vocabulary(tokenizer, folder, [fine])
    used = {"tandem.where": "rows.jsonl:2", "messages": [{"role": "user", "content": "<|x4|>"}]}
    words = (
        r"has 306 tokens, the model there 304 embeddings, and rows\.jsonl:2 uses '<\|x4\|>' .*resize_token_embeddings\(306\)"
    )
    with pytest.raises(ConfigError, match=words):
        check_vocabulary(tokenizer, folder, [fine, used])

    tokenizer.eos_token = "<|x5|>"
    tokenizer.save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"the begin, end or unknown token uses '<\|x5\|>'"):
        load_tokenizer(folder)


def test_a_vocabulary_of_another_model_is_refused(tmp_path):
    folder = tiny_model_folder(tmp_path, vocab_size=200)
    with pytest.raises(ConfigError, match=r"has 300 tokens, the model there 200 embeddings, and its vocabulary uses"):
        load_tokenizer(folder)


@pytest.mark.parametrize(("content", "words"), [(b"\x0a\x0e", "install sentencepiece"), (b"IQ== 0\n", "install tiktoken")])
def test_a_library_that_a_tokenizer_needs_is_named(folder, content, words):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"the tokenizer in {folder} is a tokenizer\.model .*pip {words}"):
        load_tokenizer(folder)


def test_a_tokenizer_that_is_not_there_yet_is_named(folder):
    lfs(folder / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not the file itself but a pointer of git-lfs"):
        load_tokenizer(folder)
