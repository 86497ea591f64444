"""Clients of stand-in servers, what is asked of them, and weights to deliver."""

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tandem.api.requests import LLMRequest
from tandem.api.weights import FolderSource, WeightSource, WeightUpdate, WeightVersion, tensor_digest, version_digest
from tandem.config.rollout import GenerationConfig
from tandem.engines.inference.remote.foreign.sglang import SGLangServer
from tandem.engines.inference.remote.foreign.vllm import VllmServer
from tests.engines_inference.remote.wire import SGLangStandIn, VllmStandIn

KINDS = {"vllm": (VllmServer, VllmStandIn), "sglang": (SGLangServer, SGLangStandIn)}


def attach(kind, server, folder, **options):
    return kind[0].attach(server.url, folder=folder, dtype=torch.float32, version=WeightVersion(0), **options)


def ask(engine, *prompts, deadline_s=None, key=None, **gconfig):
    requests = [
        LLMRequest(tuple(p), GenerationConfig(**({"max_new_tokens": 8} | gconfig)), deadline_s=deadline_s, noise_key=key)
        for p in prompts or ((5, 6, 7),)
    ]

    async def all_of_them():
        return await asyncio.gather(*(engine.agenerate(request) for request in requests))

    answers = asyncio.run(asyncio.wait_for(all_of_them(), 30))
    return answers if prompts else answers[0]


def expected(server, prompt, count):
    tokens = []
    for _ in range(count):
        tokens.append(server.next_token([*prompt, *tokens]))
    return tuple(tokens)


@dataclass(frozen=True)
class InMemory(WeightSource):
    items: tuple

    def tensors(self):
        yield from self.items


def new_weights(folder, number, shift=1.0):
    tensors = {name: tensor + shift for name, tensor in load_file(folder / "model.safetensors").items()}
    digests = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
    return tensors, digests, WeightVersion(number, version_digest(digests), "run")


def update_from_memory(folder, number=1, shift=1.0):
    tensors, digests, version = new_weights(folder, number, shift)
    return WeightUpdate(version, InMemory(tuple(tensors.items())), digests)


def next_update(folder, number=1, shift=1.0):
    """In a folder beside the model's."""
    return update_from_folder(folder, Path(tempfile.mkdtemp(dir=folder.parent)) / "update", number, shift)


def update_from_folder(folder, target, number=1, shift=1.0):
    tensors, digests, version = new_weights(folder, number, shift)
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    return WeightUpdate(version, FolderSource(target), digests)
