"""Channels between processes: a process without Tandem, as a server's is, opens this one's memory and says what is in it."""

import json
import subprocess
import sys
from collections.abc import Iterator

import torch

from scripts.gpu_check import cuda_only
from scripts.gpu_check.place import Line, Place
from tandem.api.weights import tensor_digest
from tandem.engines.inference.remote.foreign.server import IN_SERVER
from tandem.weights.cuda_ipc import CudaIpcChannel

READ = """
import hashlib, json, sys
import torch
from tandem_vllm_worker import opened
device = torch.device(sys.argv[1])
torch.empty(0, device=device)  # as a server, which has used its GPU before it opens anything
for line in sys.stdin:
    place, found = json.loads(line), {}
    for name, tensor in opened(place["handles"], place["tensors"], device):
        found[name] = hashlib.sha256(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()
    del tensor
    print(json.dumps(found), flush=True)
"""


def handles_are_opened(place: Place) -> Iterator[Line]:
    """The channel ipc: three versions are put one after another, and each is read by its handles, to the byte. At the
    end all memory is free again. On a CPU torch's shared memory is handed over by the same code."""
    cuda_only.share_blocks(place.device)
    weights = dict(place.reference("fp32").named_parameters())
    before = cuda_only.allocated(place.device)
    channel = CudaIpcChannel(place.device)
    command = [sys.executable, "-c", READ, "cuda:0" if place.device.startswith("cuda") else "cpu"]
    with subprocess.Popen(
        command, env={**cuda_only.environment(), "PYTHONPATH": str(IN_SERVER)}, stdin=-1, stdout=-1, text=True
    ) as reader:
        assert reader.stdin is not None and reader.stdout is not None
        right = []
        for version in range(3):
            put = {name: tensor.detach() + version for name, tensor in weights.items()}
            delivery = channel.put(iter(put.items()), torch.bfloat16)
            reader.stdin.write(json.dumps(delivery.source.place()) + "\n")
            reader.stdin.flush()
            found = json.loads(reader.stdout.readline())
            expected = {name: tensor_digest(tensor.to(torch.bfloat16)) for name, tensor in put.items()}
            right.append(found == expected == delivery.digests)
            del put
        reader.stdin.close()
    channel.close()
    yield Line("versions that another process opened by handles", f"{sum(right)} of 3 to the byte", "all", all(right))
    left = cuda_only.allocated(place.device)
    if before is not None and left is not None:
        yield Line("memory that the channel keeps when it is closed", f"{left - before} bytes", "0", left == before)
