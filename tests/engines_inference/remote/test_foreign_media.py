"""Images and sounds on the wire of vLLM and SGLang: the tokens that are trained are those that the server computed."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from tandem.api.chat_template import render
from tandem.api.failures import DataFailure, ServerFailed
from tandem.api.media import encode, media_of
from tandem.api.weights import WeightVersion
from tandem.config.errors import ConfigError
from tandem.config.rollout import EmbeddedEngineConfig, RolloutConfig
from tandem.engines.inference.check import check_inference_engine
from tandem.engines.inference.remote.foreign.server import StartTerms
from tandem.engines.inference.remote.foreign.sglang import SGLangServer
from tandem.engines.inference.remote.foreign.vllm import VllmServer
from tandem.media import store
from tandem.media.parts import read_media
from tandem.models.media.families import family_of
from tandem.models.tokenizer import load_tokenizer
from tests.serve.served import one_by_one, request_of
from tests.tiny_media import picture, sound, tiny_idefics3, tiny_qwen_audio, tiny_qwen_vl

MODELS = {"idefics3": tiny_idefics3, "qwen2_5_vl": tiny_qwen_vl, "qwen2_audio": tiny_qwen_audio}
SHOWN = {
    "idefics3": lambda: [picture(0, 8, 8), picture(1, 20, 16), picture(0, 8, 8)],
    "qwen2_5_vl": lambda: [picture(0, 16, 16), picture(1, 20, 16), picture(0, 16, 16)],
    "qwen2_audio": lambda: [sound(0, 0.1), sound(1, 0.2), sound(0, 0.1)],
}


@pytest.fixture(params=MODELS)
def model(request, tmp_path, monkeypatch):
    """A media model's folder, and media for it: two, of which one comes twice."""
    monkeypatch.setenv("TANDEM_MEDIA", str(tmp_path / "media"))
    options = {"splits": False} if request.param == "idefics3" else {}
    return MODELS[request.param](tmp_path, **options), SHOWN[request.param]()


def asked(folder, shown, **sampling):
    tokenizer, parts = load_tokenizer(folder), [{"type": one.kind, "medium": one} for one in shown]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]
    ids, media = encode(tokenizer, render(tokenizer, messages), media_of(messages))
    return request_of(ids, media=media, **{"max_new_tokens": 4} | sampling)


def processor(folder, seen):
    """What a server does with a prompt: each placeholder becomes those of its file."""
    tokenizer, family = load_tokenizer(folder), family_of(folder)

    def process(ids, files):
        left, made = list(files), []
        for token in ids:
            if token != family.placeholder(family.kinds[0]):
                made.append(token)
                continue
            head, _, data = left.pop(0).partition(",")
            seen.append((head, base64.b64decode(data)))
            medium = read(family.kinds[0], seen[-1][1])
            made += tokenizer(family.expansion(medium), add_special_tokens=False)["input_ids"]
        assert not left
        return made

    return process


def read(kind, data):
    (message,) = read_media([{"role": "user", "content": [{"type": kind, "bytes": data}]}])
    return message["content"][0]["medium"]


def attach(kind, server, folder):
    return kind[0].attach(server.url, folder=folder, dtype=torch.float32, version=WeightVersion(0))


def test_the_server_computes_the_tokens_that_are_trained(kind, folder, model):
    media_folder, shown = model
    request, seen = asked(media_folder, shown), []
    with kind[1](folder) as server:
        server.processor = processor(media_folder, seen)
        engine = attach(kind, server, media_folder)
        (answer,) = one_by_one(engine, [request])
        engine.close()
    assert server.requests[-1]["ids"] == list(request.input_ids), "what the server computed"
    assert answer.input_ids == request.input_ids and len(answer.output_ids) == 4
    assert [read(one.kind, data).number for one, (_, data) in zip(shown, seen, strict=True)] == [one.number for one in shown]
    if shown[0].kind == "image":
        assert (np.asarray(Image.open(io.BytesIO(seen[1][1]))) == store.image(shown[1].number)).all()


def test_a_prompt_that_goes_on_is_sent_with_its_files_again(kind, folder, model):
    """The first token has a temperature of its own, so a completion is two requests."""
    media_folder, shown = model
    request, seen = asked(media_folder, shown, first_token_temperature=2.0), []
    with kind[1](folder) as server:
        server.processor = processor(media_folder, seen)
        engine = attach(kind, server, media_folder)
        (answer,) = one_by_one(engine, [request])
        engine.close()
    assert server.requests[-1]["ids"] == [*request.input_ids, answer.output_ids[0]]


@pytest.mark.parametrize("wrong", ["fewer", "other", "silent"])
def test_a_server_that_makes_another_prompt_of_them_is_refused_with_both_numbers(kind, folder, model, wrong):
    media_folder, shown = model
    request = asked(media_folder, shown)
    process, ids = processor(media_folder, []), len(request.input_ids)

    def otherwise(given, files):
        made = process(given, files)
        return made[1:] if wrong == "fewer" else [*made[:-1], made[-1] + 1]

    with kind[1](folder) as server:
        server.processor = process if wrong == "silent" else otherwise
        engine = attach(kind, server, media_folder)
        if wrong == "silent":
            server.tells_prompt = False
        with pytest.raises(ServerFailed if wrong == "silent" else DataFailure) as failure:
            one_by_one(engine, [request])
        engine.close()
    if wrong != "silent":
        told = f"made {ids - (wrong == 'fewer')} tokens of a prompt with images or sounds that has {ids} here"
        assert failure.value.reason == "media_mismatch" and told in str(failure.value)


def test_what_cannot_be_sent_as_it_is_trained_is_not_sent(kind, folder, model):
    media_folder, shown = model
    whole = asked(media_folder, shown)
    place = next(i for i, number in enumerate(whole.media) if number)
    cut = request_of(
        whole.input_ids[:place] + whole.input_ids[place + 1 :], media=whole.media[:place] + whole.media[place + 1 :]
    )
    with kind[1](folder) as server:
        engine = attach(kind, server, media_folder)
        before = len(server.requests)
        with pytest.raises(DataFailure, match="media_mismatch"):
            one_by_one(engine, [cut])
        store.remove(shown[0].number)
        with pytest.raises(DataFailure, match="media_missing"):
            one_by_one(engine, [whole])
        engine.close()
    assert len(server.requests) == before


def test_a_server_that_a_run_starts_makes_the_pixels_that_the_trainer_makes(model, folder, tmp_path):
    media_folder, _ = model
    for server, words in (
        (VllmServer, ["--mm-processor-kwargs", '{"use_fast": false}']),
        (SGLangServer, ["--image-processor-backend", "pil"]),
    ):
        starts = [
            server.command(StartTerms("python", of, "float32", "cpu", EmbeddedEngineConfig(), (0,), media=media), 1)[0]
            for of, media in ((media_folder, True), (folder, False))
        ]
        assert [word for word in starts[0] if word not in starts[1] and word != str(media_folder)] == words


def test_vllm_may_not_keep_keys_over_an_update_that_drops_what_was_seen(model):
    rollout = RolloutConfig(backend="vllm:d1", engine=EmbeddedEngineConfig(keep_kv_on_update=True))
    with pytest.raises(ConfigError, match="keep_kv_on_update=true with vLLM and a media model"):
        check_inference_engine(rollout, model[0], "cpu")
