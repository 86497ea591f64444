"""Our completions as OpenAI's answers, whole or as a stream of events."""

import asyncio
import itertools
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from aiohttp import web
from transformers import PreTrainedTokenizerBase

from tandem.api.requests import LLMResponse, NewTokens, StopReason, TopTokens
from tandem.engines.inference.serve.questions import CompletionQuestion, chat_question, legacy_question
from tandem.engines.inference.serve.service import EngineService, check_finished
from tandem.engines.inference.serve.text import TextStream
from tandem.protocol.dialects import chat
from tandem.protocol.refusal import Refusal
from tandem.protocol.schema import record
from tandem.protocol.tool_calls import CallReader, ReplyStream
from tandem.protocol.turns import Reply

EVENTS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}

News = tuple[int, NewTokens | LLMResponse]

_INTEGER, _STRING, _OBJECT = {"type": "integer"}, {"type": "string"}, {"type": "object"}

ANSWER = record(
    {
        "id": _STRING,
        "object": {"enum": ["chat.completion", "text_completion"]},
        "created": _INTEGER,
        "model": _STRING,
        "system_fingerprint": _STRING | {"description": "The weights: number of the version and start of its digest."},
        "choices": {"type": "array", "items": _OBJECT},
        "usage": record({"prompt_tokens": _INTEGER, "completion_tokens": _INTEGER, "total_tokens": _INTEGER}),
    },
    ("id", "object", "created", "model", "choices", "usage"),
)
MODELS = record(
    {
        "object": {"enum": ["list"]},
        "data": {
            "type": "array",
            "items": record(
                {
                    "id": _STRING,
                    "object": {"enum": ["model"]},
                    "created": _INTEGER,
                    "owned_by": _STRING,
                    "max_model_len": _INTEGER | {"description": "vLLM's: most tokens of prompt and answer."},
                }
            ),
        },
    },
    ("object", "data"),
)


