"""What is saved comes back to the bit; what is not as it was saved is named; nothing in a checkpoint can run code."""

import json
import os
import pickle
import struct

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from tandem.api.team import Team
from tandem.state.checkpoint import (
    FILE,
    InvalidCheckpoint,
    NothingToResume,
    newest_valid,
    read_manifest,
    verify,
    write_manifest,
)
from tandem.state.tree import MARK, PLAIN_FILE, StateDamaged, load_part, read_tree, write_tree

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text().filter(lambda t: t != MARK), inner, max_size=3),
    max_leaves=10,
)


@given(tree=st.dictionaries(st.text(max_size=5).filter(lambda t: t != MARK), PLAIN, max_size=3))
def test_plain_data_comes_back_as_it_was(tmp_path_factory, tree):
    folder = tmp_path_factory.mktemp("tree")
    write_tree(Team(), folder, tree)
    assert read_tree(folder) == tree


def test_tensors_come_back_to_the_bit_views_and_odd_types_too(tmp_path, monkeypatch):
    monkeypatch.setattr("tandem.state.tree.FILE_BYTES", 200)
    whole = torch.randn(40)
    tree = {
        "a": {"x": whole, "view": whole[3:7], "again": whole, "scalar": torch.tensor(7.0)},
        "b": [torch.arange(5), {"c": torch.tensor([float("nan"), float("inf"), -0.0])}],
        "bytes": torch.get_rng_state(),
        "rounded": torch.randn(3).bfloat16(),
        "number": numpy.float32(0.5),
        "empty": torch.zeros(0, 3),
        "strides": {"row": torch.rand(4, 4)[:1, 0], "turned": torch.rand(1, 5).t(), "column": torch.rand(3, 4)[:, 3:]},
    }
    write_tree(Team(), tmp_path / "s", tree)
    found = read_tree(tmp_path / "s")

    assert len(list((tmp_path / "s").glob("tensors-*"))) > 1  # more than one file
    for part in ("a", "strides"):
        for name in tree[part]:
            assert torch.equal(found[part][name], tree[part][name]), name
    assert torch.equal(found["b"][0], torch.arange(5))
    assert found["b"][1]["c"].view(torch.int32).tolist() == tree["b"][1]["c"].view(torch.int32).tolist()
    assert torch.equal(found["bytes"], tree["bytes"]) and found["rounded"].dtype == torch.bfloat16
    assert found["number"] == 0.5 and found["empty"].shape == (0, 3)


def test_a_file_of_tensors_has_the_bytes_that_the_library_writes(tmp_path):
    tensors = {"ä": torch.arange(5), "b": torch.randn(3, 2), "c": torch.ones(3, dtype=torch.bool), "d": torch.ones(2).half()}
    write_tree(Team(), tmp_path, tensors)
    assert (tmp_path / "tensors-00001.safetensors").read_bytes() == save(tensors)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"a": [object()]}, "object at a/0"),
        ({"a": {1: 2}}, "not text"),
        ({"a": {MARK: 1}}, "reserved"),
        ({"a": {1, 2}}, "set"),
    ],
)
def test_what_is_neither_plain_nor_a_tensor_is_refused_by_its_place(tmp_path, tree, words):
    with pytest.raises(TypeError, match=words):
        write_tree(Team(), tmp_path, tree)


def test_a_part_without_a_state_or_with_a_strange_one_is_named(tmp_path):
    class Part:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            self.value = int(state["value"])

    with pytest.raises(StateDamaged, match="has no state of 'loader'; it has actor"):
        load_part("loader", Part(), {"actor": {}}, "step_3")
    for state in ({}, {"value": "x"}, {"value": None}, []):
        with pytest.raises(StateDamaged, match="step_3: the state of 'loader' cannot be read"):
            load_part("loader", Part(), {"loader": state}, "step_3")


# ---------------------------------------------------------------------- checkpoints that are not as they were saved


