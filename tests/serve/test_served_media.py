"""Pictures over HTTP: OpenAI's parts, tokens with media numbers, and what strangers may not send."""

import base64
import contextlib
import io

import openai
import pytest
import torch
from PIL import Image

from tandem.api.chat_template import render
from tandem.api.media import encode, media_of
from tandem.api.requests import NoiseKey
from tandem.config.libraries import media_folder
from tandem.config.rollout import EmbeddedEngineConfig
from tandem.engines.inference.remote.tandem_server import TandemServer, start_tandem_server
from tandem.media import store
from tandem.models.tokenizer import load_tokenizer
from tests.serve.served import Served, one_by_one, request_of, tiny_engine
from tests.tiny_media import picture, sound, tiny_idefics3, tiny_qwen_audio, tiny_qwen_vl


@pytest.fixture(scope="module", autouse=True)
def media_store(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_MEDIA", str(tmp_path_factory.mktemp("media")))
        yield


@pytest.fixture(scope="module")
def seeing_folder(tmp_path_factory, media_store):
    return tiny_idefics3(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def seeing(seeing_folder):
    with Served(seeing_folder, max_media_body_bytes=100_000) as served:
        yield served


def data_url(medium):
    return "data:image/png;base64," + base64.b64encode(store.packed(medium.number)).decode()


def asking(*pictures):
    parts = [{"type": "image_url", "image_url": {"url": data_url(one)}} for one in pictures]
    return [{"role": "user", "content": [{"type": "text", "text": "What?"}, *parts, {"type": "text", "text": "Say."}]}]


def of_chat(folder, *pictures, **sampling):
    """The request that a chat with these pictures is."""
    tokenizer = load_tokenizer(folder)
    parts = [{"type": one.kind, "medium": one} for one in pictures]
    content = [{"type": "text", "text": "What?"}, *parts, {"type": "text", "text": "Say."}]
    messages = [{"role": "user", "content": content}]
    ids, media = encode(tokenizer, render(tokenizer, messages, add_generation_prompt=True), media_of(messages))
    return request_of(ids, NoiseKey(5), media=media, **sampling)


def test_a_chat_with_pictures_is_what_the_engine_makes_of_them(seeing, seeing_folder):
    pictures, local = [picture(0), picture(1, 9, 33)], tiny_engine(seeing_folder)
    try:
        (expected,) = one_by_one(local, [of_chat(seeing_folder, *pictures, max_new_tokens=8)])
    finally:
        local.close()
    with openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        ask = {"model": "tiny", "messages": asking(*pictures), "max_tokens": 8, "seed": 5, "logprobs": True}
        answer = client.chat.completions.create(**ask)
        pieces = list(client.chat.completions.create(**ask, stream=True))

    (choice,) = answer.choices
    assert [entry.logprob for entry in choice.logprobs.content] == pytest.approx(expected.logprobs, abs=1e-5)
    assert answer.usage.prompt_tokens == len(expected.input_ids)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == choice.message.content


def test_tokens_with_media_numbers_are_answered_as_in_process(seeing, seeing_folder):
    request, local = of_chat(seeing_folder, picture(2)), tiny_engine(seeing_folder)
    remote = TandemServer.attach(seeing.url, run="")
    try:
        assert one_by_one(remote, [request]) == one_by_one(local, [request])
    finally:
        local.close()
        remote.close()


def test_a_chat_with_a_sound_is_what_the_engine_makes_of_it(tmp_path):
    folder, heard = tiny_qwen_audio(tmp_path), sound(0, 0.7)
    local, part = tiny_engine(folder), {"data": base64.b64encode(store.packed(heard.number)).decode(), "format": "wav"}
    with Served(folder) as hearing, contextlib.closing(local):
        (expected,) = one_by_one(local, [of_chat(folder, heard, max_new_tokens=8)])
        content = [{"type": "text", "text": "What?"}, {"type": "input_audio", "input_audio": part}]
        messages = [{"role": "user", "content": [*content, {"type": "text", "text": "Say."}]}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 8, "seed": 5, "logprobs": True}
        (choice,) = hearing.json("POST", "/v1/chat/completions", body)["choices"]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert logprobs == pytest.approx(expected.logprobs, abs=1e-5)


@pytest.mark.slow
def test_a_server_with_another_media_store_is_sent_what_it_lacks(seeing_folder, tmp_path, monkeypatch):
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("TANDEM_MEDIA", str(tmp_path / "another machine"))
        config = EmbeddedEngineConfig(max_running=4, threads=1, kv_cache_gib=0.05)
        log = tmp_path / "log"
        remote = start_tandem_server(seeing_folder, config, torch.float32, "cpu", run="r", log_file=log)
    local, requests = (
        tiny_engine(seeing_folder),
        [of_chat(seeing_folder, picture(3), picture(4)), of_chat(seeing_folder, picture(3))],
    )
    try:
        assert one_by_one(remote, requests) == one_by_one(local, requests)
        assert len(list((tmp_path / "another machine").iterdir())) == 2
    finally:
        local.close()
        remote.close()


def huge():
    """A PNG of 50,000 × 50,000 pixels, in a few bytes of a header."""
    out = io.BytesIO()
    Image.new("1", (8, 8)).save(out, "PNG")
    data = bytearray(out.getvalue())
    data[16:24] = (50_000).to_bytes(4) * 2
    return "data:image/png;base64," + base64.b64encode(data).decode()


HOSTILE = {
    "a host that is not allowed": ("https://169.254.169.254/latest/meta-data", "media_refused"),
    "a file": ("file:///etc/passwd", "media_refused"),
    "a path": ("/etc/passwd", "media_refused"),
    "a bomb": (huge(), "media_"),
    "no picture": ("data:image/png;base64,aGVsbG8=", "media_unreadable"),
    "no base64": ("data:image/png;base64,%%%", "media_unreadable"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_pictures_that_cannot_be_taken_are_refused_with_the_reason(seeing, case):
    url, reason = HOSTILE[case]
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    answer = seeing.json("POST", "/v1/chat/completions", {"model": "tiny", "messages": messages}, status=400)
    assert answer["error"]["code"].startswith(reason), answer


def test_bodies_sounds_and_numbers_that_do_not_fit_are_refused(seeing, seeing_folder):
    chat = {"model": "tiny", "messages": asking(picture(0))}
    long = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:" + "A" * 120_000}}]}]
    sound = [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "aGVsbG8=", "format": "wav"}}]}]
    marker = [{"role": "user", "content": [{"type": "text", "text": "<image>"}]}]
    low = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(picture(0)), "detail": "low"}}]}]
    seeing.json("POST", "/v1/chat/completions", chat | {"messages": long}, status=413)
    seeing.json("POST", "/v1/responses", {"model": "tiny", "input": long}, status=413)
    for path in "/v1/messages", "/v1/messages/count_tokens":
        assert seeing.json("POST", path, chat | {"messages": long}, status=413)["type"] == "error"
    for messages in (sound, marker, low):
        seeing.json("POST", "/v1/chat/completions", chat | {"messages": messages}, status=400)
    request = of_chat(seeing_folder, picture(0))
    for media, code in ([-5 if n else 0 for n in request.media], "media_missing"), (request.media[1:], "media_mismatch"):
        body = {"input_ids": request.input_ids, "media": media}
        error = seeing.json("POST", "/generate", body, status=400)["error"]
        assert error["code"] == code and str(media_folder()) not in error["message"], error