async def models(service: EngineService, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
    """`/v1/models`: the one that is served."""
    entry = {"id": service.name, "object": "model", "created": service.created, "owned_by": "tandem"}
    return {"object": "list", "data": [entry | {"max_model_len": service.limits.max_tokens}]}


async def completions(service: EngineService, body: dict[str, Any], request: web.Request) -> Any:
    """`/v1/completions`."""
    question = await legacy_question(body, service.tokenizers, service.limits)
    return await LegacyAnswer(service, question).answer(request)


async def chat_completions(service: EngineService, body: dict[str, Any], request: web.Request) -> Any:
    """`/v1/chat/completions`."""
    question = await chat_question(body, service.tokenizers, service.limits)
    return await ChatAnswer(service, question).answer(request)


class CompletionAnswer(ABC):
    """One answer; what differs between the two protocols is in `LegacyAnswer` and `ChatAnswer`."""

    prefix: str
    whole: str
    chunk: str

    def __init__(self, service: EngineService, question: CompletionQuestion):
        self._service, self._question = service, question
        self._decoder = service.tokenizers.decoder
        self._id, self._created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())

    @property
    def _reader(self) -> CallReader | None:
        """Reads a turn of a chat; None: a completion is text."""
        return None

    async def answer(self, request: web.Request) -> Any:
        """The body of the answer, or the response that streams it.

        Raises:
            Refusal: 400, 503, 504.
        """
        requests = self._question.requests()
        if self._question.stream:
            async with aclosing(self._service.stream(requests)) as news:
                return await self._stream(request, news)
        responses = await self._service.complete(requests)
        check_finished(responses)
        choices = []
        for number, response in enumerate(responses):
            reply = self._reading().read(response.output_ids, response.stop_reason)
            choices.append(self._choice(number, self._begun(number, reply), self._logprobs(response)))
        return self._frame(self.whole) | {"choices": choices, "usage": self._usage(responses)}

    async def _stream(self, request: web.Request, news: AsyncIterator[News]) -> web.StreamResponse:
        """Sends events; what goes wrong before the first is an ordinary refusal, and an event of its own after that."""
        first = await anext(news)
        if isinstance(first[1], LLMResponse):
            check_finished([first[1]])
        response = web.StreamResponse(headers=EVENTS)
        await response.prepare(request)
        try:
            async for event in self._events(first, news):
                await self._send(response, event)
            await self._send(response, None)
        except Refusal as refusal:
            await self._send(response, refusal.body())
        return response

    async def _send(self, response: web.StreamResponse, event: dict[str, Any] | None) -> None:
        text = "[DONE]" if event is None else json.dumps(event)
        try:
            async with asyncio.timeout(self._service.limits.send_timeout_s):
                await response.write(f"data: {text}\n\n".encode())
        except TimeoutError:
            raise ConnectionResetError("the reader of a stream takes nothing") from None

    async def _events(self, first: News, news: AsyncIterator[News]) -> AsyncIterator[dict[str, Any]]:
        question = self._question
        count = len(question.requests())
        readings = [self._reading() for _ in range(count)]
        sent = [0] * count
        responses: list[LLMResponse] = []
        for number in range(count):
            for piece in self._opening(number):
                yield self._chunk([piece])
        latest: News | None = first
        while latest is not None:
            number, new = latest
            ended = None
            if isinstance(new, LLMResponse):
                check_finished([new])
                responses.append(new)
                ended, start = new.stop_reason, sent[number]
                new = NewTokens(new.output_ids[start:], new.logprobs[start:], new.top[start:])
            sent[number] += len(new.output_ids)
            reply = readings[number].read(new.output_ids, ended)
            for piece in self._pieces(number, reply, self._logprobs(new), ended is not None):
                yield self._chunk([piece])
            latest = await anext(news, None)
        if question.usage_in_stream:
            yield self._chunk([]) | {"usage": self._usage(responses)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self._question.usage_in_stream else {}
        return self._frame(self.chunk) | {"choices": choices} | usage

    def _frame(self, kind: str) -> dict[str, Any]:
        version = self._service.engine.version
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._service.name,
            "system_fingerprint": f"weights-{version.number}-{version.digest[:12]}".rstrip("-"),
        }

    def _usage(self, responses: Sequence[LLMResponse]) -> dict[str, int]:
        prompt = sum(len(prompt) for prompt in self._question.prompts)
        completion = sum(len(response.output_ids) for response in responses)
        return chat.usage_of(prompt, completion)

    def _word(self, token: int) -> str:
        return str(self._decoder.decode([token], skip_special_tokens=False))

    def _begun(self, number: int, reply: Reply) -> Reply:
        """The reply with what the answer says before it."""
        return reply

    def _opening(self, number: int) -> list[dict[str, Any]]:
        """The part of a completion that is sent before its first token."""
        return []

    def _reading(self) -> "ReplyReading":
        return ReplyReading(self._question, self._decoder, self._reader)

    @abstractmethod
    def _logprobs(self, new: NewTokens | LLMResponse) -> dict[str, Any] | None:
        """The log-probabilities of these tokens, if they are wanted."""

    @abstractmethod
    def _choice(self, number: int, reply: Reply, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """One whole completion."""

    @abstractmethod
    def _pieces(self, number: int, reply: Reply, logprobs: dict[str, Any] | None, last: bool) -> Iterable[dict[str, Any]]:
        """The new parts of a completion."""


class ReplyReading:
    """Reads the tokens of one completion, in pieces or at once: as text, or with a ``reader`` as a turn of a chat."""

    def __init__(self, question: CompletionQuestion, tokenizer: PreTrainedTokenizerBase, reader: CallReader | None):
        self._text = TextStream(tokenizer, question.gconfig.stop, special=reader is not None)
        self._reply = None if reader is None else ReplyStream(reader, question.turn.tools, question.prompt_text)

    def read(self, ids: Sequence[int], ended: StopReason | None) -> Reply:
        """Takes tokens, the last ones if it ``ended``; returns what is certain now and was not before."""
        text = self._text.add(ids) if ended is None else self._text.finish(ids, stopped=ended == StopReason.STOP)
        if self._reply is None:
            return Reply(text, stop_reason=ended or StopReason.STOP)
        return self._reply.add(text) if ended is None else self._reply.finish(text, ended)


class LegacyAnswer(CompletionAnswer):
    """`/v1/completions`."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def _begun(self, number: int, reply: Reply) -> Reply:
        echo = self._question.echo
        return replace(reply, content=echo[number // self._question.gconfig.n_samples] + reply.content) if echo else reply

    def _logprobs(self, new: NewTokens | LLMResponse) -> dict[str, Any] | None:
        if not self._question.logprobs:
            return None
        ids, logprobs, top = new.output_ids, new.logprobs, new.top
        first: tuple[None, ...] = ()
        if self._question.echo and isinstance(new, LLMResponse):
            ids, logprobs, top = new.input_ids + ids, new.prompt_logprobs + logprobs, new.prompt_top + top
            first = (None,)  # the first token of a prompt has no probability
        words = [self._word(token) for token in ids]
        tops = [self._by_word(*each) for each in zip(ids[len(first) :], logprobs, top, strict=True)] if top else []
        return {
            "tokens": words,
            "token_logprobs": [*first, *logprobs],
            "top_logprobs": [*first, *tops] if self._question.top_logprobs else None,
            "text_offset": None if self._question.stream else list(itertools.accumulate(map(len, words), initial=0))[:-1],
        }

    def _by_word(self, token: int, logprob: float, top: TopTokens) -> dict[str, float]:
        """The most probable words and the chosen one; of tokens that are the same word, the most probable counts."""
        return {self._word(token): logprob for token, logprob in ((token, logprob), *reversed(top))}

    def _choice(self, number: int, reply: Reply, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        (choice,) = self._pieces(number, reply, logprobs, last=True)
        return choice

    def _pieces(self, number: int, reply: Reply, logprobs: dict[str, Any] | None, last: bool) -> Iterable[dict[str, Any]]:
        if reply.content or logprobs or last:
            reason = chat.finish_reason(reply) if last else None
            yield {"index": number, "text": reply.content, "logprobs": logprobs, "finish_reason": reason}


class ChatAnswer(CompletionAnswer):
    """`/v1/chat/completions`."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    @property
    def _reader(self) -> CallReader | None:
        return self._service.tokenizers.reader

    def _opening(self, number: int) -> list[dict[str, Any]]:
        return [chat.piece(chat.OPENING, number)]

    def _logprobs(self, new: NewTokens | LLMResponse) -> dict[str, Any] | None:
        if not self._question.logprobs:
            return None
        entries = [
            self._entry(token, logprob) | {"top_logprobs": [self._entry(*pair) for pair in top]}
            for token, logprob, top in zip(new.output_ids, new.logprobs, new.top or itertools.repeat(()), strict=False)
        ]
        return {"content": entries, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        word = self._word(token)
        return {"token": word, "logprob": logprob, "bytes": list(word.encode())}

    def _choice(self, number: int, reply: Reply, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return chat.choice(reply, number, logprobs)

    def _pieces(self, number: int, reply: Reply, logprobs: dict[str, Any] | None, last: bool) -> Iterable[dict[str, Any]]:
        return chat.pieces(reply, number, logprobs, last=last)
