"""An engine whose words are a script, with a log of what it was sent and returned; and clients that speak to a session."""

import asyncio
from contextlib import asynccontextmanager

import aiohttp

from tandem.api.requests import LLMResponse, NoiseKey, StopReason
from tandem.config.rollout import GenerationConfig
from tandem.rollout.recorder import SessionRecorder
from tests.tiny import tiny_tokenizer

GCONFIG = GenerationConfig(max_new_tokens=64, temperature=0.7)


class ScriptedEngine:
    """Says ``line(request, number)``, a text or (text, stop reason), after ``delay_s(number)`` seconds.

    Its tokens are drawn apart: a text is cut at each ``|``, and each piece is encoded by itself, so that no tokenizer would
    make these tokens of the whole text.
    """

    def __init__(self, line, tokenizer=None, delay_s=lambda number: 0.0, noise_key=NoiseKey(3, 1, 2)):  # noqa: B008
        self.tokenizer = tokenizer or tiny_tokenizer()
        self.line, self.delay_s, self.log, self.noise_key = line, delay_s, [], noise_key
        self.asked = 0

    async def agenerate(self, request):
        number, self.asked = self.asked, self.asked + 1
        await asyncio.sleep(self.delay_s(number))
        line = self.line(request, number)
        if isinstance(line, Exception):
            raise line
        text, reason = line if isinstance(line, tuple) else (line, StopReason.STOP)
        pieces = text.split("|")
        ids = [i for piece in pieces for i in self.tokenizer(piece, add_special_tokens=False)["input_ids"]]
        if reason == StopReason.STOP:
            ids.append(self.tokenizer.eos_token_id)
        logprobs = tuple(-0.01 * (number + 1) for _ in ids)
        response = LLMResponse(request.input_ids, tuple(ids), logprobs, (number,) * len(ids), reason, GCONFIG.temperature)
        self.log.append((request, response))
        return response


@asynccontextmanager
async def opened(engine, gconfig=GCONFIG, *, recorder=None, **options):
    """A session, and a client that holds its key: ``await ask(body, path=…, headers=…)`` gives (status, answer)."""
    recorder = recorder or SessionRecorder(engine.tokenizer)
    async with aiohttp.ClientSession() as http, recorder.session(engine, gconfig, **options) as session:

        async def ask(body, path="/chat/completions", headers=None, key=None):
            headers = {"Authorization": f"Bearer {session.key if key is None else key}"} | (headers or {})
            async with http.post(session.base_url + path, json=body, headers=headers) as answer:
                streams = answer.content_type == "text/event-stream"
                return answer.status, await (answer.text() if streams else answer.json())

        yield session, ask


def user(text):
    return {"role": "user", "content": text}


def reply_of(answer):
    """The assistant's message of an answer, as a client repeats it."""
    message = answer["choices"][0]["message"]
    return {name: message[name] for name in ("role", "content", "tool_calls") if message.get(name) is not None}


def untruthful(engine, tokens):
    """Trained tokens that were not sampled in exactly that context, by the engine's own log."""
    sampled = set()
    for request, response in engine.log:
        context = list(request.input_ids)
        for token, logprob, version in zip(response.output_ids, response.logprobs, response.versions, strict=True):
            sampled.add((tuple(context), token, logprob, version))
            context.append(token)
    return [
        place
        for place, trained in enumerate(tokens.mask)
        if trained
        and (tuple(tokens.ids[:place]), tokens.ids[place], tokens.logprobs[place], tokens.versions[place]) not in sampled
    ]
