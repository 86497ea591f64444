"""The embedded engine with a tiny model of a long context, whose draws are forced to a script; its log is the witness.

Everything but the draw is the engine's own: prefill in pieces, shared prompts, batches, the cache. The log-probabilities are
those that the model gives to the forced tokens.
"""

import json
import re
from contextlib import contextmanager
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM

from tandem.api.requests import NoiseKey
from tandem.api.weights import WeightVersion
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig
from tandem.engines.inference.core import EngineCore
from tandem.engines.inference.embedded import EmbeddedEngine
from tandem.engines.inference.sequences import Slots
from tandem.models.hardware import Download
from tandem.models.tokenizer import load_tokenizer
from tests.tiny import tiny_model

CONTEXT = 65536
GCONFIG = GenerationConfig(n_samples=1, max_new_tokens=256, temperature=0.7)


class ForcedSlots(Slots):
    """Draws the tokens of a script, which is asked once for each sequence: ``script(text of the prompt) -> text``."""

    def force(self, tokenizer, script):
        self.tokenizer, self.script, self.lines = tokenizer, script, {}

    def take(self, sequence):
        super().take(sequence)
        prompt = self.tokenizer.decode(list(sequence.request.input_ids), clean_up_tokenization_spaces=False)
        ids = self.tokenizer(self.script(prompt), add_special_tokens=False)["input_ids"]
        self.lines[sequence.slot] = [*ids, self.tokenizer.eos_token_id]

    def draw(self, batch, logits, version):
        counts, rows = self.counts[batch.slots], batch.rows
        forced = torch.tensor([self.lines[s][c] for s, c in zip(batch.slots.tolist(), counts.tolist(), strict=True)])
        logprobs = torch.log_softmax(logits / rows.temperatures[:, None], dim=-1).gather(1, forced[:, None])[:, 0]
        logits.fill_(float("-inf")).scatter_(1, forced[:, None], 0.0)
        super().draw(batch._replace(rows=replace(rows, uniform_temperature=True)), logits, version)
        drawn = self.unread.pop()
        self.unread.append(replace(drawn, downloads=(drawn.downloads[0], Download(logprobs))))


class Witness:
    """An engine that notes what it was sent and what it returned."""

    def __init__(self, engine):
        self.engine, self.log, self.noise_key = engine, [], NoiseKey(7)

    async def agenerate(self, request):
        response = await self.engine.agenerate(request)
        self.log.append((tuple(request.input_ids), tuple(response.output_ids)))
        return response


def long_model_folder(folder, tokenizer_folder):
    """A tiny model with a long context and the tokenizer and chat template of a real one."""
    tokenizer = load_tokenizer(tokenizer_folder)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}
    model = tiny_model(max_position_embeddings=CONTEXT, vocab_size=len(tokenizer), rope_theta=1e6, **ends)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def forced_engine(folder, script):
    """The engine, with its log."""
    config = EmbeddedEngineConfig(max_running=16, threads=1, kv_cache_gib=1.0, max_model_len=CONTEXT)
    version = WeightVersion(0)
    core = EngineCore(folder, config, torch.float32, "cpu", version)
    core.slots.__class__ = ForcedSlots
    core.slots.force(load_tokenizer(folder), script)
    engine = EmbeddedEngine(core, version=version, threads=1)
    try:
        yield Witness(engine)
    finally:
        engine.close()


@torch.no_grad()
def rescored(folder, trajectory):
    """Log-probabilities of a trajectory's trained tokens by the model itself, run once over the whole; ``[trained]``."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids, places = trajectory.input_ids, trajectory.loss_mask.nonzero().flatten()
    hidden = model.model(ids[None]).last_hidden_state[0, places - 1]
    logits = model.lm_head(hidden) / trajectory.temperature
    return torch.log_softmax(logits, dim=-1).gather(1, ids[places][:, None])[:, 0]


def hermes(name, **arguments):
    """A call as Qwen 2.5 writes it."""

    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def asked_numbers(prompt):
    """The two numbers of the question."""
    return tuple(map(int, re.findall(r"What is (\d+) \+ (\d+)", prompt)[-1]))
