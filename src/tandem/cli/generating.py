"""The answers of `tandem generate`, and the conversation of `tandem chat`."""

import argparse
import asyncio
import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tandem.api.chat_template import ASKS, render
from tandem.api.engines import InferenceEngine
from tandem.api.failures import DataFailure, ServerFailed
from tandem.api.media import reader_of
from tandem.api.requests import LLMRequest, LLMResponse, NoiseKey, StopReason
from tandem.api.weights import WeightVersion
from tandem.cli.arguments import device_of, require, sampling_of
from tandem.config.devices import usable_cores
from tandem.config.errors import ConfigError
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig, RolloutConfig
from tandem.engines.inference.build import build_inference_engine
from tandem.engines.inference.core import EngineCore
from tandem.engines.inference.embedded import EmbeddedEngine
from tandem.engines.inference.serve.text import TextStream
from tandem.models.catalog import resolve
from tandem.models.hardware import resolve_dtype
from tandem.models.tokenizer import check_chat_template, check_system_prompt, load_tokenizer
from tandem.protocol.client import HttpClient, stream_events
from tandem.rollout.workflows import Chat
from tandem.state.resuming import named_model


def sampling(arguments: argparse.Namespace) -> GenerationConfig:
    """Builds the sampling configuration. Raises `ConfigError` if a value is out of range."""
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
    """Returns the prompt's tokens: the text alone if ``raw``, otherwise a chat up to the start of the assistant's turn."""
    try:
        (prompt + (system or "")).encode()
    except UnicodeEncodeError as error:  # bytes of a command line that are not UTF-8
        raise ConfigError(f"the prompt is not UTF-8 text: {error.object[error.start]!r} at index {error.start}") from None
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
        if reader is not None and reader.placeholder(kind) in ids:
            raise ConfigError(
                f"the prompt contains {reader.marker(kind)}, this model's placeholder for an {kind}, but has no {kind}: "
                "leave it out; images and sounds go through `tandem serve` (docs/serve.md)"
            )
    return tuple(ids)


async def answer(engine: InferenceEngine, ids: tuple[int, ...], gconfig: GenerationConfig, seed: int) -> list[LLMResponse]:
    """Generates all answers together, so that they share the prompt's keys and values."""
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


def generate(arguments: argparse.Namespace) -> int:
    gconfig = sampling(arguments)
    prompt = sys.stdin.read().rstrip("\n") if arguments.prompt == "-" else arguments.prompt
    device = device_of(arguments)
    folder = resolve(named_model(arguments.model))
    tokenizer = load_tokenizer(folder)
    ids = encode(tokenizer, prompt, system=arguments.system, raw=arguments.raw)
    threads = arguments.threads or usable_cores()
    torch.set_num_threads(threads)
    dtype: Any = str(resolve_dtype(arguments.dtype, device)).removeprefix("torch.")
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
    texts = [str(tokenizer.decode(list(response.output_ids), skip_special_tokens=True)) for response in responses]
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


ASK_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 3600.0
MIN_TEMPERATURE = 0.01
"""The lowest temperature that servers accept."""


def check_chat(arguments: argparse.Namespace) -> None:
    """Raises `ConfigError` if a value is out of range."""
    temperature = arguments.temperature
    require([("--temperature", temperature, temperature >= MIN_TEMPERATURE, f"at least {MIN_TEMPERATURE} (0 is --greedy)")])
    sampling_of(arguments)
    device_of(arguments)


class ChatPartner(ABC):
    """The model that answers in a chat."""

    @abstractmethod
    def begin(self) -> None:
        """Starts a new conversation."""

    @abstractmethod
    def answer(self, text: str) -> AsyncGenerator[str, None]:
        """Appends the user's message to the conversation, yields the answer in pieces as they arrive, and appends it too."""

    @abstractmethod
    def close(self) -> None:
        """Releases the model or the connection."""


