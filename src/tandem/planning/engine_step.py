"""The overhead of a decode step of the embedded engine, which computes next to nothing: Python, dispatcher, threads that
wake."""

import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tandem.api.requests import LLMRequest, NoiseKey
from tandem.api.weights import WeightVersion
from tandem.config.generation import GenerationConfig
from tandem.config.rollout import EmbeddedEngineConfig
from tandem.engines.inference.core import EngineCore
from tandem.engines.inference.kernels import kernels

LAYERS, PROMPTS, SAMPLES, NEW_TOKENS = 8, 4, 4, 48
ALLOWED = 32
"""Steps that count: those at the end, when all prompts were computed."""


def decode_step(device: torch.device) -> float:
    """Seconds of one step: `LAYERS` small layers, `PROMPTS` times `SAMPLES` sequences that share prompts; the least."""
    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=512, num_hidden_layers=LAYERS, head_dim=32, tie_word_embeddings=True, **small)
    with tempfile.TemporaryDirectory() as folder:
        weights = LlamaForCausalLM(config).state_dict()
        del weights["lm_head.weight"]  # tied
        save_file(weights, Path(folder, "model.safetensors"), {"format": "pt"})
        config.save_pretrained(folder)
        settings = EmbeddedEngineConfig(kv_cache_gib=0.1)
        # in the dtype of the compiled kernels where there are any: their steps have less overhead
        dtype = torch.bfloat16 if device.type == "cpu" and kernels(torch.bfloat16) is not None else torch.float32
        core = EngineCore(Path(folder), settings, dtype, device, WeightVersion(0))
    gconfig = GenerationConfig(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
    for number in range(PROMPTS * SAMPLES):
        group, sample = divmod(number, SAMPLES)
        prompt = tuple(range(10 * group + 3, 10 * group + 35))
        core.add(number + 1, LLMRequest(prompt, gconfig, NoiseKey(0, 0, group, sample)))
    ended = []
    while core.has_work:
        core.step()  # waits for its tokens
        ended.append(time.perf_counter())
    return min(later - earlier for earlier, later in pairwise(ended[-ALLOWED:]))
