"""Chat with a model in the terminal: one in a folder, or one on a server (tandem serve, or any with OpenAI's protocol).

examples:
  tandem chat smollm2-135m
  tandem chat runs/addition/grpo/checkpoints/step_18 --greedy --system "Answer with just the number."
  tandem chat http://127.0.0.1:8000 --temperature 0.7

/new begins a new conversation, /quit or Ctrl-D ends. The conversation is only appended to, never rewritten: a model in a
folder sees exactly the tokens that it made.
"""

import argparse
import asyncio
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tandem.api.failures import ServerFailed
from tandem.api.requests import LLMResponse, NoiseKey, StopReason
from tandem.api.weights import WeightVersion
from tandem.config.errors import ConfigError
from tandem.config.generation import GenerationConfig
from tandem.config.rollout import EmbeddedEngineConfig
from tandem.engines.inference.core import EngineCore
from tandem.engines.inference.embedded import EmbeddedEngine
from tandem.engines.inference.remote.events import stream_events
from tandem.engines.inference.serve.text import TextStream
from tandem.models.catalog import resolve
from tandem.models.precision import resolve_dtype
from tandem.models.tokenizer import check_chat_template, load_tokenizer
from tandem.protocol.client import HttpClient
from tandem.rollout.chat import Chat
from tandem.state.machine import usable_cores

ASK_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("model", metavar="MODEL|URL", help="a folder, a hub name, smollm2-135m, or a server's address")
    parser.add_argument("--system", metavar="TEXT", help="a system message put before the conversation")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="longest answer in tokens (default: 512)")
    parser.add_argument("--temperature", type=float, default=0.7, help="1 is the model itself (default: 0.7)")
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus sampling (default: 1, off)")
    parser.add_argument("--greedy", action="store_true", help="always the most probable token")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same answers (default: 0)")
    parser.add_argument("--name", help="URL: which model, where the server has several (default: its first)")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="URL: the file with the server's token")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="MODEL: default: auto")
    parser.add_argument("--threads", type=int, help="MODEL: CPU threads (default: all)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="MODEL: default: auto")


def check(arguments: argparse.Namespace) -> None:
    """Raises `ConfigError` for values that cannot be."""
    rules = (
        ("--max-new-tokens", arguments.max_new_tokens, arguments.max_new_tokens >= 1, "at least 1"),
        ("--temperature", arguments.temperature, 0.01 <= arguments.temperature < math.inf, "at least 0.01 (0 is --greedy)"),
        ("--top-p", arguments.top_p, 0 < arguments.top_p <= 1, "above 0 and at most 1"),
        ("--threads", arguments.threads, arguments.threads is None or arguments.threads >= 1, "at least 1"),
    )
    for name, value, right, rule in rules:
        if not right:
            raise ConfigError(f"{name} must be {rule}, got {value}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda, but torch sees no GPU here; use --device cpu, or install a CUDA build of torch")


class Partner(ABC):
    """Whoever answers."""

    @abstractmethod
    def begin(self) -> None:
        """A new conversation."""

    @abstractmethod
    def answer(self, text: str) -> AsyncGenerator[str, None]:
        """Appends what the user said, yields the answer as it comes, and appends that."""

    @abstractmethod
    def close(self) -> None:
        """End."""


class LocalPartner(Partner):
    """A model in this process. The conversation is kept as tokens."""

    def __init__(self, arguments: argparse.Namespace):
        folder = resolve(arguments.model)
        self._tokenizer = load_tokenizer(folder)
        check_chat_template(self._tokenizer)
        device = "cuda" if arguments.device != "cpu" and torch.cuda.is_available() else "cpu"
        threads = arguments.threads or usable_cores()
        version = WeightVersion(0)
        config = EmbeddedEngineConfig(max_running=1, threads=threads)
        core = EngineCore(folder, config, resolve_dtype(arguments.dtype, device), device, version)
        self._engine = EmbeddedEngine(core, version=version, threads=threads)
        self._gconfig = GenerationConfig(
            n_samples=1,
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            top_p=arguments.top_p,
            greedy=arguments.greedy,
        )
        self._system, self._seed = arguments.system, arguments.seed
        self._conversations = 0
        self._chat: Chat | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The conversation so far."""
        return () if self._chat is None else self._chat.input_ids

    def begin(self) -> None:
        """See `Partner`."""
        self._chat = None
        self._conversations += 1

    async def answer(self, text: str) -> AsyncGenerator[str, None]:
        """See `Partner`."""
        if self._chat is None:
            self._chat = Chat(self._tokenizer, [{"role": "user", "content": text}], system_prompt=self._system)
        else:
            self._chat.say(text)
        key = NoiseKey(self._seed, trajectory=self._conversations)
        request = replace(self._chat.request(self._gconfig), noise_key=key)
        words, told = TextStream(self._tokenizer), 0
        async with aclosing(self._engine.stream(request)) as pieces:
            async for piece in pieces:
                if isinstance(piece, LLMResponse):
                    self._chat.add(piece)
                    yield words.finish(piece.output_ids[told:], stopped=piece.stop_reason == StopReason.STOP)
                else:
                    told += len(piece.output_ids)
                    yield words.add(piece.output_ids)

    def close(self) -> None:
        """See `Partner`."""
        self._engine.close()


class RemotePartner(Partner):
    """A model that a server has. The conversation is kept as messages."""

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
        self._messages: list[dict[str, str]] = []

    def begin(self) -> None:
        """See `Partner`."""
        self._messages = []

    async def answer(self, text: str) -> AsyncGenerator[str, None]:
        """See `Partner`."""
        self._messages.append({"role": "user", "content": text})
        said = []
        body = {**self._sampling, "messages": self._opening + self._messages}
        async with aclosing(stream_events(self._url, body, token=self._token, deadline_s=ANSWER_TIMEOUT_S)) as events:
            async for event in events:
                for choice in event.get("choices", []):
                    said.append(choice.get("delta", {}).get("content") or "")
                    yield said[-1]
        self._messages.append({"role": "assistant", "content": "".join(said)})

    def close(self) -> None:
        """See `Partner`."""


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


def partner_of(arguments: argparse.Namespace) -> Partner:
    """The model behind MODEL|URL."""
    remote = arguments.model.startswith(("http://", "https://"))
    return RemotePartner(arguments) if remote else LocalPartner(arguments)


async def _say(partner: Partner, text: str) -> None:
    async with aclosing(partner.answer(text)) as pieces:
        async for piece in pieces:
            print(piece, end="", flush=True)
    print(flush=True)


def converse(partner: Partner, read: Callable[[], str]) -> None:
    """Reads what the user says until there is no more."""
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
            asyncio.run(_say(partner, text))


def run(arguments: argparse.Namespace) -> int:
    """`tandem chat`."""
    check(arguments)
    partner = partner_of(arguments)
    terminal = sys.stdin.isatty()
    try:
        converse(partner, lambda: input("> " if terminal else ""))
    finally:
        partner.close()
    return 0
