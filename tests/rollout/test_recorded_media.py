"""A recorded agent that shows pictures: they are tokens of its path like any other, and other pictures are another path."""

import asyncio
import base64
import io
import json
import socket

import numpy as np
import pytest
from PIL import Image

from tandem.api.failures import DataFailure
from tandem.api.requests import LLMResponse, StopReason
from tandem.models.tokenizer import load_tokenizer
from tandem.protocol.bodies import Refusal
from tandem.protocol.dialects import DIALECTS
from tandem.protocol.dialects.openai_chat import read
from tandem.protocol.tool_calls import CallReader
from tandem.rollout.forest import Forest
from tests.media.files import PIXELS, bmp, png, saved
from tests.rollout.scripted import ScriptedEngine, opened, reply_of, user
from tests.tiny_media import tiny_idefics3


@pytest.fixture
def forest(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_MEDIA", str(tmp_path / "media"))
    tokenizer = load_tokenizer(tiny_idefics3(tmp_path))
    return Forest(tokenizer, CallReader(tokenizer))


def url_of(seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (16, 20, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def shown(seed, text):
    url = url_of(seed)
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]}


def said(forest, messages, words):
    """Asks and answers; the request, its node, and the history with the reply."""
    turn = read({"messages": messages}, media=True)
    asked = forest.ask(turn.messages, turn.tools)
    ids = (*forest.reader.tokenizer(words, add_special_tokens=False)["input_ids"], forest.reader.tokenizer.eos_token_id)
    response = LLMResponse(asked.input_ids, ids, (-0.5,) * len(ids), (0,) * len(ids), StopReason.STOP)
    reply = {"role": "assistant", "content": words}
    return asked, forest.add(asked, response, reply, asked.number), [*messages, reply]


def test_a_chat_with_pictures_only_appends_and_is_one_trajectory(forest):
    first, one, history = said(forest, [shown(0, "what?")], "a cat")
    second, two, _ = said(forest, [*history, shown(1, "and this?")], "a dog")
    assert second.parent is one and second.input_ids[: len(first.input_ids)] == first.input_ids
    assert len(second.media) == len(second.input_ids) and len(set(second.media)) == 3, "text and two pictures"
    (tokens,) = forest.trajectories([one, two])
    trajectory = tokens.trajectory()
    assert trajectory.media.tolist()[: len(second.media)] == list(second.media)
    assert not (trajectory.media[trajectory.loss_mask] != 0).any()


def test_the_same_words_about_another_picture_are_another_path(forest):
    _, one, history = said(forest, [shown(0, "what?")], "a cat")
    other, _, _ = said(forest, [shown(1, "what?"), *history[1:], {"role": "user", "content": "sure?"}], "yes")
    same, _, _ = said(forest, [shown(0, "what?"), *history[1:], {"role": "user", "content": "sure?"}], "yes")
    assert other.parent is None and same.parent is one
    assert other.digest != same.digest


def test_a_picture_that_cannot_be_read_is_refused_with_its_reason(forest):
    (part, text) = shown(0, "what?")["content"]
    for url, reason in (("data:image/png;base64,AAAA", "media_unreadable"), ("file:///etc/passwd", "media_refused")):
        turn = read({"messages": [{"role": "user", "content": [{**part, "image_url": {"url": url}}, text]}]}, media=True)
        with pytest.raises(DataFailure) as failure:
            forest.ask(turn.messages)
        assert failure.value.reason == reason
    with pytest.raises(Refusal, match="no other content is supported"):
        read({"messages": [shown(0, "what?")]})


def test_an_agent_shows_pictures_over_http_and_the_engine_is_asked_with_them(forest):
    engine = ScriptedEngine(lambda request, number: f"answer {number}", forest.reader.tokenizer)

    async def talk():
        async with opened(engine) as (session, ask):
            status, answer = await ask({"model": "m", "messages": [shown(0, "what?")]})
            assert status == 200
            again = [shown(0, "what?"), reply_of(answer), shown(1, "and this?")]
            assert (await ask({"model": "m", "messages": again}))[0] == 200
            assert (await ask({"model": "m", "messages": [user("bye")]}))[0] == 200
            return session.sample(1.0)

    sample = asyncio.run(talk())
    first, second, text = (request for request, _ in engine.log)
    assert first.key == second.key[: len(first.key)] and len(set(second.media)) == 3 and text.media == ()
    assert sorted(t.media is None for t in sample.trajectories) == [False, True]


CALL = {"name": "look", "arguments": {"at": "sky"}}


def told(dialect, first, second):
    """Words and a picture, a call, and its result of words and a picture, as the dialect writes them."""
    if dialect.path == "/v1/messages":
        (kind, data), (_, more) = (url.removeprefix("data:").split(";base64,") for url in (first, second))
        asked = {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}
        result = {"type": "image", "source": {"type": "base64", "media_type": kind, "data": more}}
        text = {"type": "text", "text": "seen:"}
        return {
            "max_tokens": 64,
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "what?"}, asked]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {"at": "sky"}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [text, result]}]},
            ],
        }
    if dialect.path == "/v1/responses":
        asked, result = ({"type": "input_image", "image_url": url} for url in (first, second))
        call = {"call_id": "c", "name": "look", "arguments": json.dumps(CALL["arguments"])}
        return {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "what?"}, asked]},
                {"type": "function_call", **call},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_text", "text": "seen:"}, result],
                },
            ]
        }
    asked, result = ({"type": "image_url", "image_url": {"url": url}} for url in (first, second))
    call = {"id": "c", "type": "function", "function": CALL | {"arguments": json.dumps(CALL["arguments"])}}
    return {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "what?"}, asked]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "seen:"}, result]},
        ]
    }


