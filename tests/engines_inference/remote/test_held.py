"""What a server holds against what was sent to it."""

import hashlib

import pytest
import torch

from tandem.api.failures import ServerFailed
from tandem.api.requests import StopReason
from tandem.api.weights import WeightVersion, tensor_digest
from tandem.engines.inference.remote.foreign.completions import Judge, Labels
from tandem.engines.inference.remote.foreign.in_place import HeldDigests, changed, compare
from tandem.engines.inference.remote.foreign.in_server.tandem_vllm_worker import pack_again
from tandem.engines.inference.remote.foreign.protocol import labels_of

URL = "http://127.0.0.1:1"


def collected(names, tensors):
    held = HeldDigests(names, torch.float32)
    for name, tensor in tensors.items():
        held.add(name, tensor, tensor_digest(tensor))
    return held.digests


def test_fused_tensors_are_put_together_in_the_servers_order_however_they_come():
    tensors = {f"layers.0.attn.{part}_proj.weight": torch.randn(2, 3) for part in "kqv"}
    tensors |= {f"layers.0.mlp.{part}_proj.bias": torch.randn(4) for part in ("up", "gate", "down")}
    tensors["norm.weight"] = torch.randn(3)
    names = ["layers.0.attn.qkv_proj.weight", "layers.0.mlp.gate_up_proj.bias", "layers.0.mlp.down_proj.bias", "norm.weight"]

    found = collected(names, tensors)

    def sha(*parts):
        return hashlib.sha256(torch.cat([tensors[part].reshape(-1) for part in parts]).numpy().tobytes()).hexdigest()

    assert found == {
        names[0]: sha(*(f"layers.0.attn.{part}_proj.weight" for part in "qkv")),
        names[1]: sha("layers.0.mlp.gate_proj.bias", "layers.0.mlp.up_proj.bias"),
        names[2]: sha("layers.0.mlp.down_proj.bias"),
        names[3]: sha("norm.weight"),
    }


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight", "norm.weight"])
def test_only_what_has_a_row_for_each_token_is_filled_with_zeros_as_the_server_does(name):
    matrix, filled = torch.randn(304, 8), torch.zeros(320, 8)
    filled[:304] = matrix

    assert collected([name], {name: matrix})[name] == tensor_digest(matrix if name == "norm.weight" else filled)
    assert collected([name], {name: filled})[name] == tensor_digest(filled)


def test_what_the_server_does_not_name_is_not_expected():
    assert collected(
        ["norm.weight"], {"norm.weight": torch.ones(2), "a.q_proj.weight": torch.ones(2), "x": torch.ones(1)}
    ).keys() == {"norm.weight"}


def test_comparing_takes_beginnings_of_digests_and_names_what_differs():
    digests = {"a": "0123" * 16, "b": "4567" * 16}
    assert compare({"a": "0123" * 4, "b": "4567" * 16, "c": "?"}, digests, URL) == 2
    with pytest.raises(ServerFailed, match="'b'"):
        compare({"a": "0123" * 4, "b": "0000"}, digests, URL)
    with pytest.raises(ServerFailed, match="none of its tensors"):
        compare({"c": "0000"}, digests, URL)


def test_where_nothing_can_be_compared_something_must_have_changed():
    assert changed({"a": "1", "b": "2"}, {"a": "1", "b": "3"}, URL) == 1
    with pytest.raises(ServerFailed, match="the same as before"):
        changed({"a": "1"}, {"a": "1"}, URL)


def test_spans_must_cover_the_tokens_one_after_another():
    spans = [{"version": "x", "start": 0, "end": 2}, {"version": "y", "start": 2, "end": 3}]
    assert labels_of(spans, 3) == ("x", "x", "y")
    for wrong, count in ((spans, 2), (spans, 4), (spans[1:], 1), ([spans[1], spans[0]], 3)):
        with pytest.raises(ValueError, match="weight versions"):
            labels_of(wrong, count)


def test_labels_of_two_clients_differ_and_each_knows_only_its_own():
    ours, theirs, version = Labels(URL), Labels(URL), WeightVersion(3, "d" * 64, "run")
    assert ours.numbers([ours.of(version)] * 2) == (3, 3)
    with pytest.raises(ServerFailed, match="restarted"):
        ours.numbers([theirs.of(version)])


def test_the_judge_ends_a_completion_at_the_first_reason_in_any_piece():
    judge = Judge(frozenset({7}), 4)
    assert judge.look([1, 2]) == (2, None) and judge.room == 2
    assert judge.look([7, 3, 3]) == (1, StopReason.STOP)
    assert Judge(frozenset({7}), 3).look([1, 2, 7, 4]) == (3, StopReason.STOP), "a stop token at the limit is a stop"
    assert Judge(frozenset(), 3).look([1, 2, 7, 4]) == (3, StopReason.LENGTH)


class Packs:
    """How a layer is made ready on a CPU; ``right``: with a copy of its own matrix."""

    def __init__(self, right=True):
        self.right = right

    def process_weights_after_loading(self, layer):
        copy = layer.weight.detach().clone() * self.right
        layer.cpu_linear = lambda x, weight, bias: x @ copy.T


def test_a_layer_that_multiplies_with_an_old_copy_of_its_matrix_makes_it_anew():
    tied, ones = torch.nn.Linear(4, 6, bias=False), torch.ones(1, 4)
    tied.quant_method = Packs()
    tied.quant_method.process_weights_after_loading(tied)
    old = tied.cpu_linear(ones, None, None)
    with torch.no_grad():
        tied.weight.add_(1.0)
    assert torch.equal(tied.cpu_linear(ones, None, None), old), "the copy is the old one"

    pack_again(torch.nn.Sequential(tied, torch.nn.Linear(2, 2)))

    assert torch.allclose(tied.cpu_linear(ones, None, None), old + 4.0)
    tied.quant_method.right = False
    with pytest.raises(RuntimeError, match="another matrix"):
        pack_again(tied)
