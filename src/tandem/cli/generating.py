"""The answers of `tandem generate`."""

import argparse
import asyncio
import json
import sys
import time
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tandem.api.chat_template import render
from tandem.api.engines import InferenceEngine
from tandem.api.media import reader_of
from tandem.api.requests import LLMRequest, LLMResponse, NoiseKey
from tandem.cli.sampling import device_of, require, sampling_of
from tandem.config.cores import usable_cores
from tandem.config.errors import ConfigError
from tandem.config.generation import GenerationConfig
from tandem.config.rollout import EmbeddedEngineConfig, RolloutConfig
from tandem.engines.inference.build import build_inference_engine
from tandem.models.catalog import resolve
from tandem.models.precision import resolve_dtype
from tandem.models.template_options import check_system_prompt
from tandem.models.tokenizer import check_chat_template, load_tokenizer
from tandem.state.named import named_model


def sampling(arguments: argparse.Namespace) -> GenerationConfig:
    """Raises `ConfigError` for values that cannot be."""
    require(
        (
            ("--n", arguments.n, arguments.n >= 1, "at least 1"),
            ("--top-k", arguments.top_k, arguments.top_k >= 0, "at least 0"),
        )
    )
    if arguments.raw and arguments.system is not None:
        raise ConfigError("--system needs the chat template, which --raw leaves out; write the system text into the prompt")
    return sampling_of(arguments, n_samples=arguments.n, top_k=arguments.top_k)


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, *, system: str | None, raw: bool) -> tuple[int, ...]:
    """The prompt's tokens, as a chat with the assistant's turn opened unless ``raw``."""
    try:
        (prompt + (system or "")).encode()
    except UnicodeEncodeError as error:  # bytes of a command line that are no UTF-8
        raise ConfigError(f"the prompt is not UTF-8 text: {error.object[error.start]!r} at place {error.start}") from None
    if raw:
        ids = tokenizer(prompt)["input_ids"]
    else:
        check_chat_template(tokenizer)
        messages = [{"role": "user", "content": prompt}]
        if system is not None:
            check_system_prompt(tokenizer, [messages], system, "--system")
            messages.insert(0, {"role": "system", "content": system})
        ids = tokenizer(render(tokenizer, messages, add_generation_prompt=True), add_special_tokens=False)["input_ids"]
    if not ids:
        raise ConfigError("the prompt has no tokens; give it some text")
    reader = reader_of(tokenizer)
    for kind in () if reader is None else reader.kinds:
        if reader.placeholder(kind) in ids:
            raise ConfigError(
                f"the prompt spells {reader.marker(kind)}, the place of an {kind} for this model, and there is none: leave "
                "it out; images and sounds go through `tandem serve` (docs/serve.md)"
            )
    return tuple(ids)


async def answer(engine: InferenceEngine, ids: tuple[int, ...], gconfig: GenerationConfig, seed: int) -> list[LLMResponse]:
    """All answers, generated together; they share the prompt's keys and values."""
    requests = [LLMRequest(ids, gconfig, NoiseKey(seed, sample=i), affinity="prompt") for i in range(gconfig.n_samples)]
    return list(await asyncio.gather(*(engine.agenerate(request) for request in requests)))


def as_json(prompt: str, texts: list[str], responses: list[LLMResponse], seconds: float) -> dict[str, Any]:
    answers = [
        {
            "text": text,
            "tokens": len(response.output_ids),
            "stop_reason": response.stop_reason.name.lower(),
            "output_ids": list(response.output_ids),
            "logprobs": list(response.logprobs),
        }
        for text, response in zip(texts, responses, strict=True)
    ]
    prompt_tokens = len(responses[0].input_ids)
    tokens = sum(len(response.output_ids) for response in responses)
    speed = {"seconds": round(seconds, 3), "tokens_per_s": round(tokens / seconds, 1)}
    return {"prompt": prompt, "prompt_tokens": prompt_tokens, "answers": answers} | speed


def run(arguments: argparse.Namespace) -> int:
    gconfig = sampling(arguments)
    prompt = sys.stdin.read().rstrip("\n") if arguments.prompt == "-" else arguments.prompt
    device = device_of(arguments)
    folder = resolve(named_model(arguments.model))
    tokenizer = load_tokenizer(folder)
    ids = encode(tokenizer, prompt, system=arguments.system, raw=arguments.raw)
    threads = arguments.threads or usable_cores()
    torch.set_num_threads(threads)
    dtype = str(resolve_dtype(arguments.dtype, device)).removeprefix("torch.")
    rollout = RolloutConfig(dtype=dtype, engine=EmbeddedEngineConfig(max_running=min(arguments.n, 128)))
    engine = build_inference_engine(
        rollout, folder=folder, placement="colocate", threads=threads, device=device, deterministic=False
    )
    try:
        began = time.perf_counter()
        responses = asyncio.run(answer(engine, ids, gconfig, arguments.seed))
        seconds = time.perf_counter() - began
    finally:
        engine.close()
    texts = [tokenizer.decode(response.output_ids, skip_special_tokens=True) for response in responses]
    outcome = as_json(prompt, texts, responses, seconds)
    if arguments.json:
        print(json.dumps(outcome, ensure_ascii=False))
        return 0
    for i, text in enumerate(texts):
        print(f"--- {i + 1}\n{text}" if len(texts) > 1 else text)
    cut = sum(response.truncated for response in responses)
    note = f"; {cut} cut at --max-new-tokens {arguments.max_new_tokens} or the model's context" if cut else ""
    tokens = sum(answer["tokens"] for answer in outcome["answers"])
    print(f"{tokens} tokens in {seconds:.1f} s, {outcome['tokens_per_s']:.0f} tok/s{note}", file=sys.stderr)
    return 0
