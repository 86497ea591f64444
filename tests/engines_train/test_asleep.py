"""Parts of an engine that sleep: their bytes are those that were counted before, and come back to the bit."""

import resource
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.api.failures import NotWritten, WeightsChanged
from tandem.config.train_engine import LoRAConfig, TrainEngineConfig, parse_layout
from tandem.engines.train.engine import SpreadEngine
from tandem.models.shape import Footprint, adapters_of, read_shape
from tandem.models.stored import CACHE_LINE
from tests.engines_train.steps import distance, random_batch, weighted_nll, weights_of
from tests.tiny import tiny_model_folder

PARTS = ("parameters", "optimizer")
ENGINES = {
    "trained in float32": ("float32", "lm", True, None),
    "trained in bfloat16, with masters": ("bfloat16", "lm", True, None),
    "frozen in float32": ("float32", "lm", False, None),
    "frozen in bfloat16": ("bfloat16", "lm", False, None),
    "a critic": ("float32", "scalar", True, None),
    "a frozen judge": ("bfloat16", "scalar", False, None),
    "adapters in float32": ("float32", "lm", True, 2),
    "adapters in bfloat16": ("bfloat16", "lm", True, 2),
    "two heads": ("float32", "both", True, None),
}


@pytest.fixture(scope="module", params=["llama", "smollm"])
def folder(request, tmp_path_factory):
    """With a head of its own, and with one that is tied to the embedding."""
    return tiny_model_folder(tmp_path_factory.mktemp("models"), request.param)


@pytest.fixture(scope="module")
def batch():
    return random_batch((3, 14, 2, 5, 9))


def engine_of(folder, dtype, head, trained, rank):
    config = TrainEngineConfig(path=str(folder), dtype=dtype, lora=LoRAConfig(rank=rank), max_tokens_per_micro_batch=16)
    return config, SpreadEngine(config, 3, head=head, trained=trained)


def loss_of(head):
    """A loss that every head has a gradient of."""

    def of_scores(outputs, view):
        return outputs.scores * view["loss_weights"].ne(0), {}

    def of_both(outputs, view):
        losses, metrics = weighted_nll(outputs, view)
        return losses + of_scores(outputs, view)[0], metrics

    return {"lm": weighted_nll, "scalar": of_scores, "both": of_both}[head]


@pytest.mark.parametrize("name", ENGINES)
def test_the_bytes_of_each_part_are_those_that_were_counted_before(folder, batch, name):
    dtype, head, trained, rank = ENGINES[name]
    config, engine = engine_of(folder, dtype, head, trained, rank)
    shape = read_shape(str(folder))
    counted = Footprint(
        shape=shape,
        head=head,
        dtype=dtype,
        layout=parse_layout("fsdp:d1"),
        trained=trained,
        adapters=adapters_of(config.lora, shape),
        frozen=not trained,
    )
    gradients = []

    def loss(outputs, view):
        gradients.append(engine.num_bytes()["gradients"])
        return loss_of(head)(outputs, view)

    if trained:
        engine.train_batch(batch, loss)
        assert max(gradients) == counted.gradient_bytes  # those of the first micro-batch, when the second one begins
    assert engine.num_bytes() == {
        "parameters": counted.weight_bytes + counted.rounded_bytes,
        "optimizer": counted.optimizer_bytes,
        "gradients": 0,
    }


@pytest.mark.parametrize(
    "name", ["trained in float32", "trained in bfloat16, with masters", "a critic", "adapters in bfloat16"]
)
def test_training_that_sleeps_between_steps_is_training_that_does_not(folder, batch, tmp_path, name):
    dtype, head, trained, rank = ENGINES[name]
    torch.manual_seed(1)
    _, awake = engine_of(folder, dtype, head, trained, rank)
    torch.manual_seed(1)
    _, sleepy = engine_of(folder, dtype, head, trained, rank)
    identity = [id(parameter) for parameter in sleepy.model.parameters()]
    for _ in range(3):
        sleepy.offload(PARTS, tmp_path)
        assert sleepy.num_bytes() == {"parameters": 0, "optimizer": 0, "gradients": 0}
        with pytest.raises(RuntimeError, match="are offloaded; call onload"):
            sleepy.forward(batch)
        sleepy.onload(PARTS)
        assert sleepy.train_batch(batch, loss_of(head)) == awake.train_batch(batch, loss_of(head))
    ours, theirs = weights_of(sleepy), weights_of(awake)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert [id(parameter) for parameter in sleepy.model.parameters()] == identity
    assert list(tmp_path.iterdir()) == []  # a file without a name: nothing stays of it


def copied(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "model")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frozen_model_writes_nothing_and_wakes_from_its_own_folder(folder, batch, tmp_path, dtype):
    _, engine = engine_of(folder, dtype, "lm", False, None)
    before, beside = engine.forward(batch).logprobs, [p.data_ptr() % CACHE_LINE for p in engine.model.parameters()]
    engine.offload(PARTS, tmp_path / "scratch")
    assert not (tmp_path / "scratch").exists()
    engine.onload(PARTS)
    assert torch.equal(engine.forward(batch).logprobs, before)
    assert [p.data_ptr() % CACHE_LINE for p in engine.model.parameters()] == beside, "kernels may round otherwise"


def change_a_byte(file):
    data = bytearray(file.read_bytes())
    data[-3] ^= 0x80
    file.write_bytes(data)


def cut_short(file):
    file.write_bytes(file.read_bytes()[:-100])


def remove(file):
    file.unlink()