class LocalPartner(ChatPartner):
    """A model in this process. The conversation is kept as tokens."""

    def __init__(self, arguments: argparse.Namespace):
        folder = resolve(named_model(arguments.model))
        self._tokenizer = load_tokenizer(folder, chats=True)
        if arguments.system is not None:
            check_system_prompt(self._tokenizer, [[ASKS]], arguments.system, "--system")
        device = device_of(arguments)
        threads = arguments.threads or usable_cores()
        version = WeightVersion(0)
        config = EmbeddedEngineConfig(max_running=1, threads=threads)
        core = EngineCore(folder, config, resolve_dtype(arguments.dtype, device), device, version)
        self._engine = EmbeddedEngine(core, version=version, threads=threads)
        self._gconfig = sampling_of(arguments)
        self._system, self._seed = arguments.system, arguments.seed
        self._conversations = 0
        self._chat: Chat | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        return () if self._chat is None else self._chat.input_ids

    def begin(self) -> None:
        self._chat = None
        self._conversations += 1

    async def answer(self, text: str) -> AsyncGenerator[str, None]:
        if self._chat is None:
            self._chat = Chat(self._tokenizer, [{"role": "user", "content": text}], system_prompt=self._system)
        else:
            self._chat.say(text)
        key = NoiseKey(self._seed, trajectory=self._conversations)
        request = replace(self._chat.request(self._gconfig), noise_key=key)
        words, num_streamed = TextStream(self._tokenizer), 0
        async with aclosing(self._engine.stream(request)) as pieces:
            async for piece in pieces:
                if isinstance(piece, LLMResponse):
                    self._chat.add(piece)
                    yield words.finish(piece.output_ids[num_streamed:], stopped=piece.stop_reason == StopReason.STOP)
                else:
                    num_streamed += len(piece.output_ids)
                    yield words.add(piece.output_ids)

    def close(self) -> None:
        self._engine.close()


class RemotePartner(ChatPartner):
    """A model on a server. The conversation is kept as messages."""

    def __init__(self, arguments: argparse.Namespace):
        base = arguments.model.rstrip("/").removesuffix("/v1")
        self._token = None if arguments.token_file is None else _token(arguments.token_file)
        client = HttpClient(base, token=self._token)
        try:
            name = arguments.name or _first_model(base, client.call("/v1/models", deadline_s=ASK_TIMEOUT_S))
        finally:
            client.close()
        self._url = f"{base}/v1/chat/completions"
        self._sampling = {
            "model": name,
            "max_tokens": arguments.max_new_tokens,
            "temperature": 0 if arguments.greedy else arguments.temperature,
            "top_p": arguments.top_p,
            "seed": arguments.seed,
            "stream": True,
        }
        self._opening = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
        self.messages: list[dict[str, str]] = []

    def begin(self) -> None:
        self.messages = []

    async def answer(self, text: str) -> AsyncGenerator[str, None]:
        pieces, messages = [], [*self.messages, {"role": "user", "content": text}]
        body = {**self._sampling, "messages": self._opening + messages}
        async with aclosing(stream_events(self._url, body, token=self._token, deadline_s=ANSWER_TIMEOUT_S)) as events:
            async for event in events:
                for choice in event.get("choices", []):
                    delta = choice.get("delta", {})
                    pieces.append(delta.get("content") or "")
                    yield (delta.get("reasoning_content") or "") + pieces[-1]
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]

    def close(self) -> None:
        """Does nothing: each request has its own connection."""


def _token(file: Path) -> str:
    try:
        return file.expanduser().read_text().strip()
    except OSError as error:
        raise ConfigError(f"--token-file {file} cannot be read: {error.strerror}") from error


def _first_model(base: str, answer: Any) -> str:
    try:
        return str(answer["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise ServerFailed(f"{base}/v1/models names no model: {str(answer)[:200]}", url=base, status=200) from None


def partner_of(arguments: argparse.Namespace) -> ChatPartner:
    remote = arguments.model.startswith(("http://", "https://"))
    return RemotePartner(arguments) if remote else LocalPartner(arguments)


async def _say(partner: ChatPartner, text: str) -> None:
    async with aclosing(partner.answer(text)) as pieces:
        async for piece in pieces:
            print(piece, end="", flush=True)
    print(flush=True)


def converse(partner: ChatPartner, read: Callable[[], str]) -> None:
    """Reads messages and prints answers until the input ends or the user types `/quit`."""
    while True:
        try:
            text = read().strip()
        except EOFError:
            return
        if text in ("/quit", "/exit"):
            return
        if text == "/new":
            partner.begin()
            print("— a new conversation —", flush=True)
        elif text:
            try:
                asyncio.run(_say(partner, text))
            except DataFailure as failure:  # such as a text that contains the model's image placeholder
                print(f"— not sent; please rephrase it: {failure.words}", flush=True)


def chat(arguments: argparse.Namespace) -> int:
    check_chat(arguments)
    partner = partner_of(arguments)
    terminal = sys.stdin.isatty()
    try:
        converse(partner, lambda: input("> " if terminal else ""))
    finally:
        partner.close()
    return 0
