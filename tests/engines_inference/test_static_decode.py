"""Decode steps over static tables, recorded and run again as a GPU does it: to the bit what the same steps give unrecorded,
and the tokens of ordinary steps. Those give the same bits, too, where no prompt is shared and no key is padding; otherwise
sums are taken in another order."""

import dataclasses
import logging
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tandem.api.requests import LLMRequest, NoiseKey
from tandem.api.weights import WeightVersion
from tandem.config.engine_memory import key_bucket, row_bucket
from tandem.config.generation import GenerationConfig
from tandem.engines.inference import fused_weights, static_decode
from tandem.engines.inference.arena import Arena
from tests.engines_inference.test_core_equal import make_core, prompts
from tests.engines_inference.test_core_growth import of_lengths
from tests.engines_inference.test_core_memory import GIB_OF_512
from tests.engines_inference.test_core_on_gpu import ODD, requests
from tests.engines_inference.test_core_reads_late import STOPS
from tests.pretended_gpu import DATA_DEPENDENT
from tests.tiny import tiny_model, tiny_model_folder


class Operations(TorchDispatchMode):
    """Writes down every operation with the tensors that it reads and those that it makes."""

    def __init__(self):
        super().__init__()
        self.list, self.outside = [], {}
        self._made = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in DATA_DEPENDENT | {"_local_scalar_dense"}, f"{name} makes the host wait"
        for one in tree_leaves((args, kwargs)):
            if isinstance(one, torch.Tensor) and one.layout == torch.strided and _storage(one) not in self._made:
                self.outside[_storage(one)] = one
        found = func(*args, **(kwargs or {}))
        self._made |= {_storage(one) for one in _tensors(found)} - set(self.outside)
        self.list.append((func, args, kwargs or {}, _tensors(found)))
        return found


def _storage(tensor):
    return tensor.untyped_storage().data_ptr()


def _tensors(found):
    return [one for one in tree_leaves(found) if isinstance(one, torch.Tensor)]


class Recorder:
    """Records as a CUDA graph does: a run again computes the same operations, from and into the same memory, no more."""

    def __init__(self):
        self.recordings, self.replays = [], 0

    def __call__(self, step):
        with (operations := Operations()):
            step()
        self.recordings.append(operations)
        new = True

        def replay():
            nonlocal new
            self.replays += 1
            if new:  # a GPU computes nothing while it records; here it has
                new = False
                return
            for func, args, kwargs, outputs in operations.list:
                for old, found in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
                    if old.data_ptr() != found.data_ptr():
                        old.copy_(found)

        return replay


def recorded(folder, **settings):
    core = make_core(folder, cuda_graphs=True, **settings)
    core.static.capture = Recorder()
    return core


def run(core, asked, arrivals=lambda number: 0, between=lambda core, step: None):
    """Responses by request; ``arrivals``: the step before which each comes."""
    waiting, responses, step = dict(asked), {}, 0
    while waiting or core.has_work:
        for number in [number for number in waiting if arrivals(number) <= step]:
            core.add(number, waiting.pop(number))
        responses.update(core.step())
        step += 1
        between(core, step)
    return responses


def assert_same(found, expected, exact=lambda number: False):
    """``exact``: requests whose log-probabilities are the same bits; the others' are close."""
    assert found.keys() == expected.keys()
    for number, one in expected.items():
        assert found[number].output_ids == one.output_ids, f"request {number}"
        assert found[number].stop_reason == one.stop_reason and found[number].versions == one.versions
        if exact(number):
            assert found[number].logprobs == one.logprobs, f"request {number}"
        else:
            torch.testing.assert_close(torch.tensor(found[number].logprobs), torch.tensor(one.logprobs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "smollm3"])
