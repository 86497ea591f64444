"""Versions on a disk: whole, openable by anybody, few, and not written again where nothing changed."""

import contextlib
import fcntl
import json
import os
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.api.failures import WeightUpdateFailed
from tandem.api.weights import tensor_digest
from tandem.weights.disk import DiskChannel
from tests.tiny import tiny_model, tiny_model_folder


def tensors(seed=0, count=6, rows=64):
    generator = torch.Generator().manual_seed(seed)
    return {f"layers.{i}.weight": torch.randn(rows, 16, generator=generator) for i in range(count)}


def on_disk(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}
    return found


@pytest.fixture
def channel(tmp_path):
    channel = DiskChannel(tmp_path / "weights", shard_bytes=8192)  # two of the tensors above in a file
    yield channel
    channel.close()
    assert not (tmp_path / "weights").exists()


def test_a_transposed_tensor_is_written_as_what_it_is(channel):
    sent = torch.randn(5, 9).t()
    delivery = channel.put([("w", sent)], torch.float32)
    assert torch.equal(dict(delivery.source.tensors())["w"], sent)
    assert delivery.digests["w"] == tensor_digest(sent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_version_is_a_model_folder_that_transformers_opens(tmp_path, dtype):
    base = tiny_model_folder(tmp_path, "smollm")
    model = tiny_model("smollm", seed=5)
    channel = DiskChannel(tmp_path / "weights", base, shard_bytes=8192)
    named = [(name, tensor) for name, tensor in model.state_dict().items() if name != "lm_head.weight"]
    folder = channel.put(named, dtype).source.folder

    opened = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert opened.dtype == dtype and json.loads((folder / "config.json").read_text())["dtype"] == str(dtype)[6:]
    assert all(torch.equal(tensor, model.state_dict()[name].to(dtype)) for name, tensor in opened.state_dict().items())
    assert torch.equal(opened.lm_head.weight, opened.model.embed_tokens.weight)  # tied, and given once
    text = "What is 3 + 4?"
    ours, theirs = (AutoTokenizer.from_pretrained(path) for path in (base, folder))
    assert ours.encode(text) == theirs.encode(text) and ours.chat_template == theirs.chat_template
    assert len(list(folder.glob("*.safetensors"))) > 1
    channel.close()
    assert not (tmp_path / "weights").exists()


def test_files_in_which_nothing_changed_are_linked_and_the_others_written_again(channel):
    first = tensors()
    before = channel.put(first.items(), torch.float32)
    changed = first | {"layers.3.weight": first["layers.3.weight"] + 1}  # the second tensor of the second file
    after = channel.put(changed.items(), torch.float32)

    for number, same in ((1, True), (2, False), (3, True)):
        name = f"model-{number:05d}.safetensors"
        files = [delivery.source.folder / name for delivery in (before, after)]
        assert os.path.samefile(*files) == same
    assert channel.written_bytes == 2 * first["layers.0.weight"].nbytes
    assert on_disk(before.source.folder).keys() == on_disk(after.source.folder).keys() == first.keys()
    for delivery, expected in ((before, first), (after, changed)):
        found = on_disk(delivery.source.folder)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert delivery.digests == {name: tensor_digest(tensor) for name, tensor in expected.items()}
        assert [name for name, _ in delivery.source.tensors()] and delivery.num_bytes == sum(
            tensor.nbytes for tensor in expected.values()
        )


def test_a_version_equal_to_the_one_before_is_not_written_at_all(channel):
    channel.put({name: tensor + 1 for name, tensor in tensors().items()}.items(), torch.float32)
    channel.put(tensors().items(), torch.float32)
    assert channel.written_bytes > 0
    channel.put(tensors().items(), torch.float32)
    assert channel.written_bytes == 0


@pytest.mark.parametrize("others", [{}, {"layers.9.weight": torch.ones(3, 3)}])
def test_a_stream_that_is_shorter_or_longer_than_before_is_still_whole(channel, others):
    first = tensors()
    channel.put(first.items(), torch.float32)
    second = dict(list(first.items())[: 6 if others else 3]) | others
    found = on_disk(channel.put(second.items(), torch.float32).source.folder)
    assert found.keys() == second.keys() and all(torch.equal(found[name], tensor) for name, tensor in second.items())


def test_a_tensor_of_the_same_bytes_and_another_shape_is_not_the_one_before(channel):
    channel.put([("w", torch.arange(6.0).reshape(2, 3))], torch.float32)
    after = channel.put([("w", torch.arange(6.0).reshape(3, 2))], torch.float32)
    assert on_disk(after.source.folder)["w"].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_more_names_than_fit_into_one_header_lie_in_several_files(channel):
    sent = {f"layers.{n}.{'x' * 200}": torch.tensor(float(n)) for n in range(300)}
    found = on_disk(channel.put(sent.items(), torch.float32).source.folder)
    assert found == sent


def test_the_index_of_a_version_names_its_own_files_and_not_those_of_the_base(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    (base / "model.safetensors.index.json").write_text('{"weight_map": {"old": "model-1-of-9.safetensors"}}')
    channel = DiskChannel(tmp_path / "weights", base)
    folder = channel.put(tensors().items(), torch.float32).source.folder
    assert json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].keys() == tensors().keys()
    channel.close()


def test_two_versions_are_kept_and_a_withdrawn_one_does_not_push_out_what_is_served(channel):
    folders = [channel.put(tensors(seed).items(), torch.float32).source.folder for seed in range(3)]
    assert [folder.is_dir() for folder in folders] == [False, True, True]
    given_up = channel.put(tensors(9).items(), torch.float32).source.folder
    channel.withdraw()
    last = channel.put(tensors(10).items(), torch.float32).source.folder
    assert not given_up.exists() and folders[2].is_dir() and last.is_dir()
    assert sorted(p.name for p in channel.folder.iterdir() if not p.name.startswith(".")) == [folders[2].name, last.name]


def test_a_full_disk_leaves_the_version_before_and_nothing_else_until_there_is_room(channel):
    before = channel.put(tensors(0).items(), torch.float32)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, hard))  # the header fits, and a part of the data
    try:
        with pytest.raises(WeightUpdateFailed, match=r"could not be written to .*update_2: .*File too large.* bytes"):
            channel.put(tensors(1).items(), torch.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in channel.folder.iterdir() if path.name != ".lock"] == [before.source.folder.name]
    assert torch.equal(on_disk(before.source.folder)["layers.0.weight"], tensors(0)["layers.0.weight"])
    after = channel.put(tensors(1).items(), torch.float32)
    assert torch.equal(on_disk(after.source.folder)["layers.0.weight"], tensors(1)["layers.0.weight"])