def test_a_damaged_file_of_the_store_is_logged_and_one_that_is_not_there_is_not(seeing, seeing_folder, caplog):
    shown = picture(41)
    request = of_chat(seeing_folder, shown)
    data = (media_folder() / f"{-1 - shown.number:016x}.png").read_bytes()
    (media_folder() / f"{76:016x}.png").write_bytes(data)
    for number, logged in (-5, 0), (-77, 1):
        body = {"input_ids": request.input_ids, "media": [number if n else 0 for n in request.media]}
        error = seeing.json("POST", "/generate", body, status=400)["error"]
        assert error["code"] == "media_missing" and str(media_folder()) not in error["message"], error
        told = [record.getMessage() for record in caplog.records if record.name == "tandem.serve"]
        assert len(told) == logged and all(f"{76:016x}.png was changed" in line for line in told), told


def test_placeholders_of_one_picture_that_stand_apart_do_not_end_the_server(tmp_path):
    folder, shown = tiny_qwen_vl(tmp_path), picture(0, 48, 48)
    family = load_tokenizer(folder).media
    ids, media = [family.placeholder("image"), 7] * 144, [shown.number, 0] * 144
    assert len(ids) % family.count(shown) == 0
    with Served(folder) as server:
        answer = server.json("POST", "/generate", {"input_ids": ids, "media": media}, status=400)
        assert answer["error"]["code"] == "media_mismatch"
        server.json("POST", "/generate", {"input_ids": [7, 8], "sampling": {"max_new_tokens": 2}})


def test_a_media_store_that_cannot_be_written_is_the_fault_of_the_server(seeing, tmp_path, monkeypatch):
    chat = {"model": "tiny", "messages": asking(picture(0)), "max_tokens": 1}
    medium = {"kind": "image", "data": data_url(picture(0)).partition(",")[2]}
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("TANDEM_MEDIA", str(tmp_path / "a file"))
    for path, body in ("/v1/chat/completions", chat), ("/media", medium):
        assert seeing.json("POST", path, body, status=503)["error"]["code"] == "media_store"
    monkeypatch.setenv("TANDEM_MEDIA", str(tmp_path / "another"))
    seeing.json("POST", "/v1/chat/completions", chat)


def test_a_model_that_sees_is_not_given_sounds(seeing):
    data = base64.b64encode(store.packed(sound(0).number)).decode()
    seeing.json("POST", "/media", {"kind": "audio", "data": data}, status=400)
    heard = [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}]
    body = {"model": "tiny", "input": [{"role": "user", "content": heard}], "max_output_tokens": 1}
    error = seeing.json("POST", "/v1/responses", body, status=400)["error"]
    assert "a part of type audio; this model takes image" in error["message"], error


def test_a_model_of_text_refuses_pictures(served):
    parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}]
    served.json(
        "POST", "/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": parts}]}, status=400
    )
    served.json("POST", "/generate", {"input_ids": [5, 6], "media": [0, -7]}, status=400)
    served.json("POST", "/media", {"kind": "image", "data": "aGVsbG8="}, status=404)
