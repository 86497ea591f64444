"""Rewards of another server: `tandem serve-reward`, the layouts of other systems, and servers that misbehave."""

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.api.failures import RewardFailure
from tandem.cli.serve import SERVE_REWARD
from tandem.cli.serving_rewards import judges_of
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.protocol.reward_layouts import Question
from tandem.rewards.build import build_reward
from tandem.rollout.book import NoBatch
from tandem.trainers.loop import train
from tests.rewards.asked import ROW, judge, server
from tests.scalar_judge import save_judge
from tests.tiny import tiny_model_folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A policy and a reward model."""
    folder = tmp_path_factory.mktemp("models")
    policy, other = tiny_model_folder(folder), tiny_model_folder(folder, seed=1)
    save_judge(folder / "judge", other, policy)
    return folder


@pytest.fixture(scope="module")
def served(models):
    """(URL, token) of `tandem serve-reward` on the reward model."""
    address, token = models / "address.json", models / "token"
    command = [sys.executable, "-m", "tandem", "serve-reward", f"helpful={models}/judge", "--port", "0", "--threads", "1"]
    command += ["--dtype", "float32", "--address-file", address, "--token-file", token]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 150
    while not address.exists():
        assert server.poll() is None and time.monotonic() < until, server.stderr.read()
        time.sleep(0.05)
    yield json.loads(address.read_text())["url"], token.read_text().strip()
    server.send_signal(signal.SIGTERM)
    said = server.communicate(timeout=30)[1]
    assert server.returncode == 0 and "Traceback" not in said


def rewards_of(models, tmp_path, reward, *more):
    overrides = ["gconfig.n_samples=4", "gconfig.max_new_tokens=8", "rollout.batch_size=2", "rollout.engine.threads=1"]
    keys = [f"actor.path={models}/tiny-llama-0", "actor.dtype=float32", "train_dataset.path=addition", "total_train_steps=1"]
    keys += [f"run.root={tmp_path}", "tracking.trajectories_per_step=99", "evaluate.every_steps=null", f"reward={reward}"]
    summary = train(load_config(TrainConfig, None, [*keys, *overrides, *more]))
    lines = (summary.folder / "trajectories/step_1.jsonl").read_text().splitlines()
    return {json.loads(line)["completion"]: json.loads(line)["rewards"] for line in lines}


@pytest.mark.slow
@pytest.mark.invariant
def test_a_run_gets_from_the_server_what_its_own_reward_model_would_say(models, served, tmp_path, monkeypatch):
    url, token = served
    monkeypatch.setenv("JUDGE_TOKEN", token)
    here = rewards_of(models, tmp_path / "here", f"format + 0.5*model(path={models}/judge)")
    remote = f"remote(url={url}, token_env=JUDGE_TOKEN, batch_size=3)"
    there = rewards_of(models, tmp_path / "there", f"format + 0.5*{remote}")

    assert here.keys() == there.keys() and len({parts["model"] for parts in here.values()}) > 2
    for completion, parts in here.items():
        assert there[completion]["remote"] == pytest.approx(parts["model"], abs=1e-5)


def test_the_route_of_openrlhf_scores_whole_texts(models, served, monkeypatch):
    url, token = served
    monkeypatch.setenv("JUDGE_TOKEN", token)
    ours = judge(f"remote(url={url}, token_env=JUDGE_TOKEN)", "two", messages=False)
    theirs = judge(f"remote(url={url}, token_env=JUDGE_TOKEN, layout=openrlhf)", "two", messages=False)

    assert theirs == pytest.approx(ours, abs=1e-6) and ours != pytest.approx(
        judge(f"remote(url={url}, token_env=JUDGE_TOKEN)", "ten")
    )


def test_a_class_of_a_classifier_is_served_by_its_name_or_number(models, tmp_path):
    folder = shutil.copytree(models / "judge", tmp_path / "classes")
    config = json.loads((folder / "config.json").read_text())
    config |= {"id2label": {"0": "calm", "1": "rude"}, "label2id": {"calm": 0, "rude": 1}}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    two = torch.cat([0 * weights["score.weight"], weights["score.weight"]])
    save_file({**weights, "score.weight": two}, folder / "model.safetensors", {"format": "pt"})
    served = [f"one={models}/judge", f"calm={folder}", f"rude={folder}"]

    def opened(*labels, models=served):
        return judges_of(models, labels, "cpu", "float32")

    asked = [Question((), "What is 1 + 1? ", text) for text in ("two", "ten")]
    judges = opened("calm=0", "rude=rude")
    scores = {name: judge(asked) for name, judge in judges.items()}
    # the head of `calm` is 0: the log-odds of `rude` are the score of the model with one label
    assert scores["rude"] == pytest.approx(scores["one"], abs=1e-5)
    assert scores["calm"] == pytest.approx([-score for score in scores["one"]], abs=1e-5)
    assert opened("rude", models=[str(folder)])["classes"](asked) == scores["rude"]
    parser = argparse.ArgumentParser()
    SERVE_REWARD.add_arguments(parser)
    read = parser.parse_args(["--class-label", "glad=joy", "--class-label", "rude=insult", "glad=A", "rude=A"])
    assert read.class_label == ["glad=joy", "rude=insult"] and read.models == ["glad=A", "rude=A"]
    for labels, words in (
        (("calm=0",), "--class-label of `tandem serve-reward`"),
        (("rude",), "give one class for each model, as in one=CLASS; the models are one, calm, rude"),
        (("calm=0", "rude=rud"), r"has no class_label=rud; its classes are 0 \(calm\), 1 \(rude\)"),
    ):
        with pytest.raises(ConfigError, match=words):
            opened(*labels)


def test_no_token_no_score(served):
    with pytest.raises(RewardFailure, match="answered 401") as failure:
        judge(f"remote(url={served[0]})", "two")
    assert failure.value.reason == "reward_server_failed"


def lengths(body):
    """A server that is right: the score is the length; its results come in another order."""
    results = [{"question": n, "score": len(q["completion"])} for n, q in enumerate(body["questions"])]
    return 200, {"results": results[::-1]}


def test_questions_share_requests_and_results_may_come_in_any_order():
    words = ["a" * n for n in range(1, 11)]
    with server(lengths) as (url, bodies):
        assert judge(f"remote(url={url}, batch_size=4, center=1, scale=2)", *words) == [(n - 1) / 2 for n in range(1, 11)]
    assert sorted(len(body["questions"]) for body in bodies) == [2, 4, 4]
    (asked,) = [one for body in bodies for one in body["questions"] if one["completion"] == "a"]
    assert asked == {
        "prompt": "Q: ",
        "completion": "a",
        "answer": "2",
        "messages": [*ROW["messages"], {"role": "assistant", "content": "a"}],
    }
    with server(lengths) as (url, _):
        assert judge(f"remote(url={url}, above=4)", *words) == [float(n > 4) for n in range(1, 11)]
        above = judge(f"remote(url={url}, center=1, scale=2, above=3)", *words)
        assert above == [float((n - 1) / 2 > 3) for n in range(1, 11)]


def test_a_server_that_fails_for_a_while_costs_time_and_no_sample():
    began = time.monotonic()

    def answer(body):
        return lengths(body) if time.monotonic() > began + 1.5 else (500, {"error": "busy"})

    with server(answer) as (url, bodies):
        assert judge(f"remote(url={url})", "four", "fives") == [4, 5]
    assert len(bodies) >= 3  # it did fail, and was asked again


@pytest.mark.slow
@pytest.mark.invariant
def test_a_dead_server_costs_its_patience_once_and_is_trusted_again_when_it_answers():
    dead, began = threading.Event(), time.monotonic()
    dead.set()
    with server(lambda body: time.sleep(0.3) or (500, {}) if dead.is_set() else lengths(body)) as (url, _):
        reward = build_reward(f"remote(url={url}, patience_s=2)", timeout_s=0.2)

        async def ask(count=1):
            given = {"prompt": "", "prompt_ids": (1,), "completion_ids": (2,), "row": ROW}
            asked = (reward(completion="a" * n, **given) for n in range(1, count + 1))
            return await asyncio.gather(*asked, return_exceptions=True)

        async def steps():
            failed = [failure for _ in range(10) for failure in await ask(4)]
            took_s = time.monotonic() - began
            dead.clear()
            well = await ask(4)
            dead.set()
            asyncio.get_running_loop().call_later(0.8, dead.clear)
            return failed, took_s, well, await ask(4)

        failed, took_s, well, waited = asyncio.run(steps())
        reward.close()
    assert {failure.reason for failure in failed} == {"reward_server_failed"} and took_s < 18
    assert "left a question unanswered for patience_s=2" in str(failed[-1])
    assert [result.value for result in well] == [result.value for result in waited] == [1, 2, 3, 4]


def test_a_run_whose_reward_server_is_dead_ends_by_its_failure_budget(models, tmp_path):
    began, budget = time.monotonic(), "rollout.max_data_failures=20"
    with pytest.raises(NoBatch, match=r"20 episodes in a row .* reward_server_failed"):
        rewards_of(models, tmp_path, "remote(url='http://127.0.0.1:9', patience_s=3)", budget)
    assert time.monotonic() - began < 28  # ten batches, of which the first alone waits


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda body: (500, {}), "answered 500"),
        (lambda body: (200, b"<html>"), "not JSON"),
        (lambda body: (200, {"results": []}), "1 of 1 questions have no result"),
        (lambda body: (200, {"results": [{"question": 0, "score": 1}] * 2}), "question 0 has two results"),
        (lambda body: (200, {"results": [{"question": 1, "score": 1}]}), "`question` must be one of 0…0, got 1"),
        (lambda body: (200, {"results": [{"question": 0, "score": "high"}]}), "a score must be a number, got 'high'"),
        (lambda body: (200, {"results": [{"question": 0, "score": True}]}), "a score must be a number, got True"),
        (lambda body: (200, {"results": [{"question": 0}]}), "neither a score nor a reason"),
        (lambda body: time.sleep(1.2) or (200, {}), "gave no answer within"),
    ],
)
def test_a_server_that_answers_nothing_of_use_is_a_named_failure_within_the_patience(answer, said):
    with server(answer) as (url, _):
        began = time.monotonic()
        with pytest.raises(RewardFailure, match=said) as failure:
            judge(f"remote(url={url}, patience_s=1)", "word")
        assert failure.value.reason == "reward_server_failed" and time.monotonic() - began < 30


def test_what_cannot_be_judged_costs_only_its_own_sample():
    def answer(body):
        if any(q["completion"] == "bad" for q in body["questions"]):
            return 422, {"error": "no such language"}
        results = []
        for number, question in enumerate(body["questions"]):
            word = question["completion"]
            odd = {"long": {"reason": "too_long", "message": "9 tokens"}, "nan": {"score": float("nan")}}
            results.append({"question": number, "score": len(word)} | odd.get(word, {}))
        for result in results:
            if "reason" in result:
                del result["score"]
        return 200, {"results": results}

    with server(answer) as (url, _):
        good, bad, long, nan = judge(f"remote(url={url})", "good", "bad", "long", "nan")
    assert good == 4
    assert [failure.reason for failure in (bad, long, nan)] == ["reward_refused", "too_long", "reward_not_finite"]


def test_a_server_in_slimes_layout_is_asked_for_each_sample():
    with server(lambda body: (200, len(body["response"]))) as (url, bodies):
        assert judge(f"remote(url={url}/rm, layout=slime)", "one", "three") == [3, 5]
    assert {"prompt": "Q: ", "response": "one", "label": "2"} in bodies


def test_the_route_of_vllm_and_sglang_gives_the_probability_of_a_class():
    def classes(body):
        texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
        rows = [{"index": n, "label": "bad", "probs": [0.75, len(t) / 100], "num_classes": 2} for n, t in enumerate(texts)]
        return 200, {"object": "list", "data": rows[::-1]}

    with server(classes) as (url, bodies):
        assert judge(f"remote(url={url}, layout=vllm, model=m, class_label=1)", "one", "three") == [0.06, 0.08]
        assert judge(f"remote(url={url}, layout=vllm, class_label=0)", "one") == 0.75
        unsaid = judge(f"remote(url={url}, layout=vllm, patience_s=0.1)", "one", "three")
        unknown = judge(f"remote(url={url}, layout=vllm, class_label=2, patience_s=0.1)", "one", "three")
    assert {"model": "m", "input": ["Q: one", "Q: three"]} in bodies and {"input": "Q: one"} in bodies
    assert all("has 2 classes; say with class_label which one counts" in str(failure) for failure in unsaid)
    assert all("class_label=2, and the server's model has 2 classes" in str(failure) for failure in unknown)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("remote(url='http://a:1', layout=trl)", "layout must be one of tandem, openrlhf, slime, vllm, got 'trl'"),
        ("remote(url='http://a:1', class_label=1)", "class_label is the number of a class, .* with layout=vllm; got 1"),
        ("remote(url='ftp://a')", "http://HOST:PORT"),
        ("remote(url='http://a:1', token_env=NO_SUCH)", "no variable NO_SUCH"),
        ("remote(url='http://a:1', patience_s=0)", "must be above 0"),
        ("remote(url='http://a:1', scale=x)", "scale must be a number, got 'x'"),
    ],
)
def test_a_wrong_knob_is_refused_at_start(spec, said):
    os.environ.pop("NO_SUCH", None)
    with pytest.raises(ConfigError, match=said):
        build_reward(spec, timeout_s=1.0)


def says(score):
    """A server that gives each question this score."""
    return lambda body: (200, {"results": [{"question": n, "score": score} for n in range(len(body["questions"]))]})


def test_two_servers_are_two_parts_of_the_reward():
    """Each under the name that its term has."""
    with server(says(1)) as (one, _), server(says(10)) as (ten, _):
        reward = build_reward(f"remote(url={one}, name=helpful) + remote(url={ten}, name=safe)", timeout_s=2.0)
        result = asyncio.run(reward(prompt="", completion="a", prompt_ids=(1,), completion_ids=(2,), row=ROW))
        reward.close()
    assert (result.value, dict(result.rewards)) == (11.0, {"helpful": 1.0, "safe": 10.0})


def test_an_event_loop_that_ends_with_questions_leaves_the_reward_usable():
    with server(lengths) as (url, _):
        reward = build_reward(f"remote(url={url}, patience_s=2)", timeout_s=1.0)

        async def ask(give_up_s):
            given = {"prompt": "", "completion": "four", "prompt_ids": (1,), "completion_ids": (2,), "row": ROW}
            async with asyncio.timeout(give_up_s):
                return (await reward(**given)).value

        with pytest.raises(TimeoutError):
            asyncio.run(ask(0.001))
        assert asyncio.run(ask(5.0)) == 4
        reward.close()


def test_a_server_that_fails_on_one_question_answers_the_others():
    """Also one that is too slow for many at once."""

    def answer(body):
        bad = any(q["completion"] == "bad" for q in body["questions"])
        return (500, {}) if bad or len(body["questions"]) > 2 else lengths(body)

    with server(answer) as (url, _):
        *good, bad = judge(f"remote(url={url}, patience_s=3)", "a", "bb", "ccc", "dddd", "bad")
    assert good == [1, 2, 3, 4] and bad.reason == "reward_server_failed"


def test_nobody_asks_on_for_an_episode_that_was_cancelled():
    with server(lambda body: (500, {})) as (url, bodies):
        reward = build_reward(f"remote(url={url}, patience_s=60)", timeout_s=1.0)

        async def leave():
            given = {"prompt": "", "completion": "four", "prompt_ids": (1,), "completion_ids": (2,), "row": ROW}
            asked = asyncio.create_task(reward(**given))
            while not bodies:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # it has heard the answer, and waits for the second try
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            await asyncio.sleep(1.0)  # longer than the first pause between two tries

        asyncio.run(leave())
        reward.close()
    assert len(bodies) == 1


def test_a_password_in_an_address_is_not_shown():
    with pytest.raises(ConfigError) as error:
        build_reward("remote(url='http://me:secret@judge:1/?key=hidden')", timeout_s=1.0)
    assert "secret" not in str(error.value) and "hidden" not in str(error.value)
