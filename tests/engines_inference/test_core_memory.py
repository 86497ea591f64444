"""Memory: admission, cancellation, sharing, sleep."""

import pytest
import torch

from tandem.api.failures import DataFailure
from tandem.api.requests import LLMRequest, NoiseKey
from tandem.config.rollout import GenerationConfig
from tandem.engines.inference.attention import Kernel
from tandem.engines.inference.kv_cache import KVCache
from tests.engines_inference.test_core_equal import drain, make_core, prompts, run
from tests.tiny import tiny_model_folder

LONG = GenerationConfig(max_new_tokens=100, min_new_tokens=100)
GIB_OF_512 = 512 * 2 * 2 * 2 * 8 * 4 / 2**30  # tokens · (keys, values) · layers · heads · head_dim · bytes


def test_requests_wait_until_their_memory_is_free_and_come_out_the_same(tmp_path):
    folder = tiny_model_folder(tmp_path)
    requests = {i: LLMRequest(p, LONG, NoiseKey(i)) for i, p in enumerate(prompts([20] * 9))}
    narrow = make_core(folder, deterministic=True, kv_cache_gib=GIB_OF_512)  # 120 tokens each, rows of 128: four fit
    for number, request in requests.items():
        narrow.add(number, request)
    narrow.step()
    seen, responses = narrow.statistics(), {}
    while narrow.has_work:
        responses.update(narrow.step())
        assert narrow.statistics()["kv_reserved_tokens"] <= 512
        assert narrow.statistics()["kv_held_bytes"] <= 512 * 256
    assert (seen["running"], seen["waiting"]) == (4, 5)
    wide = run(make_core(folder), requests)
    assert {i: r.output_ids for i, r in responses.items()} == {i: r.output_ids for i, r in wide.items()}


def test_the_prompt_of_a_group_is_held_once(tmp_path):
    core = make_core(tiny_model_folder(tmp_path), prefill_chunk_tokens=512)
    (prompt,) = prompts([250])
    for i in range(8):
        core.add(i, LLMRequest(prompt, GenerationConfig(max_new_tokens=32, min_new_tokens=32), NoiseKey(i)))
    core.step()
    assert core.statistics()["kv_reserved_tokens"] == 256 + 8 * 32
    drain(core)
    assert core.statistics()["kv_reserved_tokens"] == 0


def test_a_group_that_is_admitted_in_parts_still_shares_its_prompt(tmp_path):
    folder = tiny_model_folder(tmp_path)
    (prompt,) = prompts([20])
    requests = {i: LLMRequest(prompt, LONG, NoiseKey(i)) for i in range(6)}
    core = make_core(folder, max_running=4)
    responses = run(core, requests)
    assert core.statistics()["prefill_tokens"] <= 2 * 20
    alone = run(make_core(folder), {0: requests[5]})[0]
    assert responses[5].output_ids == alone.output_ids


def test_cancelling_frees_memory_at_once_wherever_the_request_is(tmp_path):
    core = make_core(tiny_model_folder(tmp_path), max_running=8)
    shared, single, long = prompts([20, 10, 90])
    for i in range(3):
        core.add(i, LLMRequest(shared, LONG, NoiseKey(i)))
    core.add(3, LLMRequest(single, LONG))
    core.step()
    core.step()
    core.add(4, LLMRequest(long, LONG))  # in prefill after one step: chunks of 24 tokens
    core.step()
    for i in range(5, 12):
        core.add(i, LLMRequest(single, LONG, NoiseKey(i)))  # the last of these wait
    core.step()
    assert core.statistics()["waiting"] > 0
    for i in range(12):
        before = core.statistics()
        core.cancel(i)
        after = core.statistics()
        assert after["running"] + after["waiting"] == before["running"] + before["waiting"] - 1
    core.cancel(77)
    assert not core.has_work and core.statistics()["kv_reserved_tokens"] == 0
    assert run(core, {0: LLMRequest(single, LONG)})[0].output_ids  # and it still works