@pytest.mark.parametrize("damage", [change_a_byte, cut_short, remove])
def test_a_folder_that_changed_while_its_model_slept_is_refused(folder, tmp_path, damage):
    model = copied(folder, tmp_path)
    _, engine = engine_of(model, "float32", "lm", False, None)
    engine.offload(PARTS, tmp_path / "scratch")
    damage(model / "model.safetensors")
    with pytest.raises(WeightsChanged, match=r"slept, and .*model\.safetensors"):
        engine.onload(PARTS)


def test_a_disk_that_is_full_is_named_and_the_engine_stays_whole(folder, batch, tmp_path):
    _, engine = engine_of(folder, "float32", "lm", True, None)
    engine.train_batch(batch, weighted_nll)
    before, limits = engine.num_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (before["optimizer"] // 2, limits[1]))  # python ignores the signal
    try:
        with pytest.raises(NotWritten, match=r"optimizer of .* cannot be offloaded to .*raise memory_limit_gib"):
            engine.offload(("optimizer",), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert engine.num_bytes() == before
    _, other = engine_of(folder, "float32", "lm", True, None)
    other.train_batch(batch, weighted_nll)
    assert engine.train_batch(batch, weighted_nll) == other.train_batch(batch, weighted_nll)


def test_what_sleeps_again_is_written_where_it_was(folder, batch, tmp_path):
    _, engine = engine_of(folder, "float32", "lm", True, None)
    engine.train_batch(batch, weighted_nll)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (sum(engine.num_bytes().values()), limits[1]))
    try:
        for _ in range(2):
            assert engine.offload(PARTS, tmp_path) == engine.onload(PARTS)
            engine.train_batch(batch, weighted_nll)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_weights_that_are_not_those_of_the_folder_are_written(folder, batch, tmp_path):
    _, engine = engine_of(folder, "float32", "lm", True, None)
    own = engine.forward(batch).logprobs
    engine.load_weights((name, -tensor) for name, tensor in list(weights_of(engine).items()))
    before = engine.forward(batch).logprobs
    assert not torch.equal(before, own)
    engine.offload(PARTS, tmp_path / "scratch")
    engine.onload(PARTS)
    assert torch.equal(engine.forward(batch).logprobs, before)


@pytest.mark.parametrize("change", ["none", "load_weights", "train"])
def test_numbers_that_changed_between_two_sleeps_are_not_lost(folder, batch, tmp_path, change):
    _, engine = engine_of(folder, "float32", "lm", True, None)
    own = weights_of(engine)
    engine.offload(("parameters",), tmp_path / "scratch")
    engine.onload(("parameters",))
    if change == "load_weights":
        engine.load_weights((name, tensor + 1) for name, tensor in list(weights_of(engine).items()))
    if change == "train":
        engine.train_batch(batch, weighted_nll)
    before = weights_of(engine)
    assert (distance(before, own) > 0) == (change != "none")
    for _ in range(2):
        engine.offload(("parameters",), tmp_path / "scratch")
        engine.onload(("parameters",))
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(engine).items())


def test_a_file_that_changed_is_named_where_the_part_wakes(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    _, engine = engine_of(copy, "float32", "lm", False, None)
    for _ in range(2):
        engine.offload(PARTS, tmp_path)
        engine.onload(PARTS)
    engine.offload(PARTS, tmp_path)
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4096] + bytes(range(256)) * 16)
    with pytest.raises(WeightsChanged, match="has other numbers for it now"):
        engine.onload(PARTS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trunk_that_is_shared_sleeps_with_its_lender_and_wakes_in_one_memory(folder, batch, tmp_path, dtype):
    config, lender = engine_of(folder, dtype, "scalar", False, None)
    borrower = SpreadEngine(config, 3, trained=False, trunk=lender)
    alone = SpreadEngine(config, 3, trained=False)
    expected, whole = alone.forward(batch).logprobs, alone.num_bytes()["parameters"]
    assert torch.equal(borrower.forward(batch).logprobs, expected)
    assert borrower.num_bytes()["parameters"] < whole / 2  # its head, if that is not the embedding
    assert borrower.offload(PARTS, tmp_path) == borrower.onload(PARTS) - borrower.num_bytes()["parameters"] == 0
    for _ in range(2):
        lender.offload(PARTS, tmp_path)
        assert lender.num_bytes()["parameters"] == 0
        with pytest.raises(RuntimeError, match="are offloaded; call onload"):
            borrower.forward(batch)
        lender.onload(PARTS)
        shared = [
            (own.data_ptr(), other.data_ptr())
            for (name, own), (_, other) in zip(
                borrower.model.named_parameters(), lender.model.named_parameters(), strict=False
            )
            if name.startswith("model.model.")
        ]
        assert shared and all(own == other for own, other in shared)
        assert torch.equal(borrower.forward(batch).logprobs, expected)
    lender.offload(PARTS, tmp_path)
    late = SpreadEngine(config, 3, trained=False, trunk=lender)  # compared by the sum of what sleeps
    lender.onload(PARTS)
    assert torch.equal(late.forward(batch).logprobs, expected)


def test_a_model_whose_files_changed_is_not_lent_a_trunk_that_sleeps(folder, tmp_path):
    changed = copied(folder, tmp_path)
    _, lender = engine_of(changed, "float32", "scalar", False, None)
    lender.offload(PARTS, tmp_path)
    weights = load_file(changed / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1
    save_file(weights, changed / "model.safetensors", {"format": "pt"})
    config = TrainEngineConfig(path=str(changed), dtype="float32", max_tokens_per_micro_batch=16)
    with pytest.raises(WeightsChanged, match=r"'model\.norm\.weight' in .* has other numbers"):
        SpreadEngine(config, 3, trained=False, trunk=lender)
