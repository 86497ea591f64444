"""The engine as a server's application. Its table of routes defines the server, its documentation and its tests.

Our completions become answers of OpenAI's protocol, whole or as a stream of events. The engine also answers
`/v1/responses` and `/v1/messages`, the dialects of agents and apps.
"""

import asyncio
import itertools
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from aiohttp import web
from transformers import PreTrainedTokenizerBase

from tandem.api.requests import LLMResponse, NewTokens, StopReason, TopTokens
from tandem.engines.inference.remote.tandem_server import INSTANCE_HEADER
from tandem.engines.inference.serve.control import DIGESTS, PARTS_SCHEMA, RUN, ServiceControl, of_run
from tandem.engines.inference.serve.questions import (
    CompletionQuestion,
    chat_question,
    chat_schema,
    completion_schema,
    legacy_question,
    turn_question,
    turn_schema,
)
from tandem.engines.inference.serve.service import EngineService, Metrics, check_finished
from tandem.engines.inference.serve.text import TextStream
from tandem.engines.inference.serve.token_routes import (
    GENERATE_ANSWER,
    MEDIUM_ANSWER,
    TOKEN_ROUTE_ANSWER,
    VERSION,
    generate,
    generate_schema,
    keep_medium,
    medium_schema,
    token_route,
    token_route_schema,
)
from tandem.protocol.bodies import Refusal, Schema, record, text
from tandem.protocol.dialects import DIALECTS, Dialect, openai_chat
from tandem.protocol.server import Application, Handler, Route, document
from tandem.protocol.tool_calls import CallReader, ReplyStream
from tandem.protocol.turns import Reply

EVENTS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}

News = tuple[int, NewTokens | LLMResponse]

_OBJECT: Schema = {"type": "object"}
_INTEGER, _STRING = {"type": "integer"}, {"type": "string"}

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
                    "max_model_len": _INTEGER
                    | {"description": "A field of vLLM: the most tokens of a prompt and its answer together."},
                }
            ),
        },
    },
    ("object", "data"),
)


