"""The message that lets an SGLang server open the memory of the GPU that it shares with the trainer."""

import base64
import inspect
import io
import pickle

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from tandem.config.errors import ConfigError
from tandem.engines.inference.remote.foreign.sglang import SGLangProtocol, handle_payloads
from tandem.protocol.client import HttpClient
from tandem.weights.cuda_ipc import BucketLayout
from tests.engines_inference.remote.clients import KINDS, attach
from tests.engines_inference.remote.wire import SGLangStandIn


def text(data):
    return base64.b64encode(data).decode()


SHAPES = {"embed": (50, 16), "scale": (), "none": (0, 4), "large": (300, 70)}
HANDLES = [[3, text(bytes([n]) * 64), 4096, n, text(b"/torch_1"), 10 + n, text(b"event"), True] for n in range(2)]
ALLOWED = {"torch Tensor", "torch Size", "torch bfloat16", "torch.storage TypedStorage"}
ALLOWED |= {"torch.multiprocessing.reductions rebuild_cuda_tensor"}


def placed():
    layout = BucketLayout(4096)
    return [list(layout.add(name, shape, torch.bfloat16)) for name, shape in SHAPES.items()]


class Reader(pickle.Unpickler):
    """Calls nothing: a tensor is the named terms of its call."""

    def find_class(self, module, name):
        assert f"{module} {name}" in ALLOWED, f"{module} {name}"
        if name != "rebuild_cuda_tensor":
            return super().find_class(module, name)
        return lambda *terms: inspect.signature(rebuild_cuda_tensor).bind(*terms).arguments


def test_a_payload_has_torchs_own_terms_for_each_tensor_of_a_bucket():
    payloads = handle_payloads(HANDLES, placed())
    found = [Reader(io.BytesIO(base64.b64decode(payload))).load() for payload in payloads]
    assert [[name for name, _ in bucket] for bucket in found] == [["embed", "scale", "none"], ["large"]]
    (_, embed), (_, scale), (_, none) = found[0]
    assert (embed["tensor_size"], embed["tensor_stride"], embed["tensor_offset"]) == ((50, 16), (16, 1), 0)
    assert (scale["tensor_size"], scale["tensor_offset"]) == ((), 50 * 16), "counted in numbers, not in bytes"
    assert (none["tensor_size"], none["tensor_stride"]) == ((0, 4), (4, 1))
    ((_, large),) = found[1]
    assert large["dtype"] is torch.bfloat16 and large["storage_device"] == 0, "the only GPU that the server sees"
    assert (large["storage_handle"], large["storage_size_bytes"], large["storage_offset_bytes"]) == (b"\1" * 64, 4096, 1)
    assert (large["ref_counter_handle"], large["ref_counter_offset"]) == (b"/torch_1", 11)
    assert (large["event_handle"], large["event_sync_required"]) == (b"event", True)


def test_a_session_brings_each_bucket_and_drops_the_cache_with_the_last(folder):
    with SGLangStandIn(folder) as server:
        http = HttpClient(server.url)
        protocol = SGLangProtocol(http)
        protocol.pause()
        protocol.reload({"handles": HANDLES, "tensors": placed()}, "run:1")
        assert [body["serialized_named_tensors"] for body in server.opened] == [
            [p] for p in handle_payloads(HANDLES, placed())
        ]
        assert [(body["flush_cache"], body["weight_version"]) for body in server.opened] == [(False, None), (True, "run:1")]
        http.close()


def test_an_sglang_server_that_is_too_old_for_it_is_refused(folder):
    with SGLangStandIn(folder, spoils={"/update_weights_from_tensor"}) as server:
        engine = attach(KINDS["sglang"], server, folder)
        with pytest.raises(ConfigError, match="has no route /update_weights_from_tensor; use version"):
            engine.take_by_handles("cpu")
        engine.close()
