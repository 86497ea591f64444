"""Images and sounds go to a reward server: by their numbers, once, and never silently left out."""

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from tandem.api.failures import RewardFailure
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.flow.residents import open_judge
from tandem.media.bound import StoreBound
from tandem.media.parts import sent
from tandem.protocol.bodies import Refusal, SchemaError, check_value
from tandem.protocol.reward_layouts import SCORE_BODY, Question
from tandem.rewards.build import build_reward
from tandem.rewards.serving import RewardApplication, ServedJudge
from tandem.trainers.loop import train
from tests.rewards.asked import server
from tests.scalar_judge import save_judge
from tests.tiny import tiny_model_folder
from tests.tiny_media import picture, sound, tiny_media_model
from tests.trainers import pictures

READS = {"seen": "idefics3", "heard": "qwen2_audio"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Reward models: one sees, one hears, one reads text alone."""
    folder = tmp_path_factory.mktemp("models")
    for name, family in READS.items():
        base = tiny_media_model(folder, family)
        save_judge(folder / name, base, base)
    text = tiny_model_folder(folder)
    save_judge(folder / "read", text, text)
    return folder


@pytest.fixture(autouse=True)
def media_store(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_MEDIA", str(tmp_path / "here"))


@contextmanager
def serving(models, there, *named):
    """The URL of `tandem serve-reward` with a media store of its own, as on another machine."""
    address = there / "address.json"
    there.mkdir()
    command = [sys.executable, "-m", "tandem", "serve-reward", *(f"{name}={models}/{name}" for name in named)]
    command += ["--port", "0", "--threads", "1", "--dtype", "float32", "--address-file", address]
    environment = os.environ | {"TANDEM_MEDIA": str(there / "media")}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    until = time.monotonic() + 150
    while not address.exists():
        assert process.poll() is None and time.monotonic() < until, process.stderr.read()
        time.sleep(0.05)
    try:
        yield json.loads(address.read_text())["url"]
    finally:
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=30)[1]
    assert process.returncode == 0 and "Traceback" not in said, said


def shown(*media):
    """A conversation with these media, and words that are always the same."""
    parts = [{"type": one.kind, "medium": one} for one in media]
    return (
        {"role": "user", "content": [*parts, {"type": "text", "text": "which?"}] if media else "which?"},
        {"role": "assistant", "content": "it is two"},
    )


def scores(spec, chats):
    """Returns the reward of each conversation; all are judged at the same time."""
    reward = build_reward(spec, timeout_s=20.0)

    async def one(chat):
        given = {"prompt": "", "completion": "it is two", "prompt_ids": (1,), "completion_ids": (2,), "row": {}}
        return (await reward(messages=chat, **given)).value

    async def all_of_them():
        return await asyncio.gather(*map(one, chats), return_exceptions=True)

    try:
        return asyncio.run(all_of_them())
    finally:
        reward.close()


@pytest.mark.slow
@pytest.mark.invariant
def test_a_served_model_sees_and_hears_what_one_in_the_run_does(models, tmp_path):
    """One picture, another with equal words, two, the same one twice, none; a text model beside says that it cannot."""
    one, other, noise = picture(1), picture(2), sound(3)
    seen = [shown(one), shown(other), shown(one, other), shown(one, one), shown()]
    heard = [shown(noise), shown(sound(4)), shown()]
    with serving(models, tmp_path / "there", "seen", "heard", "read") as url:
        for name, chats in (("seen", seen), ("heard", heard)):
            local = open_judge(str(models / name), "cpu", "float32")
            expected = [local([Question(chat, "", "")])[0] for chat in chats]
            assert scores(f"remote(url={url}, model={name}, batch_size=2)", chats) == pytest.approx(expected, abs=1e-5)
            assert len({round(score, 4) for score in expected}) == len(expected), "the score depends on what is shown"
        blind, text = scores(f"remote(url={url}, model=read)", [shown(one), shown()])
        assert blind.reason == "template_refuses" and isinstance(text, float)
        assert scores(f"remote(url={url}, model=read, show_media=false)", [shown(one)]) == [text]
        files = list((tmp_path / "there/media").iterdir())
        assert len(files) == 4, "each is there once"
        for file in files:
            file.unlink()
        again = scores(f"remote(url={url}, model=seen)", seen)  # sent anew, for the store was emptied
    local = open_judge(str(models / "seen"), "cpu", "float32")
    assert again == pytest.approx([local([Question(chat, "", "")])[0] for chat in seen], abs=1e-5)


@pytest.mark.slow
@pytest.mark.invariant
def test_a_run_with_pictures_gets_from_the_server_what_its_own_model_says(models, tmp_path):
    keys = [f"actor.path={models}/tiny-idefics3-0", "actor.dtype=float32", f"train_dataset.path={pictures.__file__}:rows"]
    keys += ["gconfig.n_samples=4", "gconfig.max_new_tokens=8", "rollout.batch_size=4", "rollout.engine.threads=1"]
    keys += [f"run.root={tmp_path}", "tracking.trajectories_per_step=99", "total_train_steps=1"]
    with serving(models, tmp_path / "there", "seen") as url:
        reward = f"model(path={models}/seen) + remote(url={url})"
        folder = train(load_config(TrainConfig, None, [*keys, f"reward={reward}"])).folder
    lines = (folder / "trajectories/step_1.jsonl").read_text().splitlines()
    parts = [json.loads(line)["rewards"] for line in lines]
    assert len(parts) == 16 and len({part["model"] for part in parts}) > 8
    assert [part["remote"] for part in parts] == pytest.approx([part["model"] for part in parts], abs=1e-4)


def test_media_are_asked_for_by_number_and_those_that_lack_are_sent(tmp_path):
    """To a server that is not Tandem's: what it is sent is what the page says."""
    one, other = picture(1), picture(2)
    kept = {one.number}

    def answer(body):
        if "numbers" in body:
            return 200, {"missing": [number for number in body["numbers"] if number not in kept]}
        if "data" in body:
            kept.add(other.number)
            return 200, {"number": other.number}
        return 200, {"results": [{"question": n, "score": 1.0} for n in range(len(body["questions"]))]}

    with server(answer) as (url, bodies):
        assert scores(f"remote(url={url})", [shown(one, other), shown(one), shown()]) == [1.0] * 3
        assert scores(f"remote(url={url})", [shown(other)]) == [1.0]
    assert [body["kind"] for body in bodies if "data" in body] == ["image"]
    asked = [question["messages"][0]["content"] for body in bodies for question in body.get("questions", ())]
    numbers = ({"type": "image", "medium": medium.number} for medium in (one, other))
    assert [*numbers, {"type": "text", "text": "which?"}] in asked and "which?" in asked


def test_what_several_requests_show_at_once_is_sent_once(monkeypatch):
    one, kept = picture(1), set()

    def answer(body):
        if "numbers" in body:
            return 200, {"missing": [number for number in body["numbers"] if number not in kept]}
        if "data" in body:
            time.sleep(0.1)  # the other requests ask meanwhile
            kept.add(one.number)
            return 200, {"number": one.number}
        return 200, {"results": [{"question": n, "score": 1.0} for n in range(len(body["questions"]))]}

    with server(answer) as (url, bodies):
        assert scores(f"remote(url={url}, batch_size=1)", [shown(one)] * 4) == [1.0] * 4
        assert [body["kind"] for body in bodies if "data" in body] == ["image"]
        assert sum("questions" in body for body in bodies) == 4
        kept.clear()
        monkeypatch.setattr("tandem.rewards.remote._LARGEST", 1000)
        (failure,) = scores(f"remote(url={url})", [shown(one)])
    assert failure.reason == "media_too_large" and "make it smaller in the data" in str(failure)


def test_what_a_client_is_about_to_show_is_not_pushed_out_by_what_it_sends(tmp_path, monkeypatch):
    first, second, third = (picture(n) for n in range(3))
    files = [sent(medium.number) for medium in (first, second, third)]
    monkeypatch.setenv("TANDEM_MEDIA", str(tmp_path / "there"))  # two of three have room
    bound = StoreBound(sum(len(base64.b64decode(file["data"])) for file in files) - 1, rest_s=0.0)
    served = RewardApplication({"seen": ServedJudge(lambda questions: [], ("image",))}, bound=bound)
    routes = {route.path: route.handler for route in served.routes}

    async def talk():
        for file in files[:2]:
            await routes["/media"](file, None)
        lacks = [await routes["/media/missing"]({"numbers": [first.number, third.number]}, None)]
        await routes["/media"](files[2], None)
        for medium in (first, second, third):
            lacks.append(await routes["/media/missing"]({"numbers": [medium.number]}, None))
        parts = [{"type": "image", "medium": second.number}]
        question = {"messages": [{"role": "user", "content": parts}], "completion": ""}
        with pytest.raises(Refusal) as refused:
            await routes["/score"]({"questions": [question]}, None)
        await served.close()
        return [lack["missing"] for lack in lacks], str(refused.value)

    lacks, refusal = asyncio.run(talk())
    assert lacks == [[third.number], [], [second.number], []]
    assert "send it to /media and ask again" in refusal and str(tmp_path) not in refusal


def test_a_part_of_an_unknown_type_is_told_all_types():
    question = {"messages": [{"role": "user", "content": [{"type": "image_url"}]}], "completion": ""}
    with pytest.raises(SchemaError, match=r"content.0..type must be one of 'text', 'image', 'audio', got 'image_url'"):
        check_value({"questions": [question]}, SCORE_BODY)


def test_a_server_that_takes_no_media_is_refused_by_name(models):
    """One of an older release has no such route, and would refuse the parts."""
    with server(lambda body: (404, {}) if "numbers" in body else (200, {"results": [{"question": 0, "score": 1}]})) as (
        url,
        _,
    ):
        (failure,) = scores(f"remote(url={url})", [shown(picture(1))])
        assert isinstance(failure, RewardFailure) and failure.reason == "reward_refused"
        assert "takes no images and sounds: it is of a release before this one" in str(failure)
        assert scores(f"remote(url={url})", [shown()]) == scores(f"remote(url={url}, show_media=false)", [shown(picture(1))])


@pytest.mark.parametrize("layout", ["openrlhf", "slime", "vllm"])
def test_layouts_of_texts_alone_refuse_rows_with_media(layout):
    row = {"messages": list(shown(picture(1))[:1]), "answer": "a"}
    reward = build_reward(f"remote(url='http://127.0.0.1:9', layout={layout})", timeout_s=1.0)
    with pytest.raises(ConfigError, match=f"layout={layout} carries texts alone, and there are parts of type image; use"):
        reward.check_row(row)
    reward.check_row({**row, "messages": list(shown()[:1])})
    reward.close()
    (failure,) = scores(f"remote(url='http://127.0.0.1:9', layout={layout})", [shown(picture(1))])
    assert failure.reason == "media_refused"
    build_reward(f"remote(url='http://127.0.0.1:9', layout={layout}, show_media=false)", timeout_s=1.0).check_row(row)
