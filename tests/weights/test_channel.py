"""What goes into a channel comes out of it, in the dtype asked for, also in another process."""

import hashlib
import pickle
import weakref
from functools import partial

import pytest
import torch

from tandem.api.weights import tensor_digest, version_digest
from tandem.weights.channel import LocalChannel, NoChannel
from tandem.weights.cuda_ipc import CudaIpcChannel
from tandem.weights.shared_memory import SharedMemoryChannel

CHANNELS = (LocalChannel, SharedMemoryChannel, partial(CudaIpcChannel, "cpu", 4096))


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (50, 16), "norm": (16,), "scale": (), "none": (0, 4), "large": (300, 70), "odd": (7, 3)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key", [None, 7])
def test_tensors_arrive_in_order_and_in_their_dtype(channel, dtype, key):
    sent = tensors()
    channel = channel()
    channel.key = key
    delivery = channel.put(sent.items(), dtype)
    received = list(delivery.source.tensors())

    assert [name for name, _ in received] == list(sent)
    for name, tensor in received:
        assert tensor.dtype == dtype
        assert torch.equal(tensor, sent[name].to(dtype))
        assert delivery.digests[name] == tensor_digest(tensor, key) == tensor_digest(sent[name].to(dtype), key)
    assert delivery.key == key


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_transposed_tensor_arrives_as_what_it_is(channel):
    sent = torch.randn(5, 9).t()
    channel = channel()
    delivery = channel.put([("w", sent)], torch.float32)
    [(_, received)] = delivery.source.tensors()
    assert torch.equal(received, sent)
    assert delivery.digests["w"] == hashlib.sha256(sent.contiguous().numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_name_that_comes_twice_is_refused(channel):
    with pytest.raises(ValueError, match="'a' came twice"):
        channel().put([("a", torch.zeros(2)), ("a", torch.zeros(2))], torch.float32)


def test_the_segment_is_written_again_and_its_memory_does_not_grow():
    channel = SharedMemoryChannel()
    first = channel.put(tensors(0).items(), torch.float32)
    second = channel.put(tensors(1).items(), torch.float32)

    assert first.source == second.source
    assert dict(second.source.tensors())["embed"].equal(tensors(1)["embed"])
    assert first.digests["embed"] != second.digests["embed"]


@pytest.mark.parametrize(("count", "dtype"), [(5, torch.float32), (4, torch.bfloat16)])
def test_a_tensor_that_changes_its_shape_or_dtype_between_updates_is_refused(count, dtype):
    channel = SharedMemoryChannel()
    channel.put([("w", torch.zeros(4))], torch.float32)
    with pytest.raises(ValueError, match="'w' has another shape"):
        channel.put([("w", torch.zeros(count))], dtype)


def test_what_lay_on_a_gpu_is_an_error_once_the_next_version_came():
    channel = CudaIpcChannel("cpu")
    before = channel.put(tensors(0).items(), torch.float32).source
    channel.put(tensors(1).items(), torch.float32)
    with pytest.raises(OSError, match="a newer update is on its way"):
        list(before.tensors())


def test_another_process_reads_the_same_memory_and_none_can_after_close(zygote, tmp_path):
    channel = SharedMemoryChannel()
    sent = tensors()
    delivery = channel.put(sent.items(), torch.bfloat16)

    result = zygote.run(READER, pickle.dumps(delivery.source).hex(), log=tmp_path / "said")
    assert result.returncode == 0, result.stdout
    assert dict(line.split() for line in result.stdout.splitlines()) == delivery.digests
    channel.close()
    channel.close()
    with pytest.raises(OSError, match="No such file"):
        list(delivery.source.tensors())


READER = """
import pickle, sys
from tandem.api.weights import tensor_digest
for name, tensor in pickle.loads(bytes.fromhex(sys.argv[1])).tensors():
    print(name, tensor_digest(tensor))
"""


def test_a_versions_digest_follows_names_and_tensors_but_not_their_order():
    one = {"a": "1", "b": "2"}
    assert version_digest(one) == version_digest({"b": "2", "a": "1"})
    assert len({version_digest(d) for d in (one, {"a": "2", "b": "1"}, {"a": "1"}, {"ab": "12"}, {})}) == 5


def test_a_rank_without_an_engine_reads_the_stream_and_holds_one_tensor_at_a_time():
    alive = []

    def stream():
        for index in range(5):
            tensor = torch.full((8,), float(index))
            alive.append(weakref.ref(tensor))
            yield f"t{index}", tensor
            del tensor
            assert sum(ref() is not None for ref in alive) <= 1

    kept = [(f"t{i}", torch.full((8,), float(i))) for i in range(5)]
    delivery = NoChannel().put(stream(), torch.float32)  # not cast, so that what is kept is the tensor itself
    expected = LocalChannel().put(kept, torch.float32)
    assert NoChannel(digests=True).put(kept, torch.float32).digests == expected.digests, "the first rank names the version"
    assert (delivery.digests, delivery.num_bytes) == ({}, expected.num_bytes)
    assert list(delivery.source.tensors()) == []
    assert all(ref() is None for ref in alive)


@pytest.mark.parametrize("key", [None, 7])
def test_a_rank_without_an_engine_counts_and_digests_what_the_others_deliver(key):
    others = LocalChannel()
    others.key = key
    expected = others.put(tensors().items(), torch.bfloat16)
    found = NoChannel(digests=True, key=key).put(tensors().items(), torch.bfloat16)
    assert (found.digests, found.num_bytes, found.key) == (expected.digests, expected.num_bytes, key)
