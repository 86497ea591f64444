"""A server that dies at any moment of a weight stream: the trainer lives, and the next update delivers by a new group."""

import multiprocessing
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from tandem.api.weights import tensor_digest
from tandem.engines.inference.remote.foreign.in_server import tandem_vllm_worker
from tandem.engines.inference.remote.foreign.protocol import (
    GroupDelivery,
    Way,
    WeightGroup,
)
from tandem.weights.collective import CollectiveChannel
from tests.ranks import LIBRARIES

SENT = {f"layer.{i}": torch.full((700,), float(i)) for i in range(4)}
EXPECTED = {name: tensor_digest(tensor) for name, tensor in SENT.items()}
IMPATIENCE_S = 4.0


def serve(pipe, dies_at):
    """A server's process. It ends before its ``dies_at``-th call of torch's or of the trainer's; 0: never."""
    left = [dies_at]

    def may_die(call):
        def made(*given, **how):
            left[0] -= 1
            if left[0] == 0:
                os._exit(3)
            return call(*given, **how)

        return made

    def group_of(*given):
        group = own_joined(*given)
        group_type = type("Mortal", (), {"abort": lambda self: group.abort()})
        group_type.broadcast = lambda self, *what: Work(may_die(group.broadcast)(*what))
        return group_type()

    class Work:
        def __init__(self, work):
            self.wait = may_die(work.wait)

    class Worker(tandem_vllm_worker.TandemWorker):
        rank, device = 0, torch.device("cpu")
        model_runner = type("Runner", (), {"get_model": lambda self: torch.nn.Identity()})()

        def reload_weights(self, weights_iterator):
            self.found = {name: tensor_digest(tensor) for name, tensor in weights_iterator}

    own_joined = tandem_vllm_worker.joined
    tandem_vllm_worker.joined = may_die(group_of)
    dist.TCPStore = may_die(dist.TCPStore)
    worker, receive, answer = Worker(), may_die(pipe.recv), may_die(pipe.send)
    while True:
        try:
            method, terms = receive()
        except EOFError:
            return
        getattr(worker, method)(**terms)
        answer(getattr(worker, "found", None))


class Server:
    """A server, by the two calls of an update; a call raises when its process is gone."""

    def __init__(self, dies_at=0):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(LIBRARIES)
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, dies_at), daemon=True)
        self.process.start()
        theirs.close()

    def call(self, method, **terms):
        try:
            self.pipe.send((method, terms))
            return self.pipe.recv()
        except (EOFError, OSError) as error:
            raise ConnectionError("the server is gone") from error

    def close(self):
        self.pipe.close()
        self.process.join(30)


def update(delivery, server):
    """One update as a protocol makes it; what the server has read."""
    plan, found = [(name, list(tensor.shape), "float32") for name, tensor in SENT.items()], []

    def join(host, port, name):
        server.call("tandem_join", host=host, port=port, size=2, backend="gloo", timeout_s=IMPATIENCE_S)

    def send(group):
        with ThreadPoolExecutor(1) as pool:
            taken = pool.submit(server.call, "tandem_receive", plan=plan)
            for tensor in SENT.values():
                group.broadcast(tensor.reshape(-1).view(torch.uint8), taken)
            found.append(taken.result())

    delivery.send(lambda: WeightGroup(Way("127.0.0.1"), 2, join, timeout_s=IMPATIENCE_S), send)
    return found[0]


@pytest.mark.slow
@pytest.mark.invariant
def test_a_server_may_die_at_each_of_its_calls_and_the_next_update_delivers():
    delivery, died = GroupDelivery(Way("127.0.0.1")), 0
    while True:
        mortal, began = Server(died + 1), time.monotonic()
        try:
            found = update(delivery, mortal)
        except (RuntimeError, ConnectionError):
            died += 1
        else:
            assert found == EXPECTED
            break
        finally:
            mortal.close()
        assert mortal.process.exitcode == 3 and delivery.group is None
        assert time.monotonic() - began < 6 * IMPATIENCE_S
        after = Server()
        assert update(delivery, after) == EXPECTED
        delivery.close()
        after.close()
    assert died >= 10, "receive, connect, join, answer, receive, two buckets with their waits, answer"


def test_a_group_that_fails_is_aborted_before_anybody_waits_for_the_server():
    """An NCCL kernel goes on when its group is only forgotten, and a server that waits for it answers never."""
    done, group = [], object.__new__(WeightGroup)

    class Stuck:
        abort = lambda self: done.append("aborted")  # noqa: E731
        broadcast = lambda self, *given: Stuck()  # noqa: E731
        is_completed = lambda self: False  # noqa: E731

    group.group, group.device, group.timeout_s = Stuck(), "cpu", 0.2
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(lambda: [time.sleep(0.01) for _ in iter(lambda: bool(done), True)])
        with pytest.raises(RuntimeError, match=r"no progress for 0\.2 s"):
            group.broadcast(torch.ones(3), taken)
    assert done == ["aborted"]


def test_other_versions_of_nccl_are_refused_by_name_on_both_sides(monkeypatch):
    server, told = Server(), []
    monkeypatch.setattr(tandem_vllm_worker, "version_of", lambda backend: "2.27.5")

    def join(host, port, name):
        try:
            server.call("tandem_join", host=host, port=port, size=2, backend="gloo", timeout_s=5)
        finally:
            told.append(True)

    with pytest.raises(RuntimeError, match=r"rank 0 .* GLOO 2\.27\.5, and rank 1 has any: install the same version"):
        WeightGroup(Way("127.0.0.1"), 2, join)
    server.close()
    assert told and server.process.exitcode == 1, "it raised too"


def test_an_engine_with_another_nccl_refuses_the_trainers_stream(monkeypatch):
    channel = CollectiveChannel(1, timeout_s=5)
    monkeypatch.setattr("tandem.weights.collective.version_of", lambda backend: "2.27.5")
    source = channel.put(SENT.items(), torch.float32).source
    monkeypatch.setattr("tandem.weights.collective.version_of", lambda backend: "2.26.2")
    with pytest.raises(OSError, match=r"the trainer has NCCL 2\.27\.5, and this engine has 2\.26\.2"):
        list(source.tensors())
    channel.close()
