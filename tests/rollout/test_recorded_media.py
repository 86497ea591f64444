"""A recorded agent that shows pictures: they are tokens of its path like any other, and other pictures are another path."""

import asyncio
import base64
import io

import numpy as np
import pytest
from PIL import Image

from tandem.api.failures import DataFailure
from tandem.api.requests import LLMResponse, StopReason
from tandem.models.tokenizer import load_tokenizer
from tandem.protocol.dialects.chat import read
from tandem.protocol.refusal import Refusal
from tandem.protocol.tool_calls import CallReader
from tandem.rollout.recording.forest import Forest
from tests.rollout.scripted import ScriptedEngine, opened, reply_of, user
from tests.tiny_media import tiny_idefics3


@pytest.fixture
def forest(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_MEDIA", str(tmp_path / "media"))
    tokenizer = load_tokenizer(tiny_idefics3(tmp_path))
    return Forest(tokenizer, CallReader(tokenizer))


def shown(seed, text):
    pixels = np.random.default_rng(seed).integers(0, 256, (16, 20, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
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
    with pytest.raises(Refusal, match="reads nothing else"):
        read({"messages": [shown(0, "what?")]})


def test_an_agent_shows_pictures_over_http_and_the_engine_is_asked_with_them(forest):
    engine = ScriptedEngine(lambda request, number: f"answer {number}", forest.reader.tokenizer)

    async def talk():
        async with opened(engine) as (session, ask):
            status, answer = await ask({"model": "m", "messages": [shown(0, "what?")]})
            assert status == 200
            again = [shown(0, "what?"), reply_of(answer), shown(1, "and this?")]
            assert (await ask({"model": "m", "messages": again}))[0] == 200
            body = {"model": "m", "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]}
            assert (await ask(body, path="/responses"))[0] == 400, "this dialect brings texts alone"
            assert (await ask({"model": "m", "messages": [user("bye")]}))[0] == 200
            return session.sample(1.0)

    sample = asyncio.run(talk())
    first, second, text = (request for request, _ in engine.log)
    assert first.key == second.key[: len(first.key)] and len(set(second.media)) == 3 and text.media == ()
    assert sorted(t.media is None for t in sample.trajectories) == [False, True]
