"""New weights over the control routes: under load, refused, interrupted, given back."""

import asyncio
import os
import threading
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.api.failures import EngineDied, ServerFailed, WeightUpdateFailed
from tandem.api.requests import NoiseKey
from tandem.api.weights import FolderSource, WeightSource, WeightUpdate, WeightVersion
from tandem.engines.inference.remote.tandem_server import TandemServer
from tandem.protocol.bodies import Refusal
from tests.serve.served import ADMIN, Served, as_body, one_by_one, request_of, update_of
from tests.tiny import tiny_model_folder

PROMPT = tuple(range(10, 30))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder below which weights may lie, with those of two other models."""
    root = tmp_path_factory.mktemp("weights")
    for seed in (1, 2):
        tiny_model_folder(root, seed=seed)
    return root


@pytest.fixture
def served(folder, root):
    with Served(folder, roots=[root]) as server:
        yield server


@pytest.fixture
def remote(served):
    server = TandemServer.attach(served.url, run="r", admin_token=ADMIN)
    yield server
    server.close()


def logprobs_under(folder, response, temperature):
    """Of the response's tokens, by the Hugging Face model in a folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([response.input_ids + response.output_ids])
    with torch.inference_mode():
        logits = model(ids).logits[0, len(response.input_ids) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(-1, ids[0, len(response.input_ids) :, None])[:, 0].tolist()


def test_under_load_each_token_is_of_the_weights_that_it_is_stamped_with(remote, served, folder, root):
    requests = [
        request_of((*PROMPT, 30 + i), NoiseKey(1, sample=i), temperature=0.7, max_new_tokens=250, min_new_tokens=250)
        for i in range(4)
    ]
    responses, reports = [], []

    async def ask():
        responses.extend(await asyncio.gather(*(remote.agenerate(request) for request in requests)))

    load = threading.Thread(target=lambda: asyncio.run(ask()))
    load.start()
    for number in (1, 2):
        while remote.statistics()["generated_tokens"] < 120 * number:
            assert load.is_alive()
        update = update_of(root / f"tiny-llama-{number}", number)
        remote.prepare_weights(update)
        reports.append(remote.commit_weights(update.version))
        assert remote.version == update.version
    load.join(60)

    folders = [folder, root / "tiny-llama-1", root / "tiny-llama-2"]
    assert len(responses) == 4 and {v for response in responses for v in response.versions} == {0, 1, 2}
    for response in responses:
        under = [logprobs_under(f, response, 0.7) for f in folders]
        for token, version in enumerate(response.versions):
            assert response.logprobs[token] == pytest.approx(under[version][token], abs=1e-4)
    assert all(report["pause_s"] >= 0 and report["recompute_s"] > 0 for report in reports)


def test_closing_gives_the_server_back_as_it_was_found(served, root):
    (before,) = one_by_one(served.engine, [request_of(PROMPT, NoiseKey(1))])
    remote = TandemServer.attach(served.url, run="r", admin_token=ADMIN)
    update = update_of(root / "tiny-llama-1", 1)
    remote.prepare_weights(update)
    remote.commit_weights(update.version)
    (other,) = one_by_one(remote, [request_of(PROMPT, NoiseKey(1))])
    remote.pause()
    remote.close()

    identity = served.json("GET", "/health")
    (after,) = one_by_one(served.engine, [request_of(PROMPT, NoiseKey(1))])
    assert other.logprobs != before.logprobs
    assert (after.output_ids, after.logprobs, after.versions) == (before.output_ids, before.logprobs, before.versions)
    assert identity["run"] is None and not identity["paused"] and identity["version"]["number"] == 0


@pytest.mark.parametrize("lie", ["a tensor", "a name", "the version"])
def test_weights_that_are_not_what_was_announced_change_nothing(remote, root, lie):
    update = update_of(root / "tiny-llama-1", 1)
    digests, version = dict(update.digests), update.version
    name = min(digests)
    if lie == "a tensor":
        other = update_of(root / "tiny-llama-2", 1)
        update = WeightUpdate(other.version, update.source, other.digests)
    elif lie == "a name":
        digests["another"] = digests.pop(name)
        update = WeightUpdate(version, update.source, digests)
    else:
        update = WeightUpdate(WeightVersion(1, "0" * 64, "r"), update.source, digests)

    with pytest.raises(WeightUpdateFailed):
        remote.prepare_weights(update)
    with pytest.raises(WeightUpdateFailed, match="nothing is prepared"):
        remote.commit_weights(update.version)
    assert remote.version.number == 0
    good = update_of(root / "tiny-llama-1", 1)
    remote.prepare_weights(good)  # and the next one works
    remote.commit_weights(good.version)


def test_a_commit_that_is_repeated_is_done_once(remote, served, root):
    update = update_of(root / "tiny-llama-1", 1)
    remote.prepare_weights(update)
    remote.commit_weights(update.version)

    assert remote.commit_weights(update.version) == {"pause_s": 0.0, "recompute_s": 0.0}


def test_a_commit_that_is_repeated_with_weights_prepared_anew_holds_no_second_model(remote, served, root):
    update = update_of(root / "tiny-llama-1", 1)
    for _ in range(2):
        remote.prepare_weights(update)
        remote.commit_weights(update.version)

    with pytest.raises(WeightUpdateFailed, match="nothing is prepared"):
        served.engine.commit_weights(update.version)


def test_words_that_come_after_the_release_do_not_take_the_server_back(remote, served, root):
    update = update_of(root / "tiny-llama-1", 1)
    served.json("POST", "/control/release", {"run": "r"})

    with pytest.raises(WeightUpdateFailed, match="belongs to no run"):
        remote.prepare_weights(update)
    with pytest.raises(ServerFailed, match="attach to it first"):
        remote.pause()
    assert served.json("GET", "/health")["run"] is None
    other = TandemServer.attach(served.url, run="other", admin_token=ADMIN)
    assert other.version.number == 0
    other.close()


def test_a_client_that_was_closed_changes_nothing(remote, root):
    remote.close()
    with pytest.raises(EngineDied, match="was closed"):
        remote.prepare_weights(update_of(root / "tiny-llama-1", 1))


def test_a_change_that_waited_asks_again_whose_the_server_is(remote, served, root):
    body = as_body(update_of(root / "tiny-llama-1", 1))

    async def prepare_behind_a_release():
        control = served.application.control
        async with control.turn:
            late = asyncio.ensure_future(control.prepare(body, None))
            await asyncio.sleep(0.1)
            served.service.run = "other"
        with pytest.raises(Refusal, match="belongs to run 'other'"):
            await late

    asyncio.run_coroutine_threadsafe(prepare_behind_a_release(), served.loop).result(30)


@pytest.mark.parametrize("parts", [(), ("kv_cache",), ("weights", "kv_cache")])
def test_what_a_killed_run_left_paused_and_asleep_makes_tokens_for_the_next(folder, root, parts):
    with Served(folder, roots=[root], owner_silent_s=1.5) as served:
        killed = TandemServer.attach(served.url, run="killed", admin_token=ADMIN)
        (before,) = one_by_one(killed, [request_of(PROMPT, NoiseKey(1))])
        if parts:
            killed.sleep(parts)
        killed.pause()
        killed.let_go()
        with pytest.raises(ServerFailed, match="belongs to run 'killed'"):
            TandemServer.attach(served.url, run="next", admin_token=ADMIN)
        time.sleep(1.6)

        remote = TandemServer.attach(served.url, run="next", admin_token=ADMIN)
        (after,) = one_by_one(remote, [request_of(PROMPT, NoiseKey(1))])
        assert after.output_ids == before.output_ids and remote.ready()
        remote.close()


def test_a_server_that_was_restarted_for_the_same_run_does_not_pass_for_the_old_one(remote, served):
    served.service.instance = "another process"
    with pytest.raises(ServerFailed, match="was restarted"):
        one_by_one(remote, [request_of(PROMPT)])
    anew = TandemServer.attach(served.url, run="r", admin_token=ADMIN)
    assert len(one_by_one(anew, [request_of(PROMPT)])) == 1
    anew.let_go()


def test_discarded_weights_cannot_be_committed(remote, root):
    update = update_of(root / "tiny-llama-1", 1)
    remote.prepare_weights(update)
    remote.discard_weights()
    remote.discard_weights()

    with pytest.raises(WeightUpdateFailed, match="nothing is prepared"):
        remote.commit_weights(update.version)


def test_weights_come_from_a_folder_only(remote):
    class Elsewhere(WeightSource):
        def tensors(self):
            return iter(())

    with pytest.raises(WeightUpdateFailed, match="from a folder only"):
        remote.prepare_weights(WeightUpdate(WeightVersion(1), Elsewhere(), {}))


def test_weights_of_another_run_are_refused(remote, root):
    with pytest.raises(WeightUpdateFailed, match="belongs to run 'r'"):
        remote.prepare_weights(update_of(root / "tiny-llama-1", 1, run="other"))


@pytest.mark.parametrize("where", ["outside", "dots", "link", "linked file", "relative", "missing", "a file", "nul"])
def test_weights_outside_of_the_allowed_folders_are_not_read(served, root, tmp_path, where):
    outside = tiny_model_folder(tmp_path, seed=1)
    if where == "link":
        (root / "link").exists() or (root / "link").symlink_to(outside)
    if where == "linked file":
        (root / "links").mkdir(exist_ok=True)
        link = root / "links" / "model.safetensors"
        link.unlink(missing_ok=True)
        link.symlink_to(outside / "model.safetensors")
    folder = {
        "outside": str(outside),
        "dots": f"{root}/../{os.path.relpath(outside, root.parent)}",
        "link": str(root / "link"),
        "linked file": str(root / "links"),
        "relative": "tiny-llama-1",
        "missing": str(root / "nothing"),
        "a file": str(root / "tiny-llama-1" / "model.safetensors"),
        "nul": f"{root}/tiny-llama-1\0",
    }[where]

    body = as_body(update_of(outside, 1, run="")) | {"folder": folder}
    error = served.json("POST", "/control/prepare", body, status=403)["error"]
    assert error["code"] == "folder" and "allowed folders only" in error["message"]
    assert served.json("GET", "/health")["run"] is None


def test_without_an_allowed_folder_no_other_weights_are_taken(folder, root):
    with Served(folder) as closed:
        message = closed.json("POST", "/control/prepare", as_body(update_of(root / "tiny-llama-1", 1, run="")), status=403)
        assert "--weights-root" in message["error"]["message"]
        assert "disk" not in closed.json("GET", "/health")["capabilities"]


def test_sleeping_weights_must_be_delivered_anew(remote, served, root):
    remote.sleep(("weights", "kv_cache"))
    with pytest.raises(ServerFailed, match="weights sleep"):
        one_by_one(remote, [request_of(PROMPT)])
    assert not remote.ready()
    remote.wake(("weights", "kv_cache"))
    with pytest.raises(ServerFailed, match="weights sleep"):
        one_by_one(remote, [request_of(PROMPT)])
    update = update_of(root / "tiny-llama-2", 1)
    remote.prepare_weights(update)
    remote.commit_weights(update.version)

    (response,) = one_by_one(remote, [request_of(PROMPT)])
    assert set(response.versions) == {1} and remote.ready()


def test_sleep_is_refused_while_requests_are_under_way(remote):
    remote.pause()

    async def ask():
        task = asyncio.ensure_future(remote.agenerate(request_of(PROMPT, max_new_tokens=3)))
        while not (await asyncio.to_thread(remote.statistics))["waiting"]:
            await asyncio.sleep(0.01)
        with pytest.raises(ServerFailed, match="under way") as refused:
            await asyncio.to_thread(remote.sleep, ("kv_cache",))
        await asyncio.to_thread(remote.resume)
        return refused.value.status, len((await task).output_ids)

    assert asyncio.run(ask()) == (409, 3)


def test_a_flush_shares_no_prompt_with_requests_to_come(remote):
    async def ask(flush):
        before = await asyncio.to_thread(remote.statistics)
        await asyncio.to_thread(remote.pause)
        tasks = [
            asyncio.ensure_future(remote.agenerate(request_of(PROMPT, NoiseKey(i), max_new_tokens=400, min_new_tokens=400)))
            for i in range(2)
        ]
        while (await asyncio.to_thread(remote.statistics))["waiting"] < 2:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(remote.resume)  # two with one prompt: it is shared
        while (await asyncio.to_thread(remote.statistics))["generated_tokens"] < before["generated_tokens"] + 4:
            await asyncio.sleep(0.005)
        await asyncio.to_thread(remote.pause)
        if flush:
            await asyncio.to_thread(remote.flush)
        middle = await asyncio.to_thread(remote.statistics)
        assert middle["running"] == 2
        third = asyncio.ensure_future(remote.agenerate(request_of(PROMPT, NoiseKey(9), max_new_tokens=1)))
        while not (await asyncio.to_thread(remote.statistics))["waiting"]:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(remote.resume)
        await third
        after = await asyncio.to_thread(remote.statistics)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while (await asyncio.to_thread(remote.statistics))["running"]:
            await asyncio.sleep(0.01)
        return after["shared_prompt_tokens"] - middle["shared_prompt_tokens"]

    assert asyncio.run(ask(flush=False)) == len(PROMPT)
    assert asyncio.run(ask(flush=True)) == 0


def test_a_folder_that_vanished_is_a_failed_update(remote, root, tmp_path_factory):
    (root / "empty").mkdir(exist_ok=True)
    update = update_of(root / "tiny-llama-1", 1)

    with pytest.raises(WeightUpdateFailed, match="removed before it was read"):
        remote.prepare_weights(WeightUpdate(update.version, FolderSource(root / "empty"), update.digests))