def test_a_stream_that_breaks_off_leaves_nothing(channel):
    def broken():
        yield from list(tensors().items())[:3]
        raise RuntimeError("the trainer ran out of memory")

    with pytest.raises(RuntimeError, match="ran out of memory"):
        channel.put(broken(), torch.float32)
    with pytest.raises(ValueError, match="came twice"):
        channel.put([("a", torch.zeros(2)), ("a", torch.zeros(2))], torch.float32)
    assert [path.name for path in channel.folder.iterdir()] == [".lock"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightUpdateFailed, match="file/weights cannot hold weights"):
        DiskChannel(tmp_path / "file" / "weights").put(tensors().items(), torch.float32)


@contextlib.contextmanager
def held(folder):
    """While another run looks after its folders there."""
    with (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_the_end_of_one_run_waits_for_another_that_is_just_making_its_folder(tmp_path):
    parent = tmp_path / "weights"
    channel = DiskChannel(parent)
    channel.put(tensors().items(), torch.float32)
    with ThreadPoolExecutor(1) as pool:
        with held(parent):
            closing = pool.submit(channel.close)
            with pytest.raises(TimeoutError):
                closing.result(0.3)
            (parent / "run-of-another").mkdir()
        closing.result(60)
    assert [path.name for path in parent.iterdir() if path.name != ".lock"] == ["run-of-another"]


def test_a_run_that_waited_while_the_last_one_removed_the_folder_makes_it_anew(tmp_path):
    parent = tmp_path / "weights"
    parent.mkdir()
    channel = DiskChannel(parent)
    with ThreadPoolExecutor(1) as pool:
        with held(parent):
            putting = pool.submit(channel.put, tensors().items(), torch.float32)
            with pytest.raises(TimeoutError):
                putting.result(0.3)
            (parent / ".lock").unlink()
            parent.rmdir()
        assert on_disk(putting.result(60).source.folder).keys() == tensors().keys()
    channel.close()
    assert not parent.exists()


def test_a_folder_that_somebody_chose_stays(tmp_path):
    channel = DiskChannel(tmp_path / "chosen", keep_parent=True)
    channel.put(tensors().items(), torch.float32)
    channel.close()
    assert [path.name for path in (tmp_path / "chosen").iterdir()] == [".lock"]


KILLED = """
import os, signal, sys, torch
from pathlib import Path
from tandem.weights.disk import DiskChannel

def stream():
    yield "a", torch.zeros(64, 64)
    os.kill(os.getpid(), signal.SIGKILL)

channel = DiskChannel(Path(sys.argv[1]))
channel.put([("a", torch.ones(64, 64))], torch.float32)
channel.put(stream(), torch.float32)
"""


def test_what_a_killed_run_left_is_removed_by_the_next_but_not_what_a_live_one_has(tmp_path, channel, zygote):
    parent = tmp_path / "weights"
    mine = channel.put(tensors().items(), torch.float32).source.folder
    killed = zygote.run(KILLED, parent, log=tmp_path / "said")
    assert killed.returncode == -signal.SIGKILL
    (left,) = [path for path in parent.glob("run-*") if path != channel.folder]
    assert {path.name for path in left.iterdir()} == {".lock", "update_1", ".update_2.partial"}

    other = DiskChannel(parent)
    theirs = other.put(tensors(1).items(), torch.float32).source.folder
    assert not left.exists() and mine.is_dir() and theirs.is_dir()
    other.close()
    assert mine.is_dir() and not theirs.exists()
    assert set(Path(parent).iterdir()) == {channel.folder, parent / ".lock"}