def test_recorded_steps_draw_the_same_for_every_way_of_sampling_and_ending(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("tandem.engines.inference.passes.kernels", lambda _: None)  # as on a GPU: torch's operators
    folder = tiny_model_folder(tmp_path, kind)
    asked = dict(enumerate(requests([*ODD, GenerationConfig(max_new_tokens=1)])))  # every fourth has a prompt of its own
    alone = prompts([12] * 9, seed=3)
    asked |= {100 + 4 * i + 3: LLMRequest(prompt, STOPS, NoiseKey(9, sample=i)) for i, prompt in enumerate(alone)}
    core = recorded(folder)
    late = [number % 11 for number in asked]  # the batch grows and shrinks
    arrivals = dict(zip(asked, late, strict=True)).__getitem__
    unrecorded = make_core(folder, cuda_graphs=True)
    expected = run(make_core(folder), asked, arrivals)
    for _ in range(2):
        found = run(core, asked, arrivals)
        assert_same(found, expected)
        assert_same(found, run(unrecorded, asked, arrivals), exact=lambda number: True)
    assert core.static.capture.replays > 10 and len(core.static.capture.recordings) > 2
    monkeypatch.setattr(static_decode, "key_bucket", lambda keys, most: keys)
    found = run(make_core(folder, cuda_graphs=True), asked, arrivals)
    assert_same(found, expected, exact=lambda number: number % 4 == 3)


def test_a_small_batch_and_a_long_one_pass_through_all_buckets(tmp_path):
    folder = tiny_model_folder(tmp_path)
    asked = {
        i: LLMRequest(p, dataclasses.replace(STOPS, max_new_tokens=100 - 5 * i)) for i, p in enumerate(prompts([9] * 17))
    }
    asked = {i: dataclasses.replace(one, noise_key=NoiseKey(i)) for i, one in asked.items()}
    core, seen = recorded(folder), set()
    asked[17] = LLMRequest(asked[0].input_ids[:5], GenerationConfig(max_new_tokens=130, min_new_tokens=130), NoiseKey(99))
    between = lambda core, step: seen.update((bucket.rows, bucket.keys) for bucket in core.static.buckets)  # noqa: E731
    found = run(core, asked, between=between)
    assert_same(found, run(make_core(folder), asked))
    assert {rows for rows, _ in seen} >= {1, 2, 4, 8} and {keys for _, keys in seen} >= {128, 256}


@pytest.mark.parametrize("alike", [1, 3])
def test_who_gives_way_and_comes_back_draws_the_same_in_recorded_steps(alike, tmp_path):
    folder = tiny_model_folder(tmp_path)
    asked = of_lengths(random.Random(1).choices((40, 100), k=10), alike=alike)
    core = recorded(folder, kv_cache_gib=GIB_OF_512)
    found = run(core, asked)
    ordinary = make_core(folder, kv_cache_gib=GIB_OF_512)
    assert_same(found, run(ordinary, asked))
    assert core.statistics()["preempted"] > 0 and core.statistics()["kv_reserved_tokens"] == 0
    assert core.static.capture.replays > 10


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("keep_kv", [False, True])
def test_new_weights_go_where_the_recordings_read_them(packed, keep_kv, tmp_path, monkeypatch):
    if not packed:  # as on a GPU
        monkeypatch.setattr(fused_weights, "packs", lambda device: False)
    folder, new = tiny_model_folder(tmp_path, "qwen2"), tiny_model("qwen2", seed=1).eval()
    asked, counts = of_lengths([30, 40, 40, 40, 25]), {}

    def switch(core, step):
        if step == 12:
            counts["before"] = core.static and core.static.captured
            core.swap(core.stage(new.state_dict().items()), WeightVersion(1), keep_kv)
        counts[step] = core.static and core.static.captured

    core = recorded(folder)
    found = run(core, asked, between=switch)
    assert counts["before"] == 1 and counts[13] == (0 if packed else 1)
    assert_same(found, run(make_core(folder), asked, between=switch))
    assert {version for one in found.values() for version in one.versions} == {0, 1}


def test_a_recording_reads_and_writes_only_what_stays_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(fused_weights, "packs", lambda device: False)
    core = recorded(tiny_model_folder(tmp_path), kv_cache_gib=0.05)
    static, seen = core.static, {}

    def no_python(*_):
        raise AssertionError("a recording is run again without the step's own code")

    def look(core, step):
        seen[step] = {_storage(one) for one in (*static.tables, core.slots.last, *core.cache.keys, *core.cache.values)}
        if static.captured:
            monkeypatch.setattr(static, "_compute", no_python)  # from now on nothing of the step is Python

    run(core, of_lengths([60, 60, 60]), between=look)
    (recording,) = static.capture.recordings
    assert static.capture.replays > 50 and len({frozenset(one) for step, one in seen.items() if step > 3}) == 1
    weights = {_storage(one) for one in core.weights.tensors()}
    rotary = {_storage(one) for both in core.passes.decoder.rotary_tables for one in both or ()}
    assert recording.outside.keys() <= seen[5] | weights | rotary


def test_a_step_that_cannot_be_recorded_runs_as_it_is_and_says_why_once(tmp_path, caplog):
    folder, asked = tiny_model_folder(tmp_path), of_lengths([30, 40, 12])
    core, tried = make_core(folder, cuda_graphs=True), []

    def broken(step):
        tried.append(step)
        raise RuntimeError("operation not permitted when stream is capturing")

    core.static.capture = broken
    with caplog.at_level(logging.WARNING):
        assert_same(run(core, asked), run(make_core(folder), asked))
    ways = {"(sampling: minimums)", "(sampling: plain)"}
    told = [one.getMessage() for one in caplog.records if "not permitted when stream" in one.getMessage()]
    assert len(told) == len(tried) <= len(ways) and all(any(way in line for way in ways) for line in told)


def test_only_so_many_recordings_are_kept_and_sleep_gives_all_back(tmp_path, monkeypatch):
    monkeypatch.setattr(static_decode, "MOST_GRAPHS", 2)
    core = recorded(tiny_model_folder(tmp_path))
    kept = []
    run(core, of_lengths([80, 60, 40, 20, 10, 5]), between=lambda core, step: kept.append(len(core.static.buckets)))
    assert max(kept) == 2 and len(core.static.capture.recordings) > 3
    core.sleep(("kv_cache",))
    tables = core.static.held_bytes()
    assert core.static.captured == 0 and core.statistics()["kv_held_bytes"] == tables > 0


def test_ranges_of_the_arena_keep_their_contents_and_never_overlap():
    choose = random.Random(0)
    cache = Arena(2, 2, 4, torch.float32, torch.device("cpu"), 2 * 2 * 2 * 4 * 4 * 2048 / 2**30)
    rows = {}
    for number in range(400):
        capacity = choose.choice([32, 64, 160, 512])
        if choose.random() < 0.55 and cache.fits([capacity]):
            row = rows[number] = cache.allocate("whole", capacity)
            for layer in range(2):
                row.slab.keys[layer][row.index], row.slab.values[layer][row.index] = number + layer, -number
        elif rows and choose.random() < 0.3:
            row = choose.choice(list(rows.values()))
            if cache.fits([row.slab.capacity + 96]):
                before = row.slab.capacity
                cache.move(row, before + 96)
                whole = next(n for n, one in rows.items() if one is row)
                row.slab.keys[0][0, :, before:] = whole
        elif rows:
            cache.free(rows.pop(choose.choice(list(rows))))
        places = sorted((row.slab.offset, row.slab.offset + row.slab.capacity) for row in rows.values())
        assert all(end <= start for (_, end), (start, _) in zip(places, places[1:], strict=False))
        assert all((row.slab.keys[0] == number).all() for number, row in rows.items())
    assert cache.layout > 0 and cache.held_bytes() == (2048 + 32) * cache.bytes_per_token
    assert cache.reserved_tokens == sum(row.slab.capacity for row in rows.values()) <= 2048


def test_buckets_hold_what_they_are_for():
    assert [row_bucket(n) for n in (1, 2, 3, 5, 8, 9, 16, 17, 128)] == [1, 2, 4, 8, 8, 16, 16, 24, 128]
    assert [key_bucket(n, 1000) for n in (1, 128, 129, 600, 1000, 1001)] == [128, 128, 256, 1000, 1000, 1001]