async def models(service: EngineService, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
    """Answers `/v1/models` with the one model that is served."""
    entry = {"id": service.name, "object": "model", "created": service.created, "owned_by": "tandem"}
    return {"object": "list", "data": [entry | {"max_model_len": service.limits.max_tokens}]}


async def completions(service: EngineService, body: dict[str, Any], request: web.Request) -> Any:
    """Answers `/v1/completions`."""
    question = await legacy_question(body, service.tokenizers, service.limits)
    return await LegacyAnswer(service, question).answer(request)


async def chat_completions(service: EngineService, body: dict[str, Any], request: web.Request) -> Any:
    """Answers `/v1/chat/completions`."""
    question = await chat_question(body, service.tokenizers, service.limits)
    return await ChatAnswer(service, question).answer(request)


class CompletionAnswer(ABC):
    """One answer. The subclasses `LegacyAnswer` and `ChatAnswer` define the parts that differ between the two protocols."""

    prefix: str
    whole: str
    chunk: str

    def __init__(self, service: EngineService, question: CompletionQuestion):
        self._service, self._question = service, question
        self._decoder = service.tokenizers.decoder
        self._id, self._created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())

    @property
    def _reader(self) -> CallReader | None:
        """The parser of chat turns; None if completions are plain text."""
        return None

    async def answer(self, request: web.Request) -> Any:
        """Returns the body of the answer, or the response that has streamed it.

        Raises:
            Refusal: with status 400, 503 or 504.
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
            choices.append(self._choice(number, self._with_echo(number, reply), self._logprobs(response)))
        return self._frame(self.whole) | {"choices": choices, "usage": self._usage(responses)}

    async def _stream(self, request: web.Request, news: AsyncIterator[News]) -> web.StreamResponse:
        """Sends events. A failure before the first event is an ordinary refusal; a later one is sent as an event."""
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
            raise ConnectionResetError("the client does not read its stream") from None

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
        return openai_chat.usage_of(prompt, completion)

    def _word(self, token: int) -> str:
        return str(self._decoder.decode([token], skip_special_tokens=False))

    def _with_echo(self, number: int, reply: Reply) -> Reply:
        """Returns the reply; if the request asks for an echo, with the prompt's text before it."""
        return reply

    def _opening(self, number: int) -> list[dict[str, Any]]:
        """Returns the chunks of a completion that are sent before its first token."""
        return []

    def _reading(self) -> "ReplyReading":
        return ReplyReading(self._question, self._decoder, self._reader)

    @abstractmethod
    def _logprobs(self, new: NewTokens | LLMResponse) -> dict[str, Any] | None:
        """Returns the log-probabilities of these tokens, or None if they were not requested."""

    @abstractmethod
    def _choice(self, number: int, reply: Reply, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """Returns one whole completion."""

    @abstractmethod
    def _pieces(self, number: int, reply: Reply, logprobs: dict[str, Any] | None, last: bool) -> Iterable[dict[str, Any]]:
        """Returns the new chunks of a completion. ``last``: True if the completion has ended."""


class ReplyReading:
    """Reads the tokens of one completion, in pieces or at once: as text, or with a ``reader`` as a turn of a chat."""

    def __init__(self, question: CompletionQuestion, tokenizer: PreTrainedTokenizerBase, reader: CallReader | None):
        self._text = TextStream(tokenizer, question.gconfig.stop, special=reader is not None)
        self._reply = None if reader is None else ReplyStream(reader, question.turn.tools, question.prompt_text)

    def read(self, ids: Sequence[int], ended: StopReason | None) -> Reply:
        """Adds tokens and returns the further part of the reply that is now certain. ``ended``: the reason why the
        completion ends with these tokens; None: it goes on."""
        text = self._text.add(ids) if ended is None else self._text.finish(ids, stopped=ended == StopReason.STOP)
        if self._reply is None:
            return Reply(text, stop_reason=ended or StopReason.STOP)
        return self._reply.add(text) if ended is None else self._reply.finish(text, ended)


class LegacyAnswer(CompletionAnswer):
    """One answer of `/v1/completions`."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def _with_echo(self, number: int, reply: Reply) -> Reply:
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
        """Maps the most probable words and the chosen one to their log-probabilities. If several tokens have the same text,
        the most probable token counts."""
        return {self._word(token): logprob for token, logprob in ((token, logprob), *reversed(top))}

    def _choice(self, number: int, reply: Reply, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        (choice,) = self._pieces(number, reply, logprobs, last=True)
        return choice

    def _pieces(self, number: int, reply: Reply, logprobs: dict[str, Any] | None, last: bool) -> Iterable[dict[str, Any]]:
        if reply.content or logprobs or last:
            reason = openai_chat.finish_reason(reply) if last else None
            yield {"index": number, "text": reply.content, "logprobs": logprobs, "finish_reason": reason}


class ChatAnswer(CompletionAnswer):
    """One answer of `/v1/chat/completions`."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    @property
    def _reader(self) -> CallReader | None:
        return self._service.tokenizers.reader

    def _opening(self, number: int) -> list[dict[str, Any]]:
        return [openai_chat.piece(openai_chat.OPENING, number)]

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
        return openai_chat.choice(reply, number, logprobs)

    def _pieces(self, number: int, reply: Reply, logprobs: dict[str, Any] | None, last: bool) -> Iterable[dict[str, Any]]:
        return openai_chat.pieces(reply, number, logprobs, last=last)


KEEP_ALIVE_S = 5.0
"""Seconds between the comments that are sent in a stream until its turn is complete."""


async def answer_turn(service: EngineService, dialect: Dialect, body: dict[str, Any], request: web.Request) -> Any:
    """Answers one turn in a dialect, whole or as a stream whose events come when the turn has ended.

    Raises:
        Refusal: with status 400, 503 or 504.
    """
    question = await _question(service, dialect, body)
    completion = asyncio.ensure_future(service.complete(question.requests()))
    try:
        if question.turn.stream:
            return await _stream(service, dialect, question, completion, request)
        reply, names = _reply(service, question, await completion)
        return dialect.answer(question.turn, reply, **names)
    finally:
        completion.cancel()  # the client may have left


async def count_tokens(service: EngineService, dialect: Dialect, body: dict[str, Any], request: web.Request) -> Any:
    """Answers with the number of tokens in a turn's prompt."""
    question = await _question(service, dialect, body)
    return dialect.counted(len(question.prompts[0]))


async def _question(service: EngineService, dialect: Dialect, body: dict[str, Any]) -> CompletionQuestion:
    turn = dialect.read(body, bool(service.tokenizers.media))
    return await turn_question(turn, body | {"stream": turn.stream}, service.tokenizers, service.limits)


def _reply(
    service: EngineService, question: CompletionQuestion, responses: Sequence[LLMResponse]
) -> tuple[Reply, dict[str, Any]]:
    check_finished(responses)
    (response,) = responses
    reading = ReplyReading(question, service.tokenizers.decoder, service.tokenizers.reader)
    usage = {"prompt_tokens": len(response.input_ids), "completion_tokens": len(response.output_ids)}
    names = {"response_id": uuid.uuid4().hex, "model": service.name, "usage": usage}
    return reading.read(response.output_ids, response.stop_reason), names


async def _stream(
    service: EngineService,
    dialect: Dialect,
    question: CompletionQuestion,
    completion: "asyncio.Future[list[LLMResponse]]",
    request: web.Request,
) -> web.StreamResponse:
    """Streams a turn. A refusal before the first byte is an ordinary response; a later one is sent as an event."""
    response = web.StreamResponse(headers=EVENTS)

    async def send(data: bytes) -> None:
        try:
            async with asyncio.timeout(service.limits.send_timeout_s):
                await response.prepare(request)  # has an effect only once
                await response.write(data)
        except TimeoutError:
            raise ConnectionResetError("the client does not read its stream") from None

    while not (await asyncio.wait([completion], timeout=KEEP_ALIVE_S))[0]:
        await send(b": the turn is being made\n\n")
    try:
        reply, names = _reply(service, question, completion.result())
    except Refusal as refusal:
        if not response.prepared:
            raise
        await send(dialect.failed(refusal))
        return response
    for event in dialect.events(question.turn, reply, **names):
        await send(event)
    return response


_TIMES = record({"pause_s": {"type": "number"}, "recompute_s": {"type": "number"}, "version": VERSION})


async def health(service: EngineService, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
    return service.identity()


async def ready(service: EngineService, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
    """Answers `/ready`: status 200, or 503 with the reasons."""
    reasons = await service.unready()
    if reasons:
        raise Refusal(503, "; ".join(reasons), code="not_ready")
    return {"ready": True, "token_age_s": service.token_age_s(), **service.identity()}


class ServedEngine(Application):
    """The server application of one engine: completions, token routes and control."""

    def __init__(self, service: EngineService):
        self._service, self.control, self._metrics = service, ServiceControl(service), Metrics()
        self.limits = service.limits
        self.routes = table(service, self.control, self._metrics)

    def headers(self) -> dict[str, str]:
        """Returns the header that names this process, so that clients notice if another one has taken the address."""
        return {INSTANCE_HEADER: self._service.instance}

    def busy(self) -> bool:
        """True while completions are under way and the engine lives."""
        return self._service.under_way > 0 and self._service.died is None

    def drain(self) -> None:
        """Refuses new completions."""
        self._service.draining = True

    def count(self, route: Route, status: int, seconds: float) -> None:
        """Counts the answer for `/metrics`."""
        self._metrics.count(route.path, status, seconds)

    async def watch(self) -> None:
        """Notices the death of the engine, even if no requests come."""
        await self._service.watch()

    async def close(self) -> None:
        """Waits for the control requests that are under way."""
        await self.control.close()


def table(service: EngineService, control: ServiceControl, metrics: Metrics) -> tuple[Route, ...]:
    limits, media = service.limits, service.tokenizers.media
    large = limits.max_media_body_bytes if media else limits.max_body_bytes
    facts = service.name, service.vocab_size, limits
    routes: list[Route] = []

    async def openapi(body: dict[str, Any], request: web.Request) -> dict[str, Any]:
        return document("tandem serve", routes)

    def add(
        method: str,
        path: str,
        summary: str,
        handler: Handler,
        *,
        body: Any = None,
        answer: Any = _OBJECT,
        max_bytes: int = limits.max_body_bytes,
    ) -> None:
        routes.append(Route(method, path, "data", summary, handler, body, answer, max_bytes))

    add("GET", "/health", "Who this server is; answers while the process lives", partial(health, service))
    add("GET", "/ready", "200 if it has current weights and generated a token recently, else 503", partial(ready, service))
    add("GET", "/metrics", "Counters for Prometheus", partial(metrics.page, service), answer=None)
    add("GET", "/openapi.json", "This table", openapi)
    add("GET", "/v1/models", "The model that is served", partial(models, service), answer=MODELS)
    add(
        "POST",
        "/v1/completions",
        "Text in, text out",
        partial(completions, service),
        body=completion_schema(*facts),
        answer=ANSWER,
    )
    add(
        "POST",
        "/v1/chat/completions",
        "Messages in, a message out",
        partial(chat_completions, service),
        body=chat_schema(*facts, media),
        answer=ANSWER,
        max_bytes=large,
    )
    routes += _dialects(service, large)
    add(
        "POST",
        "/generate",
        "Tokens in, tokens out, each with a log-probability and a version",
        partial(generate, service),
        body=generate_schema(limits.max_tokens, service.vocab_size, bool(media)),
        answer=GENERATE_ANSWER,
    )
    add(
        "POST",
        "/inference/v1/generate",
        "vLLM's token route: tokens in, tokens out",
        partial(token_route, service),
        body=token_route_schema(service.name, service.vocab_size, limits.max_tokens),
        answer=TOKEN_ROUTE_ANSWER,
    )
    if media:
        summary = "An image or sound for `/generate`, which names it by the number in the answer"
        keep, schema = partial(keep_medium, service), medium_schema(media)
        add("POST", "/media", summary, keep, body=schema, answer=MEDIUM_ANSWER, max_bytes=large)
    routes.extend(_control(control, limits.max_body_bytes, limits.max_weights_body_bytes))
    return tuple(routes)


def _dialects(service: EngineService, size: int) -> list[Route]:
    """Returns the routes of the dialects other than chat completions. ``size``: most bytes of a body."""
    routes, body = [], turn_schema(service.name)
    for dialect in DIALECTS[1:]:
        for act, path, summary in (
            (answer_turn, dialect.path, f"{dialect.summary}: a turn in, a turn out"),
            (count_tokens, dialect.count_path or "", "Number of tokens of a turn's prompt"),
        ):
            handler = partial(act, service, dialect)
            routes.append(Route("POST", path, "data", summary, handler, body, _OBJECT, size, dialect.refused))
    return routes


def _control(control: ServiceControl, small: int, large: int) -> list[Route]:
    version = {"version": VERSION}
    folder = text(4096, 1, "Absolute path of a folder with *.safetensors, below one that --weights-root allows.")
    update = record({**version, "folder": folder, "digests": DIGESTS}, ("version", "folder", "digests"))
    parts = of_run({"parts": PARTS_SCHEMA}, ("parts",))

    def post(name: str, summary: str, act: Any, body: Schema, max_bytes: int = small, answer: Schema = _OBJECT) -> Route:
        return Route("POST", f"/control/{name}", "control", summary, act, body, answer, max_bytes)

    return [
        post("attach", "Take the server for a run", control.attach, record({"run": RUN}, ("run",))),
        post("release", "Give the server back as it was found", control.release, of_run()),
        post("pause", "Stop between two steps", control.pause, of_run()),
        post("resume", "Go on", control.resume, of_run()),
        post("prepare", "Load new weights beside the old ones", control.prepare, update, large),
        post("commit", "Switch to the prepared weights", control.commit, record(version, ("version",)), answer=_TIMES),
        post("discard", "Discard the prepared weights", control.discard, of_run()),
        post("sleep", "Free the memory of weights or cache", control.sleep, parts),
        post("wake", "Allocate that memory again", control.wake, parts),
        post("flush", "Drop the cached prompts", control.flush, of_run()),
        Route(
            "GET",
            "/control/statistics",
            "control",
            "Counters of the engine",
            control.statistics,
            None,
            {"type": "object", "additionalProperties": {"type": "number"}},
        ),
    ]
