"""Weights over a process group between real processes: they arrive, and what breaks off breaks nothing else."""

import contextlib
import json
import pickle
import subprocess
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from tandem.api.failures import WeightUpdateFailed
from tandem.api.weights import tensor_digest
from tandem.weights.collective import CollectiveChannel, DeliveryGroup


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (50, 16), "norm": (16,), "scale": (), "none": (0, 4), "odd": (7, 3), "large": (300, 70)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


RECEIVER = """
import json, os, pickle, sys, threading
from tandem.api.weights import tensor_digest

def receive(source, leaves_after):
    found = {}
    try:
        for name, tensor in source.tensors():
            found[name] = tensor_digest(tensor)
            if name == leaves_after:
                os._exit(3)
        print(json.dumps(found), flush=True)
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)

for line in sys.stdin:
    receive(*pickle.loads(bytes.fromhex(line)))
"""


class Receiver:
    """A process that reads the sources that it is given, one after another."""

    def __init__(self):
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-c", RECEIVER], stdin=pipe, stdout=pipe, text=True)

    def give(self, source, leaves_after=""):
        self.process.stdin.write(pickle.dumps((source, leaves_after)).hex() + "\n")
        self.process.stdin.flush()

    def result(self):
        return json.loads(self.process.stdout.readline())


@pytest.fixture(scope="module")
def receivers():
    both = [Receiver(), Receiver()]
    yield both
    for receiver in both:
        receiver.process.stdin.close()
        receiver.process.wait(60)
        receiver.process.stdout.close()


def never():
    return False


def test_the_trainer_waits_for_receivers_at_its_own_address_only():
    channel = CollectiveChannel(1, timeout_s=10)
    source = channel.put(tensors().items(), torch.float32).source
    found = [c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
    channel.close()
    assert [address.ip for address in found if address.port == source.port] == ["127.0.0.1"]


def test_two_processes_receive_what_was_announced(receivers):
    channel = CollectiveChannel(2, timeout_s=150)
    sent = tensors()
    delivery = channel.put(sent.items(), torch.bfloat16)
    assert delivery.num_bytes == sum(tensor.numel() * 2 for tensor in sent.values())
    for receiver in receivers:
        receiver.give(delivery.source)
    channel.send(sent.items(), torch.bfloat16, never)
    assert [receiver.result() for receiver in receivers] == [delivery.digests] * 2
    assert delivery.digests == {name: tensor_digest(tensor.to(torch.bfloat16)) for name, tensor in sent.items()}

    with pytest.raises(OSError, match="which have all joined already"):
        list(delivery.source.tensors())
    channel.close()


def test_both_sides_of_the_stream_broadcast_the_same_sizes(monkeypatch):
    """NCCL needs it. Gloo is used here, and gives less than was asked for without a word: so the sizes are counted."""
    sizes, broadcast = defaultdict(list), DeliveryGroup.broadcast

    def counted(group, tensor, *given_up):
        sizes[threading.get_ident()].append(tensor.nbytes)
        broadcast(group, tensor, *given_up)

    monkeypatch.setattr(DeliveryGroup, "broadcast", counted)
    channel, sent = CollectiveChannel(1, timeout_s=150), {"v": torch.randn(3, 5), "w": torch.randn(600)}
    source = channel.put(sent.items(), torch.float32).source
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(lambda: dict(source.tensors()))
        channel.send(sent.items(), torch.float32, never)
        assert torch.equal(asked.result(60)["w"], sent["w"])
    assert list(sizes.values()) == [[60, 2400]] * 2
    channel.close()


def test_a_stream_that_ends_on_the_trainers_side_reaches_the_receiver_as_an_error(receivers):
    channel = CollectiveChannel(1, timeout_s=150)
    sent = tensors()
    receivers[0].give(channel.put(sent.items(), torch.float32).source)

    def breaking():
        yield from list(sent.items())[:2]
        raise RuntimeError("out of memory")

    began = time.monotonic()
    with pytest.raises(WeightUpdateFailed, match="out of memory"):
        channel.send(breaking(), torch.float32, never)
    assert "broke off" in receivers[0].result()["error"]
    assert time.monotonic() - began < 75
    channel.withdraw()

    delivery = channel.put(sent.items(), torch.float32)
    receivers[0].give(delivery.source)
    channel.send(sent.items(), torch.float32, never)
    assert receivers[0].result() == delivery.digests
    channel.close()


def test_a_receiver_that_gives_up_lets_the_sender_go_and_can_receive_again():
    channel = CollectiveChannel(1, timeout_s=150)
    sent = {"first": torch.zeros(10), "second": torch.randn(100_000)}
    source = channel.put(sent.items(), torch.float32).source

    def take_one():  # in a thread of this process
        with contextlib.closing(source.tensors()) as stream:
            next(stream)
        raise KeyError("not what was expected")

    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(take_one)
        with pytest.raises(WeightUpdateFailed):
            channel.send(sent.items(), torch.float32, lambda: asked.done() and asked.exception() is not None)
    assert time.monotonic() - began < 75
    channel.withdraw()

    source = channel.put(sent.items(), torch.float32).source
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(lambda: {name: tensor.clone() for name, tensor in source.tensors()})
        channel.send(sent.items(), torch.float32, never)
        assert all(torch.equal(tensor, sent[name]) for name, tensor in asked.result(60).items())
    channel.close()


def test_nobody_waits_for_an_engine_that_has_given_up_or_never_comes():
    channel = CollectiveChannel(2, timeout_s=0.5)
    channel.put(tensors().items(), torch.float32)
    with pytest.raises(WeightUpdateFailed, match="0 of 2 engines joined the stream of weights, one gave up"):
        channel.send(tensors().items(), torch.float32, lambda: True)
    with pytest.raises(WeightUpdateFailed, match=r"waited 0\.5 s for 2 engines"):
        channel.send(tensors().items(), torch.float32, never)
    channel.close()


def test_a_receiver_that_dies_on_the_way_fails_this_update(receivers):
    channel = CollectiveChannel(1, timeout_s=150)
    sent = {"first": torch.zeros(10), "second": torch.randn(2_000_000)}
    receivers[1].give(channel.put(sent.items(), torch.float32).source, leaves_after="first")
    began = time.monotonic()
    with pytest.raises(WeightUpdateFailed, match="the stream of weights broke off"):
        channel.send(sent.items(), torch.float32, never)
    assert receivers[1].process.wait(60) == 3 and time.monotonic() - began < 75
    channel.close()


def test_a_name_that_comes_twice_is_refused():
    with pytest.raises(ValueError, match="'a' came twice"):
        CollectiveChannel(1).put([("a", torch.zeros(2)), ("a", torch.zeros(2))], torch.float32)
