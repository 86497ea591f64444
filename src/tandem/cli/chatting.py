"""The conversation of `tandem chat`."""

import argparse
import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.api.chat_template import ASKS
from tandem.api.failures import DataFailure, ServerFailed
from tandem.api.requests import LLMResponse, NoiseKey, StopReason
from tandem.api.weights import WeightVersion
from tandem.cli.sampling import device_of, require, sampling_of
from tandem.config.cores import usable_cores
from tandem.config.errors import ConfigError
from tandem.config.rollout import EmbeddedEngineConfig
from tandem.engines.inference.core import EngineCore
from tandem.engines.inference.embedded import EmbeddedEngine
from tandem.engines.inference.serve.text import TextStream
from tandem.models.catalog import resolve
from tandem.models.precision import resolve_dtype
from tandem.models.template_options import check_system_prompt
from tandem.models.tokenizer import load_tokenizer
from tandem.protocol.client import HttpClient, stream_events
from tandem.rollout.chat import Chat
from tandem.state.named import named_model

ASK_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 3600.0
MIN_TEMPERATURE = 0.01
"""The lowest temperature that servers take."""


def check(arguments: argparse.Namespace) -> None:
    """Raises `ConfigError` for values that cannot be."""
    temperature = arguments.temperature
    require([("--temperature", temperature, temperature >= MIN_TEMPERATURE, f"at least {MIN_TEMPERATURE} (0 is --greedy)")])
    sampling_of(arguments)
    device_of(arguments)


class ChatPartner(ABC):
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
        self._engine.close()


class RemotePartner(ChatPartner):
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
        self.messages: list[dict[str, str]] = []

    def begin(self) -> None:
        self.messages = []

    async def answer(self, text: str) -> AsyncGenerator[str, None]:
        said, asked = [], [*self.messages, {"role": "user", "content": text}]
        body = {**self._sampling, "messages": self._opening + asked}
        async with aclosing(stream_events(self._url, body, token=self._token, deadline_s=ANSWER_TIMEOUT_S)) as events:
            async for event in events:
                for choice in event.get("choices", []):
                    delta = choice.get("delta", {})
                    said.append(delta.get("content") or "")
                    yield (delta.get("reasoning_content") or "") + said[-1]
        self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]

    def close(self) -> None:
        """Closes the connection."""


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
            try:
                asyncio.run(_say(partner, text))
            except DataFailure as failure:  # such as a text that spells the model's mark for an image
                print(f"— not sent, so say it otherwise: {failure.words}", flush=True)


def run(arguments: argparse.Namespace) -> int:
    check(arguments)
    partner = partner_of(arguments)
    terminal = sys.stdin.isatty()
    try:
        converse(partner, lambda: input("> " if terminal else ""))
    finally:
        partner.close()
    return 0
