"""Weights that ranks share are cast before they travel, and few of them lie together at a time."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.api.weights import tensor_digest
from tandem.engines.train.holders import buckets
from tandem.weights.collective import CollectiveSource
from tandem.weights.publisher import WeightPublisher
from tests.engines_train.layouts import engine_on
from tests.ranks import alone_and_on_two
from tests.tiny import tiny_model_folder


class Gathers(TorchDispatchMode):
    """Counts the bytes that each exchange brings together."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "allgather" in str(func):
            self.sizes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def streamed(folder, ranks):
    """Bytes of each exchange, and the digests of what came, by dtype; and that of the first version by a publisher."""
    torch.set_num_threads(1)
    engine, found = engine_on(folder, f"d{ranks}"), {}
    for dtype in (torch.float32, torch.bfloat16):
        with Gathers() as gathers:
            digests = {name: tensor_digest(tensor) for name, tensor in engine.weights(dtype)}
        found[str(dtype)] = {"sizes": gathers.sizes, "digests": digests}
    publisher = WeightPublisher(engine, (), run="test", dtype=torch.bfloat16)
    before = publisher.version.digest
    publisher.publish()
    return found | {"first": before, "second": publisher.version.digest}


def test_half_the_bytes_travel_where_engines_take_bfloat16_and_digests_are_equal(tmp_path):
    folder = tiny_model_folder(tmp_path, "qwen3", vocab_size=305)  # rows that two ranks cannot halve
    alone, ranks = alone_and_on_two(streamed, folder, out=tmp_path)
    weights = sum(tensor.nbytes for _, tensor in engine_on(folder, "d1").weights())
    for found in ranks:
        assert found["first"] == alone["first"] != ""
        for name in ("torch.float32", "torch.bfloat16"):
            assert found[name]["digests"] == alone[name]["digests"]
        exact, rounded = (sum(found[name]["sizes"]) for name in ("torch.float32", "torch.bfloat16"))
        assert weights <= exact < 1.02 * weights  # two rows at most are filled up, and the ends of tensors
        assert rounded < 0.52 * weights
        assert len(found["torch.bfloat16"]["sizes"]) == 1, "so small a model travels at once"


def test_a_bucket_has_the_bytes_that_it_may_or_one_tensor():
    sizes = {"a": 3, "b": 4, "c": 20, "d": 1, "e": 9}
    assert list(buckets(sizes, sizes.__getitem__, 10)) == [["a", "b"], ["c"], ["d", "e"]]
    assert list(buckets([], sizes.__getitem__, 10)) == []


@pytest.mark.parametrize(("backend", "device"), [("nccl", "cuda:1"), ("gloo", "cpu")])
def test_an_engine_receives_on_its_own_device(backend, device):
    source = CollectiveSource("127.0.0.1", 1, backend, 1, (), torch.bfloat16, 1.0)
    assert source.received_on(torch.device("cuda:1")).device == device