def checkpoint(root, step, run="exp/trial/1"):
    folder = root / f"step_{step}"
    (folder / "state").mkdir(parents=True)
    save_file({"w": torch.full((64,), float(step))}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    write_tree(Team(), folder / "state", {"a": {"x": torch.full((8,), float(step)), "step": step}})
    write_manifest(folder, run, step, {"eval/accuracy": 0.5, "loss": float("nan")})
    return folder


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def flip(path, place=-1):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def body(folder, **changes):
    """Changes the manifest and makes its digest right again, as somebody who means harm would."""
    from tandem.state.checkpoint import digest_of  # noqa: PLC0415

    found = json.loads((folder / FILE).read_text())
    del found["digest"]
    found |= changes
    (folder / FILE).write_text(json.dumps(found | {"digest": digest_of(found)}))


DAMAGE = {
    "a truncated model": (lambda f: truncate(f / "model.safetensors"), "is torn: model.safetensors has"),
    "a truncated state": (lambda f: truncate(f / "state/tensors-00001.safetensors"), "is torn: state/tensors"),
    "a flipped bit in the model": (lambda f: flip(f / "model.safetensors"), "is damaged: model.safetensors"),
    "a flipped bit in the state": (lambda f: flip(f / "state/tensors-00001.safetensors"), "is damaged: state/tensors"),
    "a flipped bit in the plain state": (lambda f: flip(f / "state" / PLAIN_FILE, 3), "is damaged: state/state.json"),
    "a missing model": (lambda f: (f / "model.safetensors").unlink(), "lacks model.safetensors"),
    "a missing state file": (lambda f: (f / "state" / PLAIN_FILE).unlink(), "lacks state/state.json"),
    "an empty file": (lambda f: os.truncate(f / "config.json", 0), "is torn: config.json has 0 of"),
    "an empty manifest": (lambda f: os.truncate(f / FILE, 0), "cannot be read"),
    "a torn manifest": (lambda f: truncate(f / FILE) or truncate(f / FILE), "cannot be read"),
    "a manifest with a flipped digit": (
        lambda f: (f / FILE).write_text((f / FILE).read_text().replace('"step": 5', '"step": 4')),
        "was changed after it was written",
    ),
    "no manifest": (lambda f: (f / FILE).unlink(), "has a model and no state"),
    "an empty folder": (lambda f: [path.unlink() for path in f.rglob("*") if path.is_file()], f"has no {FILE}"),
    "another step's files": (lambda f: body(f, step=4), "is of step 4, and its name says 5"),
    "another run's files": (lambda f: body(f, run="exp/other/2"), "is foreign: made by the run exp/other/2"),
    "an older format": (lambda f: body(f, format=0), "has format 0, and this version reads format 1"),
    "a newer format": (lambda f: body(f, format=2), "has format 2"),
    "a path upwards": (lambda f: body(f, files={"../step_4/model.safetensors": [1, ""]}), "outside of itself"),
    "an absolute path": (lambda f: body(f, files={"/etc/passwd": [1, ""]}), "outside of itself"),
    "a path of another system": (lambda f: body(f, files={"..\\x": [1, ""]}), "outside of itself"),
    "files that are no table": (lambda f: body(f, files=["model.safetensors"]), "cannot be read"),
    "sizes that are no numbers": (lambda f: body(f, files={"config.json": ["x", "y"]}), "cannot be read"),
    "a manifest that is a list": (lambda f: (f / FILE).write_text("[]"), "is not a manifest"),
    "a manifest nested without end": (lambda f: (f / FILE).write_text("[" * 200_000), "cannot be read"),
    "a file that nobody announced": (lambda f: save_file({}, f / "state/tensors-9.safetensors"), "does not name"),
    "a link in place of a file": (
        lambda f: (f / "config.json").unlink() or (f / "config.json").symlink_to("/etc/hostname"),
        "lacks config.json",
    ),
    "a folder in place of a file": (
        lambda f: (f / "config.json").unlink() or (f / "config.json").mkdir(),
        "lacks config.json",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path, damage):
    checkpoint(tmp_path, 4), checkpoint(tmp_path, 5)
    harm, words = DAMAGE[damage]
    assert newest_valid(tmp_path, "exp/trial/1").step == 5
    harm(tmp_path / "step_5")

    found = newest_valid(tmp_path, "exp/trial/1")
    assert found.step == 4
    ((path, reason),) = found.skipped
    assert path.name == "step_5" and words in reason


def test_without_a_whole_checkpoint_nothing_is_begun_silently(tmp_path):
    for step in (4, 5):
        flip(checkpoint(tmp_path, step) / "model.safetensors")
    with pytest.raises(NothingToResume, match=r"step_5 is damaged.*step_4 is damaged.*Nothing was changed"):
        newest_valid(tmp_path, "exp/trial/1")
    assert newest_valid(tmp_path / "nowhere", "exp/trial/1") is None


def test_what_was_skipped_makes_room_for_its_step_and_is_kept(tmp_path):
    checkpoint(tmp_path, 4), checkpoint(tmp_path, 5), (tmp_path / "step_5.skipped").mkdir()
    flip(tmp_path / "step_5/model.safetensors")
    newest_valid(tmp_path, None).set_skipped_aside()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_4", "step_5.skipped", "step_5.skipped.1"]


def test_a_checkpoint_of_whatever_run_is_whole_where_nobody_knows_the_run(tmp_path):
    assert verify(checkpoint(tmp_path, 4)).run == "exp/trial/1"
    assert read_manifest(tmp_path / "step_4").metrics == {"eval/accuracy": 0.5}  # what is not finite is left out


class Mine:
    def __reduce__(self):
        return (os.mkdir, ("it-ran",))


HOSTILE = {
    "a pickle as plain state": {PLAIN_FILE: pickle.dumps(Mine())},
    "a pickle as tensors": {PLAIN_FILE: b"{}", "tensors-00001.safetensors": pickle.dumps(Mine())},
    "a header that is longer than the file": {
        PLAIN_FILE: b"{}",
        "tensors-00001.safetensors": struct.pack("<Q", 2**60) + b"{}",
    },
    "a header of nothing but brackets": {
        PLAIN_FILE: b"{}",
        "tensors-00001.safetensors": struct.pack("<Q", 100_000) + b"[" * 100_000,
    },
    "offsets behind the end": {
        PLAIN_FILE: b"{}",
        "tensors-00001.safetensors": struct.pack("<Q", 62)
        + b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4000000000]}}'[:62],
    },
    "a tensor that is not there": {PLAIN_FILE: json.dumps({"a": {MARK: "b"}}).encode()},
    "a tensor with a strange name": {PLAIN_FILE: json.dumps({"a": {MARK: ["b"]}}).encode()},
    "brackets without end": {PLAIN_FILE: b"[" * 200_000},
    "no object": {PLAIN_FILE: b"3"},
    "not text": {PLAIN_FILE: b"\xff\xfe\x00"},
    "nothing": {},
}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_state_is_refused_and_runs_nothing(tmp_path, monkeypatch, hostile):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "state"
    folder.mkdir()
    for name, data in HOSTILE[hostile].items():
        (folder / name).write_bytes(data)
    with pytest.raises(StateDamaged):
        read_tree(folder)
    assert not (tmp_path / "it-ran").exists()


def test_names_of_files_are_checked_before_any_is_opened(tmp_path):
    folder = checkpoint(tmp_path, 5)
    body(folder, files={"model.safetensors": [1, ""], "a/../../x": [1, ""]})
    with pytest.raises(InvalidCheckpoint, match="outside of itself"):
        read_manifest(folder)
