"""Our completions as OpenAI's answers, whole or as a stream of events."""

import asyncio
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from aiohttp import web

from tandem.api.requests import LLMResponse, StopReason
from tandem.engines.inference.callers import NewTokens
from tandem.engines.inference.serve.questions import CompletionQuestion, chat_question, legacy_question
from tandem.engines.inference.serve.service import EngineService, check_finished
from tandem.engines.inference.serve.text import TextStream
from tandem.protocol.refusal import Refusal
from tandem.protocol.schema import record

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
        choices = [self._choice(number, response) for number, response in enumerate(responses)]
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
        texts = [TextStream(self._decoder, question.gconfig.stop) for _ in range(count)]
        sent = [0] * count
        responses: list[LLMResponse] = []
        for number in range(count):
            for delta in self._opening(number):
                yield self._chunk([delta])
        latest: News | None = first
        while latest is not None:
            number, new = latest
            ids, logprobs = new.output_ids, new.logprobs
            if isinstance(new, LLMResponse):
                check_finished([new])
                ids, logprobs = ids[sent[number] :], logprobs[sent[number] :]
                text = texts[number].finish(ids, stopped=new.stop_reason == StopReason.STOP)
                responses.append(new)
            else:
                sent[number] += len(ids)
                text = texts[number].add(ids)
            reason = finish_reason(new) if isinstance(new, LLMResponse) else None
            if text or reason or question.logprobs:
                yield self._chunk([self._delta(number, text, ids, logprobs, reason)])
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
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _text(self, response: LLMResponse) -> str:
        stream = TextStream(self._decoder, self._question.gconfig.stop)
        return stream.finish(response.output_ids, stopped=response.stop_reason == StopReason.STOP)

    def _words(self, ids: Sequence[int]) -> list[str]:
        return [str(self._decoder.decode([token], skip_special_tokens=False)) for token in ids]

    def _opening(self, number: int) -> list[dict[str, Any]]:
        """The part of a completion that is sent before its first token."""
        return []

    @abstractmethod
    def _choice(self, number: int, response: LLMResponse) -> dict[str, Any]:
        """One whole completion."""

    @abstractmethod
    def _delta(
        self, number: int, text: str, ids: Sequence[int], logprobs: Sequence[float], reason: str | None
    ) -> dict[str, Any]:
        """The new part of a completion."""


class LegacyAnswer(CompletionAnswer):
    """`/v1/completions`."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def _choice(self, number: int, response: LLMResponse) -> dict[str, Any]:
        reason = finish_reason(response)
        return self._delta(number, self._text(response), response.output_ids, response.logprobs, reason)

    def _delta(
        self, number: int, text: str, ids: Sequence[int], logprobs: Sequence[float], reason: str | None
    ) -> dict[str, Any]:
        facts = None
        if self._question.logprobs:
            facts = {"tokens": self._words(ids), "token_logprobs": list(logprobs), "top_logprobs": None, "text_offset": None}
        return {"index": number, "text": text, "logprobs": facts, "finish_reason": reason}


class ChatAnswer(CompletionAnswer):
    """`/v1/chat/completions`."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _opening(self, number: int) -> list[dict[str, Any]]:
        return [{"index": number, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}]

    def _choice(self, number: int, response: LLMResponse) -> dict[str, Any]:
        return {
            "index": number,
            "message": {"role": "assistant", "content": self._text(response), "refusal": None},
            "logprobs": self._logprobs(response.output_ids, response.logprobs),
            "finish_reason": finish_reason(response),
        }

    def _delta(
        self, number: int, text: str, ids: Sequence[int], logprobs: Sequence[float], reason: str | None
    ) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        return {"index": number, "delta": delta, "logprobs": self._logprobs(ids, logprobs), "finish_reason": reason}

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any] | None:
        if not self._question.logprobs:
            return None
        entries = [
            {"token": word, "logprob": logprob, "bytes": list(word.encode()), "top_logprobs": []}
            for word, logprob in zip(self._words(ids), logprobs, strict=True)
        ]
        return {"content": entries, "refusal": None}


def finish_reason(response: LLMResponse) -> str:
    return "length" if response.truncated else "stop"
