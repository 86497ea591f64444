"""Weights by a process group to workers of another process, in which there is no Tandem."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tandem.api.weights import tensor_digest
from tandem.engines.inference.remote.foreign.protocol import (
    Way,
    WeightGroup,
    group_backend,
)
from tandem.engines.inference.remote.foreign.server import IN_SERVER
from tandem.weights.cuda_ipc import CudaIpcChannel

WORKER = """
import hashlib, json, os, sys
import torch
from tandem_vllm_worker import TandemWorker

class Worker(TandemWorker):
    rank, model_runner, device = int(sys.argv[1]), None, torch.device("cpu")
    def reload_weights(self, weights_iterator):
        self.found = {}
        for name, tensor in weights_iterator:
            if name == "deadly":
                os._exit(3)
            data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            self.found[name] = [str(tensor.dtype), list(tensor.shape), hashlib.sha256(data).hexdigest()]

import tandem_vllm_worker
tandem_vllm_worker.pack_again = lambda model: None
Worker.model_runner = type("Runner", (), {"get_model": lambda self: None})()
worker = Worker()
for line in sys.stdin:
    method, terms = json.loads(line)
    getattr(worker, method)(**terms)
    print(json.dumps(getattr(worker, "found", None)), flush=True)
"""


class Workers:
    """Two processes that do what the server's route for its workers asks for."""

    def __init__(self):
        environment = {"PYTHONPATH": str(IN_SERVER), "OMP_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", WORKER, str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in (0, 1)
        ]

    def ask(self, method, **terms):
        for process in self.processes:
            process.stdin.write(json.dumps([method, terms]) + "\n")
            process.stdin.flush()
        return [json.loads(process.stdout.readline()) for process in self.processes]

    def close(self):
        for process in self.processes:
            process.stdin.close()
            process.stdout.close()
            process.wait(30)


@pytest.fixture
def workers():
    workers = Workers()
    yield workers
    workers.close()


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (50, 16), "scale": (), "none": (0, 4), "odd": (7, 3), "large": (300, 70)}
    made = {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}
    return made | {"exact": torch.randn(5, generator=generator)}


def deliver(group, workers, named):
    plan = [(name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in named.items()]
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(workers.ask, "tandem_receive", plan=plan)
        for tensor in named.values():
            if tensor.numel():
                group.broadcast(tensor.reshape(-1).view(torch.uint8), taken)
        return taken.result()


@pytest.mark.slow
@pytest.mark.invariant
def test_two_workers_take_two_updates_by_one_group_and_a_death_ends_the_third(workers):
    def join(host, port, name):
        workers.ask("tandem_join", host=host, port=port, size=3, backend="gloo", timeout_s=60)

    group = WeightGroup(Way("127.0.0.1"), 3, join)
    for seed in (1, 2):
        sent = tensors(seed)
        expected = {name: [str(t.dtype), list(t.shape), tensor_digest(t)] for name, t in sent.items()}
        assert deliver(group, workers, sent) == [expected, expected]
    began = time.monotonic()
    with pytest.raises((RuntimeError, json.JSONDecodeError)):
        deliver(group, workers, {"deadly": torch.zeros(10)} | {f"{i}": torch.zeros(2000) for i in range(20)})
    assert time.monotonic() - began < 30
    group.close()


@pytest.mark.slow
@pytest.mark.invariant
def test_workers_open_the_trainers_memory_by_its_handles_and_read_what_was_put(workers):
    channel = CudaIpcChannel("cpu", bucket_bytes=4096)
    for seed in (1, 2):
        sent = tensors(seed)
        delivery = channel.put(sent.items(), torch.bfloat16)
        cast = {name: tensor.to(torch.bfloat16) for name, tensor in sent.items()}
        expected = {name: ["torch.bfloat16", list(t.shape), tensor_digest(t)] for name, t in cast.items()}
        assert workers.ask("tandem_load", place=delivery.source.place()) == [expected, expected]
        assert delivery.digests == {name: digest for name, (_, _, digest) in expected.items()}
    channel.close()


def test_nccl_joins_no_two_ranks_on_one_gpu_and_none_of_which_nobody_knows_the_gpu():
    assert group_backend("cuda", [0], [1, 2]) == "nccl"
    assert group_backend("cuda", [0], [0]) == group_backend("cuda", [0], []) == group_backend("cpu", [], []) == "gloo"