def asked_in(forest, dialect, *urls):
    turn = dialect.read({"model": "m", **told(dialect, *urls)}, True)
    return forest.ask(turn.messages, turn.tools)


def test_pictures_and_results_with_pictures_are_the_same_tokens_in_every_dialect(forest):
    requests = [asked_in(forest, dialect, url_of(0), url_of(1)) for dialect in DIALECTS]
    assert len(set(requests[0].media)) == 3, "text and two pictures"
    assert {(asked.input_ids, asked.media) for asked in requests} == {(requests[0].input_ids, requests[0].media)}
    turned = [asked_in(forest, dialect, url_of(1), url_of(0)) for dialect in DIALECTS]
    assert {asked.input_ids for asked in turned} == {requests[0].input_ids} and turned[0].media != requests[0].media


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)
def test_a_model_of_text_is_shown_no_picture(dialect):
    with pytest.raises(Refusal, match="no other content is supported"):
        dialect.read({"model": "m", **told(dialect, url_of(0), url_of(1))}, False)


HOSTILE = {
    "svg": (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "media_refused"),
    "10^9 pixels, png": (png(40_000, 25_000), "media_too_large"),
    "10^9 pixels, bmp": (bmp(40_000, 25_000), "media_too_large"),
    "cut off": (saved(PIXELS)[:-80], "media_unreadable"),
    "a page": (b"<html><script>alert(1)</script>", "media_unreadable"),
    "a pdf said to be a picture": (b"%PDF-1.4\n1 0 obj", "media_unreadable"),
}
PLACES = ("file:///etc/passwd", "/etc/passwd", "../../etc/passwd", "http://127.0.0.1:{port}/x.png", "ftp://127.0.0.1/x")


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)
def test_hostile_pictures_are_refused_with_a_reason_in_every_dialect(forest, dialect):
    """A picture behind a polyglot's head is the picture; the rest is refused, and the session goes on."""
    engine = ScriptedEngine(lambda request, number: "a cat", forest.reader.tokenizer)
    path = dialect.path.removeprefix("/v1")
    good = url_of(0)

    async def talk():
        with socket.create_server(("127.0.0.1", 0)) as stranger:
            stranger.setblocking(False)
            port = stranger.getsockname()[1]
            async with opened(engine) as (_, ask):
                for name, (data, reason) in HOSTILE.items():
                    bad = f"data:image/png;base64,{base64.b64encode(data).decode()}"
                    for urls in ((bad, good), (good, bad)):
                        status, answer = await ask({"model": "m", **told(dialect, *urls)}, path=path)
                        assert (status, reason in json.dumps(answer)) == (400, True), (name, answer)
                for place in PLACES:
                    text = json.dumps({"model": "m", **told(dialect, good, "data:image/png;base64,AAAA")})
                    body = json.loads(text.replace("data:image/png;base64,AAAA", place.format(port=port)))
                    if path == "/messages":
                        body = {"model": "m", **told(dialect, good, "data:image/png;base64,AAAA")}
                        source = {"type": "url", "url": place.format(port=port)}
                        body["messages"][2]["content"][0]["content"][1]["source"] = source
                    status, answer = await ask(body, path=path)
                    assert (status, "media_refused" in json.dumps(answer)) == (400, True), (place, answer)
                polyglot = base64.b64encode(base64.b64decode(good.split(",")[1]) + b"PK\x03\x04<svg>").decode()
                url = f"data:image/svg+xml;base64,{polyglot}"
                assert (await ask({"model": "m", **told(dialect, url, url)}, path=path))[0] == 200
            with pytest.raises(BlockingIOError):
                stranger.accept()

    asyncio.run(talk())
    ((request, _),) = engine.log
    assert request.media == asked_in(forest, dialect, good, good).media


def test_a_part_of_a_kind_that_is_no_text_is_refused(forest):
    for path, part in (
        ("/v1/messages", {"type": []}),
        ("/v1/chat/completions", {"type": {}}),
        ("/v1/responses", {"type": 3}),
    ):
        (dialect,) = (one for one in DIALECTS if one.path == path)
        given = [{"role": "user", "content": [part]}]
        with pytest.raises(Refusal):
            dialect.read({"model": "m", "max_tokens": 5, "input" if "resp" in path else "messages": given}, True)
