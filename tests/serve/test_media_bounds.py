"""Bodies that a stranger may send to a server that sees or hears: bounded before anything is decoded, and on disk."""

import base64
import io
import threading
import time

import numpy as np
import pytest
from PIL import Image

from tandem.engines.inference.remote.tandem_server import TandemServer
from tandem.media import store
from tandem.media.bound import StoreBound, private_store
from tests.media.files import recorded
from tests.serve.served import Served, one_by_one, tiny_engine
from tests.serve.test_served_media import asking, of_chat
from tests.tiny_media import picture, tiny_idefics3, tiny_qwen_audio


@pytest.fixture(autouse=True)
def media_store(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_MEDIA", str(tmp_path / "media"))
    return tmp_path / "media"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_idefics3(tmp_path_factory.mktemp("model"))


def blank(width, height, number=0):
    """A picture of few bytes and many pixels, as a part."""
    out = io.BytesIO()
    image = Image.new("1", (width, height))
    image.putpixel((number % width, number // width), 1)
    image.save(out, "PNG")
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"}}


def chat(*parts, **more):
    messages = [{"role": "user", "content": list(parts)}]
    return {"model": "tiny", "messages": messages, "max_tokens": 1} | more


def test_hundreds_of_large_pictures_are_refused_by_their_headers(folder, media_store):
    """Each of them may be sent alone: 33 million pixels. Decoded they would be 24 GB."""
    body = chat(*[blank(8192, 4096)] * 240)
    with Served(folder, max_tokens=4096) as served:
        begun = time.monotonic()
        error = served.json("POST", "/v1/chat/completions", body, status=413)["error"]
        took_s = time.monotonic() - begun
        served.json("POST", "/v1/chat/completions", chat(*asking(picture(0))[0]["content"]))
    assert error["code"] == "media_too_large" and "268,435,456 pixels" in error["message"], error
    assert len(list(media_store.iterdir())) == 1, "the one small picture"
    assert took_s < 10.0


def test_hours_of_silence_are_refused_by_their_headers(tmp_path, media_store):
    silence = base64.b64encode(recorded(np.zeros(590_000, np.int16), 1000, form="FLAC")).decode()
    part = {"type": "input_audio", "input_audio": {"data": silence, "format": "flac"}}
    with Served(tiny_qwen_audio(tmp_path)) as served:
        error = served.json("POST", "/v1/chat/completions", chat(*[part] * 100), status=413)["error"]
    assert "3,600 s together" in error["message"] and not media_store.exists()


def test_more_pictures_than_tokens_fit_are_refused_before_one_is_read(folder, media_store):
    with Served(folder, max_media_body_bytes=32 << 20) as served:
        messages = [{"role": "user", "content": [blank(8, 8)] * 250}] * 4
        error = served.json("POST", "/v1/chat/completions", chat() | {"messages": messages}, status=400)["error"]
    assert error["code"] == "prompt_too_long" and not media_store.exists()


def test_a_small_picture_does_not_wait_for_the_large_ones_of_another_request(folder):
    ended = []

    def ask(served, name, body):
        assert served.request("POST", "/v1/chat/completions", body, timeout=120)[0] in (200, 400)
        ended.append(name)

    large = [chat(*[blank(4096, 2048, number) for number in range(first, first + 12)]) for first in (0, 100)]
    with Served(folder, max_tokens=4096) as served:
        threads = [threading.Thread(target=ask, args=(served, "large", body)) for body in large]
        for thread in threads:
            thread.start()
        while served.service.tokenizers.intake.num_requests < 2:
            time.sleep(0.01)
        ask(served, "small", chat(*asking(picture(0))[0]["content"]))
        for thread in threads:
            thread.join()
    assert ended == ["small", "large", "large"]


def test_requests_that_wait_for_their_pictures_are_counted(folder):
    with Served(folder, max_media_requests=1) as served:
        busy = threading.Thread(
            target=served.request,
            args=("POST", "/v1/chat/completions", chat(*[blank(4096, 2048, number) for number in range(8)])),
            kwargs={"timeout": 120},
        )
        busy.start()
        while not served.service.tokenizers.intake.num_requests:
            time.sleep(0.01)
        error = served.json("POST", "/v1/chat/completions", chat(*asking(picture(0))[0]["content"]), status=503)["error"]
        busy.join()
    assert error["code"] == "full"


def noise(seed):
    return asking(picture(seed, 64, 64))[0]["content"]


def files_of(folder):
    return {file.name: file.stat().st_size for file in folder.iterdir()}


def test_a_bounded_store_does_not_grow_and_what_went_is_sent_again(folder, tmp_path, monkeypatch):
    here, there = tmp_path / "client", tmp_path / "server"
    monkeypatch.setenv("TANDEM_MEDIA", str(here))
    shown = [f"{-1 - picture(seed, 64, 64).number:016x}.png" for seed in range(12)]
    requests = [of_chat(folder, picture(seed, 64, 64)) for seed in range(12)]
    bodies, local = [chat(*noise(seed)) for seed in range(12)], tiny_engine(folder)
    expected = one_by_one(local, requests)
    local.close()
    size = max(files_of(here).values())
    monkeypatch.setenv("TANDEM_MEDIA", str(there))
    bound = StoreBound(5 * size, rest_s=0.0)
    with Served(folder, bound=bound) as served:
        for body in bodies:
            served.json("POST", "/v1/chat/completions", body)
            assert sum(files_of(there).values()) == bound.num_bytes <= 5 * size
        assert len(files_of(there)) == 5
        body = {"input_ids": requests[0].input_ids, "media": requests[0].media}
        assert served.json("POST", "/generate", body, status=400)["error"]["code"] == "media_missing"
        remote = TandemServer.attach(served.url, run="")
        for file, request, answer in zip(shown, requests, expected, strict=True):
            data = base64.b64encode((here / file).read_bytes()).decode()
            served.json("POST", "/media", {"kind": "image", "data": data})
            assert one_by_one(remote, [request]) == [answer]
        remote.close()
    assert sum(files_of(there).values()) == bound.num_bytes <= 5 * size


def test_what_a_running_request_shows_stays_and_then_nothing_more_is_taken(folder, media_store):
    numbers = [picture(seed, 64, 64).number for seed in range(3)]
    sizes = files_of(media_store).values()
    bodies = [chat(*noise(seed)) for seed in range(3)]
    for file in media_store.iterdir():
        file.unlink()
    bound = StoreBound(2 * max(sizes), rest_s=0.0)
    with Served(folder, bound=bound) as served:
        served.json("POST", "/v1/chat/completions", bodies[0])
        served.json("POST", "/v1/chat/completions", bodies[1])
        held = files_of(media_store)
        with bound.using(numbers[:2]):
            assert served.json("POST", "/v1/chat/completions", bodies[2], status=503)["error"]["code"] == "media_store"
            assert files_of(media_store) == held
        served.json("POST", "/v1/chat/completions", bodies[2])
        assert len(files_of(media_store)) == 2


def test_a_medium_that_was_just_used_stays_for_a_while(folder, media_store):
    bodies = [chat(*noise(seed)) for seed in range(2)]
    size = max(files_of(media_store).values())
    for file in media_store.iterdir():
        file.unlink()
    with Served(folder, bound=StoreBound(size)) as served:
        served.json("POST", "/v1/chat/completions", bodies[0])
        served.json("POST", "/v1/chat/completions", bodies[1], status=503)
        served.json("POST", "/v1/chat/completions", bodies[0])


def test_a_private_store_goes_with_its_server_or_the_next_one(media_store, monkeypatch):
    (media_store / "server-left").mkdir(parents=True)
    kept = picture(0)
    with private_store():
        inner = [folder for folder in media_store.iterdir() if folder.is_dir()]
        assert len(inner) == 1 and inner[0].name != "server-left"
        with pytest.raises(store.MediaMissing):
            store.medium(kept.number)
        picture(1)
        with monkeypatch.context() as patch:
            patch.setenv("TANDEM_MEDIA", str(media_store))
            with private_store():
                assert inner[0].exists(), "another server lives in it"
    assert [file.suffix for file in media_store.iterdir()] == [".png"] and store.medium(kept.number) == kept