def test_cancelling_some_leaves_the_others_as_they_were(tmp_path):
    folder = tiny_model_folder(tmp_path)
    ids = [p for p in prompts([12, 26, 7]) for _ in range(4)]
    requests = {i: LLMRequest(p, LONG, NoiseKey(i)) for i, p in enumerate(ids)}
    core, responses = make_core(folder), {}
    for number, request in requests.items():
        core.add(number, request)
    for step in range(60):
        responses.update(core.step())
        if step % 5 == 4 and step // 5 in (0, 2, 4, 6, 8):
            core.cancel(step // 5)
    responses.update(drain(core))
    kept = {1, 3, 5, 7, 9, 10, 11}
    assert set(responses) == kept
    whole = run(make_core(folder), requests)
    assert all(responses[i].output_ids == whole[i].output_ids for i in kept)


def test_a_request_larger_than_the_whole_cache_is_refused(tmp_path):
    core = make_core(tiny_model_folder(tmp_path), kv_cache_gib=GIB_OF_512 / 4)
    with pytest.raises(DataFailure, match=r"kv_cache_gib"):
        core.add(0, LLMRequest(prompts([60])[0], LONG))


def test_sleep_gives_memory_back_and_wake_goes_on(tmp_path):
    core = make_core(tiny_model_folder(tmp_path))
    request = {0: LLMRequest(prompts([9])[0], GenerationConfig(max_new_tokens=5, min_new_tokens=5))}
    before = run(core, request)
    core.add(1, request[0])
    with pytest.raises(RuntimeError, match="idle"):
        core.sleep(("kv_cache",))
    core.cancel(1)
    core.sleep(("kv_cache",))
    assert core.statistics()["kv_held_bytes"] == 0
    core.wake(("kv_cache",))
    assert run(core, request) == before


def test_freeing_a_row_keeps_the_others_and_the_rows_in_use_stay_first():
    cache = KVCache(2, 1, 4, torch.float32, torch.device("cpu"), 1e-3)
    rows = [cache.allocate("whole", 32) for _ in range(6)]
    for number, row in enumerate(rows):
        for layer in range(2):
            row.slab.keys[layer][row.index] = number * 10 + layer
    for number in (1, 4):
        cache.free(rows[number])
    for number in (0, 2, 3, 5):
        assert rows[number].index < 4
        assert (rows[number].slab.keys[1][rows[number].index] == number * 10 + 1).all()
    assert cache.reserved_tokens == 4 * 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_attention_kernels_give_softmax_attention_and_its_log_sum_exp(dtype):
    torch.manual_seed(0)
    kernel = Kernel(6, 2, 16, 0.25, None, dtype, torch.device("cpu"))
    queries = torch.randn(3, 2, 3, 16).to(dtype)
    keys, values = torch.randn(2, 3, 2, 32, 16).to(dtype)[..., :20, :]
    hidden = torch.arange(20) >= torch.tensor([5, 20, 11])[:, None, None, None]
    out, lse = kernel.attend(queries, keys, values, kernel.additive(hidden), lse=True)

    scores = (queries.float() @ keys.float().transpose(-1, -2) * 0.25).masked_fill(hidden, float("-inf"))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert torch.allclose(out.float(), scores.softmax(-1) @ values.float(), atol=tolerance)
    assert torch.allclose(lse.float(), scores.logsumexp(-1), atol=tolerance)


def test_a_group_whose_two_rows_do_not_fit_together_is_served_one_after_the_other(tmp_path):
    folder = tiny_model_folder(tmp_path)
    gconfig = GenerationConfig(max_new_tokens=50, min_new_tokens=50)
    requests = {i: LLMRequest(prompts([40])[0], gconfig, NoiseKey(0, sample=i)) for i in range(3)}
    narrow = make_core(folder, kv_cache_gib=GIB_OF_512 * 100 / 512)
    for number, request in requests.items():
        narrow.add(number, request)
    responses = {}
    for _ in range(400):
        responses.update(narrow.step())
    assert {i: len(r.output_ids) for i, r in responses.items()} == {0: 50, 1: 50, 2: 50}
